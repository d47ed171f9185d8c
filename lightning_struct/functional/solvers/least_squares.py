"""Golub-Kahan bidiagonalisation, and the least-squares solver that comes from it: LSMR.

It minimises

    ‖A x - b‖² + damp² ‖x - center‖²

with A given by two products, on tensors or on dicts of tensors, in as many steps as asked for. Sources: Fong &
Saunders, "LSMR: an iterative algorithm for sparse least-squares problems" (2011), and Algorithm 6 of Emirahmetoglu &
Stewart, whose two slips (ρ_0 = 0, which divides by zero, and x0 taken for a vector of the preconditioned space) are
mended here.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_struct.functional.checks import Count, NotNegative, checked
from lightning_struct.functional.vectors import (
    Vector,
    dot,
    float32_holds,
    leaves,
    matching_tensors,
    norm,
    root,
    squared_norm,
    structured,
    subtract_scaled_,
)


@runtime_checkable
class RightPreconditioner(Protocol):
    """A right preconditioner C: the solver works in y = C x, so on the operator A C⁻¹.

    One that also has ``solve_normal``, x -> C⁻¹ C⁻ᵀ x, is asked for both at once where conjugate gradients need both.
    """

    def solve(self, y: Any) -> Any:
        """C⁻¹ y, of the same structure and shapes as x."""

    def solve_transpose(self, x: Any) -> Any:
        """C⁻ᵀ x, of the same structure and shapes as x."""


@dataclass(frozen=True)
class LeastSquaresResult:
    """End of a solve by :func:`lsmr`.

    Attributes:
        x: the solution, structured like ``x0`` (in the space of x, whatever the preconditioner).
        iterations: iterations done; each took one product with A and one with its transpose.
        residual_norm: ‖r‖ of the damped problem: sqrt(‖A x - b‖² + damp² ‖x - center‖²), estimated by the recurrence.
        normal_residual_norm: norm of the gradient of half the damped problem, likewise (in the preconditioned space).
        stop_reason: ``"residual"`` (btol and atol), ``"normal_residual"`` (atol), ``"zero_gradient"`` (the start solves
            the problem), ``"callback"``, or ``"maxiter"``.

    Example:
        >>> A = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> result = lsmr(A.matmul, A.T.matmul, torch.tensor([2.0, 8.0, 1.0]), atol=1e-3)
        >>> result.iterations, round(result.residual_norm, 3), result.stop_reason
        (2, 1.0, 'normal_residual')
    """

    x: Any
    iterations: int
    residual_norm: float
    normal_residual_norm: float
    stop_reason: str


@checked
def lsmr(
    matvec: Callable[[Any], Any],
    rmatvec: Callable[[Any], Any],
    b: Vector,
    *,
    damp: NotNegative = 0.0,
    x0: Vector | None = None,
    damping_center: str | Vector = "start",
    preconditioner: Vector | RightPreconditioner | None = None,
    damping_space: str = "y",
    maxiter: Count | None = None,
    atol: NotNegative = 1e-8,
    btol: NotNegative = 1e-8,
    callback: Callable[[int, Callable[[], Any]], bool | None] | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    gradient: Vector | None = None,
) -> LeastSquaresResult:
    """Solve min ‖A x - b‖² + damp² ‖x - center‖² by LSMR (Fong & Saunders 2011; Algorithm 6 of the SHF paper).

    The norm of the normal residual (equation (17)) falls at every step, and with it the residual, so stopping early is
    safe.

    Args:
        matvec: x -> A x, structured like ``b``.
        rmatvec: u -> Aᵀ u, structured like x.
        b: right-hand side, a tensor or a dict of tensors of any shapes, float32 or float64.
        damp: λ >= 0.
        x0: where to start; zero if not given.
        damping_center: ``"start"``: the damping pulls to ``x0`` (SciPy's meaning and Algorithm 6's); ``"origin"``: to 0
            (equation (18)); or a vector structured like x.
        preconditioner: the vector c of Algorithm 3 (x = c∘y), or an object with ``solve`` and ``solve_transpose``
            for C (x = C⁻¹ y). ``x0`` and the result are always in the space of x.
        damping_space: ``"y"``: the damping is on y, as in the paper; ``"x"``: on x. No difference without
            preconditioner.
        maxiter: bound on the iterations; min(sizes) of A if not given.
        atol: stop when ‖Aᵀr‖ <= atol ‖A‖ ‖r‖ (of the damped problem).
        btol: stop when ‖r‖ <= btol ‖b - A x0‖ + atol ‖A‖ ‖x - x0‖.
        callback: called after each iteration with its number (from 1) and a function that returns the x of that
            iteration as a new tensor; a true value ends the solve.
        all_reduce: sums a float64 scalar tensor over the processes when each of them holds some of the rows of A and b;
            ``rmatvec`` must then return the sum over all of them.
        gradient: Aᵀ(b - A x0), if it is known: it saves the first product with Aᵀ.

    Returns:
        LeastSquaresResult: solution, iterations, norms and the reason of the stop.

    Raises:
        ValueError: an option out of range, or a vector of the wrong structure.
        TypeError: a vector is no tensor, or holds other numbers than float32 and float64.
        FloatingPointError: a product returned NaN or infinity.

    Example:
        >>> A = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> lsmr(A.matmul, A.T.matmul, torch.tensor([2.0, 8.0, 1.0])).x.round(decimals=3)
        tensor([1., 2.])
    """
    problem = _Problem(
        matvec, rmatvec, b, damp, x0, damping_center, preconditioner, damping_space, all_reduce, gradient
    )
    if maxiter is None:
        maxiter = min(problem.size_of_b, problem.size_of_x) + (problem.size_of_x if problem.rows_in_operator else 0)
    process = Bidiagonalisation(problem)
    z = [torch.zeros_like(t) for t in process.v]
    right_hand_side_norm = process.beta
    if process.alpha * process.beta == 0.0:
        return LeastSquaresResult(problem.x_of(z), 0, right_hand_side_norm, 0.0, "zero_gradient")

    norms = IterationNorms(right_hand_side_norm, process.alpha * process.beta, process.alpha, 0.0)
    iteration, reason = 0, "maxiter"
    if maxiter > 0:
        for iteration, norms in enumerate(lsmr_steps(process, problem.damp, z), start=1):
            small = norms.operator * norms.residual
            # ‖Āᵀr̄‖ <= atol ‖Ā‖ ‖r̄‖ (section 5, equation (19))
            if norms.normal_residual <= max(atol, _EPS) * small:
                reason = "normal_residual"
            elif _is_small(norms, btol * right_hand_side_norm, atol * norms.operator, z):
                reason = "residual"
            # The callback sees the last iterate too, whatever ends the solve.
            if callback is not None and callback(iteration, lambda: problem.x_of(z)) and reason == "maxiter":
                reason = "callback"
            if reason != "maxiter" or iteration >= maxiter:
                break
    return LeastSquaresResult(problem.x_of(z), iteration, norms.residual, norms.normal_residual, reason)


# --- the problem in the variable z = y - y0, where every form of damping is one augmented operator ------------------


class _Problem:
    """The damped problem as ‖A C⁻¹ z - r0‖² + damp² ‖z‖², z = C (x - x0), on lists of tensors.

    A damping that does not pull to the start, or that is measured on x beside a preconditioner, becomes rows of the
    operator: [A C⁻¹; damp W] z = [r0; -damp W_0], with W = C⁻¹ (on x) or I (on y).
    """

    def __init__(
        self,
        matvec: Callable[[Any], Any],
        rmatvec: Callable[[Any], Any],
        b: Vector,
        damp: float,
        x0: Vector | None,
        damping_center: str | Vector,
        preconditioner: Vector | RightPreconditioner | None,
        damping_space: str,
        all_reduce: Callable[[Tensor], Tensor] | None,
        gradient: Vector | None,
    ) -> None:
        if damping_space not in ("y", "x"):
            raise ValueError(f"damping_space must be 'y' or 'x', got {damping_space!r}")
        if isinstance(damping_center, str) and damping_center not in ("start", "origin"):
            raise ValueError(f"damping_center must be 'start', 'origin' or a vector, got {damping_center!r}")
        self._matvec, self._rmatvec, self._all_reduce = matvec, rmatvec, all_reduce
        self._preconditioner, self._b_like = preconditioner, b
        self.size_of_b = sum(t.numel() for t in leaves(b, name="b"))

        if x0 is None:
            residual = [t.clone() for t in leaves(b)]
            self._x_like: Vector = rmatvec(b) if gradient is None else gradient
            self._x0: list[Tensor] | None = None
            self._gradient: list[Tensor] | None = leaves(self._x_like, name="the product with the transpose")
        else:
            self._x_like = x0
            self._x0 = leaves(x0, name="x0")
            residual = [torch.sub(t, a) for t, a in zip(leaves(b), leaves(matvec(x0), b, "A x0"), strict=True)]
            self._gradient = None if gradient is None else leaves(gradient, x0, "gradient")
        self.size_of_x = sum(t.numel() for t in leaves(self._x_like))
        is_scaling = isinstance(preconditioner, Tensor | Mapping)
        self._scale = leaves(preconditioner, self._x_like, "preconditioner") if is_scaling else None
        self._scratch = [torch.empty_like(t) for t in self._scale or []]

        offset = self._x0  # x0 - center
        if not isinstance(damping_center, str):
            center = leaves(damping_center, self._x_like, "damping_center")
            offset = [-t for t in center] if offset is None else [a - t for a, t in zip(offset, center, strict=True)]
        elif damping_center == "start":
            offset = None
        self._rows_on_x = damping_space == "x" and preconditioner is not None
        self.rows_in_operator = damp > 0 and (self._rows_on_x or offset is not None)
        self.damp = 0.0 if self.rows_in_operator else float(damp)
        self._row_damp = float(damp)
        self.residual, self._count = residual, len(residual)
        if self.rows_in_operator:
            if offset is not None and preconditioner is not None and not self._rows_on_x:
                if self._scale is None:
                    needs = "damping on y around a point other than the start needs C itself"
                    raise ValueError(f"{needs}, and the preconditioner has its inverse alone: use damping_space='x'")
                offset = [t / c for t, c in zip(offset, self._scale, strict=True)]
            zeros = [torch.zeros_like(t) for t in leaves(self._x_like)]
            self.residual = residual + (zeros if offset is None else [t.mul(-self._row_damp) for t in offset])

    def _solve(self, y: list[Tensor], out: list[Tensor] | None = None) -> list[Tensor]:
        """C⁻¹ y, written to ``out`` if given and if it is a scaling: fresh memory costs more than the product."""
        if self._preconditioner is None:
            return y
        if self._scale is not None:
            targets = out or [torch.empty_like(t) for t in y]
            return [torch.mul(t, c, out=o) for t, c, o in zip(y, self._scale, targets, strict=True)]
        x = self._preconditioner.solve(structured(self._x_like, y))  # type: ignore[union-attr]
        return leaves(x, self._x_like, "what the preconditioner's solve returned")

    def _solve_transpose(self, x: list[Tensor]) -> list[Tensor]:
        if self._preconditioner is None:
            return x
        if self._scale is not None:
            return self._solve(x, out=self._scratch)
        y = self._preconditioner.solve_transpose(structured(self._x_like, x))  # type: ignore[union-attr]
        return leaves(y, self._x_like, "what the preconditioner's solve_transpose returned")

    def forward(self, z: list[Tensor]) -> list[Tensor]:
        x = self._solve(z, out=self._scratch)
        rows = leaves(self._matvec(structured(self._x_like, x)), self._b_like, "the product with A")
        if self.rows_in_operator:
            rows = rows + [t.mul(self._row_damp) for t in (x if self._rows_on_x else z)]
        return rows

    def backward(self, u: list[Tensor]) -> list[Tensor]:
        product = self._rmatvec(structured(self._b_like, u[: self._count]))
        return self._with_rows(leaves(product, self._x_like, "the product with the transpose"), u)

    def first_backward(self, u: list[Tensor], beta: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same for u₁ = r0/β, from Aᵀr0 if that is known; and ‖Aᵀr0‖², or 1 if it is not."""
        known, self._gradient = self._gradient, None
        if known is None:
            return self.backward(u), torch.ones_like(beta)
        scale = torch.where(beta > 0.0, beta, 1.0)
        return self._with_rows([t / scale for t in known], u), dot(known, known)

    def _with_rows(self, x: list[Tensor], u: list[Tensor]) -> list[Tensor]:
        """C⁻ᵀ x, and the contribution of the appended rows."""
        if not self.rows_in_operator:
            return self._solve_transpose(x)
        below = u[self._count :]
        if self._rows_on_x:
            return self._solve_transpose([t.add(r, alpha=self._row_damp) for t, r in zip(x, below, strict=True)])
        return [t.add(r, alpha=self._row_damp) for t, r in zip(self._solve_transpose(x), below, strict=True)]

    def norm_of_rows(self, u: list[Tensor]) -> Tensor:
        """‖u‖ over all processes, see :func:`~lightning_struct.functional.vectors.dot`."""

        def squares_of(u: list[Tensor]) -> Tensor:
            squares = squared_norm(u[: self._count])
            if self._all_reduce is not None:
                (squares,) = matching_tensors(self._all_reduce(squares), squares, "the sum by all_reduce")
            return squares + squared_norm(u[self._count :]) if self.rows_in_operator else squares

        if self._all_reduce is None and not u[0].is_cpu:
            return norm(u)
        if u[0].is_cpu:
            squares = squares_of(u)
            if float32_holds(squares.item()):
                return root(squares)
        return root(squares_of([t.double() for t in u]))

    def x_of(self, z: list[Tensor]) -> Vector:
        x = self._solve(z)
        if self._x0 is not None:
            x = [a.add(t) for a, t in zip(self._x0, x, strict=True)]
        elif self._scale is None:  # the solve of an object may return its argument
            x = [t.clone() for t in x]
        return structured(self._x_like, x)


