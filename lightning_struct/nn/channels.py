"""Linear layers between the channels of images, of each pixel or of patches: convolutions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import check_dense, checked
from lightning_struct.functional.layers.registry import as_linear, is_affine, linear_with, padding
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.torch_modules import is_traced, whole_call

Sizes = tuple[int, ...]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STORED_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding)


class _FilterLinear(nn.Module):
    """A linear layer in place of a convolution: a row of its matrix is a filter."""

    def __init__(self, linear: nn.Module, kernel_size: Sizes, stride: Sizes) -> None:
        super().__init__()
        self.linear = linear
        self.kernel_size = kernel_size
        self.stride = stride

    @property
    def weight(self) -> Tensor:
        """The filters, (out_channels, in_channels, *kernel_size), for code that reads the weight of a convolution."""
        rows: Any = self.linear.weight
        return self._filters(rows)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the linear layer, for code that reads the bias of a convolution."""
        return self.linear.bias  # type: ignore[return-value]

    def _filters(self, rows: Tensor) -> Tensor:
        """(filters, in_channels, *kernel_size) of the rows of a matrix."""
        return rows.reshape(len(rows), -1, *self.kernel_size)


class ChannelLinear(_FilterLinear):
    """A linear layer from the channels of each pixel to new ones: it stands where a 1 x 1 convolution stood.

    :func:`~lightning_struct.nn.replace_linear` makes it.

    Args:
        linear: maps (..., in_channels) to (..., out_channels).
        stride: of the pixels that are kept, one number for each dimension of an image.

    Example:
        >>> import torch
        >>> from lightning_struct.nn import Circulant
        >>> layer = ChannelLinear(Circulant(16, 32), stride=(2, 2))
        >>> layer(torch.randn(5, 16, 8, 8)).shape
        torch.Size([5, 32, 4, 4])
    """

    @checked
    def __init__(self, linear: nn.Module, stride: Sizes) -> None:
        super().__init__(linear, (1,) * len(stride), stride)

    def forward(self, input: Tensor) -> Tensor:
        """(..., out_channels, height, width) for (..., in_channels, height, width); a dimension for each stride."""
        return of_channels(self.linear, input, self.stride)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def of_channels(linear: Callable[[Tensor], Tensor], x: Tensor, stride: Sizes) -> Tensor:
    """A map of the last dimension for the channels of each pixel: (..., out_channels, *pixels) for x likewise."""
    channels = -len(stride) - 1
    for dim, step in enumerate(stride, channels + 1):
        x = x[(..., slice(None, None, step)) + (slice(None),) * (-1 - dim)]
    return linear(x.movedim(channels, -1)).movedim(-1, channels)


def of_patches(linear: Callable[[Tensor], Tensor], x: Tensor, convolution: Any) -> Tensor:
    """A map of the last dimension for the patches of a convolution of one group: (..., out_channels, *pixels)."""
    if is_pointwise(convolution):
        return of_channels(linear, x, convolution.stride)
    mode = convolution.padding_mode
    x = F.pad(x, convolution._reversed_padding_repeated_twice, "constant" if mode == "zeros" else mode)
    dimensions = len(convolution.kernel_size)
    for size, step, dilation in zip(convolution.kernel_size, convolution.stride, convolution.dilation, strict=True):
        first = torch.arange(0, x.shape[-dimensions] - dilation * (size - 1), step, device=x.device)
        at = first[:, None] + dilation * torch.arange(size, device=x.device)
        x = x.index_select(-dimensions, at.flatten()).unflatten(-dimensions, at.shape).movedim(-dimensions, -1)
    patches = x.movedim(-2 * dimensions - 1, -dimensions - 1).flatten(-dimensions - 1)
    return linear(patches).movedim(-1, -dimensions - 1)


class PatchLinear(_FilterLinear):
    """A linear layer from patches of images to new channels, in place of a convolution with a larger kernel.

    :func:`~lightning_struct.nn.compress` makes it. A matrix of low rank G Hᵀ is two convolutions, with r filters and
    then 1 x 1; of other classes the matrix is made for each call, and its rows are the filters.

    Args:
        linear: maps (..., in_channels * pixels of a patch) to (..., out_channels); it has ``weight`` and ``bias``.
        kernel_size, stride, padding, dilation: of the convolution, one number for each dimension of an image.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> layer = PatchLinear(LowRank(3 * 3 * 3, 16, rank=4), (3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1))
        >>> layer(torch.randn(5, 3, 8, 8)).shape
        torch.Size([5, 16, 4, 4])
    """

    @checked
    def __init__(
        self, linear: nn.Module, kernel_size: Sizes, stride: Sizes, padding: Sizes | str, dilation: Sizes
    ) -> None:
        super().__init__(linear, kernel_size, stride)
        self.padding = padding
        self.dilation = dilation

    def forward(self, input: Tensor) -> Tensor:
        """(n, out_channels, height, width) for (n, in_channels, height, width), or with the kernel's dimensions."""
        if is_traced(input):
            return whole_call(self, input)
        check_dense("input", input)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        linear = self.linear
        if isinstance(linear, LowRank) and linear.pad is None:
            between = convolve(input, self._filters(linear.H.T), None, self.stride, self.padding, self.dilation)
            return convolve(between, linear.G.view(*linear.G.shape, *[1] * len(self.kernel_size)), self.bias)
        with torch.autocast(input.device.type, enabled=False):  # products need the dtype of their parameters
            filters = self.weight
        return convolve(input, filters, self.bias, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "dilation")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def as_matrix(layer: nn.Module) -> nn.Linear | None:
    """An ``nn.Linear`` with the matrix and the bias of a layer, sharing their memory; None for layers that have none.

    The matrix of a convolution maps the patches of images, (in_channels * pixels of a patch), to the channels.
    """
    if has_linear_weight(layer):
        return as_linear(layer)
    return _as_patch_linear(layer) if type(layer) in CONVOLUTIONS and why_not_patches(layer) is None else None


