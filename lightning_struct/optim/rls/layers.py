"""Which weights of a layer RLS trains, and what one call of the layer multiplied by each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.optim.rls.blocks import Block, Use
from lightning_struct.optim.rls.patches import batch_sum, patch_sum
from lightning_struct.optim.rls.recurrent import LevelByLevel, recurrent_rows, watch


class Matrix(NamedTuple):
    """A weight by its name below its layer, with its bias; of several groups, each reads inputs of its own.

    ``bias_rows``: which part of the bias is added to its products.
    """

    weight: str
    bias: str | None
    groups: int = 1
    bias_rows: slice = slice(None)


# What a call read: by the name of the weight, of those that RLS trains.
Blocks = Mapping[str, Block]
Reader = Callable[[Any, Blocks, tuple[Any, ...], Mapping[str, Any], Any, Any], list[Use]]


@dataclass(frozen=True)
class LayerType:
    """``matrices`` of a layer of the type; ``read``, what a call of it multiplied by them.

    Where a call must be made under something that ``read`` then gets, ``watch`` makes it; it may make None.
    """

    matrices: Callable[[Any], Sequence[Matrix]]
    read: Reader
    watch: Callable[[Any], AbstractContextManager[Any] | None] | None = None


def layer_type(layer: nn.Module) -> LayerType | None:
    """The type of a layer that RLS trains; None for any other, and for one whose ``forward`` is not that of the type."""
    for base, kind in _TYPES.items():
        if isinstance(layer, base):
            same = all(getattr(type(layer), name, None) is getattr(base, name, None) for name in _FORWARDS)
            return kind if same else None
    return None


def _bias(layer: nn.Module, block: Block, name: str = "bias") -> int | None:
    return block.bias_index(layer._parameters.get(name))


def _linear_matrices(layer: nn.Linear) -> list[Matrix]:
    return [Matrix("weight", "bias")]


def _read_linear(
    layer: nn.Linear, blocks: Blocks, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any, watched: None
) -> list[Use]:
    block = blocks["weight"]
    inputs = _argument(args, kwargs, 0, "input").reshape(-1, layer.in_features)
    total = batch_sum(inputs.to(layer.weight.dtype))
    kept = inputs if block.keeps_rows(inputs) else None
    return [Use(block, total[None], (len(inputs),), bias=_bias(layer, block), inputs=kept)]


def _convolution_matrices(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[Matrix]:
    return [Matrix("weight", "bias", groups=layer.groups)]


def _read_convolution(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    blocks: Blocks,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    watched: None,
) -> list[Use]:
    block = blocks["weight"]
    total, rows = patch_sum(layer, _argument(args, kwargs, 0, "input"))
    return [Use(block, total, (rows,) * layer.groups, bias=_bias(layer, block))]


def _recurrent_matrices(layer: nn.RNNBase) -> list[Matrix]:
    return [
        Matrix(f"weight_{kind}_{place}", f"bias_{kind}_{place}" if layer.bias else None)
        for place in _places(layer)
        for kind in ("ih", "hh")
    ]


def _read_recurrent(
    layer: nn.RNNBase,
    blocks: Blocks,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    watched: LevelByLevel | None,
) -> list[Use]:
    inputs, initial = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "hx", None)
    uses = []
    for rows in recurrent_rows(layer, inputs, initial, outputs, watched):
        for kind, total in (("ih", rows.inputs), ("hh", rows.states)):
            if (block := blocks.get(f"weight_{kind}_{rows.place}")) is not None:
                bias = _bias(layer, block, f"bias_{kind}_{rows.place}")
                uses.append(Use(block, total[None], (rows.steps,), rows.sequences, bias))
    return uses


def _places(layer: nn.RNNBase) -> list[str]:
    """How the names of the parameters end, of each direction of each level."""
    return [
        f"l{level}{end}" for level in range(layer.num_layers) for end in ("", "_reverse")[: 1 + layer.bidirectional]
    ]


def _attention_matrices(layer: nn.MultiheadAttention) -> list[Matrix]:
    out = Matrix("out_proj.weight", "out_proj.bias")
    if layer.in_proj_weight is not None:
        return [Matrix("in_proj_weight", "in_proj_bias", groups=3), out]
    size = layer.embed_dim
    return [
        *(
            Matrix(f"{name}_proj_weight", "in_proj_bias", bias_rows=slice(i * size, (i + 1) * size))
            for i, name in enumerate("qkv")
        ),
        out,
    ]


def _read_attention(
    layer: nn.MultiheadAttention,
    blocks: Blocks,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    watched: None,
) -> list[Use]:
    """The output projection reads what the heads attended to, which the layer keeps to itself: they attend once more.

    Dropout of the attention is left out there; it does not change the expectation.
    """
    read = [_argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value"))]
    dtype = layer.out_proj.weight.dtype
    totals = [batch_sum(tensor.reshape(-1, tensor.shape[-1]).to(dtype)) for tensor in read]
    rows = [tensor.numel() // tensor.shape[-1] for tensor in read]
    uses: list[Use] = []
    if (block := blocks.get("in_proj_weight")) is not None:
        uses.append(Use(block, torch.stack(totals), tuple(rows), bias=block.bias_index(layer.in_proj_bias)))
    for name, total, number in zip("qkv", totals, rows, strict=True):
        if (block := blocks.get(f"{name}_proj_weight")) is not None:
            uses.append(Use(block, total[None], (number,), bias=block.bias_index(layer.in_proj_bias)))
    if (block := blocks.get("out_proj.weight")) is not None:
        attended = _attended(layer, *(tensor.to(dtype) for tensor in read), args=args, kwargs=kwargs)
        uses.append(Use(block, batch_sum(attended)[None], (len(attended),), bias=block.bias_index(layer.out_proj.bias)))
    return uses


def _attended(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """(rows, embed_dim): the layer's output with the identity for its output projection."""
    if layer.batch_first and query.ndim == 3:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = layer.in_proj_weight is None
    output, _ = F.multi_head_attention_forward(
        query,
        key,
        value,
        layer.embed_dim,
        layer.num_heads,
        layer.in_proj_weight,
        layer.in_proj_bias,
        layer.bias_k,
        layer.bias_v,
        layer.add_zero_attn,
        0.0,
        torch.eye(layer.embed_dim, dtype=query.dtype, device=query.device),
        None,
        training=False,
        key_padding_mask=_argument(args, kwargs, 3, "key_padding_mask", None),
        need_weights=False,
        attn_mask=_argument(args, kwargs, 5, "attn_mask", None),
        use_separate_proj_weight=separate,
        q_proj_weight=layer.q_proj_weight,
        k_proj_weight=layer.k_proj_weight,
        v_proj_weight=layer.v_proj_weight,
        is_causal=_argument(args, kwargs, 7, "is_causal", False),
    )
    return output.reshape(-1, layer.embed_dim)


_REQUIRED = object()


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = _REQUIRED) -> Any:
    """An argument of a layer's call, detached."""
    value = args[place] if place < len(args) else kwargs.get(name, default)
    if value is _REQUIRED:
        raise TypeError(f"the layer was called without its argument {name!r}")
    return value.detach() if isinstance(value, Tensor) else value


_FORWARDS = ("forward", "_conv_forward")
_CONVOLUTION = LayerType(_convolution_matrices, _read_convolution)
_RECURRENT = LayerType(_recurrent_matrices, _read_recurrent, watch)
_TYPES: dict[type[nn.Module], LayerType] = {
    nn.Linear: LayerType(_linear_matrices, _read_linear),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.RNN: _RECURRENT,
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
    nn.MultiheadAttention: LayerType(_attention_matrices, _read_attention),
}