class Bidiagonalisation:
    """Golub-Kahan (Algorithm 6): β₁u₁ = r0, α₁v₁ = Aᵀu₁; then β u ← A v - α u, α v ← Aᵀu - β v, all of unit norm."""

    def __init__(self, problem: _Problem) -> None:
        self._problem, self.u = problem, problem.residual
        beta = problem.norm_of_rows(self.u)
        _normalise(self.u, beta)
        product, squares = problem.first_backward(self.u, beta)
        self.v = [t.clone() for t in product]
        alpha = norm(self.v)
        numbers = torch.stack([beta, alpha, squares]).tolist()
        if not float32_holds(numbers[2]):  # the known value of Aᵀr0 has lost its digits
            self.v = [t.clone() for t in problem.backward(self.u)]
            alpha = norm(self.v)
            numbers[1] = alpha.item()
        _normalise(self.v, alpha)
        self._take("the right-hand side", numbers[0], numbers[1])
        if self.beta == 0.0:
            self.alpha = 0.0

    def advance(self) -> None:
        for u, a in zip(self.u, self._problem.forward(self.v), strict=True):
            torch.sub(a, u, alpha=self.alpha, out=u)
        beta = self._problem.norm_of_rows(self.u)
        _normalise(self.u, beta)
        for v, a in zip(self.v, self._problem.backward(self.u), strict=True):
            subtract_scaled_(v, a, beta)
        alpha = norm(self.v)
        _normalise(self.v, alpha)
        self._take("the product", *torch.stack([beta, alpha]).tolist())  # one look at the device in an iteration

    def _take(self, name: str, beta: float, alpha: float) -> None:
        for value, of in ((beta, name), (alpha, "the product with the transpose")):
            if not math.isfinite(value):
                raise FloatingPointError(f"{of} holds NaN or infinity; check the data, the weights and the damping")
        self.beta, self.alpha = beta, alpha


