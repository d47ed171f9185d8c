"""The search for the member of a class of structured matrices that is nearest to a given matrix.

Powers of the operators of LDR-SD and LDR-TD make a hard problem of it: an entry of a subdiagonal is a factor of all
rows below it. Two things help.

- A start from the displacement itself. W - A W Bᵀ = G Hᵀ is linear in each row of A and G for fixed B and H, and in
  each row of B and H for fixed A and G: small least-squares problems, solved in turn (:func:`fit_subdiagonals`).
- Coordinates in which a parameter moves few entries. A subdiagonal operator without zeros is A = c D Z D⁻¹ with
  diagonal D, so M = D_a M' D_b, where M' has shifts for operators. The search goes over D, G' = D⁻¹ G and the rest
  of A (:class:`BalancedCoordinates`).
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.hub import tqdm

from lightning_struct.functional.structured.operators import DisplacementOperator, SubdiagonalOperator
from lightning_struct.functional.structured.scaled_toeplitz import detrended_path
from lightning_struct.functional.structured.subdiagonal import subdiagonal_to_dense
from lightning_struct.functional.structured.tridiagonal import tridiagonal_to_dense

# Singular value decompositions of larger matrices are computed for the leading values alone, at random.
_LARGEST_DECOMPOSED = 512
_OVERSAMPLED, _POWERS = 8, 4
# The largest range of log|d| over the entries d of D in which products with D and its inverse keep digits in float64.
_LARGEST_LOG_RANGE = 12.0


def relative_error(matrix: Tensor, target: Tensor) -> float:
    """‖matrix - target‖ / ‖target‖ in the Frobenius norm; the numerator alone if the target is zero."""
    error = torch.linalg.vector_norm(matrix.detach() - target)
    norm = torch.linalg.vector_norm(target)
    return float(error / norm if norm > 0 else error)


def best_factor(matrix: Tensor, target: Tensor) -> float:
    """The number c ≥ 0 with the least ‖c matrix - target‖ in the Frobenius norm: <matrix, target> / ‖matrix‖²."""
    product, square = float((matrix * target).sum()), float(matrix.square().sum())
    return product / square if product > 0 and square > 0 else 0.0


def truncated_factors(R: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """G (m, rank) and H (n, rank) with G Hᵀ the matrix of that rank nearest to R (m, n), and GᵀG = HᵀH."""
    U, singular_values, Vh = torch.linalg.svd(R, full_matrices=False)
    root = singular_values[:rank].sqrt()
    return U[:, :rank] * root, Vh[:rank].T * root


def stein_residual(M: Tensor, a: SubdiagonalOperator, b: SubdiagonalOperator) -> Tensor:
    """R (m, n) with M = Σ_{j<p} Aʲ R (Bᵀ)ʲ, p = min(m, n): the G Hᵀ from which equation (2), with Bᵀ for B, makes M.

    M - A M Bᵀ = R - Aᵖ R (Bᵀ)ᵖ. On the smaller side the power is wI, w the product of all entries with the corner; for
    the other side, if that is larger and w is not 0, a linear system is solved (in the sense of least squares: for some
    sizes it is singular).

    Args:
        M: (m, n).
        a, b: A of size m and B of size n.
    """
    m, n = M.shape
    displacement = M - a.matvec(b.matvec(M).mT).mT
    if m > n:
        return stein_residual(M.mT, b, a).mT
    w = a.subdiagonal.prod() * a.corner
    if w == 0 or m == n:
        return displacement / (1 - w * b.subdiagonal.prod() * b.corner)
    identity = torch.eye(n, dtype=M.dtype, device=M.device)
    power = identity
    for _ in range(m):
        power = b.matvec(power)
    return displacement @ torch.linalg.pinv(identity - w * power)


def refine_(weights: Sequence[Tensor], to_dense: Callable[[], Tensor], target: Tensor, iterations: int) -> None:
    """Lower ‖M - target‖ over the weights of M by L-BFGS, in place; never ends higher than it started.

    If it takes longer than some seconds, a progress bar shows the relative error on a terminal.

    Args:
        weights: leaf tensors in float64 that make M.
        to_dense: makes M, (m, n), with gradients to the weights.
        target: (m, n), float64.
        iterations: at most.
    """
    if iterations == 0:
        return
    scale = target.square().sum().clamp(min=torch.finfo(target.dtype).tiny)
    least = float("inf")
    best = [weight.detach().clone() for weight in weights]

    def closure() -> Tensor:
        nonlocal least
        bar.update(1)
        for weight in weights:
            weight.grad = None
        value = (to_dense() - target).square().sum() / scale
        value.backward()
        if value.item() < least:
            least = value.item()
            for copy, weight in zip(best, weights, strict=True):
                copy.copy_(weight.detach())
            bar.set_description(f"relative error {least**0.5:.2g}", refresh=False)
        return value

    optimizer = torch.optim.LBFGS(
        weights,
        max_iter=iterations,
        history_size=100,
        tolerance_grad=1e-10,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )
    with torch.enable_grad(), progress_bar(iterations * 5 // 4, "evaluation") as bar:
        optimizer.step(closure)
    with torch.no_grad():
        for copy, weight in zip(best, weights, strict=True):
            weight.copy_(copy)
            weight.grad = None


def progress_bar(total: int, unit: str) -> Any:
    """tqdm's, on a terminal after some seconds, or torch's own if it is not installed."""
    return tqdm(total=total, unit=unit, delay=3.0, leave=False, disable=not sys.stderr.isatty())


def leading_factors(R: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """G (m, rank) and H (n, rank) with G Hᵀ near to R (m, n): nearest if R is small, else by random projections."""
    if min(R.shape) <= _LARGEST_DECOMPOSED:
        return truncated_factors(R, rank)
    basis = torch.linalg.qr(R @ torch.randn(R.shape[1], rank + _OVERSAMPLED, dtype=R.dtype, device=R.device)).Q
    for _ in range(_POWERS):  # torch.svd_lowrank does the same in ten times the time, through transposed products
        basis = torch.linalg.qr(R @ torch.linalg.qr((basis.T @ R).T).Q).Q
    G, H = truncated_factors(basis.T @ R, rank)
    return basis @ G, H


def fit_subdiagonals(
    W: Tensor, rank: int, a: SubdiagonalOperator, b: SubdiagonalOperator, sweeps: int
) -> tuple[SubdiagonalOperator, SubdiagonalOperator]:
    """Lower ‖W - A W Bᵀ - G Hᵀ‖ over A, B, G and H by least squares for A and G, and for B and H, in turn.

    If it takes longer than some seconds, a progress bar shows the sweeps on a terminal.

    Args:
        W: (m, n), float64.
        rank: r, the columns of G and H.
        a, b: where A and B start; a corner that is zero there remains zero.
        sweeps: how often both are solved for.
    """
    corners = bool(a.corner != 0), bool(b.corner != 0)
    _, H = leading_factors(W - a.matvec(b.matvec(W).mT).mT, rank)
    # Read row by row and column by column: no other matrix of that size is made.
    squares, neighbours = W.square(), W.roll((1, 1), (0, 1)).mul_(W)
    with progress_bar(sweeps, "sweep") as bar:
        for _ in range(sweeps):
            a, G = _fit_rows(W, squares, neighbours, b, H, corners[0])
            b, H = _fit_rows(W.T, squares.T, neighbours.T, a, G, corners[1])
            bar.update(1)
    return a, b


def _fit_rows(
    W: Tensor, squares: Tensor, neighbours: Tensor, b: SubdiagonalOperator, H: Tensor, with_corner: bool
) -> tuple[SubdiagonalOperator, Tensor]:
    """The subdiagonal A and the G that minimise ‖W - A W Bᵀ - G Hᵀ‖: for each row one entry of A, and the row of G.

    Args:
        W: (m, n).
        squares: those of W.
        neighbours: (m, n), each entry of W times its upper left neighbour, cyclically.
        b: B.
        H: (n, r).
        with_corner: whether A has a corner.
    """
    # Row i of A F, with F = W Bᵀ, is the entry of A times row i - 1 of F, cyclically. F has the columns of W, moved by
    # one and multiplied by the entries of B: so sums over its rows are products of matrices that are there with
    # vectors.
    circle = torch.cat([b.corner.reshape(1), b.subdiagonal])
    squared = (squares @ circle.square().roll(-1)).roll(1)
    along = neighbours @ circle
    cross, own, target = (W @ (circle[:, None] * H).roll(-1, 0)).roll(1, 0), H.T @ H, W @ H
    if not with_corner:
        squared[0] = along[0] = 0
        cross[0] = 0
    # The row of G is eliminated: the rest of the row above, and of W, when their parts along H are taken away.
    inverse = torch.linalg.pinv(own, hermitian=True)
    along_above, along_w = cross @ inverse, target @ inverse
    remaining = squared - (cross * along_above).sum(1)
    product = along - (along_above * target).sum(1)
    determined = remaining > 1e-12 * squared
    entries = torch.where(determined, product / torch.where(determined, remaining, 1.0), 1.0)
    if not with_corner:
        entries[0] = 0
    return SubdiagonalOperator(entries[1:], entries[0]), along_w - entries[:, None] * along_above


class BalancedCoordinates:
    """M of a layer as D_a M'(A', B', G', H') D_b, with A' = D_a⁻¹ A D_a of constant subdiagonal, and B' likewise.

    Args:
        layer: a ``LearnedOperatorLinear`` in float64. No entry of its subdiagonals may be zero.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._sides = [_Side(*pair) for pair in zip(layer.operators, (layer.G, layer.H), strict=True)]

    @staticmethod
    def are_exact_for(layer: Any) -> bool:
        """Whether the entries of D range over few orders of magnitude, and none of the subdiagonals' is zero."""
        return all(bool(found < _LARGEST_LOG_RANGE) for found in layer.log_ranges())

    @property
    def variables(self) -> list[Tensor]:
        """Variables of the search: leaf tensors."""
        corners = self.layer.corner == "learned"
        return [variable for side in self._sides for variable in side.variables(corners)]

    def to_dense(self) -> Tensor:
        """M, (out_features, in_features), with gradients to the variables."""
        a, b = self._sides
        A, B = a.operator(), b.operator()
        if isinstance(A, SubdiagonalOperator) and isinstance(B, SubdiagonalOperator):
            M = subdiagonal_to_dense(A.subdiagonal, A.corner, B.subdiagonal, B.corner, a.generators, b.generators)
        else:
            M = tridiagonal_to_dense(A, B, a.generators, b.generators)
        M = a.scale[:, None] * M * b.scale
        return M[: self.layer.out_features, : self.layer.in_features]

    @torch.no_grad()
    def write_back(self) -> None:
        """Set the parameters of the layer to the variables."""
        for side, operator, generators in zip(
            self._sides, self.layer.operators, (self.layer.G, self.layer.H), strict=True
        ):
            side.write(operator, generators)


