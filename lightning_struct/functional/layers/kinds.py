"""Declarations of layers, made once for per-sample gradients, Kronecker factors, RLS and ``replace_linear``.

A :class:`LayerKind` says which matrices a layer multiplies by, which parameters its ``forward`` uses, and whose rules
serve it. The measurements stay in their own modules: RLS reads sums of inputs, gradient norms read
cotangents too. :func:`~lightning_struct.functional.layers.registry.register_layer` declares layers that torch does not
have.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from lightning_struct.functional.layers.calls import LayerCall

if TYPE_CHECKING:
    from lightning_struct.functional.layers.per_sample.contributions import Contribution

ContributionRule: TypeAlias = "Callable[[LayerCall], dict[str, Contribution]]"


class Matrix(NamedTuple):
    """A weight that multiplies rows of inputs, and the bias that is added to the products.

    Args:
        weight: its name below the layer; the shape is (out, in), of a convolution (out, in / groups, *kernel).
        bias: the name of the bias; None without.
        groups: the rows of the weight are so many matrices; each of them reads inputs of its own.
        bias_rows: the part of the bias that is added to these products.
        transposed: the weight is stored as (in, out), that of a transposed convolution as (in, out / groups, *kernel).

    Example:
        >>> Matrix("kernel", transposed=True)  # y = x K, without bias
        Matrix(weight='kernel', bias=None, groups=1, bias_rows=slice(None, None, None), transposed=True)
    """

    weight: str
    bias: str | None = None
    groups: int = 1
    bias_rows: slice = slice(None)
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Declaration of one kind of layers: its attributes that are functions take a layer.

    Attributes:
        base: the type of torch whose rules serve them; None if they have a rule of their own only.
        matrices: the matrices that they multiply rows by.
        parameters: names of the parameters of their own that their ``forward`` uses.
        hidden_layers: layers below them whose parameters their ``forward`` uses without calling them.
        rule: how to read off each sample's share, instead of the rule of ``base``.
        declared: by ``register_layer``; layers are then checked against the declaration.
    """

    base: type[nn.Module] | None
    matrices: Callable[[Any], Sequence[Matrix]] = lambda layer: ()
    parameters: Callable[[Any], Collection[str]] = lambda layer: ("weight", "bias")
    hidden_layers: Callable[[Any], Collection[nn.Module]] = lambda layer: ()
    rule: ContributionRule | None = None
    declared: bool = False

    @property
    def is_affine(self) -> bool:
        """Whether a call is x Wᵀ + b over the last dimension of its first argument."""
        return self.base is nn.Linear


def recurrent_places(layer: nn.RNNBase, level: int | None = None) -> list[str]:
    """Ends of the parameters' names, ``"l0"``, ``"l0_reverse"``, ...: by direction, of all levels or of one."""
    levels = range(layer.num_layers) if level is None else [level]
    return [f"l{i}{end}" for i in levels for end in ("", "_reverse")[: 1 + layer.bidirectional]]


def _of_recurrent(layer: nn.RNNBase) -> list[Matrix]:
    return [
        Matrix(f"weight_{kind}_{place}", f"bias_{kind}_{place}" if layer.bias else None)
        for place in recurrent_places(layer)
        for kind in ("ih", "hh")
    ]


def _of_attention(layer: nn.MultiheadAttention) -> list[Matrix]:
    out = Matrix("out_proj.weight", "out_proj.bias")
    if layer.in_proj_weight is not None:
        return [Matrix("in_proj_weight", "in_proj_bias", groups=3), out]
    size = layer.embed_dim
    rows = [slice(i * size, (i + 1) * size) for i in range(3)]
    return [*(Matrix(f"{q}_proj_weight", "in_proj_bias", bias_rows=r) for q, r in zip("qkv", rows, strict=True)), out]


_ATTENTION_PARAMETERS = (
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
)  # fmt: skip


def _kinds(*types: type[nn.Module], **declared: Any) -> dict[type[nn.Module], LayerKind]:
    return {kind: LayerKind(kind, **declared) for kind in types}


_OF_TORCH: dict[type[nn.Module], LayerKind] = {
    **_kinds(nn.Linear, matrices=lambda layer: [Matrix("weight", "bias")]),
    **_kinds(nn.Conv1d, nn.Conv2d, nn.Conv3d, matrices=lambda layer: [Matrix("weight", "bias", layer.groups)]),
    **_kinds(
        nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
        matrices=lambda layer: [Matrix("weight", "bias", layer.groups, transposed=True)],
    ),
    **_kinds(
        nn.RNNCell, nn.LSTMCell, nn.GRUCell,
        matrices=lambda layer: [Matrix(f"weight_{of}", f"bias_{of}" if layer.bias else None) for of in ("ih", "hh")],
        parameters=lambda layer: ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
    ),
    **_kinds(nn.RNN, nn.LSTM, nn.GRU, matrices=_of_recurrent, parameters=lambda layer: layer._flat_weights_names),
    **_kinds(
        nn.MultiheadAttention, matrices=_of_attention,
        parameters=lambda layer: _ATTENTION_PARAMETERS, hidden_layers=lambda layer: [layer.out_proj],
    ),
    **_kinds(
        nn.Embedding, nn.EmbeddingBag, nn.PReLU, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d,
        nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    ),
}  # fmt: skip

# Whatever their forward is: all that derive from a type, until one of them is declared otherwise.
_COUPLING_OF_TORCH: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.modules.batchnorm._BatchNorm: lambda layer: layer.training or layer.running_mean is None
}

# Layers of other libraries, by their modules and names: nobody has to import the libraries.
_OF_OTHERS: dict[tuple[str, str], LayerKind] = {
    ("transformers.pytorch_utils", "Conv1D"): LayerKind(
        nn.Linear, matrices=lambda layer: [Matrix("weight", "bias", transposed=True)]
    )
}

# Declarations by ``register_layer`` go before those of torch's layers.
KINDS: ChainMap[type[nn.Module], LayerKind] = ChainMap({}, _OF_TORCH)
COUPLING: ChainMap[type[nn.Module], Callable[[Any], bool]] = ChainMap({}, _COUPLING_OF_TORCH)


_FORWARDS = ("forward", "_conv_forward")


def kind_of_type(layer_type: type[nn.Module]) -> LayerKind | None:
    """The kind of a type, or of the nearest base that has one, if the type has its ``forward``."""
    for base in layer_type.__mro__:
        if (kind := _kind_at(base)) is not None:
            same = all(getattr(layer_type, name, None) is getattr(base, name, None) for name in _FORWARDS)
            return kind if same else None
    return None


def nearest_kind(layer_type: type[nn.Module]) -> LayerKind | None:
    """The kind of the nearest base that has one, whatever the type's own ``forward`` is."""
    return next((kind for base in layer_type.__mro__ if (kind := _kind_at(base)) is not None), None)


def _kind_at(base: type) -> LayerKind | None:
    return KINDS.get(base) or _OF_OTHERS.get((base.__module__, base.__name__))


def couples_samples(layer: nn.Module) -> bool:
    """Whether a sample's outputs depend on the other samples of the batch, as in batch normalisation in training."""
    couples = next((COUPLING[base] for base in type(layer).__mro__ if base in COUPLING), None)
    return couples is not None and couples(layer)
