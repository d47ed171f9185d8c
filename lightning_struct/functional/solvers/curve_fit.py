"""Small nonlinear least-squares problems, one or thousands at once: the method of Levenberg, Marquardt and Moré."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

from lightning_struct.functional.checks import Positive, Size, as_tensor, checked, first_line
from lightning_struct.functional.torch_tools import triangular_factor

Bounds: TypeAlias = Sequence[Any] | Tensor
"""Lower and upper bounds of the parameters, each a number, a sequence of P numbers, or a tensor (P,)."""

_LEAST = 1e-3  # damping of a singular problem, of the largest
_SEARCHES = 10  # for the damping of a radius
_TAKEN = 1e-4  # of the predicted reduction of the loss
_BY_QR = 64  # problems at once; more are factorised by Cholesky, which is faster and squares the condition number
_MATCH = 1e-6  # of derivatives by rows with those by parameters

_REASONS = ("max_steps", "ftol", "xtol", "gtol", "not_finite")
_MAX_STEPS, _FTOL, _XTOL, _GTOL, _NOT_FINITE = range(5)

# Of z = (r / scale)²: ρ(z), for which Σ ρ is minimised, and its derivative.
_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "squared": (lambda z: z, torch.ones_like),
    "soft_l1": (lambda z: 2 * ((1 + z).sqrt() - 1), lambda z: (1 + z).rsqrt()),
    "huber": (lambda z: torch.where(z <= 1, z, 2 * z.clamp(min=1).sqrt() - 1), lambda z: z.clamp(min=1).rsqrt()),
    "cauchy": (torch.log1p, lambda z: 1 / (1 + z)),
}


@dataclass(frozen=True)
class CurveFit:
    """The result of fits; all tensors have the leading dimensions of the first parameters.

    Attributes:
        parameters: (..., P).
        covariance: (..., P, P), s² (JᵀJ)⁻¹ with s² = Σ r² / (N - P); zero for parameters at a bound, infinite if J is
            singular or, without ``absolute_sigma``, N = P.
        residuals: (..., N): f(x) - y, divided by sigma.
        converged: (...), bool: the fit ended within the tolerance, with finite numbers.
        reason: of each fit, in order: ``"ftol"`` (a step would change the sum of squares by less than the tolerance),
            ``"xtol"`` (the same of the parameters), ``"gtol"`` (the columns of J are orthogonal to the residuals),
            ``"max_steps"``, or ``"not_finite"`` (first residuals or any derivatives are NaN or infinite).
        steps: (...), int: steps that were tried.

    Example:
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)
        >>> fit = curve_fit(lambda x, a, b: a * x + b, x, 2 * x + 1, [0.0, 0.0])
        >>> fit.parameters, fit.converged, fit.standard_errors.shape
        (tensor([2., 1.], dtype=torch.float64), tensor(True), torch.Size([2]))
    """

    parameters: Tensor
    covariance: Tensor
    residuals: Tensor
    converged: Tensor
    reason: list[str]
    steps: Tensor

    @property
    def standard_errors(self) -> Tensor:
        """The square roots of the diagonal of the covariance, (..., P)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).sqrt()

    def __iter__(self) -> Iterator[Tensor]:
        """Refuse ``popt, pcov = curve_fit(...)``: the result has names."""
        raise TypeError("a CurveFit has no order: write fit = curve_fit(...), then fit.parameters and fit.covariance")


