"""Checkpoints of a model with adapters, without the frozen weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_struct.callbacks.validation_merit import BEST_WEIGHTS
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.nn.adapter_files import IN_CHECKPOINTS, check_base, description_of, names_in_folder, norms_of
from lightning_struct.nn.adapters import frozen_parameter_names, has_adapters
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import refuse_sharded_weights
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException

_NORMS_BEFORE = "adapter_base_norms"  # the key up to version 0.3
_WEIGHTS = {"state_dict", "current_model_state"}  # Lightning's averages of weights are in the first, with the second


class AdapterCheckpoint(Callback):
    """Leaves the frozen weights of a model with adapters out of its checkpoints.

    For example::

        Trainer(callbacks=[AdapterCheckpoint(), ModelCheckpoint(...)])

    A checkpoint then has the weights that :func:`~lightning_struct.nn.adapter_state_dict` returns: the adapters, other
    trained parameters, and the buffers. With ``ckpt_path`` the Trainer loads them into a module that already has its
    base and its adapters, from ``__init__`` or ``configure_model``; a resumed run continues as if it had not stopped.
    The norms of the left-out weights are kept, so another base is an error. The best weights that a
    :class:`~lightning_struct.callbacks.ValidationMeritStopping` keeps are without the base, too.

    A checkpoint also has the description that :func:`~lightning_struct.nn.save_adapters` writes. Outside a Trainer
    ``load_adapters(base, path)`` adds the adapters to the base: the module without adapters, or the network in it.
    ``load_from_checkpoint(path, strict=False)`` loads them into a module that has adapters from its ``__init__``.

    From :meth:`setup` to :meth:`teardown`, or to an exception, it extends the module's ``on_save_checkpoint`` and
    ``on_load_checkpoint``, because Lightning asks no callbacks when it saves only weights, nor before it loads weights.
    So ``trainer.save_checkpoint(path, weights_only=True)`` after the end of a run keeps all weights.

    Raises:
        MisconfigurationException: the strategy shards the weights; the module has no adapters at the start of a fit; a
            checkpoint was trained beside another base.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[AdapterCheckpoint()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._additions: list[_Addition] = []  # between setup and teardown

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_sharded_weights(trainer, "AdapterCheckpoint")
        self._additions = [
            _Addition(pl_module, "on_save_checkpoint", _leave_out_base),
            _Addition(pl_module, "on_load_checkpoint", _fill_in_base),
        ]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not has_adapters(pl_module):
            raise MisconfigurationException(
                f"AdapterCheckpoint: {type(pl_module).__name__} has no adapters: call add_adapters, or leave it out"
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        _leave_out_base(pl_module, checkpoint)
        if (
            not self._additions
        ):  # after the end of a run, a callback after this one may put an average of the weights in
            _Addition(pl_module, "on_save_checkpoint", _leave_out_base, once=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        while self._additions:
            self._additions.pop().remove()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")  # which Lightning does not call then


class _Addition:
    """Stands in for a checkpoint hook of a module, and calls another after it. It goes with copies of the module.

    Lightning calls those of the module after those of callbacks.

    Args:
        pl_module: the module.
        name: of its hook, a method of its class or an attribute of its own.
        added: called as ``added(module, checkpoint)`` after it.
        once: whether it takes itself away when it is called.
    """

    def __init__(self, pl_module: Any, name: str, added: Callable[[Any, dict[str, Any]], None], once: bool = False):
        self.pl_module, self.name, self.added, self.once = pl_module, name, added, once
        self.own = vars(pl_module).get(name)
        vars(pl_module)[name] = self

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        if self.once:
            self.remove()
        if self.own is None:
            getattr(type(self.pl_module), self.name)(self.pl_module, checkpoint)
        else:
            self.own(checkpoint)
        self.added(self.pl_module, checkpoint)

    def remove(self) -> None:
        del vars(self.pl_module)[self.name]
        if self.own is not None:
            vars(self.pl_module)[self.name] = self.own


def _leave_out_base(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """Take the frozen weights out of a checkpoint, and keep their norms."""
    if not has_adapters(pl_module):
        return
    frozen = frozen_parameter_names(pl_module)
    for state in _states_with_weights(checkpoint):
        best, now = state[BEST_WEIGHTS], checkpoint.get("state_dict", {})
        same = {n for n in best.keys() & now.keys() if plain_name(n) in frozen and torch.equal(best[n], now[n].cpu())}
        state[BEST_WEIGHTS] = {name: value for name, value in best.items() if name not in same}
    of_files = description_of(pl_module) | {"base_norms": {}, "names": names_in_folder(pl_module)}
    described = checkpoint.setdefault(IN_CHECKPOINTS, of_files)
    for key in _WEIGHTS & checkpoint.keys():  # in a second call nothing is left to be taken out
        weights = checkpoint[key]
        left_out = {plain_name(name): value for name, value in weights.items() if plain_name(name) in frozen}
        described["base_norms"].update(norms_of(left_out))
        checkpoint[key] = {name: value for name, value in weights.items() if plain_name(name) not in frozen}


def _fill_in_base(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """Put the frozen weights that the module has into a checkpoint that they were left out of.

    The others get the names that they have in the module, which may be compiled now, or no longer.
    """
    before = checkpoint.get(IN_CHECKPOINTS, {}).get("base_norms", checkpoint.get(_NORMS_BEFORE))
    if before is None:
        return
    own = pl_module.state_dict()
    left_out = {name: value for name, value in own.items() if plain_name(name) in before}
    try:
        check_base({plain_name(name): value for name, value in left_out.items()}, before)
    except ValueError as error:
        raise MisconfigurationException(f"AdapterCheckpoint: {error}") from None
    names = {plain_name(name): name for name in own}

    def filled_in(weights: dict[str, Any], base: dict[str, Tensor]) -> dict[str, Any]:
        return {**base, **{names.get(plain_name(name), name): value for name, value in weights.items()}}

    for key in _WEIGHTS & checkpoint.keys():
        checkpoint[key] = filled_in(checkpoint[key], left_out)
    for state in _states_with_weights(checkpoint):
        on_cpu = {name: value.cpu() for name, value in left_out.items()}
        state[BEST_WEIGHTS] = filled_in(state[BEST_WEIGHTS], on_cpu)


def _states_with_weights(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of those ValidationMeritStopping that keep weights to put back."""
    states = checkpoint.get("callbacks", {}).values()
    return [state for state in states if isinstance(state, dict) and state.get(BEST_WEIGHTS)]
