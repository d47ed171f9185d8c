"""Blocks of structured matrices between channels, in place of a convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor, nn

from lightning_struct.nn.replace import LayerFactory, check_makes_layers
from lightning_struct.nn.structured import StructuredLinear, positive_size
from lightning_struct.nn.tracing import is_traced, whole_call


class BlockStructured(nn.Module):
    """An l x k block matrix of structured matrices between k and l channels, in place of a convolution.

    Thomas et al., section 5.2 and Appendix F.1. Each block maps a flattened channel to a flattened channel, as the
    Toeplitz matrix of a filter does. By Proposition 1(d) the whole is of low displacement rank if its blocks are. The
    paper's blocks are square; those in place of a convolution with a stride are not.

    Args:
        in_channels: k.
        out_channels: l.
        size: n, entries of a channel.
        factory: called as ``factory(n, m, bias=False)`` for each block; makes a :class:`StructuredLinear`, which is
            then divided by the root of the number of blocks that are added up, k / ``groups``.
        out_size: m, entries of a channel that comes out, or the size of its image, as (height, width). None: as what
            goes in.
        in_shape: the size of the images that are taken, as (height, width), of ``size`` entries. None: any.
        groups: parts of the channels between which there are no blocks, as of ``nn.Conv2d``.
        bias: add a trained vector of m numbers to each channel that comes out, zero at the start.
        device, dtype: of the parameters.

    Raises:
        TypeError: the factory makes something else.
        ValueError: a size is not positive, ``in_shape`` has not ``size`` entries, or the channels are no multiples of
            ``groups``.

    Example:
        >>> from functools import partial
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> layer = BlockStructured(3, 3, 8 * 8, partial(LDRSubdiagonal, rank=2))
        >>> layer(torch.randn(5, 3, 8, 8)).shape
        torch.Size([5, 3, 8, 8])
        >>> layer.weight_parameters, round(layer.compression_ratio, 1)
        (3456, 10.7)
        >>> BlockStructured(4, 8, 64, LDRSubdiagonal, out_size=(4, 4), groups=2)(torch.randn(5, 4, 8, 8)).shape
        torch.Size([5, 8, 4, 4])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        factory: LayerFactory,
        *,
        out_size: int | Sequence[int] | None = None,
        in_shape: Sequence[int] | None = None,
        groups: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_makes_layers(factory)
        self.in_channels = positive_size("in_channels", in_channels)
        self.out_channels = positive_size("out_channels", out_channels)
        self.size = positive_size("size", size)
        self.in_shape = None if in_shape is None else tuple(positive_size("in_shape", entries) for entries in in_shape)
        if self.in_shape is not None and prod(self.in_shape) != size:
            raise ValueError(f"in_shape must have size={size} entries, but is {self.in_shape}")
        self.out_shape: tuple[int, ...] | None = None
        if out_size is not None:
            sizes = out_size if isinstance(out_size, Iterable) else (out_size,)
            self.out_shape = tuple(positive_size("out_size", entries) for entries in sizes)
        self.out_size = self.size if self.out_shape is None else prod(self.out_shape)
        self.groups = positive_size("groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"in_channels and out_channels must be multiples of groups={groups}, but are {in_channels} and "
                f"{out_channels}"
            )
        self.blocks_in_row = in_channels // groups
        blocks = [factory(size, self.out_size, bias=False) for _ in range(self.blocks_in_row * out_channels)]
        for block in blocks:
            if not isinstance(block, StructuredLinear):
                raise TypeError(
                    f"factory must make a structured layer, but makes {type(block).__name__}: take nn.Conv2d"
                )
        self.blocks = nn.ModuleList(blocks)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_channels, self.out_size))
        for block in self.structured:
            block.gain = self.blocks_in_row**-0.5
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
        """Entries of the blocks for each of their parameters."""
        return len(self.blocks) * self.size * self.out_size / self.weight_parameters

    def to_dense(self) -> Tensor:
        """The block matrix, (l m, k n), with gradients to the parameters; zero between channels of other groups."""
        blocks = [block.to_dense() for block in self.structured]
        rows = [torch.cat(blocks[at : at + self.blocks_in_row], 1) for at in range(0, len(blocks), self.blocks_in_row)]
        in_group = self.out_channels // self.groups
        return torch.block_diag(*(torch.cat(rows[at : at + in_group]) for at in range(0, len(rows), in_group)))

    def forward(self, input: Tensor) -> Tensor:
        """The products: (batch, l, ...) for an input (batch, k, ...); without the batch if the input has none.

        ... is ``in_shape``, or (n,) or (height, width) of n entries if that is None. It comes out as ``out_size`` if
        that is given.

        Raises:
            ValueError: the input has another shape.
        """
        if is_traced(input):
            return whole_call(self, input)
        if input.dim() < 3 or input.shape[1] != self.in_channels or not self._takes(input.shape[2:]):
            if input.dim() > 1 and input.shape[0] == self.in_channels and self._takes(input.shape[1:]):
                return self.forward(input.unsqueeze(0)).squeeze(0)
            image = f"{self.in_channels}, " + ("..." if self.in_shape is None else ", ".join(map(str, self.in_shape)))
            entries = f" with {self.size} entries in a channel" if self.in_shape is None else ""
            raise ValueError(
                f"BlockStructured takes (batch, {image}) or ({image}){entries}, but the input has shape "
                f"{tuple(input.shape)}"
            )
        channels = input.flatten(2).unbind(1)
        products = [block(channels[self._channel(index)]) for index, block in enumerate(self.blocks)]
        y = torch.stack(products, 1).unflatten(1, (self.out_channels, self.blocks_in_row)).sum(2)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.unflatten(2, input.shape[2:] if self.out_shape is None else self.out_shape)

    def _takes(self, image: torch.Size) -> bool:
        return image.numel() == self.size if self.in_shape is None else image == self.in_shape

    def _channel(self, index: int) -> int:
        """The channel from which a block maps."""
        row, column = divmod(index, self.blocks_in_row)
        return row * self.groups // self.out_channels * self.blocks_in_row + column

    @property
    def structured(self) -> Iterator[StructuredLinear]:
        """The blocks, row after row."""
        for block in self.blocks:
            assert isinstance(block, StructuredLinear)
            yield block

    def extra_repr(self) -> str:
        text = f"in_channels={self.in_channels}, out_channels={self.out_channels}, size={self.size}"
        if self.in_shape is not None:
            text += f", in_shape={self.in_shape}"
        if self.out_shape is not None:
            text += f", out_size={self.out_shape}"
        return text if self.groups == 1 else f"{text}, groups={self.groups}"
