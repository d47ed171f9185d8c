"""Kronecker factors of the Gauss-Newton matrix of a layer, and the right preconditioner that they make.

The Gauss-Newton block of a weight that multiplies rows ã (its bias's 1 among them) is the mean over samples of vec(f
ãᵀ) vec(f ãᵀ)ᵀ, f the back-propagated product of the square root of the loss Hessian with random signs, as in
:func:`~lightning_struct.functional.preconditioner.randomized_gauss_newton_diagonal`. It is taken for G ⊗ A, A the mean
of ã ãᵀ and G that of f fᵀ (Martens & Grosse 2015; over the T positions of a sequence or an image A is the mean and G
the sum, as in Grosse & Martens 2016). This is exact in expectation for one sample at one position, and where ã and f
are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from lightning_struct.functional.layer_call import LayerCall, tensors_in
from lightning_struct.functional.layers import base_call
from lightning_struct.functional.per_sample.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Uncovered,
    at_least_float32,
)
from lightning_struct.functional.per_sample.convolution import Convolution
from lightning_struct.functional.per_sample.projections import ParameterUse, RecordedCalls, is_recorded, parameter_uses
from lightning_struct.functional.per_sample.rules import contributions, draws_random_numbers
from lightning_struct.functional.randomness import RandomState, random_state, restored_random_state
from lightning_struct.functional.stateless import call_with

# An explicit inverse is used where its relative error is below this.
_LARGEST_ERROR = 0.1


# --- what the factors are made of ------------------------------------------------------------------------------------


class SecondMoments(NamedTuple):
    """Sums over the positions of all samples, for each group of a weight (a grouped convolution, stacked projections).

    Attributes:
        inputs: Σ ã ãᵀ, (groups, in, in), or its diagonal, (groups, in).
        outputs: Σ f fᵀ, (groups, out, out), or its diagonal, (groups, out).
        positions: (groups,), terms in each sum.
    """

    inputs: Tensor
    outputs: Tensor
    positions: Tensor


def second_moments(
    use: Contribution,
    *,
    groups: int = 1,
    transposed: bool = False,
    bias: bool = False,
    diagonal_inputs: bool = False,
    diagonal_outputs: bool = False,
) -> SecondMoments:
    """Second moments of one use of a weight, or of a bias alone, for which ã is 1 and f the sum over positions.

    Args:
        use: what the back-propagated probe adds to the weight, as rows ã and f.
        groups: matrices that are stacked in the rows of the weight, each with inputs of its own.
        transposed: the weight is stored as (in, out).
        bias: ã ends in a 1.
        diagonal_inputs: keep the diagonal of Σ ã ãᵀ only.
        diagonal_outputs: keep the diagonal of Σ f fᵀ only.

    Raises:
        Uncovered: the use is no product of a matrix with rows.
    """
    if transposed and isinstance(use, Outer):
        use = Outer(use.cotangents, use.inputs)
    if isinstance(use, Outer) and use.rows is not None:
        size = use.shape[0] // groups
        return _among(
            second_moments(
                Outer(use.inputs, use.cotangents),
                groups=(use.rows.stop - use.rows.start) // size,
                bias=bias,
                diagonal_inputs=diagonal_inputs,
                diagonal_outputs=diagonal_outputs,
            ),
            use.rows.start // size,
            groups,
        )
    moments: list[SecondMoments] = []
    for rows, cotangents in _rows(use, groups):
        rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
        inputs, outputs = _second_moment(rows, diagonal_inputs), _second_moment(cotangents, diagonal_outputs)
        positions = inputs.new_full((groups,), rows.shape[1])
        moments.append(SecondMoments(inputs.expand(groups, *inputs.shape[1:]), outputs, positions))
    return SecondMoments(
        *(torch.stack(sums).sum(0) if len(sums) > 1 else sums[0] for sums in zip(*moments, strict=True))
    )


def _among(moments: SecondMoments, first: int, groups: int) -> SecondMoments:
    """Sums of all groups from those of some, the first of which is number ``first``; zero for the others."""
    before, after = first, groups - first - len(moments.positions)
    sums = [torch.cat([t.new_zeros(before, *t.shape[1:]), t, t.new_zeros(after, *t.shape[1:])]) for t in moments]
    return SecondMoments(*sums)


def _second_moment(rows: Tensor, diagonal: bool) -> Tensor:
    return rows.square().sum(1) if diagonal else rows.mT @ rows


def _rows(use: Contribution, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
    """ã as (groups or 1, positions, in) and f as (groups, positions, out), in parts."""
    if isinstance(use, Outer):
        rows, cotangents = (at_least_float32(t).flatten(0, 1) for t in (use.inputs, use.cotangents))
        yield rows[None], cotangents.unflatten(1, (groups, -1)).transpose(0, 1)
    elif isinstance(use, Convolution):
        for chunk in use.image_chunks():
            patches, cotangents = use.input_patches(chunk)  # (m, groups, features, positions)
            yield patches.permute(1, 0, 3, 2).flatten(1, 2), cotangents.permute(1, 0, 3, 2).flatten(1, 2)
    elif isinstance(use, Dense) and use.gradients.ndim == 2:
        shares = at_least_float32(use.gradients)
        yield shares.new_ones(1, len(shares), 1), shares.unflatten(1, (groups, -1)).transpose(0, 1)
    else:
        raise Uncovered(f"a {type(use).__name__} is no product of a matrix with rows")


def squared_shares(use: Contribution) -> Tensor:
    """Σᵢ cᵢ² over the samples' shares of one use, elementwise; of the parameter's shape."""
    if isinstance(use, Dense):
        return at_least_float32(use.gradients).square().sum(0)
    if isinstance(use, Lookup):
        _, table_rows, shares = use.rows_by_sample()
        return shares.new_zeros(use.shape).index_add_(0, table_rows, shares.square())
    return torch.stack([use.per_sample(chunk).square().sum(0) for chunk in use.chunks()]).sum(0)


# --- the preconditioner of one block ---------------------------------------------------------------------------------


class NotPositiveDefinite(ArithmeticError):
    """A damped factor has no Cholesky factor, in float64 either."""


@dataclass(frozen=True)
class KroneckerRoot:
    """C of a block with CᵀC = (G + (μ/π) I) ⊗ (A + π μ I), on matrices (groups, out, in) of weights and biases.

    Attributes:
        inputs: lower Cholesky factors (groups, in, in), or square roots (groups, in) of a diagonal.
        outputs: likewise, (groups, out, out) or (groups, out).
        inverses: of the damped factors, see :func:`with_inverses`; None for none.
    """

    inputs: Tensor
    outputs: Tensor
    inverses: tuple[Tensor, Tensor] | None = None

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return _solved_rows(self.inputs, _solved_columns(self.outputs, y, transpose=True), transpose=True)

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return _solved_rows(self.inputs, _solved_columns(self.outputs, x, transpose=False), transpose=False)

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x, by the inverses of the factors where there are: matrix products are quicker than solves."""
        if self.inverses is None:
            return self.solve(self.solve_transpose(x))
        of_inputs, of_outputs = self.inverses
        x = x * of_outputs[:, :, None] if of_outputs.ndim == 2 else of_outputs @ x
        return x * of_inputs[:, None] if of_inputs.ndim == 2 else x @ of_inputs


