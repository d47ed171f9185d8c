"""Records of one pass: calls whose cotangents are to come, shares that have arrived, and checks of their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.calls import LayerCall, map_leaves, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import Contribution, at_least_float32
from lightning_struct.functional.layers.per_sample.inner_calls import ParameterUse
from lightning_struct.functional.layers.per_sample.layer_contributions import (
    compares_outputs,
    keeps_outputs,
    may_run_again,
)
from lightning_struct.functional.randomness import RandomState, random_signs
from lightning_struct.functional.torch_tools import current_backward


@dataclass(eq=False)
class PendingCall:
    """One call of a layer whose cotangents are pending.

    Attributes:
        call: without cotangents.
        parameters: those that it uses, by name.
        backward: the pass within which it was made, by a checkpoint, or -1.
        autocast: (device, dtype, enabled) of the call, for running the layer again; None if it is not.
        random_state: of the generators before the call, for the same.
        use: the one use inside of the call that the cotangents are of; None for the whole call.
        accumulated: the parameters whose gradients it has taken part in.
    """

    call: LayerCall
    parameters: dict[str, nn.Parameter]
    backward: int
    autocast: tuple[str, torch.dtype, bool] | None = None
    random_state: RandomState | None = None
    use: ParameterUse | None = None
    accumulated: set[nn.Parameter] = field(default_factory=set)


def pending_call(call: LayerCall, parameters: dict[str, nn.Parameter], state: RandomState | None) -> PendingCall:
    """The record of a call for the backward pass, cut off from the graph.

    Args:
        call: with its outputs.
        parameters: those that it uses and that are trained, by name.
        state: of the random generators before the call, where its layer draws random numbers.
    """
    args, kwargs = _detached((call.args, call.kwargs))
    outputs = _detached(call.outputs, copy=compares_outputs(call.layer)) if keeps_outputs(call.layer) else None
    pending = PendingCall(replace(call, args=args, kwargs=kwargs, outputs=outputs), parameters, current_backward())
    if may_run_again(call.layer):
        device = tensors_in(outputs)[0].device.type
        pending.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        pending.random_state = state
    return pending


def _detached(value: Any, *, copy: bool = False) -> Any:
    """``value`` with its tensors cut off from the graph, which would otherwise live as long as they.

    What was one tensor in two places still is.
    """
    seen: dict[int, Tensor] = {}

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen[id(leaf)] = leaf.detach().clone() if copy else leaf.detach()
        return seen.get(id(leaf), leaf)

    return map_leaves(cut, value)


@dataclass
class ArrivedShares:
    """Shares of a parameter's gradient that have arrived before it is accumulated.

    ``outer`` is the backward pass that a checkpoint's own, ``backward``, belongs to; ``fresh`` says that the gradient
    was None.
    """

    backward: int
    outer: int
    fresh: bool
    calls: list[PendingCall] = field(default_factory=list)
    shares: list[Contribution] = field(default_factory=list)
    reason: str | None = None


@dataclass
class MeasuredNorms:
    squared_norms: list[Tensor] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    checksum: Tensor | None = None


class Checksums(NamedTuple):
    """Projections of one parameter's gradient G on four pairs of random signs, r over its rows and s over its columns.

    Attributes:
        measured: (4,), rᵀ(Σᵢ cᵢ)s; linear in the gradient: the mean over processes is that of the mean gradient.
        gradient: (4,), rᵀGs.
        scale: what both are compared by, ‖G‖ or a tenth of (Σᵢ‖cᵢ‖²)^½ if that is larger (then G is mostly rounding).
        tolerance: the largest ``relative_error`` that is rounding.
    """

    measured: Tensor
    gradient: Tensor
    scale: Tensor
    tolerance: float

    @property
    def relative_error(self) -> Tensor:
        """A scalar, an estimate of ‖Σᵢ cᵢ - G‖ / ``scale``; 0 if both are 0."""
        error = torch.linalg.vector_norm(self.measured - self.gradient) / math.sqrt(len(self.gradient))
        return error / self.scale.clamp(min=torch.finfo(self.scale.dtype).tiny)


def checksum_of_shares(parameter: nn.Parameter, shares: Sequence[Contribution], seed: int) -> Tensor:
    """(4,), rᵀ(Σᵢ cᵢ)s of all shares of one backward pass."""
    left, right = _signs(parameter, seed)
    with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
        projections = [share.projections(left, right) for share in shares]
        return projections[0] if len(projections) == 1 else torch.stack(projections).sum(0)


def checksums(parameter: nn.Parameter, measured: Tensor, squared_norms: Sequence[Tensor], seed: int) -> Checksums:
    """Checksums of what was measured and of the parameter's ``.grad`` as it is now.

    Args:
        parameter: with a gradient, dense or sparse.
        measured: the sum of :func:`checksum_of_shares` over the backward passes.
        squared_norms: ‖cᵢ‖² of the shares, of each pass.
        seed: of the signs, the same as for ``measured``.
    """
    assert parameter.grad is not None
    gradient = at_least_float32(parameter.grad.detach())
    left, right = (vector.to(gradient.dtype) for vector in _signs(parameter, seed))
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        projected = torch.linalg.vecdot(left[:, gradient.indices()[0]] @ gradient.values(), right)
        norm = torch.linalg.vector_norm(gradient.values())
    else:
        projected = torch.linalg.vecdot(left @ gradient.reshape(left.shape[1], right.shape[1]), right)
        norm = torch.linalg.vector_norm(gradient)
    spread = torch.stack([norms.sum() for norms in squared_norms]).sum().sqrt()
    scale = torch.maximum(norm, 0.1 * spread.to(norm.dtype))
    tolerance = 1e-6 if gradient.dtype == torch.float64 else 0.05
    return Checksums(measured, projected, scale, tolerance)


def _signs(parameter: nn.Parameter, seed: int) -> tuple[Tensor, Tensor]:
    """r over the rows of the parameter and s over its columns, (4, rows) and (4, columns) of ±1, always the same."""
    rows = parameter.shape[0] if parameter.ndim else 1
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return _signs_of(rows, parameter.numel() // max(1, rows), dtype, parameter.device, seed)


@lru_cache(maxsize=64)  # of shapes; layers of one shape share theirs
@torch.inference_mode(False)
def _signs_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator, like = torch.Generator().manual_seed(seed), torch.empty(0, dtype=dtype, device="cpu")
    left, right = (random_signs(4, size, like=like, generator=generator).to(device) for size in (rows, columns))
    return left, right
