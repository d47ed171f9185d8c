"""What one call of a layer multiplied by each of the weights that RLS trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional.layer_call import LayerCall
from lightning_struct.functional.layers import kind_of
from lightning_struct.optim.rls.patches import batch_sum, patch_sum
from lightning_struct.optim.rls.recurrent import LevelByLevel, recurrent_rows, watch
from lightning_struct.optim.rls.weights import TrainedWeight, Use

# By the name of the weight below its layer, of those that RLS trains.
TrainedWeights = Mapping[str, TrainedWeight]


@dataclass(frozen=True)
class LayerReader:
    """How RLS sees what the layers of one kind multiply.

    Attributes:
        read: the uses of the trained weights in one call; the last argument is what ``watch`` made.
        watch: what a call must be made under for ``read`` to see everything; it may make None.
    """

    read: Callable[[LayerCall, TrainedWeights, Any], list[Use]]
    watch: Callable[[Any], AbstractContextManager[Any] | None] | None = None


def layer_reader(layer: nn.Module) -> LayerReader | None:
    """How to see what a layer reads; None for a layer that RLS does not train."""
    kind = kind_of(layer)
    return None if kind is None or kind.base is None else _READERS.get(kind.base)


def _bias(layer: nn.Module, weight: TrainedWeight, name: str | None) -> int | None:
    return None if name is None else weight.bias_index(layer._parameters.get(name))


def _read_affine(call: LayerCall, weights: TrainedWeights, watched: None) -> list[Use]:
    kind = kind_of(call.layer)
    assert kind is not None
    (matrix,) = kind.matrices(call.layer)
    weight = weights[matrix.weight]
    inputs = call.input.reshape(-1, weight.features)
    total = batch_sum(inputs.to(weight.parameter.dtype))
    kept = inputs if weight.keeps_rows(inputs) else None
    return [Use(weight, total[None], (len(inputs),), bias=_bias(call.layer, weight, matrix.bias), inputs=kept)]


def _read_convolution(call: LayerCall, weights: TrainedWeights, watched: None) -> list[Use]:
    weight = weights["weight"]
    total, rows = patch_sum(call.layer, call.input)
    return [Use(weight, total, (rows,) * call.layer.groups, bias=_bias(call.layer, weight, "bias"))]


def _read_recurrent(call: LayerCall, weights: TrainedWeights, watched: LevelByLevel | None) -> list[Use]:
    inputs, initial = call.argument(0, "input"), call.argument(1, "hx", None)
    uses = []
    for rows in recurrent_rows(call.layer, inputs, initial, call.outputs, watched):
        for kind, total in (("ih", rows.inputs), ("hh", rows.states)):
            if (weight := weights.get(f"weight_{kind}_{rows.place}")) is not None:
                bias = _bias(call.layer, weight, f"bias_{kind}_{rows.place}")
                uses.append(Use(weight, total[None], (rows.steps,), rows.sequences, bias))
    return uses


def _read_attention(call: LayerCall, weights: TrainedWeights, watched: None) -> list[Use]:
    """The output projection reads what the heads attended to, which the layer keeps to itself: they attend once more.

    Dropout of the attention is left out there; it does not change the expectation.
    """
    layer = call.layer
    read = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    dtype = layer.out_proj.weight.dtype
    totals = [batch_sum(tensor.reshape(-1, tensor.shape[-1]).to(dtype)) for tensor in read]
    rows = [tensor.numel() // tensor.shape[-1] for tensor in read]
    uses: list[Use] = []
    if (weight := weights.get("in_proj_weight")) is not None:
        uses.append(Use(weight, torch.stack(totals), tuple(rows), bias=weight.bias_index(layer.in_proj_bias)))
    for name, total, number in zip("qkv", totals, rows, strict=True):
        if (weight := weights.get(f"{name}_proj_weight")) is not None:
            uses.append(Use(weight, total[None], (number,), bias=weight.bias_index(layer.in_proj_bias)))
    if (weight := weights.get("out_proj.weight")) is not None:
        attended = _attended(call, *(tensor.to(dtype) for tensor in read))
        uses.append(
            Use(weight, batch_sum(attended)[None], (len(attended),), bias=weight.bias_index(layer.out_proj.bias))
        )
    return uses


def _attended(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(rows, embed_dim): the layer's output with the identity for its output projection."""
    layer = call.layer
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
        key_padding_mask=call.argument(3, "key_padding_mask", None),
        need_weights=False,
        attn_mask=call.argument(5, "attn_mask", None),
        use_separate_proj_weight=separate,
        q_proj_weight=layer.q_proj_weight,
        k_proj_weight=layer.k_proj_weight,
        v_proj_weight=layer.v_proj_weight,
        is_causal=call.argument(7, "is_causal", False),
    )
    return output.reshape(-1, layer.embed_dim)


_CONVOLUTION = LayerReader(_read_convolution)
_RECURRENT = LayerReader(_read_recurrent, watch)
# By the base of the kind of layer.
_READERS: dict[type[nn.Module], LayerReader] = {
    nn.Linear: LayerReader(_read_affine),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.RNN: _RECURRENT,
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
    nn.MultiheadAttention: LayerReader(_read_attention),
}
