"""Per-sample squared gradient norms without per-sample gradients, and the test that reads a batch size off them.

‖Var‖₁ = (Σᵢ‖gᵢ‖² - n‖ḡ‖²)/(n - 1) needs only the norms, and a Linear layer's norms are products of two row norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def linear_squared_norms(inputs: Tensor, cotangents: Tensor, *, weight: bool = True, bias: bool = True) -> Tensor:
    """Squared norms of the per-sample gradients of one Linear layer, the sum over its weight and bias.

    Args:
        inputs: (n, ..., in_features), what the layer read.
        cotangents: (n, ..., out_features), the derivative of each sample's loss in the layer's output.
        weight: count the weight.
        bias: count the bias.

    Returns:
        (n,), in the dtype of the arguments, but at least float32 (under autocast they differ). With rows of one position, (‖a‖² + 1)‖δ‖²; with T positions ⟨A Aᵀ, Δ Δᵀ⟩ or
        the norm of the product Δᵀ A, whichever is smaller.
    """
    n = inputs.shape[0]
    dtype = torch.promote_types(torch.promote_types(inputs.dtype, cotangents.dtype), torch.float32)
    a = inputs.reshape(n, -1, inputs.shape[-1]).to(dtype)
    delta = cotangents.reshape(n, -1, cotangents.shape[-1]).to(dtype)
    norms = torch.zeros(n, dtype=dtype, device=delta.device)
    positions = a.shape[1]
    if weight and positions == 1:
        norms += _row_norms(a[:, 0]) * _row_norms(delta[:, 0])
    elif weight and positions * positions <= a.shape[2] * delta.shape[2]:
        norms += torch.einsum("nst,nst->n", a @ a.mT, delta @ delta.mT)
    elif weight:
        norms += (delta.mT @ a).square().sum((1, 2))
    if bias:
        norms += _row_norms(delta.sum(1))
    return norms


def _row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1).square()


class GradientNorms:
    """What :func:`per_sample_gradient_norms` gathers; read ``squared_norms`` after the backward pass."""

    def __init__(self) -> None:
        self._norms: Tensor | None = None

    def _add(self, norms: Tensor) -> None:
        if self._norms is not None and self._norms.shape != norms.shape:
            raise ValueError(
                f"layers saw batches of different sizes, {self._norms.shape[0]} and {norms.shape[0]}: the first "
                "dimension of every layer's input must be the batch"
            )
        self._norms = norms if self._norms is None else self._norms + norms

    @property
    def squared_norms(self) -> Tensor:
        """(n,): squared norm of each sample's own share of the gradient that was back-propagated.

        With a loss that is the mean over n samples that share is gᵢ/n: multiply by n² for ‖gᵢ‖².

        Raises:
            RuntimeError: no backward pass has reached a layer yet.
        """
        if self._norms is None:
            raise RuntimeError("no gradient norms yet: run a forward and a backward pass inside the context first")
        return self._norms


@contextmanager
def per_sample_gradient_norms(module: nn.Module) -> Iterator[GradientNorms]:
    """Inside the context an ordinary forward and backward yields the squared gradient norm of every sample.

    Covers ``nn.Linear`` with any leading shape; its trainable weight and bias are counted, frozen ones are not.

    Args:
        module: every trainable parameter below it must belong to an ``nn.Linear`` that is called once in the forward.

    Raises:
        ValueError: a trainable parameter belongs to another kind of layer, or to two layers; it is named.
        RuntimeError: a layer is called twice within one backward pass (the norms would lack their cross terms), or a
            second backward pass is made (its samples are others: enter the context anew for each).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> with per_sample_gradient_norms(model) as norms:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        >>> norms.squared_norms.shape
        torch.Size([4])
    """
    gathered = GradientNorms()
    layers = _trainable_linears(module)
    pending: set[nn.Linear] = set()
    counted: set[nn.Linear] = set()

    def forward_hook(layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        if layer in pending:
            raise RuntimeError(
                f"{layers[layer]} is called twice before a backward pass: the norm of the sum of both uses needs "
                "their cross terms, which are not measured"
            )
        pending.add(layer)
        inputs = args[0].detach()

        def backward_hook(cotangents: Tensor) -> None:
            if layer in counted:
                raise RuntimeError(
                    f"a second backward pass reached {layers[layer]}: its samples are not those of the first; enter "
                    "per_sample_gradient_norms anew for each backward pass"
                )
            counted.add(layer)
            pending.discard(layer)
            bias = layer.bias is not None and layer.bias.requires_grad
            norms = linear_squared_norms(inputs, cotangents, weight=layer.weight.requires_grad, bias=bias)
            gathered._add(norms)

        output.register_hook(backward_hook)

    handles = [layer.register_forward_hook(forward_hook) for layer in layers]
    try:
        yield gathered
    finally:
        for handle in handles:
            handle.remove()


def _trainable_linears(module: nn.Module) -> dict[nn.Module, str]:
    layers: dict[nn.Module, str] = {}
    owner: dict[nn.Parameter, str] = {}
    for name, layer in module.named_modules():
        for key, parameter in layer.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            full = f"{name}.{key}" if name else key
            if type(layer) is not nn.Linear:
                raise ValueError(
                    f"no rule for the parameter {full} of a {type(layer).__name__}: only nn.Linear has one"
                )
            if parameter in owner:
                raise ValueError(f"{full} is tied to {owner[parameter]}: tied weights have no rule")
            owner[parameter] = full
            layers[layer] = name or type(layer).__name__
    return layers


def gradient_variance(squared_norms: Tensor, mean_gradient_squared_norm: float) -> float:
    """‖Var‖₁, the sum over all weights of the sample variance of the per-sample gradients (section 4.3).

    Args:
        squared_norms: (n,), ‖gᵢ‖² of each sample, n >= 2.
        mean_gradient_squared_norm: ‖ḡ‖² of the mean gradient.

    Raises:
        ValueError: fewer than two samples.
    """
    return variance_from_sums(
        squared_norms.sum(dtype=torch.float64).item(), squared_norms.shape[0], mean_gradient_squared_norm
    )


def variance_from_sums(sum_of_squared_norms: float, samples: int, mean_gradient_squared_norm: float) -> float:
    """:func:`gradient_variance` from Σ‖gᵢ‖² and n, which add up over processes."""
    if samples < 2:
        raise ValueError(f"the variance of gradients needs at least 2 samples, got {samples}")
    variance = (sum_of_squared_norms - samples * mean_gradient_squared_norm) / (samples - 1)
    return max(variance, 0.0)  # max(0.0, variance) would take NaN for 0


def required_batch_size(
    variance: float,
    mean_gradient_squared_norm: float,
    dataset_size: int | None,
    theta: float,
) -> int:
    """The paper's n̂ (equation 14, Algorithm 2): the batch at which the norm test holds.

    The paper bounds E‖error‖² by θ²‖ḡ‖; here by θ²‖ḡ‖², as in Byrd et al. (2012): the first power would change with the
    scale of the loss.

    Args:
        variance: ‖Var‖₁, see :func:`gradient_variance`.
        mean_gradient_squared_norm: ‖ḡ‖² of the batch.
        dataset_size: N, samples that can be drawn without replacement; None for a stream without end.
        theta: θ > 0, the relative error that the gradient may have.

    Returns:
        An integer in [1, N]; N where the gradient is zero (with a stream that is an error).

    Raises:
        ValueError: an argument out of range.
        ZeroDivisionError: zero gradient and no ``dataset_size``.
    """
    if not theta > 0:
        raise ValueError(f"theta must be > 0, got {theta}")
    if not (0 <= variance < math.inf and 0 <= mean_gradient_squared_norm < math.inf):
        raise ValueError(
            f"variance and squared norm must be finite and >= 0, got {variance}, {mean_gradient_squared_norm}"
        )
    bound = theta * theta * mean_gradient_squared_norm
    if dataset_size is None:
        return max(1, math.ceil(variance / bound))
    if dataset_size < 1:
        raise ValueError(f"dataset_size must be >= 1, got {dataset_size}")
    denominator = variance + (dataset_size - 1) * bound
    if denominator == 0.0:
        return dataset_size
    return min(dataset_size, max(1, math.ceil(dataset_size * variance / denominator)))


def norm_test_batch_size(
    squared_norms: Tensor, mean_gradient_squared_norm: float, dataset_size: int | None, theta: float
) -> int:
    """n̂ of one batch from its per-sample squared gradient norms; see :func:`required_batch_size`.

    Args:
        squared_norms: (n,), ‖gᵢ‖², n >= 2.
        mean_gradient_squared_norm: ‖ḡ‖² of the mean gradient.
        dataset_size: N, or None for a stream.
        theta: θ.
    """
    squared = float(mean_gradient_squared_norm)
    return required_batch_size(gradient_variance(squared_norms, squared), squared, dataset_size, theta)
