"""State of SHF around a step: the parameter group, the memory of the next step, and the module's buffers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.optim.requirements import WEIGHTS_ALONE, check_optimizer_state
from lightning_struct.optim.shf.report import PhaseTimer
from lightning_struct.optim.shf.settings import is_damping

# Key of the memory in the optimizer's state: torch casts the state of a parameter to its dtype when it is loaded.
_KEY = "shf"


@dataclass(frozen=True)
class Decisions:
    """Decisions of the steps so far, which a resumed run takes over.

    Attributes:
        exact: of a squared error, whether the exact solver takes the steps, since the batch stays; None: not known yet.
        refused_rows: name of a block -> why its rows cannot be told apart.
        refused_batches: whether whole batches cannot be recorded.
        too_many_rows: name of a matrix -> the rows of J from which on there is too little memory for it.
        damping_factor: by which λ is divided first in the next step.
        inverse_squares: sum of 1/λ² of the steps.
        lowest_error: the lowest estimate of the loss of new samples.
        penalties: fields of the :class:`~lightning_struct.functional.residuals.penalties.Penalties` of the conditions.
    """

    exact: bool | None = None
    refused_rows: Mapping[str, str] = field(default_factory=dict)
    refused_batches: bool = False
    too_many_rows: Mapping[str, int] = field(default_factory=dict)
    damping_factor: float = 2.0
    inverse_squares: float = 0.0
    lowest_error: float = math.inf
    penalties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """State that a resumed run needs beside the values of the parameter group.

    It is replaced, not changed: a ``state_dict()`` taken before, and an optimizer loaded from one, hold the old one.

    Attributes:
        steps: number of steps done.
        direction: d of the last step, flat, from which a warm start begins.
        largest_batch: samples of the largest batch so far.
        first_damping: λ₁, if the first step chose it.
        uncovered: whether layers do not show the gradients of single samples.
        max_factor_size: rows above which a Kronecker factor is a diagonal.
        factors: averages of the Kronecker factors, by the name of their block.
        factor_damping: λ of the step that these averages were updated in.
        step_scale: σ of the rule of the next batch.
        change: s d of the last step, whose gain the next batch has still to show.
        own_change: change of the loss of its own batch in that step.
        largest_fall: bound on the fall of the model in that step.
        average_changes: running averages of the changes of the loss of the next batch and of the own one.
        average_fits: running averages of the fall of the own batch at full length and of its bound.
        ratio: their ratio r; None if it is not measured yet.
        first_loss, last_loss: f before the first and after the last step.
        blocks: rows of each block of residuals.
        decisions: of the steps so far.
    """

    steps: int = 0
    direction: Tensor | None = None
    largest_batch: int = 0
    first_damping: float | None = None
    uncovered: bool = False
    max_factor_size: int | None = None
    factors: dict[str, dict[str, Tensor]] | None = None
    factor_damping: float = 0.0
    step_scale: float = 1.0
    change: Tensor | None = None
    own_change: float = 0.0
    largest_fall: float = 0.0
    average_changes: tuple[float, float] = (0.0, 0.0)
    average_fits: tuple[float, float] = (0.0, 0.0)
    ratio: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    blocks: dict[str, int] | None = None
    decisions: Decisions = Decisions()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Memory:
        """The memory in an optimizer's ``state``; that of before the first step if there is none."""
        kept = {each.name: state[_KEY][each.name] for each in fields(cls) if each.name in state.get(_KEY, {})}
        return cls(**kept | {"decisions": Decisions(**kept.get("decisions", {}))})

    def to_state(self, state: dict[Any, Any]) -> None:
        """Put it into an optimizer's ``state``, as a dict of tensors and numbers."""
        state[_KEY] = {each.name: getattr(self, each.name) for each in fields(self)}
        state[_KEY]["decisions"] = dict(vars(self.decisions))