@dataclass(frozen=True)
class DiagonalRoot:
    """C of a block with CᵀC = D + μ² I, on tensors of the shape of ``root``, its diagonal."""

    root: Tensor

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return y / self.root

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return x / self.root

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x."""
        return x / self.root.square()


def kronecker_root(inputs: Tensor, outputs: Tensor, damping: float) -> KroneckerRoot:
    """Factor the damped factors: A + π μ I and G + (μ/π) I with π² = (tr A/dim A)/(tr G/dim G).

    Args:
        inputs: A, (groups, in, in), or its diagonal (groups, in).
        outputs: G, (groups, out, out), or its diagonal (groups, out).
        damping: μ > 0.

    Raises:
        FloatingPointError: a factor holds NaN or infinity.
        NotPositiveDefinite: no Cholesky factor, in float64 either.

    Example:
        >>> root = kronecker_root(torch.eye(3)[None], torch.eye(2)[None], damping=3.0)
        >>> root.solve_normal(torch.full((1, 2, 3), 16.0))
        tensor([[[1., 1., 1.],
                 [1., 1., 1.]]])
    """
    of_inputs, of_outputs = _shifts(inputs, outputs, damping)
    return KroneckerRoot(_root(inputs, of_inputs), _root(outputs, of_outputs))


def unchecked_kronecker_root(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[KroneckerRoot, Tensor]:
    """The same without waiting for the device: the root, and whether it is good, a bool tensor ().

    Where it is not, :func:`kronecker_root` finds the root in float64, or raises.
    """
    of_inputs, of_outputs = _shifts(inputs, outputs, damping)
    (root_of_inputs, first), (root_of_outputs, second) = (
        _unchecked_root(inputs, of_inputs),
        _unchecked_root(outputs, of_outputs),
    )
    return KroneckerRoot(root_of_inputs, root_of_outputs), first & second


def with_inverses(roots: Sequence[KroneckerRoot | DiagonalRoot]) -> list[KroneckerRoot | DiagonalRoot]:
    """The roots, with the inverses that ``solve_normal`` is quicker by, where rounding cannot make them indefinite.

    Whether it can is asked of the device once for all.
    """
    factored = [root for root in roots if isinstance(root, KroneckerRoot)]
    good = iter(torch.stack([_is_invertible(root) for root in factored]).tolist() if factored else ())
    return [
        replace(root, inverses=(_inverse(root.inputs), _inverse(root.outputs)))
        if isinstance(root, KroneckerRoot) and next(good)
        else root
        for root in roots
    ]


def diagonal_root(diagonal: Tensor, damping: float) -> DiagonalRoot:
    """The root of D + μ² I.

    Raises:
        FloatingPointError: the diagonal holds NaN or infinity.
    """
    _refuse_not_finite(diagonal)
    return DiagonalRoot((diagonal + damping * damping).sqrt_())


def unchecked_diagonal_root(diagonal: Tensor, damping: float) -> tuple[DiagonalRoot, Tensor]:
    """The same without waiting for the device: the root, and whether it is good, a bool tensor ()."""
    return DiagonalRoot((diagonal + damping * damping).sqrt_()), diagonal.sum().isfinite()


def _shifts(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """π μ and μ/π, (groups,)."""
    of_inputs, of_outputs = _mean_eigenvalue(inputs), _mean_eigenvalue(outputs)
    defined = (of_inputs > 0) & (of_outputs > 0)
    # The quotient of the roots: that of the numbers may be out of range.
    ratio = torch.where(defined, of_inputs.sqrt() / torch.where(defined, of_outputs, 1.0).sqrt(), 1.0)
    return damping * ratio, damping / ratio


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=1, dim2=2)
    return diagonal.mean(1)


def _root(factor: Tensor, shift: Tensor) -> Tensor:
    for dtype in (factor.dtype, torch.float64):
        root, good = _unchecked_root(factor.to(dtype), shift.to(dtype))
        if good:
            return root.to(factor)
        _refuse_not_finite(factor)
    raise NotPositiveDefinite(
        f"the damped factor of {factor.shape[1]} rows is not positive definite, in float64 either"
    )


def _unchecked_root(factor: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The root, and whether it is good."""
    finite = factor.sum().isfinite()
    if factor.ndim == 2:
        return (factor + shift[:, None]).sqrt_(), finite
    damped = factor.clone()
    damped.diagonal(dim1=1, dim2=2).add_(shift[:, None])
    root, info = torch.linalg.cholesky_ex(damped)
    return root, finite & (info == 0).all() & root.diagonal(dim1=1, dim2=2).isfinite().all()


