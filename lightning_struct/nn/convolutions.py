"""Blocks of structured matrices between channels, and the replacement of convolutions by them."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_struct.functional.checks import check_dense, checked, positive_size, warn
from lightning_struct.functional.torch_tools import in_eval_mode
from lightning_struct.nn.channels import CONVOLUTIONS, why_not_patches, why_not_pointwise
from lightning_struct.nn.replace import (
    LayerFactory,
    check_makes_layers,
    is_from_linear,
    log_replacement,
    put_in_place,
    replacement,
    selected_layers,
)
from lightning_struct.nn.report import note_left, reasons_as_text
from lightning_struct.nn.selection import Model, Selection, Selector
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear
from lightning_struct.nn.torch_modules import is_traced, take_hooks, whole_call

_MANY_BLOCKS = 10_000
_Convolution = Any  # nn.Conv1d, nn.Conv2d or nn.Conv3d


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

    @checked
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
        device: Device = None,
        dtype: Dtype = None,
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
            both = f"{in_channels} and {out_channels}"
            raise ValueError(f"in_channels and out_channels must be multiples of groups={groups}, but are {both}")
        self.blocks_in_row = in_channels // groups
        blocks = [factory(size, self.out_size, bias=False) for _ in range(self.blocks_in_row * out_channels)]
        for block in blocks:
            if not isinstance(block, StructuredLinear):
                raise TypeError(f"factory makes {type(block).__name__}, no structured layer: take nn.Conv2d")
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
        check_dense("input", input)
        if input.dim() < 3 or input.shape[1] != self.in_channels or not self._takes(input.shape[2:]):
            if input.dim() > 1 and input.shape[0] == self.in_channels and self._takes(input.shape[1:]):
                return self.forward(input.unsqueeze(0)).squeeze(0)
            image = f"{self.in_channels}, " + ("..." if self.in_shape is None else ", ".join(map(str, self.in_shape)))
            entries = f" with {self.size} entries in a channel" if self.in_shape is None else ""
            taken = f"(batch, {image}) or ({image}){entries}"
            raise ValueError(f"BlockStructured takes {taken}, but the input has shape {tuple(input.shape)}")
        channels = input.flatten(2).unbind(1)
        products = []
        for index, block in enumerate(self.blocks):
            row, column = divmod(index, self.blocks_in_row)
            products.append(block(channels[row * self.groups // self.out_channels * self.blocks_in_row + column]))
        y = torch.stack(products, 1).unflatten(1, (self.out_channels, self.blocks_in_row)).sum(2)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.unflatten(2, input.shape[2:] if self.out_shape is None else self.out_shape)

    def _takes(self, image: torch.Size) -> bool:
        return image.numel() == self.size if self.in_shape is None else image == self.in_shape

    @property
    def structured(self) -> Iterator[StructuredLinear]:
        """The blocks, row after row."""
        for block in self.blocks:
            assert isinstance(block, StructuredLinear)
            yield block

    def extra_repr(self) -> str:
        shapes = {"in_shape": self.in_shape, "out_size": self.out_shape}
        options = {**shapes, "groups": None if self.groups == 1 else self.groups}
        text = f"in_channels={self.in_channels}, out_channels={self.out_channels}, size={self.size}"
        return text + "".join(f", {name}={value}" for name, value in options.items() if value is not None)


@checked
def replace_conv(
    model: Model,
    factory: LayerFactory,
    example: Tensor | tuple[Any, ...],
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> Model:
    """Put a ``BlockStructured`` where each convolution stands, in place (Thomas et al., section 5.2).

    For example::

        layer = functools.partial(LDRSubdiagonal, rank=2)
        model = replace_conv(model, layer, torch.zeros(1, 3, 32, 32), include="layer1")
        print(replacement_report(model))

    With n pixels in a channel that goes in and m in one that comes out, each block is a matrix m x n between two
    channels, as a convolution has the Toeplitz matrix of a filter. So the sizes of images must be known: the model
    is run once on an example, in eval mode and without gradients. From then on it takes images of that size alone.
    A filter of 3 x 3 has 9 numbers, a block of most classes more than its images have pixels: the blocks can do more,
    and are not smaller. They are made and called one by one, so a warning names layers with more than 10,000.

    Left as they are: convolutions of images of several sizes, and those of 1 x 1 pixels, which :func:`replace_linear`
    takes. :func:`~lightning_struct.nn.replacement_report` names them. A block is no filter, so a ``BlockStructured``
    has no ``weight``: a convolution whose weight the model reads, as CLIP does for its dtype, is left out by
    ``exclude``, or compressed by :func:`~lightning_struct.nn.compress`, which keeps filters.

    New layers have the device, the dtype, the mode and the hooks of the old ones, and ``requires_grad`` as these. The
    bias has one number for each pixel.

    Args:
        model: searched with everything below it. If it is a convolution itself, the new layer is returned.
        factory: called as ``factory(n, m, bias=False)`` for each block; or the ``from_linear`` of a structured class,
            called on an ``nn.Linear`` with the Toeplitz matrix of the filter.
        example: an input of the model, or a tuple of its arguments.
        include, exclude: which convolutions, as for :func:`replace_linear`.

    Returns:
        ``model``.

    Raises:
        TypeError: the factory makes no structured layers.
        ValueError: nothing is replaced; ``include`` or ``exclude`` has something that is not in the model; or the
            factory refuses a layer, which is named.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 1))
        >>> model = replace_conv(model, Circulant, torch.zeros(1, 1, 8, 8))
        >>> [type(layer).__name__ for layer in model], model(torch.randn(2, 1, 8, 8)).shape
        (['BlockStructured', 'ReLU', 'Conv2d'], torch.Size([2, 4, 3, 3]))
    """
    check_makes_layers(factory)
    selection = Selection(model, include, exclude)
    sizes = _sizes_of_images(model, example if isinstance(example, tuple) else (example,))
    places: list[tuple[str, nn.Module]] = []
    reasons: dict[str, str] = {}
    layers: dict[_Convolution, list[str]] = selected_layers(
        model, selection, {}, "replace_conv", lambda layer: type(layer) in CONVOLUTIONS
    )
    for layer, names in layers.items():
        seen, shown = sizes.get(layer, set()), names[0] or "the model"
        if (reason := _why_not(layer, seen)) is not None:
            reasons[shown] = reason
            note_left(layer, reason)
            continue
        ((size, out_size),) = seen
        blocks = layer.in_channels * layer.out_channels // layer.groups
        if blocks > _MANY_BLOCKS:
            warn(
                f"{shown} becomes {blocks:,} blocks, one for each pair of channels, which are made and called one by "
                "one: this takes much time and memory. Leave such layers out by exclude=..., or take compress"
            )
        new = blocks_in_place_of(names[0], layer, size, out_size, factory)
        log_replacement(names[0], layer, new)
        take_hooks(new, layer)
        places += [(name, new) for name in names]
    if not places:
        raise ValueError(
            "replace_conv replaces nothing: no convolution larger than one pixel, which the example reaches, is "
            f"included and not excluded in {type(model).__name__}{reasons_as_text(reasons)}"
        )
    return put_in_place(model, places)


_Sizes = set[tuple[torch.Size, torch.Size]]


def _sizes_of_images(model: nn.Module, example: tuple[Any, ...]) -> dict[nn.Module, _Sizes]:
    """The sizes of the images that go into each convolution, and of those that come out."""
    sizes: dict[nn.Module, _Sizes] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        dimensions = len(layer.kernel_size)  # type: ignore[arg-type]
        sizes.setdefault(layer, set()).add((args[0].shape[-dimensions:], output.shape[-dimensions:]))

    # lazy ones become convolutions when they are called
    kinds = [(module, getattr(module, "cls_to_become", None) or type(module)) for module in model.modules()]
    handles = [module.register_forward_hook(note) for module, kind in kinds if kind in CONVOLUTIONS]
    try:
        force_eager = torch.compiler.set_stance("force_eager")  # a compiled graph runs no hooks that came after it
        with torch.no_grad(), torch.random.fork_rng(devices=[]), in_eval_mode(model), force_eager:
            model(*example)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _why_not(layer: _Convolution, sizes: _Sizes) -> str | None:
    """The reason for which blocks cannot stand in place of a convolution; None if they can."""
    if set(layer.kernel_size) == {1}:
        return why_not_pointwise(layer) or "its kernel is one pixel: replace_linear takes it"
    others = ": compress takes it" if why_not_patches(layer) is None else ""
    if not sizes:
        return f"the example of replace_conv does not reach it{others}"
    if len(sizes) > 1:
        return f"it is called on images of several sizes{others}"
    return None


def blocks_in_place_of(
    name: str, layer: _Convolution, size: torch.Size, out_size: Sequence[int] | None, factory: LayerFactory
) -> BlockStructured:
    """The layer in place of a convolution.

    Args:
        name: of the convolution, for errors.
        layer: the convolution.
        size: of the images that go in. Where only their pixels are known, images of any size with as many are taken; a
            ``from_linear`` needs the size.
        out_size: of those that come out; None: the same.
        factory: makes the blocks.
    """
    from_linear = is_from_linear(factory)
    out_size = None if out_size is None or tuple(out_size) == tuple(size) else out_size
    filters = iter(layer.weight.detach().flatten(0, 1))

    def block(in_features: int, out_features: int, bias: bool) -> nn.Module:
        linear = nn.Linear(in_features, out_features, bias=False, device="meta").train(layer.training)
        weight = layer.weight.new_empty(()).expand(out_features, in_features)
        if from_linear:  # the Toeplitz matrix (m, n) of a filter: its columns are its outputs for each pixel
            filter = next(filters)
            geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            single = type(layer)(1, 1, *geometry, bias=False, padding_mode=layer.padding_mode, device="meta")
            pixels = torch.eye(size.numel(), dtype=filter.dtype, device=filter.device).view(-1, 1, *size)
            images: Tensor = functional_call(single, {"weight": filter[None, None]}, (pixels,))
            weight = images.flatten(1).T.contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        return replacement(name, linear, factory)

    blocks = BlockStructured(
        layer.in_channels,
        layer.out_channels,
        size.numel(),
        block,
        out_size=out_size,
        in_shape=size if len(size) == len(layer.kernel_size) else None,
        groups=layer.groups,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    with torch.no_grad():
        if from_linear:  # a sum of blocks that are near to those of the convolution is near to it as it is
            for structured in blocks.structured:
                structured.scale_(blocks.blocks_in_row**0.5)
        if layer.bias is not None and blocks.bias is not None:
            if from_linear:
                blocks.bias.copy_(layer.bias[:, None].expand_as(blocks.bias))
            blocks.bias.requires_grad_(layer.bias.requires_grad)
    return blocks.train(layer.training)
