"""Per-sample gradient contributions of ``nn.MultiheadAttention``, from what a call read and returned alone.

A recorder that is there during the call need not do this (see :mod:`~lightning_struct.functional.per_sample.projections`), except with
``add_bias_kv``. The projections of queries, keys and values are not among the layer's outputs. Here they and the attention
are computed again, and the attention is differentiated in them by autograd: this and two products with the output projection
are all that it costs. The layer never calls ``out_proj`` as a module, so its parameters are told here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.layer_call import LayerCall
from lightning_struct.functional.per_sample.contributions import Contribution, Dense, Outer, Uncovered
from lightning_struct.functional.per_sample.rerun import by_sample, check_rerun, draws_random_numbers


def attention_contributions(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share of the gradients that one call of an attention layer gives its parameters.

    Self and cross attention with every option of the layer and every mask. Dropout needs the random generators as they
    were before the call (see :func:`~lightning_struct.functional.randomness.restored_random_state`).

    Args:
        call: of ``nn.MultiheadAttention``. Its outputs are the attention's output and its weights or None. Its ``samples``
            are n, or None for as many as there are sequences; of k·n sequences each k in a row are one sample.

    Returns:
        By the name of the parameter, ``out_proj.weight`` and ``out_proj.bias`` among them.

    Raises:
        Uncovered: the input is one sequence without a batch dimension; the number of sequences is no multiple of n; dropout
            took another mask than in the call.
    """
    layer, outputs, cotangents, samples = call.layer, call.outputs, call.cotangents, call.samples
    assert samples is None or isinstance(samples, int)
    given = _Arguments(*call.args, **call.kwargs)
    if given.query.dim() != 3:
        raise Uncovered("it read one sequence without a batch dimension")

    def time_first(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to(outputs[0].dtype)  # under autocast the layer computes in this one
        return tensor.transpose(0, 1) if layer.batch_first else tensor

    def samples_first(tensor: Tensor) -> Tensor:
        return by_sample(tensor.transpose(0, 1), samples)

    device = outputs[0].device.type
    with torch.autocast(device, enabled=False), torch.no_grad():
        inputs = [time_first(tensor) for tensor in (given.query, given.key, given.value)]
        points = _projected(layer, inputs)
        with torch.enable_grad():
            attended, weights = _attend(layer, given, *(point.requires_grad_() for point in points))
        out_weight = layer.out_proj.weight.detach().to(attended.dtype)
        if draws_random_numbers(layer):
            bias = None if layer.out_proj.bias is None else layer.out_proj.bias.detach().to(attended.dtype)
            check_rerun(time_first(outputs[0]), F.linear(attended.detach(), out_weight, bias))
        of_output = torch.zeros_like(attended) if cotangents[0] is None else time_first(cotangents[0])
        ends, of_ends = [attended], [of_output @ out_weight]
        if weights is not None and cotangents[1] is not None:
            ends.append(weights)
            of_ends.append(cotangents[1])
        of_points = torch.autograd.grad(ends, points, of_ends, materialize_grads=True)

        contributions: dict[str, Contribution] = {
            "out_proj.weight": Outer(samples_first(attended.detach()), samples_first(of_output)),
        }
        if layer.out_proj.bias is not None:
            contributions["out_proj.bias"] = Dense(samples_first(of_output).sum(1))
        deltas = [samples_first(of[: tensor.shape[0]]) for of, tensor in zip(of_points, inputs, strict=True)]
        if layer.bias_k is not None:
            for name, of in zip(("bias_k", "bias_v"), of_points[1:], strict=True):
                contributions[name] = Dense(samples_first(of[-1:]).sum(1)[:, None, None])
        read = [samples_first(tensor) for tensor in inputs]
        if layer.in_proj_bias is not None:
            contributions["in_proj_bias"] = Dense(torch.cat([delta.sum(1) for delta in deltas], 1))
        if layer.in_proj_weight is None:
            for name, tensor, delta in zip("qkv", read, deltas, strict=True):
                contributions[f"{name}_proj_weight"] = Outer(tensor, delta)
        elif given.query is given.key is given.value:
            contributions["in_proj_weight"] = Outer(read[0], torch.cat(deltas, 2))
        else:
            shape, size = tuple(layer.in_proj_weight.shape), layer.embed_dim
            blocks = [
                Outer(tensor, delta, shape, slice(i * size, (i + 1) * size))
                for i, (tensor, delta) in enumerate(zip(read, deltas, strict=True))
            ]
            contributions["in_proj_weight"] = RowBlocks(blocks)
        return contributions


@dataclass(frozen=True, eq=False)
class RowBlocks(Contribution):
    """One use of a parameter whose rows are several matrices, each with inputs of its own.

    Args:
        blocks: of the same samples and parameter, with ``rows`` that do not overlap.
    """

    blocks: Sequence[Outer]

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def samples(self) -> int:
        return self.blocks[0].samples

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks[0].shape

    def squared_norms(self) -> Tensor:
        return torch.stack([block.squared_norms() for block in self.blocks]).sum(0)

    def per_sample(self, chunk: slice) -> Tensor:
        return torch.stack([block.per_sample(chunk) for block in self.blocks]).sum(0)

    def projection(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([block.projection(left, right) for block in self.blocks]).sum()


@dataclass(frozen=True)
class _Arguments:
    """The arguments of ``nn.MultiheadAttention.forward``, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def _projected(layer: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Queries (L, N, E), keys and values (S, N, E), or (S + 1, N, E) with ``bias_k`` and ``bias_v`` behind them."""
    if layer.in_proj_weight is None:
        weights: Sequence[Tensor] = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        weights = layer.in_proj_weight.chunk(3)
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    ends = (None, layer.bias_k, layer.bias_v)
    projected = []
    for tensor, weight, bias, end in zip(inputs, weights, biases, ends, strict=True):
        points = F.linear(tensor, weight.to(tensor.dtype), None if bias is None else bias.to(tensor.dtype))
        if end is not None:
            points = torch.cat([points, end.to(points.dtype).expand(1, points.shape[1], -1)])
        projected.append(points)
    return projected


def _attend(
    layer: nn.MultiheadAttention, given: _Arguments, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What ``out_proj`` reads, (L, N, E), and the weights that the layer returns; the random numbers drawn are the layer's.

    The operations are those of ``torch.nn.functional.multi_head_attention_forward``, since a kernel with dropout may draw
    differently where its arguments differ.
    """
    heads, (length, sequences, width) = layer.num_heads, query.shape
    q, k, v = (tensor.view(tensor.shape[0], sequences * heads, -1).transpose(0, 1) for tensor in (query, key, value))
    if layer.add_zero_attn:
        k, v = (torch.cat([tensor, tensor.new_zeros(tensor.shape[0], 1, tensor.shape[2])], 1) for tensor in (k, v))
    probability = layer.dropout if layer.training else 0.0
    causal = given.is_causal and given.key_padding_mask is None and not given.need_weights
    mask = None if causal else _mask(given, heads, sequences, k)
    if not given.need_weights:
        q, k, v = (tensor.reshape(sequences, heads, *tensor.shape[1:]) for tensor in (q, k, v))
        if mask is not None:
            mask = mask[None] if mask.shape[0] == 1 else mask.view(sequences, heads, -1, k.shape[2])
        attended = F.scaled_dot_product_attention(q, k, v, mask, probability, causal)
        return attended.permute(2, 0, 1, 3).reshape(length, sequences, width), None
    q = q * math.sqrt(1.0 / q.shape[2])
    scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
    weights = F.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if probability > 0:
        weights = F.dropout(weights, probability)
    attended = torch.bmm(weights.to(v.dtype), v).transpose(0, 1).reshape(length, sequences, width)
    weights = weights.view(sequences, heads, length, -1)
    return attended, weights.mean(1) if given.average_attn_weights else weights


def _mask(given: _Arguments, heads: int, sequences: int, key: Tensor) -> Tensor | None:
    """What is added to the scores, (1 or N·heads, 1 or L, keys); keys beyond those of the call are not masked."""
    parts = []
    if given.attn_mask is not None:
        mask = _additive(given.attn_mask, key)
        parts.append(mask[None] if mask.dim() == 2 else mask)
    if given.key_padding_mask is not None:
        padding = _additive(given.key_padding_mask, key)[:, None, None].expand(-1, heads, -1, -1)
        parts.append(padding.reshape(sequences * heads, 1, -1))
    return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=key.dtype).masked_fill_(mask, -math.inf)
    return F.pad(mask.to(key.dtype), (0, key.shape[1] - mask.shape[-1]))
