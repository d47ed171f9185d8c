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
_SLOW = 100, 20  # tolerances, and steps that change the loss by no more: a fit ends, its minimum may be at infinity
_BY_QR = 64  # problems at once; more are factorised by Cholesky, which is faster and squares the condition number,
_PIVOT = 1e-9  # but for those with a squared pivot below this share of its column's square
_CHECKED = 16  # problems whose derivatives by rows are compared with those by parameters
_MATCH = 1e-6  # of the two
_NUMBERS_AT_ONCE = 2**17  # residuals for each thread of a CPU, whose caches then keep their derivatives

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
    data = [y.expand(batch + (N,)).reshape(-1, N)]
    if batch and not shared:
        data.append(x.flatten(0, len(batch) - 1))
    if sigma is not None:
        data.append(weights.expand(batch + (N,)).reshape(-1, N))

    def values(parameters: Sequence[Tensor], *of_fit: Tensor) -> Tensor:
        try:
            found = f(*(of_fit or (x,)), *parameters)
        except (RuntimeError, TypeError) as error:
            if "numpy" not in str(error):
                raise
            raise TypeError(
                f"f must compute by functions of torch, such as torch.exp instead of numpy.exp: {first_line(error)}"
            ) from error
        if not isinstance(found, Tensor) or found.numel() != N:
            raise ValueError(
                f"f must return {N} numbers in a tensor, one for each row of x, but returns {_shape(found)}"
            )
        return found.reshape(-1)

    derivatives = _Derivatives(values, N)
    at_once = max(1, _NUMBERS_AT_ONCE * torch.get_num_threads() // N) if y.device.type == "cpu" else len(data[0])

    def evaluate(p: Tensor, data: Sequence[Tensor]) -> Iterator[Tensor]:
        for first in range(0, p.shape[1], at_once):
            part = slice(first, first + at_once)
            of_y, *inputs = (of[part] for of in data)
            deviations = None if sigma is None else inputs.pop()[:, None]
            rows = derivatives.rows(p[:, part], of_y, inputs)
            yield rows if deviations is None else torch.where(deviations.isinf(), 0.0, rows / deviations)

    counts = None if sigma is None else data[-1].isfinite().sum(1)
    return _fits(evaluate, p0, data, bounds, loss, scale, max_steps, tolerance, counts, scaled=not absolute_sigma)


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
    if not parameters.dim() or not parameters.numel() or parameters.dtype.itemsize < 4:
        raise ValueError(f"parameters must be (..., P), float32 or float64: {_shape(parameters)} {parameters.dtype}")
    for number, of_data in enumerate(data):
        as_tensor(f"data {number}", of_data)
        if of_data.shape[: len(batch)] != batch:
            raise ValueError(
                f"data {number} must begin with the dimensions {tuple(batch)} of the problems, but is {_shape(of_data)}"
            )
    flat = [of_data.reshape(-1, *of_data.shape[len(batch) :]) for of_data in data]

    def evaluate(p: Tensor, data: Sequence[Tensor]) -> Iterator[Tensor]:
        rows = _forward(lambda p, *of_data: residuals(torch.stack(p), *of_data), p, 0.0, data)
        if rows.shape[2] < len(p):
            raise ValueError(f"residuals must be as many as the {len(p)} parameters at least, but are {rows.shape[2]}")
        yield rows

    return _fits(evaluate, parameters, flat, bounds, loss, scale, max_steps, tolerance)


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


def _forward(function: Callable[..., Tensor], p: Tensor, y: Tensor | float, data: Sequence[Tensor]) -> Tensor:
    """Derivatives by each parameter, by forward mode, and the values of a function of one problem less y, as rows."""

    def twice(p: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        r = function(p.unbind(), *data)
        if not isinstance(r, Tensor) or r.dim() != 1 or not r.is_floating_point():
            raise TypeError(f"residuals must return a tensor (N,) of real floating point, but returns {_shape(r)}")
        return r, r

    J, r = vmap(jacfwd(twice, has_aux=True), in_dims=(1, *(0 for _ in data)))(p, *data)
    return torch.cat([J.mT, (r - y)[:, None]], 1)


class _Derivatives:
    """Values of a function of parameters and their derivatives, by rows if these are independent.

    That is one backward pass, with parameters of their own for each row. In the first call some of its derivatives are
    compared with those of a sum of all rows; if they differ, forward mode is taken.

    Args:
        function: of the parameters and the data of one problem, returns (N,).
        count: N.
    """

    def __init__(self, function: Callable[..., Tensor], count: int) -> None:
        self._function, self._count = function, count
        self._by_rows: bool | None = None

    def rows(self, p: Tensor, y: Tensor, data: Sequence[Tensor]) -> Tensor:
        """The derivatives by each parameter (P, B), and values less y (B, N), as rows (B, P + 1, N)."""
        if self._by_rows is None:
            few, u = slice(_CHECKED), torch.arange(self._count, dtype=p.dtype, device=p.device).square().sin()
            expected = self._pulled_back(p[:, few], [of[few] for of in data], (), u)[1]
            try:
                rows = self._by_one_pass(p, y, data)
                self._by_rows = torch.allclose(rows[few, :-1] @ u, torch.stack(expected, -1), _MATCH, equal_nan=True)
            except (RuntimeError, ValueError, TypeError, IndexError):  # f has no meaning for parameters by rows
                self._by_rows = False
            if self._by_rows:
                return rows
        return self._by_one_pass(p, y, data) if self._by_rows else _forward(self._function, p, y, data)

    def _by_one_pass(self, p: Tensor, y: Tensor, data: Sequence[Tensor]) -> Tensor:
        values, columns = self._pulled_back(p, data, (self._count,), None)
        return torch.stack([*columns, values - y.view_as(values)], -2).view(-1, len(p) + 1, self._count)

    def _pulled_back(
        self, p: Tensor, data: Sequence[Tensor], shape: tuple[int, ...], u: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Values, and derivatives of Σ u values by each parameter, repeated to a shape; without B if it is one."""
        is_one = p.shape[1] == 1  # vmap takes longer than a small function
        with torch.enable_grad():
            places = p[:, 0] if is_one else p
            places = places.reshape(*places.shape, *(1 for _ in shape)).expand(*places.shape, *shape)
            parameters = [of.detach().requires_grad_() for of in places]
            function = self._function if is_one else vmap(self._function)
            values = function(parameters, *(of[0] if is_one else of for of in data))
            total = values.sum() if u is None else (values * u).sum()
            return values.detach(), torch.autograd.grad(total, parameters, materialize_grads=True)


def _limits(bounds: Bounds | None, start: Tensor) -> list[Tensor] | None:
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
    return [limit.expand(count)[:, None] for limit in (lower, upper)]


def _fits(
    evaluate: Callable[[Tensor, Sequence[Tensor]], Iterator[Tensor]],
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
    """The fits of all problems.

    Args:
        evaluate: of parameters (P, B) and the data of B problems, yields the columns of J, and r, as rows (_, P + 1, N)
            of some problems after the others.
        counts: the numbers of residuals that count; None: all.
    """
    if loss not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}, but is {loss!r}")
    batch, count = start.shape[:-1], start.shape[-1]
    limits, (rho, derivative) = _limits(bounds, start), _LOSSES[loss]

    def weighted(rows: Tensor) -> tuple[Tensor, ...]:
        if loss == "squared":
            R, z, size = _triangular(rows)
            return size**2, R, z, size
        ratio = (rows[:, -1] / scale).square()
        return scale**2 * rho(ratio).sum(1), *_triangular(rows * derivative(ratio).sqrt()[:, None])

    def problem(p: Tensor, data: Sequence[Tensor]) -> Sequence[Tensor]:
        return _joined([weighted(rows) for rows in evaluate(p, data)])

    with torch.no_grad():
        first = start.reshape(-1, count).T.contiguous()
        p, reasons, steps = _minimise(problem, first, data, limits, int(max_steps), float(tolerance))
        parts = [(rows[:, -1].clone(), _triangular(rows)) for rows in evaluate(p, data)]
        r, (R, z, size) = torch.cat([r for r, _ in parts]), _joined([part for _, part in parts])
        held = torch.zeros_like(p, dtype=torch.bool)
        if limits is not None:
            held = (p <= limits[0]) | (p >= limits[1])
            R, _ = _with_diagonal(R.masked_fill(held, 0.0), z, held)
        reasons = torch.where(size.isfinite() & R.isfinite().all(0).all(0), reasons, _NOT_FINITE)
        covariance = inverse_of_normal_matrices(R)
        if scaled:
            degrees = (r.shape[1] if counts is None else counts) - count
            unknown = covariance.isinf() | (torch.as_tensor(degrees, device=p.device) <= 0)
            covariance = torch.where(unknown, torch.inf, covariance * (size**2 / degrees))
        covariance = covariance.masked_fill(held[:, None] | held, 0.0)
    return CurveFit(
        p.T.reshape(start.shape),
        covariance.permute(2, 0, 1).reshape(*batch, count, count),
        r.reshape(*batch, -1),
        ((reasons != _MAX_STEPS) & (reasons != _NOT_FINITE)).reshape(batch),
        [_REASONS[index] for index in reasons.tolist()],
        steps.reshape(batch),
    )


def inverse_of_normal_matrices(R: Tensor) -> Tensor:
    """(RᵀR)⁻¹ of triangular matrices (P, P, B), by their columns scaled to norm one; infinite if R is singular."""
    norms = _norms(R)
    scale = torch.where(norms > 0, norms, 1.0)
    scaled = (R / scale).permute(2, 0, 1)
    smallest = torch.finfo(R.dtype).eps * len(R)
    diagonal = scaled.diagonal(dim1=1, dim2=2).abs()
    is_singular = ((diagonal <= smallest).any(1) | ~scaled.isfinite().all(2).all(1))[:, None, None]
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    inverse = torch.linalg.solve_triangular(torch.where(is_singular, eye, scaled), eye.expand_as(scaled), upper=True)
    product = (inverse @ inverse.mT).masked_fill(is_singular, torch.inf)
    return product.permute(1, 2, 0) / (scale[:, None] * scale)


def _triangular(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R, z = Qᵀr and ‖r‖ of J = QR, (P, P, B), (P, B) and (B,); J's columns and r are the rows, (B, P + 1, N)."""
    count = rows.shape[1] - 1
    if len(rows) <= _BY_QR:
        R = triangular_factor(rows.mT)[:, :count].permute(1, 2, 0)
        size = torch.linalg.vector_norm(rows[:, count], dim=1)  # that of R is NaN if any of J is
        return R[:, :count], R[:, count], size
    G = (rows @ rows.mT).permute(1, 2, 0).contiguous()
    R, is_poor = torch.zeros_like(G), torch.zeros_like(G[0, 0], dtype=torch.bool)
    for j in range(count):
        pivots = G[j, j:] - (R[:j, j, None] * R[:j, j:]).sum(0)
        is_poor |= ~(pivots[0] > _PIVOT * G[j, j])
        R[j, j:] = pivots / pivots[0].sqrt()
    R, z, size = R[:count, :count], R[:count, count], G[count, count].sqrt()
    for some in is_poor.nonzero()[:, 0].split(_BY_QR) if bool(is_poor.any()) else ():
        R[..., some], z[..., some], size[some] = _triangular(rows[some])
    return R, z, size


def _joined(parts: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Arrays of some problems after the others as arrays of all."""
    return parts[0] if len(parts) == 1 else [torch.cat(part, -1) for part in zip(*parts, strict=True)]


def _norms(vectors: Tensor) -> Tensor:
    """Euclidean norms along the first dimension."""
    return _dot(vectors, vectors).sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sums of products along the first dimension."""
    return (a * b).sum(0)


def _with_diagonal(R: Tensor, z: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """R and z of the matrix R with the rows of a diagonal one, (P, B) or (B,), below, and of z with zeros."""
    matrix = z.new_zeros(R.shape[2], len(z) + 1, 2 * len(z))  # its columns are rows
    matrix[:, :-1, : len(z)], matrix[:, -1, : len(z)] = R.permute(2, 1, 0), z.T
    matrix[:, :-1, len(z) :].diagonal(dim1=1, dim2=2).copy_(diagonal.expand_as(z).T)
    return _triangular(matrix)[:2]


def _solved(T: Tensor, b: Tensor, *, upper: bool) -> Tensor:
    """T⁻¹ b of triangular matrices T (P, P, B) and b (P, B)."""
    if b.shape[1] <= _BY_QR:
        return torch.linalg.solve_triangular(T.permute(2, 0, 1), b.T[..., None], upper=upper)[..., 0].T
    x = torch.zeros_like(b)
    for i in range(len(b) - 1, -1, -1) if upper else range(len(b)):
        x[i] = (b[i] - _dot(T[i], x)) / T[i, i]
    return x


def _step(R: Tensor, z: Tensor, radius: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """d and λ: d minimises ‖R d + z‖² + λ ‖d‖², with ‖d‖ within a tenth of the radius, or shorter with λ = 0.

    Moré (1978), section 5, in parameters that are scaled.
    """

    def solve(R: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d, ‖d‖, and minus its logarithmic derivative by λ."""
        d = -_solved(R, z, upper=True)
        length = _norms(d)
        return d, length, _norms(_solved(R.transpose(0, 1), d / length, upper=False)) ** 2

    d, length, slope = solve(R, z)
    new, is_long = torch.zeros_like(radius), ~(length <= 1.1 * radius)
    if not bool(is_long.any()):
        return d, new
    R, z, radius, damping, length, slope = (part[..., is_long] for part in (R, z, radius, damping, length, slope))
    lowest = (length - radius) / (radius * slope)
    lowest = torch.where(lowest.isfinite(), lowest, 0.0)
    highest = torch.maximum(_norms(_dot(R, z[:, None])) / radius, lowest)
    least = torch.maximum(lowest, _LEAST * highest)
    lowest = torch.where(length.isfinite(), lowest, least)  # a singular R has no step without damping
    current = torch.minimum(torch.maximum(torch.where(damping > 0, damping, lowest), least), highest)
    for _ in range(_SEARCHES):
        found, length, slope = solve(*_with_diagonal(R, z, current.sqrt()))
        is_found = (abs(length - radius) <= 0.1 * radius) | ((length < radius) & (current <= lowest))
        if bool(is_found.all()):
            break
        lowest = torch.where(length > radius, torch.maximum(lowest, current), lowest)
        highest = torch.where(length < radius, torch.minimum(highest, current), highest)
        further = torch.maximum(current + (length - radius) / (radius * slope), lowest)
        current = torch.where(is_found, current, torch.minimum(further, highest))
    d[:, is_long], new[is_long] = found, current
    return d, new


def _minimise(
    problem: Callable[..., Any], p: Tensor, data: Sequence[Tensor], bounds: Any, max_steps: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters (P, B), the indices of the reasons (B,), and steps (B,).

    ``problem`` returns, of parameters (P, B) and data, Σ ρ, and R, z and ‖r‖ of the problems whose rows have the roots
    of the weights of the loss.
    """
    tolerance = max(tolerance, 4 * torch.finfo(p.dtype).eps)
    ends, index = p.clone(), torch.arange(p.shape[1], device=p.device)
    reasons, steps = torch.zeros_like(index), torch.full_like(index, max_steps)
    f, R, z, size = problem(p, data)
    reason = torch.where(f.isfinite(), 0, _NOT_FINITE)
    D, damping, radius, slow = torch.zeros_like(p), torch.zeros_like(f), torch.ones_like(f), torch.zeros_like(f)
    for step in range(max_steps + 1):
        norms = _norms(R)
        R = torch.where(norms > 0, R, 0.0)  # squares of very small numbers are zero
        gradient = _dot(R, z[:, None])
        reason = torch.where((reason == 0) & ~gradient.isfinite().all(0), _NOT_FINITE, reason)
        D = torch.maximum(D, norms)
        is_flat, free, right = abs(gradient) <= tolerance * norms * size, R, z
        if bounds is not None:
            held = ((p <= bounds[0]) & (gradient > 0)) | ((p >= bounds[1]) & (gradient < 0))
            is_flat |= held
            free, right = _with_diagonal(torch.where(held, 0.0, R), z, held)
        reason = torch.where((reason == 0) & is_flat.all(0), _GTOL, reason)
        weights = torch.where(D > 0, D, 1.0)
        extent = _norms(weights * p)
        if step == 0:
            radius = torch.where(extent > 0, extent, 1.0)
        scaled, damping = _step(free / weights, right, radius, damping)
        d = scaled / weights
        new, is_last = p + d, (reason == 0) & (damping == 0)
        if bounds is not None:
            unbounded, new = new, torch.clamp(new, *bounds)
            d, is_last = new - p, is_last & (new == unbounded).all(0)
        length = _norms(weights * d)
        if step == 0:
            radius = torch.minimum(radius, length)
        Rd = (R * d).sum(1)
        predicted = -_dot(Rd, Rd + 2 * z)
        # The last step of a fit is not tried: the residuals at its end are computed with the covariance.
        is_last &= predicted <= tolerance * f
        p, reason = torch.where(is_last, new, p), torch.where(is_last, _FTOL, reason)
        done = (reason != 0) | (step == max_steps)
        if bool(done.any()):
            ends[:, index[done]], reasons[index[done]], steps[index[done]] = p[:, done], reason[done], step
            if bool(done.all()):
                break
            left = (~done).nonzero()[:, 0]
            state = (index, p, f, R, z, size, D, damping, radius, slow, reason, extent, new, length, predicted)
            index, p, f, R, z, size, D, damping, radius, slow, reason, extent, new, length, predicted = (
                part[..., left] for part in state
            )
            data = [of.index_select(0, left) for of in data]
        further = problem(new, data)
        reduction = f - further[0]
        ratio = torch.where(predicted > 0, reduction / predicted, 0.0)  # NaN if the new residuals are
        shrunk = torch.where(reduction > -99 * f, 0.5, 0.1) * torch.minimum(radius, 10 * length)
        grown = torch.where((ratio >= 0.75) | (damping == 0), 2 * length, radius)
        radius = torch.where(ratio > 0.25, grown, shrunk)
        taken, change = ratio > _TAKEN, torch.maximum(abs(reduction), predicted) / f
        slow = torch.where(change <= _SLOW[0] * tolerance, slow + 1, torch.where(taken, 0, slow))
        is_small = ((change <= tolerance) & (ratio <= 2)) | (slow >= _SLOW[1])
        reason = torch.where(~(radius > tolerance * extent), _XTOL, torch.where(is_small, _FTOL, reason))
        states = zip((new, *further), (p, f, R, z, size), strict=True)
        p, f, R, z, size = (torch.where(taken, after, before) for after, before in states)
    return ends, reasons, steps
