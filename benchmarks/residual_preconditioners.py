"""The gain of a preconditioner in LSMR on residuals: distance to a damped step's solution after some products.

    OMP_NUM_THREADS=1 python benchmarks/residual_preconditioners.py [--steps 6 18 30] [--seed 0]

Trains a network of 9,873 parameters on Poisson's equation, 1,020 points, by ``SHF(module, "least_squares")``, and takes
the problem min ‖r + J d‖² + λ²‖d‖² of the steps named, with the λ of the step and with an eighth of it. Printed is by
how much of itself the value at d is above its lowest, after products with J and Jᵀ, those of the preconditioner counted
too:

- ``bidiagonalisation``: one Golub-Kahan process with all columns kept and orthogonalised, as in SHF;
- ``conjugate gradients``: the same Krylov space in exact arithmetic, without orthogonalisation;
- ``Kronecker``: conjugate gradients, preconditioned by Kronecker factors of JᵀJ for each layer, from the gradients of
  rows;
- ``Nyström 50``: preconditioned by a randomised Nyström approximation of JᵀJ of rank 50, which takes 50 of the
  products.

A minute of one core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import harness
from lightning_struct.data.equations import Poisson
from lightning_struct.functional import LeastSquares, ProjectedLeastSquares
from lightning_struct.functional.residuals.residual_rows import RowRecords
from lightning_struct.models.pinn import PhysicsInformedNetwork
from lightning_struct.optim import SHF
from lightning_struct.optim.shf.residuals.model import ResidualModel

PRODUCTS = (20, 40, 60, 80, 120, 160)
RANK = 50
Apply = Callable[[Tensor], Tensor]


def kronecker(jacobian: Tensor, sizes: list[torch.Size], damping: float) -> Apply:
    """C⁻¹ with C² = A ⊗ G + λ² for matrices, JᵀJ + λ² for the rest: A and G from each row's gradient as a matrix."""
    factors = []
    for size, columns in zip(sizes, jacobian.split([size.numel() for size in sizes], dim=1), strict=True):
        if len(size) == 2:
            gradients = columns.unflatten(1, size)
            left = torch.einsum("noi,npi->op", gradients, gradients)
            right = torch.einsum("noi,noj->ij", gradients, gradients)
            (left_values, u), (right_values, v) = torch.linalg.eigh(left / left.trace()), torch.linalg.eigh(right)
            values = left_values.clamp_min(0)[:, None] * right_values.clamp_min(0)
        else:
            values, u = torch.linalg.eigh(columns.mT @ columns)
            values, v = values.clamp_min(0)[:, None], torch.ones(1, 1)
        factors.append((u, v, (values + damping**2).rsqrt()))

    def apply(x: Tensor) -> Tensor:
        parts = x.split([size.numel() for size in sizes])
        return torch.cat(
            [
                (u @ ((u.mT @ part.view(scale.shape) @ v) * scale) @ v.mT).reshape(-1)
                for part, (u, v, scale) in zip(parts, factors, strict=True)
            ]
        )

    return apply


def nystrom(jacobian: Tensor, damping: float) -> Apply:
    """The same of a randomised Nyström approximation (Frangella, Tropp & Udell 2023, algorithm 2.1 and section 5)."""
    sketch = torch.linalg.qr(torch.randn(jacobian.shape[1], RANK, generator=torch.Generator().manual_seed(1)))[0]
    product = jacobian.mT @ (jacobian @ sketch)
    shift = torch.finfo(product.dtype).eps * product.norm().item()
    product += shift * sketch
    factor = torch.linalg.cholesky(sketch.mT @ product)
    u, s, _ = torch.linalg.svd(torch.linalg.solve_triangular(factor, product.mT, upper=False).mT, full_matrices=False)
    values = (s * s - shift).clamp_min(0)
    scale = ((values[-1] + damping**2) / (values + damping**2)).sqrt()
    return lambda x: x + u @ ((scale - 1) * (u.mT @ x))


def conjugate_gradients(jacobian: Tensor, b: Tensor, damping: float, apply: Apply, steps: int) -> list[Tensor]:
    """Iterates for C⁻¹(JᵀJ + λ²)C⁻¹ y = C⁻¹Jᵀb, as C⁻¹y; the first is after one step."""
    y = torch.zeros(jacobian.shape[1])
    residual = apply(jacobian.mT @ b)
    direction, square, iterates = residual.clone(), residual @ residual, []
    for _ in range(steps):
        if square == 0.0:
            iterates.append(apply(y))
            continue
        moved = apply(direction)
        product = apply(jacobian.mT @ (jacobian @ moved) + damping**2 * moved)
        length = square / (direction @ product)
        y, residual = y + length * direction, residual - length * product
        square, last = residual @ residual, square
        direction = residual + (square / last) * direction
        iterates.append(apply(y))
    return iterates


def distances(jacobian: Tensor, residual: Tensor, sizes: list[torch.Size], damping: float) -> dict[str, list[str]]:
    """By way, the distances after each of ``PRODUCTS``."""

    def value(d: Tensor) -> float:
        moved = residual + jacobian @ d
        return (moved @ moved + damping**2 * (d @ d)).item()

    gram = jacobian @ jacobian.mT
    best = value(-jacobian.mT @ torch.linalg.solve(gram + damping**2 * torch.eye(len(gram)), residual))

    def row(solutions: list[Tensor | None]) -> list[str]:
        return ["" if d is None else f"{max(value(d) / best - 1, 0.0):.1e}" for d in solutions]

    found = {"bidiagonalisation": row([
        ProjectedLeastSquares(jacobian.matmul, jacobian.mT.matmul, -residual, k).solution(damping) for k in PRODUCTS
    ])}  # fmt: skip
    ways = {
        "conjugate gradients": (lambda x: x, 0),
        "Kronecker": (kronecker(jacobian, sizes, damping), 0),
        f"Nyström {RANK}": (nystrom(jacobian, damping), RANK),
    }
    for name, (apply, spent) in ways.items():
        iterates = conjugate_gradients(jacobian, -residual, damping, apply, max(PRODUCTS) - spent)
        found[name] = row([iterates[k - spent - 1] if k > spent else None for k in PRODUCTS])
    return found


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[6, 18, 30])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    equation = Poisson(2)
    module = PhysicsInformedNetwork(equation, [64, 64, 48, 48])
    generator = torch.Generator().manual_seed(arguments.seed)
    counts = {"interior": 900, "boundary": 120}
    points = {name: equation.regions[name].sample(n, generator) for name, n in counts.items()}
    optimizer, records = SHF(module, "least_squares"), RowRecords(module)
    harness.print_header("step", "loss", "λ", "way", *(f"{k} products" for k in PRODUCTS))
    for step in range(max(arguments.steps) + 1):
        if step in arguments.steps:
            weights = {name: p.detach() for name, p in module.named_parameters()}
            model = ResidualModel(records, LeastSquares(), weights, points)
            jacobian = model.jacobian(model.form_for_gram).dense()
            for damping in (optimizer.damping, optimizer.damping / 8):
                sizes = [p.shape for p in weights.values()]
                for way, cells in distances(jacobian, model.residual, sizes, damping).items():
                    harness.print_row(step, f"{model.value:.1e}", f"{damping:.1e}", way, *cells)
        optimizer.step(inputs=points)


if __name__ == "__main__":
    main()
