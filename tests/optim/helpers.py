"""One step of SHF written down plainly, with dense matrices: what the optimizer is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional.jacobian.losses import get_loss
from tests.cases import dense_jacobian, flat, gaussian, trainable  # noqa: F401  # gaussian: for the tests beside


def set_weights(module: nn.Module, weights: Tensor) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p, part in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
        p.data.copy_(part.view_as(p))


def sample_loss(loss: str, output: Tensor, target: Tensor) -> Tensor:
    if loss == "mse":
        return 0.5 * (output - target).square().sum()
    return F.cross_entropy(output[None], target[None])


def hessian_root(loss: str, output: Tensor) -> Tensor:
    """S with S Sᵀ the Hessian of one sample's loss: of the many, the one that the losses document."""
    if loss == "mse":
        return torch.eye(output.numel(), dtype=output.dtype)
    p = output.softmax(-1)
    return torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())


@dataclass(frozen=True)
class DenseModel:
    """Value, per-sample gradients and Gauss-Newton matrix of a batch, without the penalty.

    ``jacobian`` is (n, k, weights), ``roots`` (n, k, k).
    """

    value: float
    gradients: Tensor
    gauss_newton: Tensor
    jacobian: Tensor
    roots: Tensor

    @property
    def gradient(self) -> Tensor:
        return self.gradients.mean(0)

    def squared_probes(self, probe: Tensor) -> Tensor:
        """(weights,): the mean over samples of (Jᵢᵀ S uᵢ)²."""
        return torch.einsum("nkp,nkl,nl->np", self.jacobian, self.roots, probe).square().mean(0)

    @property
    def variance(self) -> float:
        return self.gradients.var(0, correction=1).sum().item()


def dense_model(module: nn.Module, loss: str, inputs: Tensor, targets: Tensor) -> DenseModel:
    """The network's outputs must be (n, k)."""
    outputs = module(inputs).detach()
    jacobian = dense_jacobian(module, inputs)
    gradients, gauss_newton, roots, value = [], torch.zeros(()), [], 0.0
    for output, target, rows in zip(outputs, targets, jacobian, strict=True):
        hessian = torch.autograd.functional.hessian(lambda z, t=target: sample_loss(loss, z, t), output)
        slope = torch.autograd.functional.jacobian(lambda z, t=target: sample_loss(loss, z, t), output)
        gradients.append(rows.T @ slope)
        roots.append(hessian_root(loss, output))
        gauss_newton = gauss_newton + rows.T @ hessian @ rows / len(outputs)
        value += sample_loss(loss, output, target).item() / len(outputs)
    return DenseModel(value, torch.stack(gradients), gauss_newton, jacobian, torch.stack(roots))


def value_at(module: nn.Module, loss: str, inputs: Tensor, targets: Tensor, weights: Tensor, l2: float) -> float:
    before = flat(trainable(module)).clone()
    set_weights(module, weights)
    with torch.no_grad():
        outputs = module(inputs)
        value = sum(sample_loss(loss, o, t).item() for o, t in zip(outputs, targets, strict=True)) / len(outputs)
    set_weights(module, before)
    return value + 0.5 * l2 * weights.square().sum().item()


def dense_direction(
    model: DenseModel, weights: Tensor, start: Tensor, *, damping: float, center: str, weight: Tensor, l2: float
) -> Tensor:
    """argmin of the model + ½ l2 ‖w + d‖² + ½ λ² ‖W (d - center)‖², by its normal equations."""
    pull = damping**2 * weight.T @ weight
    matrix = model.gauss_newton + l2 * torch.eye(len(weights), dtype=weights.dtype) + pull
    right = -model.gradient - l2 * weights
    if center == "start":
        right = right + pull @ start
    return torch.linalg.solve(matrix, right)


def dense_cg_iterates(matrix: Tensor, right: Tensor, start: Tensor, inverse: Tensor, iterations: int) -> list[Tensor]:
    """The iterates 1, 2, ... of conjugate gradients from ``start``, preconditioned by ``inverse``."""
    x, r = start, right - matrix @ start
    p, iterates = inverse @ r, []
    for _ in range(iterations):
        alpha = (r @ inverse @ r) / (p @ matrix @ p)
        x, r_new = x + alpha * p, r - alpha * matrix @ p
        p, r = inverse @ r_new + (r_new @ inverse @ r_new) / (r @ inverse @ r) * p, r_new
        iterates.append(x)
    return iterates


def best_going_back(iterates: list[Tensor], value: Callable[[Tensor], float]) -> Tensor:
    """Martens (2010): iterates are kept at 1.3-fold intervals; one goes back over them while the loss falls."""
    kept, next_kept = [], 1.0
    for i, x in enumerate(iterates, start=1):
        if i >= next_kept:
            kept.append(x)
            next_kept = max(i + 1, 1.3 * i)
    best = iterates[-1]
    for x in reversed(kept):
        if value(x) > value(best):
            break
        best = x
    return best


class RecordingLoss:
    """A loss that keeps the vectors of signs that S was multiplied with: the probes of the randomised diagonal."""

    def __init__(self, name: str) -> None:
        self._loss = get_loss(name)
        self.probe = torch.empty(0)
        self.value, self.residual = self._loss.value, self._loss.residual
        self.sqrt_hessian_transpose = self._loss.sqrt_hessian_transpose

    def sqrt_hessian(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        if torch.equal(vector.abs(), torch.ones_like(vector)):
            self.probe = vector.clone()
        return self._loss.sqrt_hessian(outputs, targets, vector)


class TriangularPreconditioner:
    """A dense C over all weights, as an object on dicts of tensors; counts its updates."""

    def __init__(self, matrix: Tensor, like: dict[str, Tensor]) -> None:
        self.matrix, self._like, self.updates = matrix, like, 0

    def update(self, linearization: object, loss: object, targets: Tensor, damping: float) -> None:
        self.updates += 1

    def solve(self, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._split(torch.linalg.solve(self.matrix, flat({name: y[name] for name in self._like})))

    def solve_transpose(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._split(torch.linalg.solve(self.matrix.T, flat({name: x[name] for name in self._like})))

    def _split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([t.numel() for t in self._like.values()])
        return {name: part.view_as(t) for (name, t), part in zip(self._like.items(), parts, strict=True)}