@checked
def curve_fit(
    f: Callable[..., Tensor],
    x: Any,
    y: Any,
    p0: Any,
    *,
    sigma: Any = None,
    bounds: Bounds | None = None,
    absolute_sigma: bool = False,
    loss: str = "squared",
    scale: Positive = 1.0,
    max_steps: Size = 1000,
    tolerance: Positive = 1e-10,
) -> CurveFit:
    """Fit a curve f(x, a, b, ...) to measurements, or thousands of curves to as many sets of measurements at once.

    For example::

        fit = curve_fit(lambda x, a, b: a * torch.exp(-b * x), x, y, p0=[1.0, 1.0])
        print(fit.parameters, fit.standard_errors)

    Derivatives are exact. Use float64: float32 ends at about three digits. x, y, p0 and sigma are tensors, arrays of
    NumPy, or lists of numbers; the results are tensors in the dtype of y.

    Args:
        f: called as ``f(x, *parameters)`` for one fit, returns (N,) or any shape of N numbers. The parameters are
            scalars, or (N,) with one value for each row if f treats rows alike. It computes by functions of torch.
        x: whatever ``f`` takes: (N, ...), the same for all fits, or (..., N, ...) with one for each.
        y: measurements, (N,) or (..., N).
        p0: first parameters, (P,), or (..., P) for as many independent fits. Several starts for the same y are
            independent fits, too.
        sigma: standard deviations of y, a number or shaped as y; residuals are divided by them. An infinite one masks a
            measurement: it does not count, whatever it is.
        bounds: lower and upper ones, infinite if a side has none.
        absolute_sigma: whether ``sigma`` is in the unit of y: the covariance is then not scaled by s².
        loss: ``"squared"``, or ``"soft_l1"``, ``"huber"`` or ``"cauchy"``, which outliers influence less.
        scale: the residual, in units of sigma, at which a robust loss begins to count less than the square.
        max_steps: a fit ends after so many.
        tolerance: of the verdict, relative; at least four roundings.

    Raises:
        ValueError: y, x, p0, sigma or bounds do not fit together; there are fewer measurements than parameters; p0 is
            outside of the bounds; a setting is out of range.
        TypeError: numbers are not real; ``f`` calls functions of NumPy.

    Example:
        >>> x = torch.linspace(0, 4, 50, dtype=torch.float64)
        >>> fit = curve_fit(lambda x, a, b: a * torch.exp(-b * x), x, 3 * torch.exp(-0.7 * x), [1.0, 1.0])
        >>> fit.parameters
        tensor([3.0000, 0.7000], dtype=torch.float64)
        >>> fit.converged.item()
        True
    """
    x, y = as_tensor("x", x), _real("y", y)
    x, y = (value.to(torch.promote_types(x.dtype, y.dtype)) for value in (x, y)) if x.is_floating_point() else (x, y)
    p0 = _real("p0", p0).to(y)
    batch, N = p0.shape[:-1], y.shape[-1] if y.dim() else 0
    if y.dtype.itemsize < 4 or not p0.numel():
        raise ValueError(f"y must be in float32 or float64, and p0 have parameters, got {y.dtype} and {_shape(p0)}")
    if not p0.dim() or y.shape not in (batch + (N,), (N,)) or not N:
        raise ValueError(f"y must be (N,) or p0's leading dimensions and N, but y is {_shape(y)} and p0 {_shape(p0)}")
    if N < p0.shape[-1]:
        raise ValueError(f"y has {N} values for {p0.shape[-1]} parameters: give as many values at least")
    weights = _real("sigma", 1.0 if sigma is None else sigma).to(y)
    if weights.shape not in ((), (N,), y.shape) or not bool((weights > 0).all()):
        raise ValueError(f"sigma must be positive, a number or shaped as y {_shape(y)}, but is {_shape(weights)}")
    if x.shape[:1] != (N,) and x.shape[: len(batch) + 1] != batch + (N,):
        raise ValueError(f"x must have {N} rows, as y has values, but is {_shape(x)}")
    shared = x.shape[: len(batch) + 1] != batch + (N,)
    xs = (x.expand(batch + x.shape) if shared else x).flatten(0, len(batch) - 1) if batch else x[None]
    data = [xs, y.expand(batch + (N,)), weights.expand(batch + (N,))]

    def residuals(p: Tensor, x: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
        try:
            values = f(x, *p.unbind())
        except (RuntimeError, TypeError) as error:
            if "numpy" not in str(error):
                raise
            raise TypeError(
                f"f must compute by functions of torch, such as torch.exp instead of numpy.exp: {first_line(error)}"
            ) from error
        if not isinstance(values, Tensor) or values.numel() != N:
            raise ValueError(
                f"f must return {N} numbers in a tensor, one for each row of x, but returns {_shape(values)}"
            )
        return torch.where(sigma.isinf(), 0.0, (values.reshape(-1) - y) / sigma)

    flat = [data[0], *(of_data.reshape(-1, N) for of_data in data[1:])]
    evaluate = _by_rows(residuals, p0.reshape(-1, p0.shape[-1]), flat)
    counts = flat[2].isfinite().sum(1)
    return _fits(evaluate, p0, flat, bounds, loss, scale, max_steps, tolerance, counts, scaled=not absolute_sigma)


@checked
def levenberg_marquardt(
    residuals: Callable[..., Tensor],
    parameters: Tensor,
    *data: Tensor,
    bounds: Bounds | None = None,
    loss: str = "squared",
    scale: Positive = 1.0,
    max_steps: Size = 1000,
    tolerance: Positive = 1e-10,
) -> CurveFit:
    """Minimise the sums of squares of small residual functions, one or thousands of independent ones at once.

    The trust-region form with the scaling of Moré (1978): J by forward mode, the damping of each step from its radius
    in units of the largest norms that the columns of J have had. Problems that have ended leave the batch. Bounds are
    held by projection; parameters at a bound that would leave it rest.

    Args:
        residuals: of one problem, called as ``residuals(p, *of_data)`` with p (P,), returns (N,). For several problems
            it runs under ``torch.func.vmap``.
        parameters: first ones, (P,) or (..., P) for as many problems.
        data: tensors with the leading dimensions of the problems, without these passed to ``residuals``.
        bounds, loss, scale, max_steps, tolerance: as in :func:`curve_fit`.

    Raises:
        ValueError: as in :func:`curve_fit`.
        TypeError: ``parameters`` or the residuals are not of real floating point.

    Example:
        >>> def rosenbrock(p):
        ...     return torch.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])
        >>> levenberg_marquardt(rosenbrock, torch.tensor([[-1.2, 1.0], [2.0, 2.0]], dtype=torch.float64)).parameters
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """
    parameters, batch = _real("parameters", parameters), parameters.shape[:-1]
    if not parameters.dim() or parameters.dtype.itemsize < 4:
        raise ValueError(f"parameters must be (..., P) in float32 or float64, but are {_shape(parameters)}")
    for number, of_data in enumerate(data):
        as_tensor(f"data {number}", of_data)
        if of_data.shape[: len(batch)] != batch:
            raise ValueError(
                f"data {number} must begin with the dimensions {tuple(batch)} of the problems, but is {_shape(of_data)}"
            )
    flat = [of_data.reshape(-1, *of_data.shape[len(batch) :]) for of_data in data]
    return _fits(_forward(residuals), parameters, flat, bounds, loss, scale, max_steps, tolerance)


Evaluate = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Parameters (B, P) and the data of B problems -> residuals (B, N) and Jacobians (B, N, P)."""


def _real(name: str, value: Any) -> Tensor:
    """A value as a tensor of real floating point; whole numbers that are no tensor become float64."""
    tensor = as_tensor(name, value)
    if not isinstance(value, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must hold real floating-point numbers, but is {tensor.dtype}")
    return tensor.detach()


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _each(function: Callable[..., Any]) -> Callable[[Tensor, Sequence[Tensor]], Any]:
    """A function of one problem, for all of a batch."""

    def evaluate(p: Tensor, data: Sequence[Tensor]) -> Any:
        if len(p) > 1:
            return vmap(function)(p, *data)
        result = function(p[0], *(of_data[0] for of_data in data))  # vmap takes longer than a small function
        return tuple(part[None] for part in result) if isinstance(result, tuple) else result[None]

    return evaluate


def _forward(residuals: Callable[..., Tensor]) -> Evaluate:
    """The Jacobian by forward mode."""

    def twice(p: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        r = residuals(p, *data)
        if not isinstance(r, Tensor) or r.dim() != 1 or not r.is_floating_point():
            raise TypeError(f"residuals must return a tensor (N,) of real floating point, but returns {_shape(r)}")
        return r, r

    each = _each(jacfwd(twice, has_aux=True))

    def evaluate(p: Tensor, data: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        J, r = each(p, data)
        return r, J

    return evaluate


def _by_rows(residuals: Callable[..., Tensor], p: Tensor, data: Sequence[Tensor]) -> Evaluate:
    """The Jacobian by one backward pass with parameters of their own for each row, if the rows are independent.

    That is compared with the derivative of a random sum of residuals at the first parameters; else forward mode is
    taken.
    """
    each = _each(residuals)

    def evaluate(p: Tensor, data: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            rows = p[:, :, None].expand(-1, -1, data[1].shape[1]).clone().requires_grad_()
            r = each(rows, data)
            return r.detach(), torch.autograd.grad(r.sum(), rows)[0].mT

    with torch.enable_grad():
        whole = p.clone().requires_grad_()
        r = each(whole, data)
        u = torch.randn(r.shape, dtype=r.dtype, device=r.device, generator=torch.Generator(r.device).manual_seed(0))
        expected = torch.autograd.grad((u * r).sum(), whole)[0]
    try:
        found = (evaluate(p, data)[1].mT @ u[:, :, None])[..., 0]
    except (RuntimeError, ValueError, TypeError, IndexError):  # f has no meaning for one parameter for each row
        return _forward(residuals)
    matches = torch.allclose(found, expected, rtol=_MATCH, equal_nan=True)
    return evaluate if matches else _forward(residuals)


def _limits(bounds: Bounds | None, start: Tensor) -> tuple[Tensor, Tensor] | None:
    if bounds is None:
        return None
    count = start.shape[-1]
    if len(bounds) != 2:
        raise ValueError(f"bounds must be two, lower and upper ones, but are {bounds}")
    lower, upper = (torch.as_tensor(of, dtype=start.dtype, device=start.device) for of in bounds)
    if any(of.shape not in ((), (count,)) for of in (lower, upper)) or not bool((lower < upper).all()):
        raise ValueError(f"bounds must be lower ones below upper ones, numbers or ({count},), but are {bounds}")
    outside = (start < lower) | (start > upper)
    if bool(outside.any()):
        worst = outside.nonzero()[0].tolist()
        raise ValueError(f"bounds exclude the first value {start[tuple(worst)].item():.6g} of parameter {worst[-1]}")
    return lower.expand(count), upper.expand(count)


def _fits(
    evaluate: Evaluate,
    start: Tensor,
    data: Sequence[Tensor],
    bounds: Bounds | None,
    loss: str,
    scale: float,
    max_steps: int,
    tolerance: float,
    counts: Tensor | None = None,
    *,
    scaled: bool = True,
) -> CurveFit:
    """The fits of all problems; ``counts`` (B,) are the numbers of residuals that count, None: all."""
    if loss not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}, but is {loss!r}")
    if start.numel() == 0:
        raise ValueError(f"there are no parameters: {_shape(start)}")
    batch, count = start.shape[:-1], start.shape[-1]
    limits = _limits(bounds, start)
    with torch.no_grad():
        p, reasons, steps = _minimise(
            evaluate, start.reshape(-1, count), data, limits, loss, scale, int(max_steps), float(tolerance)
        )
        r, J = evaluate(p, data)
        held = torch.zeros_like(p, dtype=torch.bool) if limits is None else (p <= limits[0]) | (p >= limits[1])
        covariance = inverse_of_normal_matrices(J.masked_fill(held[:, None], 0.0), held)
        if scaled:
            degrees = (torch.full_like(r[:, 0], r.shape[1]) if counts is None else counts) - count
            scaled_by = r.square().sum(1) / degrees.clamp(min=1)
            unknown = covariance.isinf() | (degrees <= 0)[:, None, None]
            covariance = torch.where(unknown, torch.inf, covariance * scaled_by[:, None, None])
            covariance = torch.where(held[:, None] | held[:, :, None], 0.0, covariance)
    return CurveFit(
        p.reshape(start.shape),
        covariance.reshape(*batch, count, count),
        r.reshape(*batch, -1),
        ((reasons != _MAX_STEPS) & (reasons != _NOT_FINITE)).reshape(batch),
        [_REASONS[index] for index in reasons.tolist()],
        steps.reshape(batch),
    )


def inverse_of_normal_matrices(J: Tensor, held: Tensor) -> Tensor:
    """(JᵀJ)⁻¹, (B, P, P), by the columns of J scaled to norm one; infinite if J is singular, zero where held."""
    norms = torch.linalg.vector_norm(J, dim=1)
    scale = torch.where(norms > 0, norms, 1.0)
    rows = torch.cat([(J / scale[:, None]).nan_to_num(), torch.diag_embed(held.to(J.dtype))], 1)
    R = triangular_factor(rows)
    diagonal = R.diagonal(dim1=1, dim2=2).abs()
    is_singular = (diagonal <= torch.finfo(R.dtype).eps * R.shape[1]).any(1) | ~J.isfinite().all(2).all(1)
    eye = torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
    inverse = torch.linalg.solve_triangular(
        torch.where(is_singular[:, None, None], eye, R), eye.expand_as(R), upper=True
    )
    covariance = inverse @ inverse.mT / (scale[:, :, None] * scale[:, None])
    return covariance.masked_fill(is_singular[:, None, None], torch.inf)


def _triangular(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """R (B, P, P), upper triangular, and z = R⁻ᵀ Aᵀ b (B, P) with RᵀR = AᵀA, of A (B, M, P) and b (B, M)."""
    count = A.shape[2]
    if len(A) <= _BY_QR:
        R = triangular_factor(torch.cat([A, b[:, :, None]], 2))
        return R[:, :count, :count], R[:, :count, count]
    L, info = torch.linalg.cholesky_ex(A.mT @ A)
    R, z = L.mT, torch.linalg.solve_triangular(L, A.mT @ b[:, :, None], upper=False)[..., 0]
    for some in info.nonzero()[:, 0].split(_BY_QR):
        R[some], z[some] = _triangular(A[some], b[some])
    return R, z


def _step(R: Tensor, z: Tensor, D: Tensor, radius: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """d and λ: d minimises ‖R d + z‖² + λ ‖D d‖², ‖D d‖ within a tenth of the radius, or shorter with λ = 0.

    Moré (1978), section 5.
    """

    def solve(R: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = -torch.linalg.solve_triangular(R, z[:, :, None], upper=True)[..., 0]
        length = torch.linalg.vector_norm(D * d, dim=1)
        slope = torch.linalg.solve_triangular(R.mT, (D * D * d)[:, :, None], upper=False)[..., 0]
        return d, length, slope.square().sum(1) / length.square()

    d, length, slope = solve(R, z)
    is_short = length <= 1.1 * radius
    if bool(is_short.all()):
        return d, torch.zeros_like(radius)
    lowest = ((length - radius) / (radius * slope)).nan_to_num(0.0, 0.0, 0.0)
    gradient = (R.mT @ z[:, :, None])[..., 0] / D
    highest = torch.maximum(torch.linalg.vector_norm(gradient, dim=1) / radius, lowest)
    least = torch.maximum(lowest, _LEAST * highest)
    lowest = torch.where(length.isfinite(), lowest, least)  # a singular R has no step without damping
    current = torch.where(is_short, 0.0, torch.where(damping > 0, damping, lowest).clamp(least, highest))
    for _ in range(_SEARCHES):
        below = torch.diag_embed(current.sqrt()[:, None] * D)
        d, length, slope = solve(*_triangular(torch.cat([R, below], 1), torch.cat([z, torch.zeros_like(z)], 1)))
        is_found = is_short | ((length - radius).abs() <= 0.1 * radius) | ((length < radius) & (current <= lowest))
        if bool(is_found.all()):
            break
        lowest = torch.where(length > radius, torch.maximum(lowest, current), lowest)
        highest = torch.where(length < radius, torch.minimum(highest, current), highest)
        further = (current + (length - radius) / (radius * slope)).clamp(lowest, highest)
        current = torch.where(is_found, current, further)
    return d, current


def _minimise(
    evaluate: Evaluate,
    start: Tensor,
    data: Sequence[Tensor],
    bounds: tuple[Tensor, Tensor] | None,
    loss: str,
    scale: float,
    max_steps: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters (B, P), the indices of the reasons (B,), and steps (B,)."""
    tolerance = max(tolerance, 4 * torch.finfo(start.dtype).eps)
    rho, derivative = _LOSSES[loss]

    def problem(p: Tensor, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Σ ρ, and R, z and ‖r‖ of the problem whose rows have the roots of the weights of the loss."""
        r, J = evaluate(p, data)
        value = r.square().sum(1)
        if loss != "squared":
            ratio = (r / scale).square()
            value, weights = scale**2 * rho(ratio).sum(1), derivative(ratio).sqrt()
            r, J = weights * r, weights[:, :, None] * J
        is_finite = value.isfinite()
        if not bool(is_finite.all()):
            r, J = (torch.where(is_finite.view(-1, *[1] * (t.dim() - 1)), t, 0.0) for t in (r, J))
        R, z = _triangular(J, r)
        return value, R, z, torch.linalg.vector_norm(r, dim=1)

    ends, reasons = start.clone(), torch.zeros(len(start), dtype=torch.int64, device=start.device)
    steps = torch.full_like(reasons, max_steps)
    index, p = torch.arange(len(start), device=start.device), start
    f, R, z, size = problem(p, data)
    reason = torch.where(f.isfinite(), 0, _NOT_FINITE)
    D, damping, radius = torch.zeros_like(p), torch.zeros_like(f), torch.ones_like(f)
    for step in range(max_steps + 1):
        norms, gradient = torch.linalg.vector_norm(R, dim=1), (R.mT @ z[:, :, None])[..., 0]
        reason = torch.where((reason == 0) & ~gradient.isfinite().all(1), _NOT_FINITE, reason)
        D = torch.maximum(D, norms)
        is_flat = gradient.abs() <= tolerance * norms * size[:, None]
        held = None
        if bounds is not None:
            held = ((p <= bounds[0]) & (gradient > 0)) | ((p >= bounds[1]) & (gradient < 0))
            is_flat |= held
        reason = torch.where((reason == 0) & is_flat.all(1), _GTOL, reason)
        done = reason != 0
        if bool(done.any()) or step == max_steps:
            done |= step == max_steps
            ends[index[done]], reasons[index[done]], steps[index[done]] = p[done], reason[done], step
            if bool(done.all()):
                break
            state = (index, p, f, R, z, size, D, damping, radius, reason)
            index, p, f, R, z, size, D, damping, radius, reason = (part[~done] for part in state)
            data, held = [of_data[~done] for of_data in data], None if held is None else held[~done]
        weights = torch.where(D > 0, D, 1.0)
        extent = torch.linalg.vector_norm(weights * p, dim=1)
        if step == 0:
            radius = torch.where(extent > 0, extent, 1.0)
        free, right = R, z
        if held is not None:
            rows = torch.cat([R.masked_fill(held[:, None], 0.0), torch.diag_embed(held.to(R.dtype))], 1)
            free, right = _triangular(rows, torch.cat([z, torch.zeros_like(z)], 1))
        d, damping = _step(free, right, weights, radius, damping)
        if bounds is not None:
            d = (p + d).clamp(*bounds) - p
        length = torch.linalg.vector_norm(weights * d, dim=1)
        if step == 0:
            radius = torch.minimum(radius, length)
        Rd = (R @ d[:, :, None])[..., 0]
        predicted = -(Rd * (Rd + 2 * z)).sum(1)
        further = problem(p + d, data)
        reduction = f - further[0]
        ratio = torch.where(predicted > 0, reduction / predicted, 0.0).nan_to_num(-1.0, -1.0, -1.0)
        shrunk = torch.where(reduction > -99 * f, 0.5, 0.1) * torch.minimum(radius, 10 * length)
        grown = torch.where((ratio >= 0.75) | (damping == 0), 2 * length, radius)
        radius = torch.where(ratio <= 0.25, shrunk, grown)
        is_small = (reduction.abs() <= tolerance * f) & (predicted <= tolerance * f) & (ratio <= 2)
        reason = torch.where(radius <= tolerance * extent, _XTOL, torch.where(is_small, _FTOL, reason))
        taken = ratio > _TAKEN
        p, f, R, z, size = (
            torch.where(taken.view(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip((p + d, *further), (p, f, R, z, size), strict=True)
        )
    return ends, reasons, steps