class StepState:
    """The state of an optimizer during one step; values set here are set there.

    Args:
        optimizer_state: its ``state``.
        group: its parameter group.
        names: of the group's parameters.
        seed: of all steps.

    Attributes:
        group: the group, with λ, ``drop``, γ and ``maxiter``.
        weights: name -> the trained weights, detached.
        timed: the phases of the step.
    """

    def __init__(self, optimizer_state: Any, group: dict[str, Any], names: Sequence[str], seed: int) -> None:
        self._state, self._seed_of_all, self.group = optimizer_state, seed, group
        self._memory = Memory.from_state(optimizer_state)
        self.weights = {name: p.detach() for name, p in zip(names, group["params"], strict=True)}
        self.timed = PhaseTimer()

    @property
    def memory(self) -> Memory:
        return self._memory

    @memory.setter
    def memory(self, value: Memory) -> None:
        self._memory = value
        value.to_state(self._state)

    @property
    def damping(self) -> float:
        """λ, once it is known: the group has None until the first step has chosen it."""
        damping = self.group["damping"]
        assert damping is not None, "the first step chooses it first"
        return damping

    @damping.setter
    def damping(self, value: float) -> None:
        if not is_damping(value):
            raise ValueError(f"damping must be finite and > 0, got {value}")
        self.group["damping"] = float(value)

    def start(self, like: Tensor) -> Tensor | None:
        """d0 = γ d of the last step (section 4.5); None for zero."""
        decay, direction = self.group["warm_start"], self.memory.direction
        if direction is None or decay == 0.0:
            return None
        return direction.to(like) * decay  # a loaded direction may come from another device or dtype

    def seed(self, purpose: str) -> int:
        """Seed for ``purpose`` in this step. 32 bits: the CPU generator ignores the rest."""
        return random.Random(f"{self._seed_of_all} {self.memory.steps} {purpose}").getrandbits(32)


def check_state(state_dict: Mapping[str, Any], options: Mapping[str, Any], weights: int) -> None:
    """Raise unless a state can be that of an SHF with these options in its group that trains so many weights.

    Raises:
        ValueError: see above.
    """
    check_optimizer_state(state_dict)
    groups = state_dict["param_groups"]
    # torch adds "differentiable" to the options of an optimizer that has loaded a state
    if len(groups) != 1 or not groups[0].keys() >= options.keys() - {"differentiable"}:
        raise ValueError(f"the state is of another optimizer than SHF. {WEIGHTS_ALONE}")
    direction = Memory.from_state(state_dict["state"]).direction
    if direction is not None and len(direction) != weights:
        raise ValueError(
            f"the state is of an SHF that trains {len(direction):,} weights, and this one trains {weights:,}: load it "
            "into one whose module is that of the one that was saved, with the same parameters frozen"
        )


class BufferUpdates:
    """The one forward per step that updates the buffers of a module, if its forward writes into any.

    It is the last one with the old weights: those before it, on copies of the buffers, read the same as a
    first forward.
    Statistics of batch normalisation are written, a mask or a table of positions is not. The first forward with the
    same layers in training tells, by the values: a write through ``.data`` leaves no other trace. A forward that begins
    to write later is seen by ``watched``.

    Args:
        module: the network.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_training: list[nn.Module] = []
        self._writes: bool | None = None  # with these layers in training; None: not known yet

    def are_needed(self) -> bool:
        """Whether a forward writes into buffers, or may do so."""
        modules = list(self._module.modules())
        if not any(layer.training and next(layer.buffers(recurse=False), None) is not None for layer in modules):
            return False
        in_training = [layer for layer in modules if layer.training]
        if in_training != self._in_training:
            self._in_training, self._writes = in_training, None
        return self._writes is not False

    def run(self, args: Sequence[Any]) -> None:
        """Update the buffers.

        Args:
            args: of the module.
        """
        buffers = list(self._module.buffers())
        before = [b.clone() for b in buffers] if self._writes is None else []
        state = _state(self._module)
        self._module(*args)
        if self._writes is None:
            same = _is_same(state, _state(self._module))
            pairs = zip(before, buffers, strict=True) if same else ()
            self._writes = not (same and all(b.layout is not torch.strided or torch.equal(a, b) for a, b in pairs))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, the first evaluation of a module whose forward wrote nothing so far tells whether it does now."""
        if self._writes is not False:
            yield
            return
        states: list[tuple[list[Tensor], list[int]]] = []

        def before(module: nn.Module, args: Any) -> None:
            states.append(_state(module))

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            if len(states) == 1 and not _is_same(states[0], _state(module)):
                self._writes = True

        handles = [self._module.register_forward_pre_hook(before), self._module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each tensor was written to; tensors of inference mode do not count."""
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]


def _state(module: nn.Module) -> tuple[list[Tensor], list[int]]:
    buffers = list(module.buffers())
    return buffers, versions(buffers)


def _is_same(before: tuple[list[Tensor], list[int]], after: tuple[list[Tensor], list[int]]) -> bool:
    """Whether the same tensors are there, and none was written to."""
    (old, old_versions), (new, new_versions) = before, after
    return len(old) == len(new) and all(map(is_, old, new)) and old_versions == new_versions