def has_linear_weight(layer: nn.Module) -> bool:
    """Whether the layer has the weight of an ``nn.Linear``, also if its ``forward`` makes something else of it."""
    return isinstance(layer, nn.Linear) or is_affine(layer)


def why_not_linear(layer: nn.Module) -> str | None:
    """The reason why a layer with such a weight may not compute as ``nn.Linear`` does; None if it does."""
    if is_affine(layer):
        return None
    return (
        f"{type(layer).__name__} has a forward of its own, which may differ from that of nn.Linear: "
        "declare it by register_layer, or name the layer in include"
    )


def in_place_of(layer: Any, linear: nn.Module) -> nn.Module:
    """The replacement of ``layer``, around ``linear``, whose matrix is near to the one of :func:`as_matrix`."""
    if type(layer) not in CONVOLUTIONS:
        return linear
    if is_pointwise(layer):
        return ChannelLinear(linear, layer.stride).train(layer.training)
    return PatchLinear(linear, layer.kernel_size, layer.stride, layer.padding, layer.dilation).train(layer.training)


def why_not_patches(convolution: Any) -> str | None:
    """The reason for which :class:`PatchLinear` cannot stand in place of a convolution; None if it can."""
    if convolution.groups != 1:
        return f"it has {convolution.groups} groups"
    if convolution.padding_mode != "zeros":
        return f"it has padding_mode={convolution.padding_mode!r}"
    return None


def is_pointwise(layer: nn.Module) -> bool:
    """Whether the layer is a 1 x 1 convolution: a linear map of the channels of each pixel."""
    return type(layer) in CONVOLUTIONS and why_not_pointwise(layer) is None


def why_not_pointwise(convolution: Any) -> str | None:
    """The reason why a convolution is no map of each pixel's channels, with the function that takes it; or None."""
    if type(convolution) not in CONVOLUTIONS:
        return f"{type(convolution).__name__} is a class of its own, which may compute something else"
    reason = why_not_patches(convolution)
    if set(convolution.kernel_size) != {1}:
        takes = "replace_conv and compress take" if reason is None else "replace_conv takes"
        return f"its kernel is larger than one pixel: {takes} it"
    if convolution.groups != 1:
        return reason
    if not any(map(any, padding(convolution))):
        return None
    what = f"it has padding {convolution.padding}"
    return f"{what}: compress takes it" if reason is None else f"{what}, and {reason}"


def has_filters(layer: nn.Module) -> bool:
    """Whether the layer is a convolution, transposed or not, or an embedding, or derived, with a plain weight."""
    return isinstance(layer, CONVOLUTIONS + _STORED_TRANSPOSED) and "weight" in layer._parameters


def linear_of(layer: Any) -> nn.Linear:
    """An ``nn.Linear`` with the weight and the bias of a linear layer, a convolution or an embedding, as a matrix.

    That of a convolution maps patches to channels, of a group each; a transposed one maps a pixel to patches, and an
    embedding an index, with a one at its place, to a vector.
    """
    if isinstance(layer, _STORED_TRANSPOSED):
        return linear_with(layer.weight.flatten(1).t(), getattr(layer, "bias", None), layer.training)
    return _as_patch_linear(layer) if isinstance(layer, CONVOLUTIONS) else as_linear(layer)


def as_filters(layer: Any, matrix: Tensor) -> Tensor:
    """A matrix as of :func:`linear_of` in the form of the weight of a convolution or of an embedding."""
    return (matrix.T if isinstance(layer, _STORED_TRANSPOSED) else matrix).reshape(layer.weight.shape)


def _as_patch_linear(convolution: Any) -> nn.Linear:
    linear = linear_with(convolution.weight.flatten(1), convolution.bias, convolution.training)
    linear.weight.requires_grad_(convolution.weight.requires_grad)  # also if it is a copy, as of channels last
    return linear
