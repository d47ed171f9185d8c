"""Attention whose projections are layers of any kind."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import checked
from lightning_struct.functional.layers.registry import linear_with
from lightning_struct.nn.torch_modules import is_traced, take_hooks, whole_call

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The names of the layers of :class:`StructuredAttention`."""


class StructuredAttention(nn.Module):
    """Multi-head attention that calls its four projections, where ``nn.MultiheadAttention`` reads their weights.

    It takes the arguments of that one, and computes the same if the projections do. ``nn.TransformerEncoderLayer`` and
    ``nn.TransformerDecoderLayer`` take it for ``self_attn`` and ``multihead_attn``.
    :func:`~lightning_struct.nn.replace_linear` makes it.

    Args:
        q_proj: makes queries (..., embed_dim) of (..., embed_dim).
        k_proj: makes keys, (..., embed_dim).
        v_proj: makes values, (..., embed_dim).
        out_proj: from the heads' results, (..., embed_dim), to the outputs.
        embed_dim: the features of queries and outputs.
        num_heads: a divisor of ``embed_dim``.
        dropout: probability for the attention weights, in training.
        batch_first: inputs and outputs are (batch, steps, features) where else they are (steps, batch, features).

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``.

    Example:
        >>> from functools import partial
        >>> from lightning_struct.nn import LowRank, replace_linear
        >>> layer = replace_linear(nn.TransformerEncoderLayer(16, 2, 32), partial(LowRank, rank=2))
        >>> type(layer.self_attn).__name__, layer(torch.randn(5, 3, 16)).shape
        ('StructuredAttention', torch.Size([5, 3, 16]))
    """

    # nn.TransformerEncoderLayer looks at these to learn whether it may read the weights: it may not.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    @checked
    def __init__(
        self,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        out_proj: nn.Module,
        *,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim = {embed_dim}, but is {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.out_proj = out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and attention weights, as ``nn.MultiheadAttention`` gives them.

        Args:
            query: (L, N, E), or (N, L, E) if ``batch_first``, or (L, E).
            key: (S, N, features), likewise.
            value: (S, N, features), likewise.
            key_padding_mask: (N, S) or (S,): True for ignored keys, or numbers to be added to the scores.
            need_weights: whether the weights are returned, for which they must be formed.
            attn_mask: (L, S) or (N * heads, L, S), likewise.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: says that ``attn_mask`` is the causal mask.

        Returns:
            (L, N, E) and (N, L, S), or (N, heads, L, S) if not averaged; without the batch if the query has none; None
            for the weights that are not needed.

        Raises:
            ValueError: ``is_causal`` without ``attn_mask``.
        """
        if is_traced(query):
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return whole_call(self, query, key, value, *masks)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says that attn_mask is the causal mask, but attn_mask is None: give it")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        q, k, v = (
            projection(tensor).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, tensor in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        only_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if only_causal else self._added_to_scores(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, only_causal)
        output = self.out_proj(heads.transpose(1, 2).flatten(-2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _added_to_scores(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one that is added to scores (N, heads, L, S)."""
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            if mask.dtype == torch.bool
            else mask.to(q.dtype)
            for mask in (attn_mask, None if padding is None else padding[:, None, None])
            if mask is not None
        ]
        return sum(added[1:], added[0]) if added else None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def projections_of(attention: nn.MultiheadAttention) -> dict[str, nn.Linear]:
    """The four projections as layers of their own, by :data:`PROJECTIONS`. They share the memory of the attention."""
    if attention.in_proj_weight is not None:
        weights = attention.in_proj_weight.chunk(3)
    else:
        weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    biases = [None] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    linears = [linear_with(weight, bias, attention.training) for weight, bias in zip(weights, biases, strict=True)]
    return dict(zip(PROJECTIONS, [*linears, attention.out_proj], strict=True))


def why_not_called(attention: nn.MultiheadAttention) -> str | None:
    """The reason for which :class:`StructuredAttention` cannot stand in place of the attention; None if it can."""
    if type(attention) is not nn.MultiheadAttention:
        return f"{type(attention).__name__} reads the weights of its projections"
    if attention.bias_k is not None:
        return "add_bias_kv=True"
    if attention.add_zero_attn:
        return "add_zero_attn=True"
    return None


def with_own_projections(attention: nn.MultiheadAttention) -> StructuredAttention:
    """The attention with its projections as layers, in memory of their own, and with its hooks."""
    called = StructuredAttention(
        *(own_linear(linear) for linear in projections_of(attention).values()),
        embed_dim=attention.embed_dim,
        num_heads=attention.num_heads,
        dropout=attention.dropout,
        batch_first=attention.batch_first,
    ).train(attention.training)
    take_hooks(called, attention)
    return called


def own_linear(linear: nn.Linear) -> nn.Linear:
    """An ``nn.Linear`` with the same weights in memory of its own."""
    twin = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    for name, parameter in linear.named_parameters():
        setattr(twin, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
    return twin.train(linear.training)
