"""The only place that touches private fields of Lightning. Checked with Lightning 2.6.0 and 2.6.6."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import enable_grad
from torch.optim import Optimizer

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.namespaces import lightning_classes
from lightning_struct.utilities.random_states import isolated_random_states, random_states, set_random_states


def names_of_optimizers(trainer: L.Trainer) -> str:
    """The classes of the optimizers of a fit, for an error; ``"none"`` if ``configure_optimizers`` returns None.

    Lightning puts a stand-in in its place then.
    """
    stand_ins = lightning_classes("core.optimizer._MockOptimizer")
    return ", ".join(type(each).__name__ for each in trainer.optimizers if not isinstance(each, stand_ins)) or "none"


def validation_loaders(trainer: L.Trainer) -> list[Any]:
    """The validation loaders of a fit, as Lightning prepared them; none if it will not validate.

    ``Trainer.val_dataloaders`` is None until the first validation is due. The loop sets its loaders up here as it would
    then, once.
    """
    if not trainer.enable_validation:
        return []
    if trainer.val_dataloaders is None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def cycles(trainer: L.Trainer) -> bool:
    """Whether a training loader that is at its end begins again, until the longest is at its end."""
    combined = trainer.fit_loop._combined_loader  # None if another loader could not be prepared
    return combined is not None and combined._mode == "max_size_cycle"


def prepare_batch(trainer: L.Trainer, batch: Any, validation_loader: int) -> Any:
    """Batch of validation as the steps get it: through the transfer hooks, in the precision of inputs.

    It is on the device of the module, which after the training, in ``on_fit_end``, is the CPU.

    Args:
        trainer: in fit.
        batch: as the loader gives it.
        validation_loader: number of the loader among those of validation.
    """
    stage = trainer.state.stage
    trainer.validating = True
    try:
        batch = trainer.precision_plugin.convert_input(batch)
        module = trainer.lightning_module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=validation_loader)
        return trainer.strategy.batch_to_device(batch, module.device, validation_loader)
    finally:
        trainer.state.stage = stage


def unwrapped_sampler(sampler: Any) -> Any:
    """A sampler without the distributed one that Lightning may have put around it."""
    wrappers = lightning_classes("trainer.connectors.data_connector.DistributedSamplerWrapper")
    return sampler.dataset._sampler if isinstance(sampler, wrappers) else sampler


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation is due after the training batch that has just ended."""
    fit_loop = trainer.fit_loop
    assert fit_loop._data_fetcher is not None
    return fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)


