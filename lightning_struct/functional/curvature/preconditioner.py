"""Diagonals of the curvature, and the right preconditioners made of them (section 4.4)."""

import torch
from torch import Tensor

from lightning_struct.functional.checks import NotNegative, checked, require_real
from lightning_struct.functional.jacobian.linearization import Linearization
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.randomness import random_signs


@checked
def randomized_gauss_newton_diagonal(
    linearization: Linearization,
    loss: GaussNewtonLoss,
    targets: Tensor,
    *,
    probe: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Unbiased estimate of the diagonal of the Gauss-Newton matrix (Chapelle & Erhan 2011; Algorithm 3).

    With a random sign for each output, the mean over samples of (Jᵢᵀ S uᵢ)². All samples share one backward pass: for a
    Linear layer the sum of the squares is (S̃²)ᵀ(F²).

    Args:
        linearization: the network at the current weights.
        loss: its square root of the Hessian is S.
        targets: of the n outputs, as the loss takes them.
        probe: signs shaped like the outputs, if they must be known beforehand; drawn if not given.
        generator: for the draw.

    Returns:
        A tensor for each parameter: (1/n) Σᵢ (Jᵢᵀ S uᵢ)², whose expectation is the diagonal of (1/n) Σᵢ Jᵢᵀ S Sᵀ Jᵢ.

    Example:
        >>> from lightning_struct.functional import SquaredError, linearize
        >>> weights, inputs = {"weight": torch.zeros(1, 2)}, torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> linearization = linearize(torch.nn.Linear(2, 1, bias=False), weights, inputs)
        >>> randomized_gauss_newton_diagonal(linearization, SquaredError(), torch.ones(2, 1))  # means of x²
        {'weight': tensor([[5., 2.]])}
    """
    outputs = linearization.outputs
    if probe is None:
        probe = random_signs(*outputs.shape, like=outputs, generator=generator)
    squares = linearization.squared_vjp(loss.sqrt_hessian(outputs, targets, probe))
    return {name: t / outputs.shape[0] for name, t in squares.items()}


@checked
def empirical_fisher_diagonal(
    linearization: Linearization, loss: GaussNewtonLoss, targets: Tensor
) -> dict[str, Tensor]:
    """The mean over samples of the squared gradient, elementwise: (1/n) Σᵢ gᵢ² (Martens 2010, section 4.7).

    Args:
        linearization: the network at the current weights.
        loss: its value for one sample is differentiated.
        targets: of the n outputs, as the loss takes them.

    Returns:
        A tensor for each parameter, of its shape and dtype.

    Example:
        >>> from lightning_struct.functional import SquaredError, linearize
        >>> weights, inputs = {"weight": torch.zeros(1, 2)}, torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> linearization = linearize(torch.nn.Linear(2, 1, bias=False), weights, inputs)
        >>> empirical_fisher_diagonal(linearization, SquaredError(), torch.tensor([[1.0], [2.0]]))  # means of x² y²
        {'weight': tensor([[18.5000,  2.0000]])}
    """
    outputs = linearization.outputs
    residual = loss.residual(outputs, targets)
    squares = linearization.squared_vjp(loss.sqrt_hessian(outputs, targets, residual))
    return {name: t / outputs.shape[0] for name, t in squares.items()}


@checked
def jacobi_scaling(diagonal: Tensor) -> Tensor:
    """c = 1/(1 + √C) for the mean C of the squared probes: the right preconditioner of Algorithm 3 (x = c∘y).

    The text of section 4.4 has 1/(1 + C) with the sum instead of the mean; that one trains worse.

    Args:
        diagonal: C >= 0, of any shape and floating dtype, as :func:`randomized_gauss_newton_diagonal` returns it.

    Returns:
        c in (0, 1], of the shape and dtype of C.

    Example:
        >>> jacobi_scaling(torch.tensor([0.0, 1.0, 9.0]))
        tensor([1.0000, 0.5000, 0.2500])
    """
    require_real(diagonal=diagonal)
    return diagonal.sqrt().add_(1.0).reciprocal_()


@checked
def fisher_scaling(diagonal: Tensor, damping: NotNegative) -> Tensor:
    """c with c² = (F + λ²)^(-3/4), Martens' (2010) preconditioner of CG as a right preconditioner.

    Args:
        diagonal: F >= 0, of any shape and floating dtype, as :func:`empirical_fisher_diagonal` returns it.
        damping: λ; if it is 0, c is infinite for F = 0.

    Returns:
        c, of the shape and dtype of F.

    Example:
        >>> fisher_scaling(torch.tensor([0.0, 15.0]), damping=1.0)
        tensor([1.0000, 0.3536])
    """
    require_real(diagonal=diagonal)
    return (diagonal + float(damping) ** 2).pow_(-0.375)
