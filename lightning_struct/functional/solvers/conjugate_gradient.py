"""Preconditioned conjugate gradients with the stopping rule of Martens (2010)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.checks import Count, NotNegative, Size, checked
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.functional.vectors import Vector, dot, leaves, norm, structured


@dataclass(frozen=True)
class ConjugateGradientResult:
    """End of a solve by :func:`conjugate_gradient`.

    Attributes:
        x: the solution, structured like ``b``.
        iterations: iterations done; each took one product with B, and one more if only rounding was left or the start
            solved the system.
        residual: b - B x, by the recurrence, structured like ``b``.
        quadratic: ½ xᵀB x - bᵀx, by the recurrence.
        stop_reason: ``"progress"`` (Martens' rule), ``"residual"``, ``"zero_gradient"`` (the start solves the system),
            ``"curvature"`` (B is not positive definite along a direction), ``"callback"``, or ``"maxiter"``.

    Example:
        >>> B = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> result = conjugate_gradient(B.matmul, torch.tensor([2.0, 8.0]), rtol=1e-3)
        >>> result.iterations, round(result.quadratic, 3), result.stop_reason
        (2, -9.0, 'residual')
    """

    x: Any
    iterations: int
    residual: Any
    quadratic: float
    stop_reason: str

    @property
    def residual_norm(self) -> float:
        """‖b - B x‖, by the recurrence."""
        return norm(leaves(self.residual)).item()


@checked
def conjugate_gradient(
    matvec: Callable[[Any], Any],
    b: Vector,
    *,
    x0: Vector | None = None,
    preconditioner: Vector | RightPreconditioner | None = None,
    maxiter: Count = 250,
    progress_tolerance: NotNegative = 5e-4,
    progress_window: Size = 10,
    rtol: NotNegative = 0.0,
    callback: Callable[[int, Callable[[], Any]], bool | None] | None = None,
) -> ConjugateGradientResult:
    """Solve B x = b for a symmetric positive definite B.

    Stops after i steps when the quadratic is negative and has fallen, over the last k = max(``progress_window``, i/10)
    steps, by less than k times ``progress_tolerance`` of its value (Martens 2010, section 4.4).

    Args:
        matvec: x -> B x, on tensors or dicts of tensors.
        b: right-hand side, structured like x.
        x0: where to start; zero if not given.
        preconditioner: as for ``lsmr``: c with x = c∘y, or an object with ``solve`` and ``solve_transpose`` for C;
            residuals are multiplied by C⁻¹C⁻ᵀ.
        maxiter: bound on the iterations.
        progress_tolerance: ε of the rule; 0 turns it off.
        progress_window: the fewest steps that the rule looks back; with a good preconditioner 10 are many.
        rtol: stop when ‖b - B x‖ <= rtol ‖b‖; in any case when only rounding is left of the residual of the start.
        callback: as for ``lsmr``.

    Returns:
        ConjugateGradientResult: solution, iterations, norms and the reason of the stop.

    Raises:
        ValueError: an option out of range, or a vector of the wrong structure.
        TypeError: a vector is no tensor, or holds other numbers than float32 and float64.
        FloatingPointError: a product returned NaN or infinity.

    Example:
        >>> B = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> conjugate_gradient(B.matmul, torch.tensor([2.0, 8.0])).x.round(decimals=3)
        tensor([1., 2.])
    """
    right, precondition = leaves(b, name="b"), _preconditioning(preconditioner, b)
    if x0 is None:
        x, r = [torch.zeros_like(t) for t in right], [t.clone() for t in right]
    else:
        x = [t.clone() for t in leaves(x0, b, "x0")]
        r = [t - p for t, p in zip(right, leaves(matvec(x0), b, "B x0"), strict=True)]
    y = precondition(r)
    p, r_y = [t.clone() for t in y], dot(r, y)
    smallest = rtol * norm(right).item() if rtol > 0 else 0.0
    start = [] if x0 is None else [dot(r, x) + dot(right, x)]
    values: list[float] = []  # of the quadratic, at the start and after each step
    iteration, reason, rounding = 0, "maxiter", 0.0
    while True:
        product = leaves(matvec(structured(b, p)), b, "the product with B")
        # One look at the device for all that the host needs to know in an iteration.
        curvature, progress, *of_start = torch.stack([dot(p, product), r_y, *start]).tolist()
        if not values:  # beyond rounding the recurrence is noise, which may grow
            values, start = [-0.5 * sum(of_start)], []  # B x = b - r
            rounding = progress * max(torch.finfo(t.dtype).eps for t in r) ** 2
            if progress == 0.0:
                reason = "zero_gradient"
                break
        elif progress <= rounding:
            reason = "residual"
            break
        if iteration == maxiter:
            break
        if not math.isfinite(curvature):
            raise FloatingPointError("the product with B holds NaN or infinity; check data, weights and damping")
        if curvature <= 0.0:
            reason = "curvature"
            break
        alpha = progress / curvature
        values.append(values[-1] - 0.5 * alpha * progress)  # since p·r = r·y
        for x_, r_, p_, q in zip(x, r, p, product, strict=True):
            x_.add_(p_, alpha=alpha)
            r_.sub_(q, alpha=alpha)
        iteration += 1
        k, now = max(progress_window, iteration // 10), values[-1]  # of Martens' rule
        is_slow = iteration > k and now < 0.0 and (now - values[-1 - k]) / now < k * progress_tolerance
        if rtol > 0 and norm(r).item() <= smallest:
            reason = "residual"
        elif progress_tolerance > 0 and is_slow:
            reason = "progress"
        stop = callback is not None and callback(iteration, lambda: structured(b, [t.clone() for t in x]))
        if stop and reason == "maxiter":
            reason = "callback"
        if reason != "maxiter" or iteration == maxiter:  # the last step needs no direction for another
            break
        y = precondition(r)
        r_y, previous = dot(r, y), r_y
        for p_, y_ in zip(p, y, strict=True):
            p_.mul_(r_y / previous).add_(y_)
    return ConjugateGradientResult(structured(b, x), iteration, structured(b, r), values[-1], reason)


def _preconditioning(
    preconditioner: Vector | RightPreconditioner | None, b: Vector
) -> Callable[[list[Tensor]], list[Tensor]]:
    """r -> C⁻¹C⁻ᵀ r."""
    if preconditioner is None:
        return lambda r: [t.clone() for t in r]
    if isinstance(preconditioner, Tensor | Mapping):
        scale = leaves(preconditioner, b, "preconditioner")
        return lambda r: [t * c * c for t, c in zip(r, scale, strict=True)]
    solve_normal: Callable[[Any], Any] = getattr(
        preconditioner, "solve_normal", lambda r: preconditioner.solve(preconditioner.solve_transpose(r))
    )
    return lambda r: leaves(solve_normal(structured(b, r)), b, "what the preconditioner's solve returned")
