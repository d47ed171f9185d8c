"""Per-sample squared gradient norms without per-sample gradients, and the test that reads a batch size off them.

‖Var‖₁ = (Σᵢ‖gᵢ‖² - n‖ḡ‖²)/(n - 1) needs only the norms, and those follow from one ordinary forward and backward
pass shows of each layer: its inputs and the cotangents of its outputs.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.checks import Extended, Size, check_dense, checked, require_real
from lightning_struct.functional.layers.per_sample.recorder import GradientNormRecorder


class GradientNorms:
    """Result of :func:`per_sample_gradient_norms`; read ``squared_norms`` after the backward pass."""

    def __init__(self, recorder: GradientNormRecorder) -> None:
        self._recorder = recorder

    @property
    def squared_norms(self) -> Tensor:
        """(n,): squared norm of each sample's own share of the gradient that was back-propagated.

        With a loss that is the mean over n samples that share is gᵢ/n: multiply by n² for ‖gᵢ‖². After several backward
        passes, the samples of the first, then those of the second, and so on.

        Raises:
            RuntimeError: no backward pass has reached a layer yet.
            ValueError: parameters cannot be measured, or layers saw batches of different sizes.
        """
        by_pass: dict[int, list[Tensor]] = defaultdict(list)
        for result in self._recorder.results():
            for number, norms in zip(result.passes, result.squared_norms, strict=True):
                by_pass[number].append(norms)
        if not by_pass:
            raise RuntimeError("no gradient norms yet: run a forward and a backward pass inside the context first")
        for of_pass in by_pass.values():
            sizes = sorted({len(norms) for norms in of_pass})
            if len(sizes) > 1:
                seen = f"layers saw batches of different sizes, {' and '.join(map(str, sizes))}"
                raise ValueError(f"{seen}: the first dimension of every layer's input must be the batch")
        return torch.cat([torch.stack(by_pass[number]).sum(0) for number in sorted(by_pass)])


@checked
@contextmanager
def per_sample_gradient_norms(module: nn.Module) -> Iterator[GradientNorms]:
    """Measure, inside the context, the squared gradient norm of every sample in an ordinary forward and backward pass.

    Exact, of all trainable parameters that get a gradient; frozen ones are not counted. See
    :class:`GradientNormRecorder` for the covered layers. If the gradients are None at first, each is compared with the
    sum of its measured shares, so that a weight that is used outside of its layer too, as the transposed one of a
    tied decoder, is an error when ``squared_norms`` is read.

    Args:
        module: its layers have the samples in the first dimension of their inputs.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> with per_sample_gradient_norms(model) as norms:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        >>> norms.squared_norms.shape
        torch.Size([4])
    """
    begins_without = [p for p in module.parameters() if p.requires_grad and p.grad is None and not is_lazy(p)]
    with GradientNormRecorder(module, check=True) as recorder, ExitStack() as stack:
        recorder.ambiguous = True
        # after the recorder's own hooks, and before others change the gradients
        for parameter in begins_without:
            handle = parameter.register_post_accumulate_grad_hook(lambda parameter: recorder.verify([parameter]))
            stack.callback(handle.remove)
        yield GradientNorms(recorder)


@checked
def gradient_variance(squared_norms: Tensor, mean_gradient_squared_norm: float | Tensor) -> float:
    """‖Var‖₁, the sum over all weights of the sample variance of the per-sample gradients (section 4.3).

    Args:
        squared_norms: (n,), ‖gᵢ‖² of each sample, n >= 2.
        mean_gradient_squared_norm: ‖ḡ‖² of the mean gradient.

    Raises:
        ValueError: fewer than two samples.

    Example:
        >>> gradients = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # of two samples
        >>> gradient_variance(gradients.square().sum(1), gradients.mean(0).square().sum().item())
        2.0
    """
    require_real(1, squared_norms=squared_norms)
    check_dense("squared_norms", squared_norms, has_numbers=True)
    total = squared_norms.sum(dtype=torch.float64).item()
    return variance_from_sums(total, squared_norms.shape[0], float(mean_gradient_squared_norm))


def variance_from_sums(sum_of_squared_norms: float, samples: int, mean_gradient_squared_norm: float) -> float:
    """:func:`gradient_variance` from Σ‖gᵢ‖² and n, which add up over processes."""
    if samples < 2:
        raise ValueError(f"the variance of gradients needs at least 2 samples, got {samples}")
    variance = (sum_of_squared_norms - samples * mean_gradient_squared_norm) / (samples - 1)
    return max(variance, 0.0)  # max(0.0, variance) would take NaN for 0


@checked
def required_batch_size(
    variance: float | Tensor, mean_gradient_squared_norm: float | Tensor, dataset_size: Size | None, theta: Extended
) -> int:
    """The paper's n̂ (equation 14, Algorithm 2): the batch at which the norm test holds.

    The paper bounds E‖error‖² by θ²‖ḡ‖; here by θ²‖ḡ‖², as in Byrd et al. (2012): the first power would change with the
    scale of the loss.

    Args:
        variance: ‖Var‖₁, see :func:`gradient_variance`.
        mean_gradient_squared_norm: ‖ḡ‖² of the batch.
        dataset_size: N, samples that can be drawn without replacement; None for a stream without end.
        theta: θ > 0, the relative error that the gradient may have; infinite: any.

    Returns:
        An integer in [1, N]; 1 if θ is infinite, else N if the gradient is zero (with a stream that is an error).

    Raises:
        ValueError: an argument out of range.
        ZeroDivisionError: zero gradient and no ``dataset_size``.

    Example:
        >>> required_batch_size(variance=4.0, mean_gradient_squared_norm=1.0, dataset_size=None, theta=0.5)
        16
        >>> required_batch_size(variance=4.0, mean_gradient_squared_norm=1.0, dataset_size=100, theta=0.5)
        14
    """
    variance, mean_gradient_squared_norm = float(variance), float(mean_gradient_squared_norm)
    if not theta > 0:
        raise ValueError(f"theta must be > 0, got {theta}")
    if not (0 <= variance < math.inf and 0 <= mean_gradient_squared_norm < math.inf):
        got = f"{variance}, {mean_gradient_squared_norm}"
        raise ValueError(f"variance and squared norm must be finite and >= 0, got {got}")
    if theta == math.inf:
        return 1
    bound = theta * theta * mean_gradient_squared_norm
    if dataset_size is None:
        if bound == 0.0 or math.isinf(variance / bound):
            remedy = "give dataset_size, the bound on the batch"
            raise ZeroDivisionError(f"the mean gradient is zero, which no batch measures well enough: {remedy}")
        return max(1, math.ceil(variance / bound))
    denominator = variance + (dataset_size - 1) * bound
    if denominator == 0.0:
        return dataset_size
    return min(dataset_size, max(1, math.ceil(dataset_size * variance / denominator)))


@checked
def norm_test_batch_size(
    squared_norms: Tensor, mean_gradient_squared_norm: float | Tensor, dataset_size: Size | None, theta: Extended
) -> int:
    """n̂ of one batch from its per-sample squared gradient norms; see :func:`required_batch_size`.

    Args:
        squared_norms: (n,), ‖gᵢ‖², n >= 2.
        mean_gradient_squared_norm: ‖ḡ‖² of the mean gradient.
        dataset_size: N, or None for a stream.
        theta: θ.

    Returns:
        An integer, as of :func:`required_batch_size`.

    Raises:
        ValueError: fewer than two samples, or an argument out of range.
        ZeroDivisionError: zero gradient and no ``dataset_size``.

    Example:
        >>> gradients = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # of two samples
        >>> squared_norm = gradients.mean(0).square().sum().item()
        >>> norm_test_batch_size(gradients.square().sum(1), squared_norm, dataset_size=None, theta=0.25)
        4
    """
    squared = float(mean_gradient_squared_norm)
    return required_batch_size(gradient_variance(squared_norms, squared), squared, dataset_size, theta)
