"""The search for the member of a class of structured matrices that is nearest to a given matrix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.hub import tqdm

from lightning_struct.functional.structured.operators import SubdiagonalOperator


def relative_error(matrix: Tensor, target: Tensor) -> float:
    """‖matrix - target‖ / ‖target‖ in the Frobenius norm; the numerator alone where the target is zero."""
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

    Where it takes longer than some seconds, a progress bar shows the relative error on a terminal.

    Args:
        weights: leaf tensors in float64, of which M is made.
        to_dense: makes M, (m, n), with gradients to the weights.
        target: (m, n), float64.
        iterations: at most.
    """
    scale = target.square().sum().clamp(min=torch.finfo(target.dtype).tiny)
    best = float("inf")
    kept = [weight.detach().clone() for weight in weights]

    def loss() -> Tensor:
        return (to_dense() - target).square().sum() / scale

    def closure() -> Tensor:
        nonlocal best
        bar.update(1)
        for weight in weights:
            weight.grad = None
        value = loss()
        value.backward()
        if value.item() < best:
            best = value.item()
            for copy, weight in zip(kept, weights, strict=True):
                copy.copy_(weight.detach())
            bar.set_description(f"relative error {best**0.5:.2g}", refresh=False)
        return value

    if iterations > 0:
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
            for copy, weight in zip(kept, weights, strict=True):
                weight.copy_(copy)
                weight.grad = None


def progress_bar(total: int, unit: str) -> Any:
    """tqdm's, on a terminal after some seconds, or what torch has in place of it where that is not installed."""
    return tqdm(total=total, unit=unit, delay=3.0, leave=False, disable=not sys.stderr.isatty())
