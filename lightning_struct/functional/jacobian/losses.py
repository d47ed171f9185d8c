"""Losses as the Gauss-Newton model needs them: a value, and a square root of the Hessian in the outputs.

For one sample the Hessian of the loss in the network's outputs is S Sᵀ and its gradient is S r. With J the Jacobian of
the outputs, the Gauss-Newton matrix is then (SᵀJ)ᵀ(SᵀJ) and the gradient (SᵀJ)ᵀ r: a least-squares problem. For the
squared error S = I and r is the residual.
"""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_struct.functional.checks import check_dense, checked, require_real
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.functional.randomness import random_signs
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.vectors import inner

T = TypeVar("T")


@runtime_checkable
class GaussNewtonLoss(Protocol):
    """A loss as SHF needs it. ``outputs`` are (n, ...), ``targets`` whatever the loss reads; sample i is row i."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the n samples, a scalar tensor (float64 if rounding matters)."""

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """r, shaped like ``outputs``, with S r the derivative of each sample's loss in its outputs."""

    def sqrt_hessian(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """S times ``vector``, sample by sample; shaped like ``outputs``."""

    def sqrt_hessian_transpose(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """Sᵀ times ``vector``, sample by sample; shaped like ``outputs``."""


class SquaredError:
    """½‖outputs - targets‖², summed over everything but the batch and averaged over samples (SHF paper, section 3).

    Example:
        >>> SquaredError().value(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2))  # ½ (5 + 25)/2
        tensor(7.5000, dtype=torch.float64)
    """

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        residual = self.residual(outputs, targets)  # f_i = ½ r_iᵀr_i (section 3)
        return inner(residual, residual) / (2 * outputs.shape[0])

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _refuse(outputs, targets)
        if outputs.shape != targets.shape:
            shapes = f"outputs are {tuple(outputs.shape)} but targets {tuple(targets.shape)}"
            raise ValueError(f"{shapes}: they must be alike{_of_one_output(outputs, targets)}")
        if not targets.is_floating_point():
            raise TypeError(
                f"the squared error is of real numbers, and targets are {targets.dtype}: give targets.float(), or "
                "loss='cross_entropy' if they are labels"
            )
        return outputs - targets

    def sqrt_hessian(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return vector

    def sqrt_hessian_transpose(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return vector


class CrossEntropy:
    """Softmax cross-entropy of logits (n, ..., classes), averaged over positions, then over samples.

    Targets are class indices (n, ...) or probabilities shaped like the logits. S = diag(√p) - p√pᵀ and r = (p - y)/√p,
    so that S r = p - y; √p is bounded from below. The paper trains autoencoders only; this makes SHF train classifiers.

    A position whose class index is ``ignore_index``, such as padding, does not count; a sample in which none counts has
    a loss of 0. torch's mean is over all positions of a batch that count. This one weighs samples alike, whatever their
    lengths: the loss of a sample does not depend on those beside it.

    Args:
        ignore_index: the class index that marks positions which do not count.

    Raises:
        TypeError: ``ignore_index`` is no integer.

    Example:
        >>> CrossEntropy().value(torch.zeros(2, 4), torch.tensor([0, 3]))  # log 4
        tensor(1.3863, dtype=torch.float64)
        >>> CrossEntropy().value(torch.zeros(2, 3, 4), torch.tensor([[0, 3, 1], [2, -100, -100]]))  # of padded ones
        tensor(1.3863, dtype=torch.float64)
    """

    @checked
    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs, targets)
        logits = at_least_float32(outputs.reshape(-1, outputs.shape[-1]))
        if targets.is_floating_point():
            return F.cross_entropy(logits.double(), targets.reshape(logits.shape).double())
        labels = self._labels(targets).reshape(-1)
        # 1 - p, the sum of the other classes: if it is small, so is -log p, which loses no digits by log1p
        others = logits.softmax(-1).scatter(-1, labels[:, None], 0.0).sum(-1)
        small, large = -torch.log1p(-others.clamp_max(0.5)), F.cross_entropy(logits, labels, reduction="none")
        counted = self._counted(targets).reshape(len(targets), -1)
        losses = torch.where(others < 0.5, small, large).reshape(counted.shape)
        number = _once(targets, ("number", self.ignore_index), lambda t: counted.sum(1).clamp_min(1))
        of_samples = (losses * counted).sum(1, dtype=torch.float64) / number
        return of_samples.mean()

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs, targets)
        p, root = _once(outputs, "p", self._probabilities)
        y = targets if targets.is_floating_point() else F.one_hot(self._labels(targets), outputs.shape[-1])
        return (p - y.to(p.dtype)) / root * self._root_of_share(outputs, targets)

    def sqrt_hessian(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        p, root = _once(outputs, "p", self._probabilities)
        scaled = root * vector
        return (scaled - p * scaled.sum(-1, keepdim=True)) * self._root_of_share(outputs, targets)

    def sqrt_hessian_transpose(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        p, root = _once(outputs, "p", self._probabilities)
        return root * (vector - (p * vector).sum(-1, keepdim=True)) * self._root_of_share(outputs, targets)

    @staticmethod
    def _probabilities(outputs: Tensor) -> tuple[Tensor, Tensor]:
        """p, and √p bounded from below."""
        p = outputs.softmax(-1)
        return p, p.clamp_min(torch.finfo(p.dtype).eps).sqrt()

    def _counted(self, targets: Tensor) -> Tensor:
        """Whether a position counts, shaped like the class indices."""
        # to torch -100 equals 156 in uint8
        return _once(targets, ("counted", self.ignore_index), lambda t: t.long() != self.ignore_index)

    def _labels(self, targets: Tensor) -> Tensor:
        """The class indices, with an existing one at positions that do not count."""
        return _once(targets, ("labels", self.ignore_index), lambda t: t.long().where(self._counted(t), 0))

    def _root_of_share(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """√ of a position's weight in the mean of its sample, which each of two factors has: 1/√T, or 0."""
        if targets.is_floating_point():
            return (outputs[0].numel() / outputs.shape[-1]) ** -0.5

        def share_of(targets: Tensor) -> Tensor:
            counted = self._counted(targets).reshape(len(targets), -1).to(outputs.dtype)
            return (counted / counted.sum(1, keepdim=True).clamp_min(1).sqrt()).reshape(*targets.shape, 1)

        return _once(targets, ("share", self.ignore_index, outputs.dtype), share_of)

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        _refuse(outputs, targets)
        expected = outputs.shape if targets.is_floating_point() else outputs.shape[:-1]
        if outputs.ndim < 2 or targets.shape != expected:
            remedy = ""
            if targets.shape == outputs.shape:
                remedy = ": one-hot targets are probabilities, as by targets.float()"
                if outputs.ndim < 2 or outputs.shape[-1] == 1:
                    remedy = ": one logit for two classes is for 'binary_cross_entropy'"
            elif not targets.is_floating_point() and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
                remedy = ": the classes come last here, as by outputs.movedim(1, -1) in the module"
            raise ValueError(
                "cross-entropy needs logits (n, ..., classes) and targets of class indices (n, ...) or probabilities "
                f"like the logits; got {tuple(outputs.shape)} and {tuple(targets.shape)} ({targets.dtype}){remedy}"
            )
        if targets.is_floating_point() or not targets.numel():
            return
        lowest, highest = _once(targets, ("range", self.ignore_index), lambda t: _range(self._labels(t)))
        if not 0 <= lowest <= highest < outputs.shape[-1]:
            raise ValueError(
                f"class indices must be in [0, {outputs.shape[-1]}), got {lowest} to {highest}; positions of the index "
                f"{self.ignore_index} do not count (CrossEntropy(ignore_index=...) for another)"
            )


class BinaryCrossEntropy:
    """Cross-entropy of logits (n, ...) for one Bernoulli variable each, averaged over samples and outputs.

    Targets are shaped like the logits: 0 and 1 of any dtype, or probabilities. It is torch's
    ``binary_cross_entropy_with_logits``, for classifiers of two classes, of several labels at once, and for
    autoencoders of pixels between 0 and 1. S = diag(√(p(1 - p))) and r = (p - y)/√(p(1 - p)), so that S r = p - y; the
    root is bounded from below.

    Example:
        >>> BinaryCrossEntropy().value(torch.zeros(2, 1), torch.tensor([[True], [False]]))  # log 2
        tensor(0.6931, dtype=torch.float64)
    """

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs, targets)
        logits = at_least_float32(outputs)
        probabilities = targets.to(logits.dtype)  # no term is negative, so that small losses keep all their digits
        losses = probabilities * F.softplus(-logits) + (1 - probabilities) * F.softplus(logits)
        return losses.sum(dtype=torch.float64) / losses.numel()  # without a float64 copy of a large tensor

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs, targets)
        # 1/√k: each of the two factors of a sample's mean over its k outputs
        return (outputs.sigmoid() - targets.to(outputs.dtype)) / self._root(outputs) * outputs[0].numel() ** -0.5

    def sqrt_hessian(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self._root(outputs) * vector * outputs[0].numel() ** -0.5

    def sqrt_hessian_transpose(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.sqrt_hessian(outputs, targets, vector)  # S is diagonal

    @staticmethod
    def _root(outputs: Tensor) -> Tensor:
        variance = outputs.sigmoid() * (-outputs).sigmoid()
        return variance.clamp_min(torch.finfo(outputs.dtype).eps).sqrt()

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        _refuse(outputs, targets)
        if outputs.shape != targets.shape:
            shapes = f"got {tuple(outputs.shape)} and {tuple(targets.shape)}{_of_one_output(outputs, targets)}"
            raise ValueError(f"binary cross-entropy needs targets like the logits; {shapes}")
        if not targets.numel():
            return
        lowest, highest = _once(targets, ("range", outputs.dtype), lambda t: _range(t.to(outputs.dtype)))
        if not 0 <= lowest <= highest <= 1:
            raise ValueError(f"targets of binary cross-entropy must be in [0, 1], got {lowest:g} to {highest:g}")


# Tensors on other devices than the CPU -> their version, and what was made of them, by a name.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _once(tensor: Tensor, name: Hashable, make: Callable[[Tensor], T]) -> T:
    """Apply ``make`` to outputs or targets, on other devices than the CPU once as long as they do not change.

    A step evaluates the loss of the same targets, and multiplies by its Hessian at the same outputs, several times: the
    host would start the same operations again, or wait for them.
    """
    if tensor.is_cpu or tensor.is_inference() or tensor.requires_grad:
        return make(tensor)
    version, made = _made.get(tensor, (-1, {}))
    if version != tensor._version:
        version, made = _made[tensor] = tensor._version, {}
    if name not in made:
        made[name] = make(tensor)
    return made[name]


def _range(values: Tensor) -> tuple[float, float]:
    """The lowest and the highest."""
    lowest, highest = torch.stack(values.aminmax()).tolist()
    return lowest, highest


def _refuse(outputs: Tensor, targets: Tensor) -> None:
    """Refuse what no loss takes: other things than tensors, outputs that are not real or of no sample."""
    check_dense("outputs", outputs)
    check_dense("targets", targets)
    require_real(outputs=outputs)
    if outputs.is_meta is not targets.is_meta:
        raise TypeError("one of outputs and targets is on the meta device, without numbers, and the other is not")
    if outputs.ndim == 0 or not len(outputs):
        raise ValueError(f"a loss is a mean over samples: outputs must be (n, ...), got {tuple(outputs.shape)}")
    if targets.is_complex():
        raise TypeError(
            f"targets are {targets.dtype}, but losses are of real numbers: give torch.view_as_real(targets)"
        )


def _of_one_output(outputs: Tensor, targets: Tensor) -> str:
    """The remedy if the targets lack the last dimension of the outputs, of size 1."""
    return ": give targets of shape (n, 1), as by targets[:, None]" if outputs.shape == (*targets.shape, 1) else ""


def derivative_error(loss: GaussNewtonLoss, outputs: Tensor, targets: Tensor) -> float:
    """Distance of S r from the derivative of each sample's loss, as a share of the larger of both.

    It is 0 if autograd does not differentiate the value.

    Example:
        >>> class Doubled(SquaredError):
        ...     def value(self, outputs, targets):
        ...         return 2 * (outputs - targets).square().sum(1).mean()
        >>> derivative_error(Doubled(), torch.ones(3, 2), torch.zeros(3, 2))
        0.75
    """
    with torch.enable_grad():
        point = outputs.detach().requires_grad_()
        try:
            (mean,) = torch.autograd.grad(loss.value(point, targets), point)
        except RuntimeError:
            return 0.0
    found = loss.sqrt_hessian(outputs, targets, loss.residual(outputs, targets))
    return _distance(found, mean * len(outputs))


def transpose_error(loss: GaussNewtonLoss, outputs: Tensor, targets: Tensor) -> float:
    """Distance of Sᵀv from the derivative of vᵀS a in a, as a share of the larger of both, for random signs v.

    It is 0 if autograd does not differentiate S a.

    Example:
        >>> class Wrong(SquaredError):
        ...     def sqrt_hessian_transpose(self, outputs, targets, vector):
        ...         return 2 * vector
        >>> transpose_error(Wrong(), torch.ones(3, 2), torch.zeros(3, 2))
        0.5
    """
    v = random_signs(*outputs.shape, like=outputs, generator=torch.Generator(outputs.device).manual_seed(0))
    with torch.enable_grad():
        point = torch.zeros_like(v, requires_grad=True)
        try:
            (derivative,) = torch.autograd.grad(loss.sqrt_hessian(outputs, targets, point), point, v)
        except RuntimeError:
            return 0.0
    return _distance(loss.sqrt_hessian_transpose(outputs, targets, v), derivative)


def _distance(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ as a share of the larger norm of both."""
    largest = max(inner(t, t).item() for t in (found, expected))
    error = inner(found - expected, found - expected).item()
    return (error / largest) ** 0.5 if largest > 0.0 else 0.0


def get_loss(loss: str | GaussNewtonLoss | LeastSquares) -> GaussNewtonLoss | LeastSquares:
    """The loss of a name; an object with the methods of a loss as it is.

    Names are ``"mse"`` (:class:`SquaredError`), ``"cross_entropy"`` (:class:`CrossEntropy`), ``"binary_cross_entropy"``
    (:class:`BinaryCrossEntropy`) and ``"least_squares"`` (:class:`~lightning_struct.functional.LeastSquares` with
    weights of 1).

    Raises:
        ValueError: an unknown name.
        TypeError: an object that lacks one of the methods; they are named.
    """
    if isinstance(loss, str):
        named: dict[str, Callable[[], GaussNewtonLoss | LeastSquares]] = {
            "mse": SquaredError,
            "cross_entropy": CrossEntropy,
            "binary_cross_entropy": BinaryCrossEntropy,
            "least_squares": LeastSquares,
        }
        if loss not in named:
            raise ValueError(f"loss must be {', '.join(map(repr, named))} or an object, got {loss!r}")
        return named[loss]()
    if isinstance(loss, LeastSquares):
        return loss
    methods = ("value", "residual", "sqrt_hessian", "sqrt_hessian_transpose")
    if missing := [name for name in methods if not callable(getattr(loss, name, None))]:
        raise TypeError(
            f"the loss {type(loss).__name__} lacks {', '.join(missing)} (see GaussNewtonLoss); torch's squared error "
            "is 'mse' here, half the sum over outputs, its cross-entropies 'cross_entropy' and 'binary_cross_entropy'"
        )
    return loss
