"""Replacement of convolutions by blocks of structured matrices between channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.nn.blocks import BlockStructured
from lightning_struct.nn.channels import CONVOLUTIONS, why_not_patches, why_not_pointwise
from lightning_struct.nn.hooks import take_hooks
from lightning_struct.nn.replace import (
    LayerFactory,
    is_from_linear,
    log_replacement,
    put_in_place,
    replacement,
)
from lightning_struct.nn.report import as_text, note_left
from lightning_struct.nn.selection import Selection, Selector

_Convolution = Any  # nn.Conv1d, nn.Conv2d or nn.Conv3d


def replace_conv(
    model: nn.Module,
    factory: LayerFactory,
    example: Tensor | tuple[Any, ...],
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> nn.Module:
    """Put a :class:`~lightning_struct.nn.BlockStructured` where each convolution stands that keeps the size of images,
    in place (Thomas et al., section 5.2). ::

        layer = functools.partial(LDRSubdiagonal, rank=2)
        model = replace_conv(model, layer, torch.zeros(1, 3, 32, 32), include="layer1")
        print(replacement_report(model))

    With n pixels in a channel, each block is a matrix n x n between two channels, where a convolution has the Toeplitz
    matrix of a filter. So the sizes of images must be known: the model is run once on an example, in eval mode and
    without gradients. From then on it takes images of that size alone.

    Left as they are: convolutions with a stride, with groups or without the padding that keeps the size, those of
    images of several sizes, and those of 1 x 1 pixels, which :func:`replace_linear` takes.
    :func:`~lightning_struct.nn.replacement_report` names them. New layers have the device, the dtype, the mode and the
    hooks of the old ones, and ``requires_grad`` as these. The bias has one number for each pixel.

    Args:
        model: searched with everything below it. If it is a convolution itself, the new layer is returned.
        factory: called as ``factory(n, n, bias=False)`` for each block; or the ``from_linear`` of a structured class,
            called on an ``nn.Linear`` with the Toeplitz matrix of the filter.
        example: an input of the model, or a tuple of its arguments.
        include, exclude: which convolutions, as for :func:`replace_linear`.

    Returns:
        ``model``.

    Raises:
        TypeError: the factory makes no structured layers.
        ValueError: nothing is replaced; a name, a pattern or a module of ``include`` or ``exclude`` is not in the
            model; or the factory refuses a layer, which is named.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2))
        >>> model = replace_conv(model, Circulant, torch.zeros(1, 1, 8, 8))
        >>> [type(layer).__name__ for layer in model], model(torch.randn(2, 1, 8, 8)).shape
        (['BlockStructured', 'ReLU', 'Conv2d'], torch.Size([2, 4, 3, 3]))
    """
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
            ((size, _),) = seen
            replacements[id(layer)] = blocks_in_place_of(name, layer, size, factory)
            log_replacement(name, layer, replacements[id(layer)])
            take_hooks(replacements[id(layer)], layer)
        places.append((name, replacements[id(layer)]))
    if not places:
        raise ValueError(
            "replace_conv replaces nothing: no convolution that keeps the size of images, is included and not "
            f"excluded is in {type(model).__name__}{as_text(reasons)}"
        )
    put_in_place(model, places)
    return model if places[0][0] else places[0][1]


_Sizes = set[tuple[torch.Size, torch.Size]]


def _sizes_of_images(model: nn.Module, example: tuple[Any, ...]) -> dict[nn.Module, _Sizes]:
    """The sizes of the images that go into each convolution, and of those that come out."""
    sizes: dict[nn.Module, _Sizes] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        dimensions = len(layer.kernel_size)  # type: ignore[arg-type]
        sizes.setdefault(layer, set()).add((args[0].shape[-dimensions:], output.shape[-dimensions:]))

    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_hook(note) for module in modes if type(module) in CONVOLUTIONS]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(*example)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return sizes


def _why_not(layer: _Convolution, sizes: _Sizes) -> str | None:
    """The reason for which blocks cannot stand in place of a convolution; None if they can."""
    if layer.groups != 1:
        return f"it has {layer.groups} groups"
    if set(layer.kernel_size) == {1}:
        return why_not_pointwise(layer) or "its kernel is one pixel: replace_linear takes it"
    others = ": compress takes it" if why_not_patches(layer) is None else ""
    if not sizes:
        return f"the example of replace_conv does not reach it{others}"
    if len(sizes) > 1:
        return f"it is called on images of several sizes{others}"
    ((before, after),) = sizes
    if before != after:
        return f"it makes images {tuple(after)} of images {tuple(before)}{others}"
    return None


def blocks_in_place_of(name: str, layer: _Convolution, size: torch.Size, factory: LayerFactory) -> BlockStructured:
    """The layer in place of a convolution of images of that size, which matters to a ``from_linear`` alone; other
    factories need the number of pixels."""
    from_linear = is_from_linear(factory)
    pairs = iter([(i, j) for i in range(layer.out_channels) for j in range(layer.in_channels)])

    def block(in_features: int, out_features: int, bias: bool) -> nn.Module:
        linear = _toeplitz_linear(layer, *next(pairs), size, from_linear)
        return replacement(name, linear, factory)

    blocks = BlockStructured(
        layer.in_channels,
        layer.out_channels,
        size.numel(),
        block,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    with torch.no_grad():
        if from_linear:  # a sum of blocks that are near to those of the convolution is near to it as it is
            for structured in blocks.structured:
                structured.scale_(layer.in_channels**0.5)
        if layer.bias is not None and blocks.bias is not None:
            if from_linear:
                blocks.bias.copy_(layer.bias[:, None].expand_as(blocks.bias))
            blocks.bias.requires_grad_(layer.bias.requires_grad)
    return blocks.train(layer.training)


def _toeplitz_linear(layer: _Convolution, i: int, j: int, size: torch.Size, with_weight: bool) -> nn.Linear:
    """An ``nn.Linear`` of the size of the block from channel j to channel i, with its weight if that is asked for."""
    n = size.numel()
    linear = nn.Linear(n, n, bias=False, device="meta").train(layer.training)
    weight = layer.weight.new_empty(()).expand(n, n)
    if with_weight:
        # Column k of the Toeplitz matrix of a filter is what it makes of pixel k.
        pixels = torch.eye(n, dtype=layer.weight.dtype, device=layer.weight.device).view(n, 1, *size)
        convolve: Callable[..., Tensor] = layer._conv_forward
        weight = convolve(pixels, layer.weight.detach()[i : i + 1, j : j + 1], None).flatten(1).T.contiguous()
    linear.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    return linear