class _Side:
    """One operator and its generators in balanced coordinates: A = D A' D⁻¹ and G = D G'."""

    def __init__(self, operator: DisplacementOperator, generators: Tensor) -> None:
        self._kind: Any = type(operator)
        subdiagonal, *others, corners = _entries(operator)
        # The geometric mean c of the absolute entries, (); and the entries d of D with A = c D Z D⁻¹, (n,).
        self._constant = subdiagonal.abs().log().mean().exp() if len(subdiagonal) else subdiagonal.new_ones(())
        self._start = path = F.pad((subdiagonal / self._constant).cumprod(0), (1, 0), value=1.0)
        self._moved = torch.ones_like(path)
        self.generators = generators.detach() / path[:, None]
        self._corners = corners / _corners_of_scale(path, corners)
        self._others: list[Tensor] = []
        if others:
            diagonal, superdiagonal = others
            self._others = [diagonal.clone(), superdiagonal * path[1:] / path[:-1]]
        for variable in self.variables(corners=True):
            variable.requires_grad_(True)

    @property
    def scale(self) -> Tensor:
        """The entries of D, (n,)."""
        return self._start * self._moved

    def variables(self, corners: bool) -> list[Tensor]:
        return [self._moved, self.generators, *self._others, *([self._corners] if corners else [])]

    def operator(self) -> Any:
        """A'."""
        return self._kind(self._constant.expand(len(self._start) - 1), *self._others, self._corners)

    def write(self, operator: DisplacementOperator, generators: Tensor) -> None:
        """Set the entries of A and G, in place."""
        d = self.scale
        subdiagonal, *others, corners = _entries(operator)
        subdiagonal.copy_(self._constant * d[1:] / d[:-1])
        corners.copy_(self._corners * _corners_of_scale(d, corners))
        if others:
            diagonal, superdiagonal = others
            diagonal.copy_(self._others[0])
            superdiagonal.copy_(self._others[1] * d[:-1] / d[1:])
        generators.copy_(d[:, None] * self.generators)


def _entries(operator: Any) -> list[Tensor]:
    """The fields of an operator, detached: subdiagonal, (diagonal, superdiagonal,) and corners."""
    return [entry.detach() for entry in vars(operator).values() if isinstance(entry, Tensor)]


def _corners_of_scale(d: Tensor, corners: Tensor) -> Tensor:
    """The factors by which D A' D⁻¹ has other corners than A', one or two."""
    first_by_last = d[0] / d[-1]
    return torch.stack([first_by_last, 1 / first_by_last]) if corners.ndim else first_by_last


def log_range(subdiagonal: Tensor) -> Tensor:
    """The range of log|d| over the entries d of that D, () float64: of log|s_1 ... s_k| less its trend.

    It is infinite if an entry is zero.
    """
    path = F.pad(detrended_path(subdiagonal.double().abs().log())[0], (1, 0))
    return (path.max() - path.min()).nan_to_num(torch.inf)