def validate_now(trainer: L.Trainer) -> None:
    """Run the validation of a fit, from ``on_train_start``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    has_run = loop._has_run
    loop.run()
    loop._has_run = has_run  # else a resumed epoch would count as over
    trainer.training = True


class TrainingLoaders:
    """The training loaders of a fit: changed where Lightning prepares them, and the lengths that it derives from them.

    Lightning prepares the loaders in ``FitLoop.setup_data``, at the start of fit, again after
    ``reload_dataloaders_every_n_epochs``, and earlier if somebody asks for ``estimated_stepping_batches``. It puts in
    its distributed sampler, calls ``Strategy.process_dataloader``, and begins to iterate. The only place for a change
    is between the last two: both methods are replaced on their instances, until :meth:`restore`.

    The result of ``prepare`` is read by the training alone. ``Trainer.train_dataloader`` remains as Lightning
    prepared, so that any other reader within an epoch has a pass of its own.

    Args:
        trainer: in ``Callback.setup``.
        prepare: gets each training loader, with all that Lightning put into it, and how many there were before it in
            this ``setup_data``; returns the loader to train with.
        prepared: is called when all loaders of a ``setup_data`` are there and have begun to be iterated.
    """

    def __init__(self, trainer: L.Trainer, prepare: Callable[[Any, int], Any], prepared: Callable[[], None]) -> None:
        self._trainer, self._restored = trainer, False
        self._preparing: list[Any] | None = None
        self._combined: Any = None
        self._originals: list[Any] = []
        self._loop, self._strategy = trainer.fit_loop, trainer.strategy
        process_dataloader, setup_data = self._strategy.process_dataloader, self._loop.setup_data

        def process(loader: Any) -> Any:
            loader = process_dataloader(loader)
            if self._preparing is None:
                return loader
            self._preparing.append(loader)
            self._random_states = random_states(())
            return prepare(loader, len(self._preparing) - 1)

        def setup() -> None:
            originals: list[Any] = []
            self._preparing = originals
            try:
                setup_data()
            finally:
                self._preparing = None
            if not originals:
                return
            self._combined, self._originals = self._loop._combined_loader, originals
            if self._restored:
                self._combined.flattened = originals
                return
            read = self._combined.flattened
            self._combined.flattened = originals  # sets Trainer.train_dataloader, too
            self._combined._flattened = read
            prepared()

        vars(self._strategy)["process_dataloader"], vars(self._loop)["setup_data"] = process, setup

    def restore(self) -> None:
        """Put Lightning's methods and the loaders back, once."""
        if not self._restored:
            del vars(self._strategy)["process_dataloader"], vars(self._loop)["setup_data"]
            if self._combined is not None:
                self._combined.flattened = self._originals
                if self._combined._iterator is None:  # Lightning has ended the workers of the loaders that it read
                    self._combined.reset()
        self._restored = True

    @property
    def steps_fetch(self) -> bool:
        """Whether the module fetches its batches itself: ``training_step(self, dataloader_iter)``."""
        return isinstance(self._loop._data_fetcher, lightning_classes("loops.fetchers._DataLoaderIterDataFetcher"))

    @property
    def ahead(self) -> int:
        """Batches that Lightning has fetched beyond the one under way; it does so for loaders without a length."""
        return len(getattr(self._loop._data_fetcher, "batches", ()))  # only _PrefetchDataFetcher has batches

    @property
    def unread(self) -> int:
        """Batches that Lightning has fetched but not trained on: an exception may have ended the training on one."""
        return self.ahead + self._loop.epoch_loop.batch_progress.current.ready - self.batches_done

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that were trained on."""
        return self._loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]

    @property
    def epoch_done(self) -> bool:
        """Whether the last of them was the epoch's last."""
        progress = self._loop.epoch_loop.batch_progress
        return progress.is_last_batch and progress.current.ready == self.batches_done

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether Lightning goes on, from a checkpoint, with batches of the epoch still to come."""
        return self._loop.restarting and self.batches_done > 0 and not self.epoch_done

    @property
    def overfits(self) -> bool:
        """Whether ``Trainer(overfit_batches=...)`` takes the same few samples in each epoch."""
        return self._trainer.overfit_batches > 0  # type: ignore[attr-defined]

    @property
    def limits(self) -> list[int | float]:
        """Largest number of batches that each loader gives in an epoch."""
        combined = self._loop._combined_loader
        assert combined is not None and combined.limits is not None
        return combined.limits

    @limits.setter
    def limits(self, limits: list[int | float]) -> None:
        """Set the limits, and the length of the epoch to that of the present loaders."""
        combined = self._loop._combined_loader
        assert combined is not None
        combined.limits = limits
        if combined._iterator is not None:
            combined._iterator.limits = limits
        length = known_length(combined)
        if self._loop._data_fetcher is not None:
            self._loop._data_fetcher.length = length
        self.length = math.inf if length is None else length

    @property
    def length(self) -> int | float:
        """Batches of the epoch."""
        return self._loop.max_batches

    @length.setter
    def length(self, batches: float) -> None:
        self._loop.max_batches = batches
        total = batches if batches < math.inf else None
        bar: Any = self._trainer.progress_bar_callback
        tqdm, rich = lightning_classes("callbacks.TQDMProgressBar"), lightning_classes("callbacks.RichProgressBar")
        if isinstance(bar, tqdm) and bar._train_progress_bar is not None:
            bar.train_progress_bar.total = total
        elif isinstance(bar, rich) and bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)

    def iterate_anew(self) -> None:
        """Start iterating again, as ``setup_data`` did, in the order of the epoch that is to come.

        Lightning tells samplers the epoch (``set_epoch``) after that; but workers are asked for batches at once. Of the
        global random generators both draw the same, so that others see one start only.
        """
        fetcher = self._loop._data_fetcher
        assert fetcher is not None
        epoch = self._loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        for loader in fetcher.combined_loader.flattened:
            for holder in (loader, getattr(loader, "batch_sampler", None)):
                if callable(set_epoch := getattr(getattr(holder, "sampler", None), "set_epoch", None)):
                    set_epoch(epoch)
        with isolated_random_states():
            set_random_states(self._random_states, ())
            iter(fetcher)


def trained_on(trainer: L.Trainer) -> bool:
    """Whether the training batch under way has been trained on, so that a checkpoint counts it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.processed == progress.started == progress.ready  # type: ignore[attr-defined]