def _normalise(vector: list[Tensor], norm: Tensor) -> None:
    scale = norm.clamp_min(torch.finfo(norm.dtype).tiny).reciprocal_()
    for t in vector:
        t.mul_(scale)


class IterationNorms(NamedTuple):
    """Norms that the stopping rules read after an iteration; that of the solution z is no more than its bound."""

    residual: float
    normal_residual: float
    operator: float
    solution_bound: float


def lsmr_steps(process: Bidiagonalisation, damp: float, z: list[Tensor]) -> Iterator[IterationNorms]:
    """LSMR (Algorithm 6; Fong & Saunders 2011, sections 2.8 and 5); ``z`` is updated in place. The names are theirs."""
    alpha, beta = process.alpha, process.beta
    alpha_bar, zeta_bar = alpha, alpha * beta
    # Algorithm 6 sets rho_0 = 0, which divides by zero at k = 1; Fong & Saunders have rho_0 = 1.
    rho, rho_bar, c_bar, s_bar = 1.0, 1.0, 1.0, 0.0
    h = [t.clone() for t in process.v]
    h_bar = [torch.zeros_like(t) for t in process.v]
    # For the estimate of ‖r‖ (section 2.8.1) and of ‖A‖.
    beta_dd, beta_d, rho_d_old, tau_tilde_old, theta_tilde, zeta, d = beta, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0
    frobenius = alpha * alpha + damp * damp
    bound_h, bound_h_bar, bound = 1.0, 0.0, 0.0
    while True:
        process.advance()
        alpha, beta = process.alpha, process.beta

        # Algorithm 6, "construct rotation P̂": the damping.
        alpha_hat = math.hypot(alpha_bar, damp)
        c_hat, s_hat = (alpha_bar / alpha_hat, damp / alpha_hat) if alpha_hat else (1.0, 0.0)
        # "Construct and apply rotation P".
        rho_old, rho = rho, math.hypot(alpha_hat, beta)
        c, s = alpha_hat / rho, beta / rho
        theta_new, alpha_bar = s * alpha, c * alpha

        # "Construct and apply rotation P̄".
        rho_bar_old, zeta_old = rho_bar, zeta
        theta_bar, rho_temp = s_bar * rho, c_bar * rho
        rho_bar = math.hypot(rho_temp, theta_new)
        c_bar, s_bar = rho_temp / rho_bar, theta_new / rho_bar
        zeta, zeta_bar = c_bar * zeta_bar, -s_bar * zeta_bar

        # "Update h̄, x, h".
        of_h_bar, of_x, of_h = theta_bar * rho / (rho_old * rho_bar_old), zeta / (rho * rho_bar), theta_new / rho
        for x_, h_, hb, v in zip(z, h, h_bar, process.v, strict=True):
            torch.sub(h_, hb, alpha=of_h_bar, out=hb)
            x_.add_(hb, alpha=of_x)
            torch.sub(v, h_, alpha=of_h, out=h_)
        bound_h_bar = bound_h + abs(of_h_bar) * bound_h_bar
        bound, bound_h = bound + abs(of_x) * bound_h_bar, 1.0 + abs(of_h) * bound_h

        # The estimate of ‖r̄‖ of equation (19).
        beta_acute, beta_check = c_hat * beta_dd, -s_hat * beta_dd
        beta_hat, beta_dd = c * beta_acute, -s * beta_acute
        theta_tilde_old = theta_tilde
        rho_tilde_old = math.hypot(rho_d_old, theta_bar)
        c_tilde_old, s_tilde_old = rho_d_old / rho_tilde_old, theta_bar / rho_tilde_old
        theta_tilde, rho_d_old = s_tilde_old * rho_bar, c_tilde_old * rho_bar
        beta_d = -s_tilde_old * beta_d + c_tilde_old * beta_hat
        tau_tilde_old = (zeta_old - theta_tilde_old * tau_tilde_old) / rho_tilde_old
        tau_d = (zeta - theta_tilde * tau_tilde_old) / rho_d_old
        d += beta_check * beta_check

        residual_norm = math.sqrt(d + (beta_d - tau_d) ** 2 + beta_dd * beta_dd)
        frobenius += beta * beta
        operator_norm = math.sqrt(frobenius)
        frobenius += alpha * alpha + damp * damp
        yield IterationNorms(residual_norm, abs(zeta_bar), operator_norm, bound)


def _is_small(norms: IterationNorms, absolute: float, relative: float, z: list[Tensor]) -> bool:
    """Whether ‖r̄‖ <= ``absolute`` + ``relative`` ‖z‖; only near the bound on ‖z‖ the host waits for ‖z‖ itself."""
    missing = norms.residual - absolute
    # a hundredth for rounding
    return missing <= 0.0 or missing <= 1.01 * relative * norms.solution_bound and missing <= relative * norm(z).item()


_EPS = torch.finfo(torch.float64).eps