def _is_invertible(root: KroneckerRoot) -> Tensor:
    """Whether (L Lᵀ)⁻¹ of both factors is good enough, a bool tensor ()."""
    conditions = [_condition(factor) for factor in (root.inputs, root.outputs) if factor.ndim == 3]
    if not conditions:
        return torch.ones((), dtype=torch.bool, device=root.inputs.device)
    return torch.cat(conditions).max() * torch.finfo(root.inputs.dtype).eps < _LARGEST_ERROR


def _condition(root: Tensor) -> Tensor:
    """A bound from above on λ_max by an estimate of λ_min, (groups,)."""
    return root.square().sum((1, 2)) / root.diagonal(dim1=1, dim2=2).amin(1).square()


def _inverse(root: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹."""
    return root.square().reciprocal() if root.ndim == 2 else torch.cholesky_inverse(root)


def _refuse_not_finite(factor: Tensor) -> None:
    if not factor.sum().isfinite():
        raise FloatingPointError("the curvature factor holds NaN or infinity")


def _solved_columns(root: Tensor, matrix: Tensor, *, transpose: bool) -> Tensor:
    """L⁻¹ or L⁻ᵀ times each column of (groups, rows, columns)."""
    if root.ndim == 2:
        return matrix / root[:, :, None]
    return torch.linalg.solve_triangular(root.mT if transpose else root, matrix, upper=transpose)


def _solved_rows(root: Tensor, matrix: Tensor, *, transpose: bool) -> Tensor:
    """L⁻¹ or L⁻ᵀ times each row of (groups, rows, columns)."""
    if root.ndim == 2:
        return matrix / root[:, None]
    return torch.linalg.solve_triangular(root if transpose else root.mT, matrix, upper=not transpose, left=False)


# --- what a network's layers read, and what comes back to them --------------------------------------------------------


class _Probed(NamedTuple):
    """A call of a layer, or a use inside of it.

    Attributes:
        layer: the layer.
        edges: of the graph, where the cotangents arrive.
        read: its contributions, given the cotangents; raises Uncovered where the samples cannot be told apart.
    """

    layer: nn.Module
    edges: Sequence[GradientEdge | None]
    read: Callable[[list[Any]], dict[str, Contribution]]


class Probe(NamedTuple):
    """Result of back-propagating one vector.

    Attributes:
        uses: (layer, name of the parameter below it, its use) for each call of each layer.
        gradients: of the parameters that were asked for, by name; zero where nothing arrives.
    """

    uses: list[tuple[nn.Module, str, Contribution]]
    gradients: dict[str, Tensor]


def probe_layers(
    module: nn.Module,
    args: Sequence[Any],
    layers: Collection[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    cotangent: Callable[[Tensor], Tensor],
) -> Probe:
    """Run a module once, back-propagate, and read off what each call of the layers adds to their parameters.

    The module's buffers stay as they are. A call whose samples cannot be told apart is left out, as is one through
    which nothing comes back.

    Args:
        module: called as ``module(*args)``.
        args: its inputs.
        layers: modules below it.
        parameters: of which the whole gradient is wanted.
        cotangent: from the module's outputs to what is back-propagated from them.
    """
    calls: list[_Probed] = []
    states: dict[nn.Module, RandomState] = {}
    recordings: dict[nn.Module, RecordedCalls] = {}

    def before(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if draws_random_numbers(layer):
            states[layer] = random_state(*tensors_in((inputs, kwargs)))
        elif is_recorded(layer):
            recordings[layer] = RecordedCalls().__enter__()

    def after(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        call, recording = LayerCall(layer, inputs, kwargs, outputs), recordings.pop(layer, None)
        if recording is not None:
            recording.__exit__()
            if outputs is not None:  # else it has failed
                for edge, use in parameter_uses(base_call(call), recording.calls):
                    calls.append(_Probed(layer, [edge], partial(_contributions_of_use, use)))
            return
        # An edge of the graph, and not the tensor, which may be written over by the next layer.
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in tensors_in(outputs)]
        calls.append(_Probed(layer, edges, partial(_contributions, call, states.pop(layer, None))))

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [
        layer.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=is_recorded(layer))
        for layer in layers
    ]
    try:
        with torch.enable_grad():
            outputs = call_with(module, {}, tuple(args))
    finally:
        for handle in handles:
            handle.remove()

    wanted: list[Any] = [edge for probed in calls for edge in probed.edges if edge is not None]
    wanted += parameters.values()
    cotangents_of_outputs = cotangent(outputs.detach()).to(outputs.dtype)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents_of_outputs, allow_unused=True) if wanted else ())
    uses = []
    for probed in calls:
        cotangents = [None if edge is None else next(found) for edge in probed.edges]
        if any(t is not None for t in cotangents):
            with suppress(Uncovered):
                uses += [(probed.layer, name, use) for name, use in probed.read(cotangents).items()]
    gradients = {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }
    return Probe(uses, gradients)


def _contributions(call: LayerCall, state: RandomState | None, cotangents: list[Any]) -> dict[str, Contribution]:
    with nullcontext() if state is None else restored_random_state(state):
        return contributions(replace(call, cotangents=cotangents))


def _contributions_of_use(use: ParameterUse, cotangents: list[Any]) -> dict[str, Contribution]:
    return use.contributions(cotangents[0], None)
