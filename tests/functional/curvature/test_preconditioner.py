import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional import BinaryCrossEntropy, CrossEntropy, GaussNewtonLoss, SquaredError, linearize
from lightning_struct.functional.curvature.preconditioner import (
    empirical_fisher_diagonal,
    fisher_scaling,
    jacobi_scaling,
    randomized_gauss_newton_diagonal,
)
from lightning_struct.functional.randomness import random_signs
from tests.cases import dense_jacobian, flat, trainable

BACKENDS = ["layer_rules", "double_backward"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 3)).double()


LOSSES = {
    "mse": (SquaredError(), torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)),
    "cross_entropy": (CrossEntropy(), torch.tensor([2, 0])),
    "binary_cross_entropy": (BinaryCrossEntropy(), torch.tensor([[1, 0, 1], [0, 0, 1]])),
}


def inputs() -> Tensor:
    return torch.randn(2, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def sample_loss(loss: GaussNewtonLoss, output: Tensor, target: Tensor) -> Tensor:
    """The loss of one sample by torch alone."""
    if isinstance(loss, SquaredError):
        return 0.5 * (output - target).square().sum()
    if isinstance(loss, BinaryCrossEntropy):
        return nn.functional.binary_cross_entropy_with_logits(output, target.to(output.dtype))
    return nn.functional.cross_entropy(output[None], target[None])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "targets"), LOSSES.values(), ids=LOSSES)
def test_the_mean_over_all_sign_vectors_is_the_diagonal_of_the_gauss_newton_matrix(
    loss: GaussNewtonLoss, targets: Tensor, backend: str
) -> None:
    module, x = network(), inputs()
    params = trainable(module)
    linearization = linearize(module, params, x, backend=backend)
    probes = [torch.tensor(signs, dtype=torch.float64).view(2, 3) for signs in itertools.product((-1, 1), repeat=6)]
    estimates = [flat(randomized_gauss_newton_diagonal(linearization, loss, targets, probe=p)) for p in probes]
    jacobian = dense_jacobian(module, x)
    expected = torch.zeros(flat(params).numel(), dtype=torch.float64)
    for output, target, rows in zip(module(x).detach(), targets, jacobian, strict=True):
        hessian = torch.autograd.functional.hessian(lambda z, t=target: sample_loss(loss, z, t), output)
        expected += torch.diag(rows.T @ hessian @ rows) / 2
    torch.testing.assert_close(torch.stack(estimates).mean(0), expected, rtol=0, atol=1e-12)


def test_signs_are_drawn_from_the_generator() -> None:
    module, x = network(), inputs()
    linearization = linearize(module, trainable(module), x)
    loss, targets = LOSSES["mse"]
    probe = random_signs(2, 3, like=x, generator=torch.Generator().manual_seed(7))
    drawn = randomized_gauss_newton_diagonal(linearization, loss, targets, generator=torch.Generator().manual_seed(7))
    given = randomized_gauss_newton_diagonal(linearization, loss, targets, probe=probe)
    assert torch.equal(flat(drawn), flat(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_signs_are_plus_and_minus_one_in_even_shares(dtype: torch.dtype) -> None:
    signs = random_signs(100, 100, like=torch.empty(0, dtype=dtype), generator=torch.Generator().manual_seed(0))
    assert signs.dtype == dtype and torch.equal(signs.abs(), torch.ones_like(signs))
    assert abs(signs.mean().item()) < 0.04  # four standard deviations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "targets"), LOSSES.values(), ids=LOSSES)
def test_the_empirical_fisher_diagonal_is_the_mean_of_squared_per_sample_gradients(
    loss: GaussNewtonLoss, targets: Tensor, backend: str
) -> None:
    module, x = network(), inputs()
    squares = []
    for x_i, target in zip(x, targets, strict=True):
        gradients = torch.autograd.grad(sample_loss(loss, module(x_i), target), list(module.parameters()))
        squares.append(torch.cat([g.reshape(-1) for g in gradients]).square())
    linearization = linearize(module, trainable(module), x, backend=backend)
    diagonal = empirical_fisher_diagonal(linearization, loss, targets)
    torch.testing.assert_close(flat(diagonal), torch.stack(squares).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        (jacobi_scaling, [1.0, 1 / 2, 1 / 4]),  # of Algorithm 3
        (lambda d: fisher_scaling(d, 2.0).square(), [4.0**-0.75, 5.0**-0.75, 13.0**-0.75]),  # Martens' preconditioner
    ],
    ids=["jacobi", "fisher"],
)
def test_scalings_are_those_of_the_papers_and_leave_the_diagonal(
    scaled: Callable[[Tensor], Tensor], expected: list[float]
) -> None:
    diagonal = torch.tensor([0.0, 1.0, 9.0], dtype=torch.float64)
    torch.testing.assert_close(scaled(diagonal), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert diagonal.tolist() == [0.0, 1.0, 9.0]
