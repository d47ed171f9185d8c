"""Blocks of structured matrices between channels, in place of a convolution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_struct.nn.replace import LayerFactory
from lightning_struct.nn.structured import StructuredLinear, positive_size


class BlockStructured(nn.Module):
    """An l x k block matrix of square structured matrices between k and l channels, in place of a convolution.

    Thomas et al., section 5.2 and Appendix F.1. Each block maps a flattened channel to a flattened channel, as the
    Toeplitz matrix of a filter does. By Proposition 1(d) the whole is of low displacement rank if its blocks are.

    Args:
        in_channels: k.
        out_channels: l.
        size: n, entries of a channel.
        factory: called as ``factory(n, n, bias=False)`` for each block; makes a :class:`StructuredLinear`, which is
            then divided by √k, since k blocks are added up.
        bias: add a trained vector of n numbers to each channel that comes out, zero at the start.
        device, dtype: of the parameters.

    Raises:
        TypeError: the factory makes something else.
        ValueError: a size is not positive.

    Example:
        >>> from functools import partial
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> layer = BlockStructured(3, 3, 8 * 8, partial(LDRSubdiagonal, rank=2))
        >>> layer(torch.randn(5, 3, 8, 8)).shape
        torch.Size([5, 3, 8, 8])
        >>> layer.weight_parameters, round(layer.compression_ratio, 1)
        (3456, 10.7)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        factory: LayerFactory,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = positive_size("in_channels", in_channels)
        self.out_channels = positive_size("out_channels", out_channels)
        self.size = positive_size("size", size)
        blocks = [factory(size, size, bias=False) for _ in range(in_channels * out_channels)]
        for block in blocks:
            if not isinstance(block, StructuredLinear):
                raise TypeError(
                    f"factory must make a structured layer, but makes {type(block).__name__}: take nn.Conv2d"
                )
        self.blocks = nn.ModuleList(blocks)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_channels, size))
        for block in self.structured:
            block.gain = in_channels**-0.5
            block.scale_(block.gain)
        self.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw new weights of all blocks, and set the bias to zero."""
        for block in self.structured:
            block.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def weight_parameters(self) -> int:
        """The number of trained numbers that the blocks are made of."""
        return sum(parameter.numel() for parameter in self.blocks.parameters())

    @property
    def compression_ratio(self) -> float:
        """Entries of the block matrix for each of its parameters."""
        return self.in_channels * self.out_channels * self.size**2 / self.weight_parameters

    def to_dense(self) -> Tensor:
        """The block matrix, (l n, k n), with gradients to the parameters."""
        blocks = [block.to_dense() for block in self.structured]
        rows = [torch.cat(blocks[row : row + self.in_channels], 1) for row in range(0, len(blocks), self.in_channels)]
        return torch.cat(rows)

    def forward(self, x: Tensor) -> Tensor:
        """The products: (batch, l, ...) for x (batch, k, ...), where ... is (n,) or (height, width) of n entries;
        without the batch if x has none.

        Raises:
            ValueError: x has another shape.
        """
        if x.dim() < 3 or x.shape[1] != self.in_channels or x.shape[2:].numel() != self.size:
            if x.dim() > 1 and x.shape[0] == self.in_channels and x.shape[1:].numel() == self.size:
                return self.forward(x.unsqueeze(0)).squeeze(0)
            raise ValueError(
                f"BlockStructured takes (batch, {self.in_channels}, ...) or ({self.in_channels}, ...) with {self.size} "
                f"entries in a channel, but the input has shape {tuple(x.shape)}"
            )
        channels = x.flatten(2).unbind(1)
        products = [block(channels[index % self.in_channels]) for index, block in enumerate(self.blocks)]
        y = torch.stack(products, 1).unflatten(1, (self.out_channels, self.in_channels)).sum(2)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.unflatten(2, x.shape[2:])

    @property
    def structured(self) -> Iterator[StructuredLinear]:
        """The blocks, row after row."""
        for block in self.blocks:
            assert isinstance(block, StructuredLinear)
            yield block

    def extra_repr(self) -> str:
        return f"in_channels={self.in_channels}, out_channels={self.out_channels}, size={self.size}"
