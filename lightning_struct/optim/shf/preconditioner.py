"""The right preconditioner of one step, for any damping that the step is tried with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.kronecker import BlockPreconditioner, Factors, KroneckerFactors, averaged
from lightning_struct.optim.shf.objective import FlatWeights
from lightning_struct.optim.shf.solve import Preconditioner

# The factors are damped anew before their interval ends if λ has become larger by this factor.
_LARGER = 1.5


@dataclass(frozen=True)
class StepPreconditioner:
    """The preconditioner of one step.

    Attributes:
        at: λ -> the preconditioner; a step that fails is tried again with a larger λ.
        factor_damping: λ of the step that the averages of the Kronecker factors were updated in.
        factors: these averages; None with another preconditioner.
    """

    at: Callable[[float], Preconditioner]
    factor_damping: float
    factors: Factors | None = None


def check_per_sample(given: Any, module: nn.Module) -> None:
    """Raise ValueError where a diagonal preconditioner, made of gradients per sample, meets batch normalisation."""
    layer = coupling_layer(module) if isinstance(given, str) and given != "kronecker" else None
    if layer is not None:
        raise ValueError(
            f"preconditioner={given!r} is made of gradients per sample, and the layer {layer} normalises over the "
            f"batch, which leaves them undefined: use preconditioner=None or 'kronecker', or put the layer in eval mode"
        )


def preconditioner_by_name(name: str, model: BatchModel, seed: int) -> Callable[[float], Tensor]:
    """λ -> c of a diagonal preconditioner (section 4.4), the random signs drawn with ``seed``."""

    def at(damping: float) -> Tensor:
        try:
            return model.scaling(name, damping, seed=seed)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"preconditioner={name!r} is made of gradients per sample, and the module takes no single sample "
                f"({first_line(error)}), as where nodes of a graph depend on each other: use preconditioner=None or "
                "'kronecker'"
            ) from error

    return at


def preconditioner_by_object(
    given: Any, model: BatchModel, loss: GaussNewtonLoss
) -> Callable[[float], RightPreconditioner]:
    """λ -> a user's preconditioner, after its ``update``, on flat vectors."""

    def at(damping: float) -> RightPreconditioner:
        if hasattr(given, "update"):
            given.update(model.linearization, loss, model.targets, damping)
        return _OnFlatVectors(given, model.weights)

    return at


class _OnFlatVectors:
    """A preconditioner on dicts of tensors, for solvers on flat vectors."""

    def __init__(self, preconditioner: RightPreconditioner, weights: FlatWeights) -> None:
        self._preconditioner, self._weights = preconditioner, weights

    def solve(self, y: Tensor) -> Tensor:
        return self._weights.flat(self._preconditioner.solve(self._weights.unflat(y)))

    def solve_transpose(self, x: Tensor) -> Tensor:
        return self._weights.flat(self._preconditioner.solve_transpose(self._weights.unflat(x)))

    def solve_normal(self, x: Tensor) -> Tensor:
        if not hasattr(self._preconditioner, "solve_normal"):
            return self.solve(self.solve_transpose(x))
        return self._weights.flat(self._preconditioner.solve_normal(self._weights.unflat(x)))


class KroneckerAverages:
    """Running averages of the Kronecker factors over the steps, and the preconditioner that they give.

    Args:
        measured: how the factors come from a batch.
        decay: weight of the old average, in [0, 1).
        interval: steps from one update of the averages to the next.
        l2: weight of ½‖w‖² in the loss.
    """

    def __init__(self, measured: KroneckerFactors, *, decay: float, interval: int, l2: float) -> None:
        self._measured, self._decay, self._interval, self._l2 = measured, decay, interval, l2
        self._cache: tuple[Factors, float, BlockPreconditioner] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    @property
    def max_size(self) -> int | None:
        """Rows above which a factor is kept as its diagonal."""
        return self._measured.max_size

    def summary(self) -> str:
        """See :meth:`~lightning_struct.optim.SHF.summary`."""
        return self._measured.summary()

    def of_step(self, model: BatchModel, memory: Mapping[str, Any], damping: float, seed: int) -> StepPreconditioner:
        """The preconditioner of a step, from the averages with its batch in them where the interval asks for it.

        Args:
            model: the model of the batch.
            memory: the optimizer's: the averages of before and the number of the step.
            damping: λ of the step.
            seed: seed of the random signs.
        """
        old = memory.get("factors")
        if old is not None:
            old = self._measured.taken_over(old, model.gradient)
            if memory["steps"] % self._interval:
                return self._with(old, memory["factor_damping"])
        self._cache = None  # makes room for the new ones
        new = self._measured.measure(model, seed)
        return self._with(new if old is None else averaged(old, new, self._decay), damping)

    def _with(self, factors: Factors, factor_damping: float) -> StepPreconditioner:
        return StepPreconditioner(partial(self._at, factors, factor_damping), factor_damping, factors)

    def _at(self, factors: Factors, factor_damping: float, damping: float) -> BlockPreconditioner:
        raised = damping > _LARGER * factor_damping  # as where a step is tried again; less is not worth the roots
        strength = math.sqrt((damping if raised else factor_damping) ** 2 + self._l2)  # μ
        if self._cache is None or self._cache[0] is not factors or self._cache[1] != strength:
            self._cache = None
            self._cache = factors, strength, self._measured.preconditioner(factors, strength)
        return self._cache[2]
