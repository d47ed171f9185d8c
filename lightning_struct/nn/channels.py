"""Linear layers between the channels of images: 1 x 1 convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ChannelLinear(nn.Module):
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

    def __init__(self, linear: nn.Module, stride: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = linear
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """(..., out_channels, height, width) for x (..., in_channels, height, width), with as many dimensions as strides."""
        channels = -len(self.stride) - 1
        for dim, stride in enumerate(self.stride, channels + 1):
            x = x[(..., slice(None, None, stride)) + (slice(None),) * (-1 - dim)]
        return self.linear(x.movedim(channels, -1)).movedim(-1, channels)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def is_pointwise(layer: nn.Module) -> bool:
    """Whether the layer is a 1 x 1 convolution: a linear map of the channels of each pixel."""
    return why_not_pointwise(layer) is None


def why_not_pointwise(layer: nn.Module) -> str | None:
    """The reason for which the layer is no 1 x 1 convolution between all channels; None if it is one."""
    if type(layer) not in CONVOLUTIONS:
        return f"{type(layer).__name__} is no convolution"
    convolution: Any = layer
    if set(convolution.kernel_size) != {1}:
        return "its kernel is larger than one pixel: replace_conv"
    if convolution.groups != 1:
        return f"it has {convolution.groups} groups"
    if not isinstance(convolution.padding, str) and any(convolution.padding):
        return f"it has padding {convolution.padding}"
    return None


def as_pointwise_linear(layer: nn.Module) -> nn.Linear:
    """An ``nn.Linear`` with the weight and the bias of a 1 x 1 convolution, sharing their memory."""
    convolution: Any = layer
    linear = nn.Linear(convolution.in_channels, convolution.out_channels, convolution.bias is not None, device="meta")
    weight, bias = convolution.weight, convolution.bias
    linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return linear.train(convolution.training)
