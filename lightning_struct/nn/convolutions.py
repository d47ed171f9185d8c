"""Replacement of convolutions by blocks of structured matrices between channels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_struct.functional.torch_helpers import in_eval_mode
from lightning_struct.nn.blocks import BlockStructured
from lightning_struct.nn.channels import CONVOLUTIONS, why_not_patches, why_not_pointwise
from lightning_struct.nn.hooks import take_hooks
from lightning_struct.nn.replace import (
    LayerFactory,
    check_makes_layers,
    is_from_linear,
    log_replacement,
    put_in_place,
    replacement,
)
from lightning_struct.nn.report import note_left, reasons_as_text
from lightning_struct.nn.selection import Model, Selection, Selector

_MANY_BLOCKS = 10_000
_Convolution = Any  # nn.Conv1d, nn.Conv2d or nn.Conv3d


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
    channels, where a convolution has the Toeplitz matrix of a filter. So the sizes of images must be known: the model
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
    replacements: dict[int, BlockStructured] = {}
    places: list[tuple[str, nn.Module]] = []
    reasons: dict[str, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if type(layer) not in CONVOLUTIONS:
            continue
        if (reason := selection.why_not(name, layer)) is not None:
            note_left(layer, f"replace_conv: {reason}")
            continue
        seen = sizes.get(layer, set())
        reason = _why_not(layer, seen)
        if reason is not None:
            reasons[name or "the model"] = reason
            note_left(layer, reason)
            continue
        if id(layer) not in replacements:
            ((size, out_size),) = seen
            blocks = layer.in_channels * layer.out_channels // layer.groups
            if blocks > _MANY_BLOCKS:
                warnings.warn(
                    f"{name or 'the model'} becomes {blocks:,} blocks, one for each pair of channels, which are made "
                    "and called one by one: this takes much time and memory. Leave such layers out by exclude=..., or "
                    "take compress",
                    stacklevel=2,
                )
            replacements[id(layer)] = blocks_in_place_of(name, layer, size, out_size, factory)
            log_replacement(name, layer, replacements[id(layer)])
            take_hooks(replacements[id(layer)], layer)
        places.append((name, replacements[id(layer)]))
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
        if from_linear:
            weight = _toeplitz(layer, next(filters), size)
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


def _toeplitz(layer: _Convolution, filter: Tensor, size: torch.Size) -> Tensor:
    """The matrix (m, n) of one filter of a convolution, whose columns are what it makes of each pixel."""
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    single = type(layer)(1, 1, *geometry, bias=False, padding_mode=layer.padding_mode, device="meta")
    pixels = torch.eye(size.numel(), dtype=filter.dtype, device=filter.device).view(-1, 1, *size)
    images: Tensor = functional_call(single, {"weight": filter[None, None]}, (pixels,))
    return images.flatten(1).T.contiguous()