def optimizer_steps(trainer: L.Trainer, module: L.LightningModule) -> int:
    """``Trainer.global_step`` in a fit of ``module``, for each batch: that property asks seven others."""
    loop = trainer.fit_loop.epoch_loop
    if module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer_steps
    return loop.manual_optimization.optim_step_progress.total.completed


def logs_now(trainer: L.Trainer) -> bool:
    """Whether loggers get the values of this training step: Lightning's ``should_update_logs``."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every != 0 and ((trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0 or trainer.should_stop)


def accumulates(trainer: L.Trainer) -> bool:
    """Whether the optimizer does not step at the batch under way (automatic optimization)."""
    return trainer.fit_loop._should_accumulate()


def skips_backward(trainer: L.Trainer) -> bool:
    """Whether this epoch trains nothing: a ``StochasticWeightAveraging`` passes over the data for batch normalisation.

    From ``on_train_epoch_start`` on, in the callbacks after it. For the pass it has set one batch more than there are,
    and as many accumulated batches, so that no step is taken before the last one.
    """
    return trainer.fit_loop._skip_backward


def train_in_parts(trainer: L.Trainer, train_on: Callable[[Any, Callable[..., Any]], Any]) -> Callable[[], None]:
    """Train on each batch of automatic optimization by parts; returns a function that undoes it.

    Args:
        trainer: in ``Callback.setup``.
        train_on: gets the batch, and a function that takes the number of its parts, and the parts, each with the factor
            of its loss. That runs their forward and backward passes, only the last of which may exchange gradients
            with other processes, and leaves the gradients as they were if one fails. ``train_on`` calls it, and returns
            what it returns.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make_closure = loop._make_closure
    block_exchange = getattr(trainer.strategy, "block_backward_sync", nullcontext)

    def make(kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Any:
        closure = make_closure(kwargs, optimizer, batch_idx)
        batch, zero_grad = kwargs.get("batch"), closure._zero_grad_fn
        given = [p for group in optimizer.param_groups for p in group["params"]]

        def train(count: int, parts: Iterable[tuple[Any, float]]) -> Any:
            # the passes of this batch come into gradients of their own, if others have been accumulated
            kept = [] if zero_grad is not None else [(p, p.grad) for p in given if p.grad is not None]
            for parameter, _ in kept:
                parameter.grad = None
            losses, result = list[Any](), None
            logged: Any = trainer._results
            try:
                for number, (part, factor) in enumerate(parts, start=1):
                    logged.batch, logged.batch_size = part, None  # by whose samples self.log weighs
                    with nullcontext() if number == count else block_exchange():
                        result = loop._training_step(type(kwargs)({**kwargs, "batch": part}))
                        if zero_grad is not None and not losses:
                            zero_grad()
                        if result.closure_loss is not None:
                            result.closure_loss = result.closure_loss * factor
                            losses.append(result.closure_loss.detach().clone())
                            if closure._backward_fn is not None:
                                closure._backward_fn(result.closure_loss)
            except BaseException:
                for parameter, gradient in kept:
                    parameter.grad = gradient
                raise
            for parameter, gradient in kept:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
            logged.batch, logged.batch_size = batch, None
            assert result is not None
            result.loss = sum(losses) if losses else None
            return result

        closure.closure = enable_grad()(lambda *arguments: train_on(batch, train))
        return closure

    loop._make_closure = make

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo


def loss_scale(trainer: L.Trainer) -> float | None:
    """Factor by which a GradScaler multiplies the loss; None without one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale()


def gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Factor in the gradients in ``on_before_optimizer_step``: 1 unless the optimizer unscales them itself."""
    scale = loss_scale(trainer)
    return scale if scale is not None and getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
