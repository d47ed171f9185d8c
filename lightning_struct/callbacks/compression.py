"""Compression of the trained module in the middle of a fit."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_struct.callbacks.validation_merit import ValidationMeritStopping
from lightning_struct.functional.layers.calls import tensors_in
from lightning_struct.nn.compress import check_goal, compress
from lightning_struct.nn.layer_structure import apply_structure, layer_structure
from lightning_struct.nn.report import replacement_report
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checkpoint_hooks import add_checkpoint_hooks, remove_checkpoint_hooks
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.lightning_internals import prepare_batch, training_batches, validation_loaders
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException, lightning_classes

_STRUCTURE = "layer_structure"


class Compression(Callback):
    """Compresses the module at the beginning of an epoch by :func:`~lightning_struct.nn.compress`; training goes on.

    For example::

        Trainer(max_epochs=12, callbacks=[Compression(budget=0.25, epoch=8)]).fit(module, data)

    After compressing, ``configure_optimizers`` is called again, so learning rates and schedulers start again, and
    ``ModelCheckpoint``, ``EarlyStopping`` and :class:`~lightning_struct.callbacks.ValidationMeritStopping` forget the
    scores of the larger model. A :func:`~lightning_struct.nn.replacement_report` shows the fate of each layer.

    Checkpoints record which layers are structured. With this callback the Trainer makes these layers before it loads
    the weights, in ``fit``, ``validate``, ``test`` and ``predict``; a resumed run continues as if it had not stopped.
    Without a Trainer, call ``apply_structure(module, checkpoint["layer_structure"])``, then ``load_state_dict``.

    Layers are measured on the first samples of the first validation loader; without validation, on the first training
    samples, which are trained on as well. If the latter come from several loaders, ``loss`` is required. The same
    callback can compress another module in another fit. A training that ends before ``epoch`` gets a warning.

    Args:
        budget, max_loss_increase: the goal: give one of them, see :func:`~lightning_struct.nn.compress`.
        epoch: epoch at whose beginning the module is compressed; 0 for a module that comes with trained weights.
        samples: number of samples to measure on.
        loss: called as ``loss(module, batch)``, () for a batch. None: the relative squared change of the outputs for a
            batch that is a tensor, or for its first element.
        include, exclude: names or patterns of layers, as seen from the module: ``"network.layer1.*"``.

    Raises:
        MisconfigurationException: there are several processes, or a callback that averages weights; the module has no
            layer to compress, or the goal is out of reach; ``epoch`` or ``samples`` is out of range; there are several
            training loaders, but no validation and no ``loss``.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[Compression(budget=0.25, epoch=8)], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        budget: float | None = None,
        *,
        max_loss_increase: float | None = None,
        epoch: int = 1,
        samples: int = 512,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
    ) -> None:
        try:
            check_goal(budget, max_loss_increase)
        except ValueError as error:
            raise MisconfigurationException(f"Compression: {error}") from None
        check_counts(0, epoch=epoch)
        check_counts(samples=samples)
        self.epoch, self.samples = epoch, samples
        goal = {"budget": budget, "max_loss_increase": max_loss_increase}
        self._options: dict[str, Any] = {**goal, "loss": loss, "include": include, "exclude": exclude}
        self._is_done = False
        self._fitted: weakref.ref[nn.Module] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise MisconfigurationException(
                f"Compression needs one process, not {trainer.world_size}: use devices=1, or compress before the fit"
            )
        if stage == "fit":
            _refuse_averages(trainer)
            if self._fitted is not None and self._fitted() is not pl_module:
                self._is_done = False
            self._fitted = weakref.ref(pl_module)
        add_checkpoint_hooks(pl_module, "Compression", save=_note_structure, load=_make_structure)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        remove_checkpoint_hooks(pl_module, "Compression")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_done or trainer.current_epoch < self.epoch:
            return
        before = sum(parameter.numel() for parameter in pl_module.parameters())
        with torch.random.fork_rng():
            batches = list(self._batches(trainer))
            try:
                compress(pl_module, batches, **self._options)
            except (TypeError, ValueError) as error:
                raise MisconfigurationException(f"Compression: {error}") from error
        self._is_done = True
        trainer.strategy.setup_optimizers(trainer)
        _forget_scores(trainer, pl_module)
        after = sum(parameter.numel() for parameter in pl_module.parameters())
        rank_zero_info(
            f"Compression at the beginning of epoch {trainer.current_epoch}: {before:,} parameters are {after:,} now.\n"
            f"{replacement_report(pl_module)}"
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:  # resumed after the last batch of an epoch, Lightning does not say that the next one begins
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_done and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(f"Compression has compressed nothing: the training has ended before epoch {self.epoch}.")

    def state_dict(self) -> dict[str, Any]:
        return {"is_done": self._is_done}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fitted": None}  # weak references cannot be copied

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_done = state_dict["is_done"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        _note_structure(pl_module, checkpoint)  # also after the end of a run

    def _batches(self, trainer: L.Trainer) -> Iterator[Any]:
        """Batches with as many samples as are asked for, on the device of the module."""
        validation = validation_loaders(trainer)
        loaders, batches = ([validation[0]], validation[0]) if validation else training_batches(trainer)
        if batches is not loaders[0] and self._options["loss"] is None:
            raise MisconfigurationException(
                "Compression measures on the first training samples, as there is no validation, and they come from "
                f"{len(loaders)} loaders in a {type(trainer.train_dataloader).__name__}: give a validation loader, or "
                "loss=..., which is called as loss(module, batch), a batch being what training_step gets"
            )
        missing = self.samples
        with ExitStack() as stack:
            for loader in loaders:
                stack.enter_context(_left_where_it_was(loader))
            for batch in batches:
                prepared = prepare_batch(trainer, batch, 0 if validation else None)
                yield prepared
                first = next(iter(tensors_in(prepared)), None)
                missing -= 1 if first is None or first.dim() == 0 else len(first)
                if missing <= 0:
                    return


@contextmanager
def _left_where_it_was(loader: Any) -> Iterator[None]:
    """A loader that can go on in the middle of an epoch begins after this as if nobody had read it.

    So does a loader of torch with persistent workers, whose iterations are all the same object.
    """
    resumable = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    state = loader.state_dict() if resumable else None
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        loader._iterator = None
    try:
        yield
    finally:
        if iterator is not None:
            loader._iterator = iterator
        if resumable:
            loader.load_state_dict(state)


def _note_structure(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint[_STRUCTURE] = layer_structure(pl_module)


def _make_structure(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """Make the layers that the weights of a checkpoint are for."""
    try:
        apply_structure(pl_module, checkpoint.get(_STRUCTURE, {}))
    except ValueError as error:
        raise MisconfigurationException(f"Compression: {error}") from error


def _refuse_averages(trainer: Any) -> None:
    """Refuse Lightning's callbacks that keep averages: of weights that would be gone."""
    for callback in trainer.callbacks:
        for of in type(callback).__mro__:
            if of.__name__ in ("WeightAveraging", "StochasticWeightAveraging"):
                raise MisconfigurationException(
                    f"{type(callback).__name__} averages weights that Compression takes away: leave out one of them"
                )


def _forget_scores(trainer: Any, pl_module: Any) -> None:
    """Have callbacks look for the best from now on: neither weights nor scores of before fit the module any more."""
    for callback in trainer.callbacks:
        if hasattr(callback, "best_k_models"):
            callback.best_k_models = {}
            callback.best_model_score = None
            callback.best_model_path = callback.kth_best_model_path = ""
        elif isinstance(callback, lightning_classes("callbacks.EarlyStopping")):
            worst = torch.tensor(torch.inf)
            callback.best_score = worst if callback.mode == "min" else -worst
            callback.wait_count = 0
        elif isinstance(callback, ValidationMeritStopping):
            callback.begin_anew(trainer, pl_module)
