"""Declarations of layers, made once for per-sample gradients, Kronecker factors, RLS and ``replace_linear``.

A :class:`LayerKind` says which matrices a layer multiplies by, which parameters its ``forward`` uses, and whose rules
serve it. What is measured of a layer stays where it is measured: RLS reads sums of inputs, gradient norms read
cotangents too. :func:`register_layer` declares layers that torch does not have.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from lightning_struct.functional.layers.calls import LayerCall

if TYPE_CHECKING:
    from lightning_struct.functional.layers.per_sample.contributions import Contribution

Rule: TypeAlias = "Callable[[LayerCall], dict[str, Contribution]]"


class Matrix(NamedTuple):
    """A weight that multiplies rows of inputs, and the bias that is added to the products.

    Args:
        weight: its name below the layer; the shape is (out, in), of a convolution (out, in / groups, *kernel).
        bias: the name of the bias; None without.
        groups: the rows of the weight are so many matrices, each of which reads inputs of its own.
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


@dataclass(frozen=True)
class ElementwiseForm:
    """An output y = a(x) + Σ_p p ⊙ b_p(x) of the shape of the input x: parameters p scale or shift its features.

    It is that of inputs with one number of dimensions.

    Attributes:
        channels_first: the features are in the second dimension, else in the last.
        pointwise: features are in the last dimension, and no position of the others depends on another one.
        vanishes: a = 0.
        shifts: the names of the parameters with b = 1.
    """

    channels_first: bool
    pointwise: bool
    vanishes: bool
    shifts: frozenset[str]


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Declaration of one kind of layers: its attributes that are functions take a layer.

    Attributes:
        base: the type of torch whose rules serve them; None if they have a rule of their own only.
        matrices: the matrices that they multiply rows by.
        parameters: names of the parameters of their own that their ``forward`` uses.
        hidden_layers: layers below them whose parameters their ``forward`` uses without calling them.
        rule: how to read off each sample's share, instead of the rule of ``base``.
        declared: by :func:`register_layer`; layers are then checked to be what was declared.
        recognized: by what a layer computed (see :mod:`~lightning_struct.functional.layers.recognition`).
        forms: how the parameters scale and shift the features, by the number of dimensions of the input, for layers
            without matrices that were recognized by that.
    """

    base: type[nn.Module] | None
    matrices: Callable[[Any], Sequence[Matrix]] = lambda layer: ()
    parameters: Callable[[Any], Collection[str]] = lambda layer: ("weight", "bias")
    hidden_layers: Callable[[Any], Collection[nn.Module]] = lambda layer: ()
    rule: Rule | None = None
    declared: bool = False
    recognized: bool = False
    forms: Mapping[int, ElementwiseForm] | None = None

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

_OF_TORCH: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LayerKind(nn.Linear, lambda layer: [Matrix("weight", "bias")]),
    **{
        kind: LayerKind(kind, lambda layer: [Matrix("weight", "bias", groups=layer.groups)])
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    },
    **{
        kind: LayerKind(kind, lambda layer: [Matrix("weight", "bias", groups=layer.groups, transposed=True)])
        for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
    **{
        kind: LayerKind(
            kind,
            lambda layer: [Matrix(f"weight_{of}", f"bias_{of}" if layer.bias else None) for of in ("ih", "hh")],
            lambda layer: ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
        )
        for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    },
    **{
        kind: LayerKind(kind, _of_recurrent, lambda layer: layer._flat_weights_names)
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    },
    nn.MultiheadAttention: LayerKind(
        nn.MultiheadAttention, _of_attention, lambda layer: _ATTENTION_PARAMETERS, lambda layer: [layer.out_proj]
    ),
    **{
        kind: LayerKind(kind)
        for kind in (
            nn.Embedding, nn.PReLU, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d,
            nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        )
    },
}  # fmt: skip

# Whatever their forward is: all that derive from a type, until one of them is declared otherwise.
_COUPLING_OF_TORCH: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.modules.batchnorm._BatchNorm: lambda layer: layer.training or layer.running_mean is None,
}

# What is declared goes before what torch has.
_KINDS: ChainMap[type[nn.Module], LayerKind] = ChainMap({}, _OF_TORCH)
_COUPLING: ChainMap[type[nn.Module], Callable[[Any], bool]] = ChainMap({}, _COUPLING_OF_TORCH)


def register_layer(
    layer_type: type[nn.Module] | None = None,
    matrix: Matrix | None = None,
    *,
    like: type[nn.Module] | None = None,
    rule: Rule | None = None,
    couples_samples: bool | Callable[[Any], bool] | None = None,
) -> Any:
    """Declare a type of layers, once for per-sample gradient norms, Kronecker factors, RLS and ``replace_linear``.

    Exactly one of ``matrix``, ``like`` and ``rule`` says what a layer of the type computes. The declaration holds for
    the type and for its subclasses that do not override ``forward``, and replaces an earlier one. Declare before an
    optimizer or a recorder is made.

    - ``register_layer(Conv1D, Matrix("weight", "bias", transposed=True))``: an affine map y = x Wᵀ + b over the last
      dimension of the first argument, under these names. It is served wherever ``nn.Linear`` is.
    - ``register_layer(MyLSTM, like=nn.LSTM)``: a call computes what ``nn.LSTM`` computes from the same arguments, with
      parameters of the same names. Calls with further arguments are left out of the gradient norms.
    - ``register_layer(Scale, rule=function)``, or ``@register_layer(Scale)`` above the function: how each sample's
      share of the gradients follows from a :class:`LayerCall`. RLS does not train such a layer; its Kronecker factors
      are diagonal.
    - ``@register_layer(like=nn.Linear)`` above a class declares that class.

    Args:
        layer_type: a subclass of ``nn.Module``.
        matrix: the weight, a parameter of two dimensions of the layer itself, and its bias, which may be None.
        like: a type that is known.
        rule: makes, of a call, one :class:`~lightning_struct.functional.layers.per_sample.contributions.Contribution`
            for each trainable parameter of the layer itself, by name.
        couples_samples: whether the outputs of a sample depend on the other samples of the batch, as in batch
            normalisation; a function of the layer, or one value for all. It may also stand alone.

    Raises:
        TypeError: ``layer_type`` or ``like`` is no type of modules, ``matrix`` no :class:`Matrix`, ``rule`` not
            callable.
        ValueError: several of ``matrix``, ``like`` and ``rule``; ``like`` is a type that is not known; a matrix with
            groups or with a part of a bias. When a layer of the type is met: its parameters are not those declared.

    Example:
        >>> import torch
        >>> class Transposed(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = torch.nn.Parameter(torch.ones(3, 2))
        ...     def forward(self, x):
        ...         return x @ self.kernel
        >>> register_layer(Transposed, Matrix("kernel", transposed=True))
        >>> kind_of_type(Transposed).is_affine
        True
        >>> unregister_layer(Transposed)
    """
    declared = {"matrix": matrix, "like": like, "rule": rule}
    given = [name for name, value in declared.items() if value is not None]
    if layer_type is not None and not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register_layer declares a type of nn.Module, got {layer_type!r}: give the class, not a layer")
    if layer_type is None or (not given and couples_samples is None):

        def decorator(decorated: Any) -> Any:
            if layer_type is None:
                register_layer(decorated, matrix, like=like, rule=rule, couples_samples=couples_samples)
            else:
                register_layer(layer_type, rule=decorated)
            return decorated

        return decorator
    if len(given) > 1:
        raise ValueError(f"register_layer({layer_type.__name__}) has {' and '.join(given)}: give one of them")
    kind: LayerKind | None = None
    if matrix is not None:
        kind = _affine_kind(matrix)
    elif like is not None:
        kind = _like(like)
    elif rule is not None:
        if not callable(rule):
            raise TypeError(f"rule must be a function of a LayerCall, got {rule!r}")
        kind = LayerKind(None, parameters=lambda layer: layer._parameters, rule=rule, declared=True)
    unregister_layer(layer_type)
    if kind is not None:
        _KINDS[layer_type] = kind
    if couples_samples is not None:
        _COUPLING[layer_type] = couples_samples if callable(couples_samples) else lambda layer: bool(couples_samples)
    _forget()
    return None


def unregister_layer(layer_type: type[nn.Module]) -> None:
    """Take back what :func:`register_layer` declared of a type; nothing if it was not declared.

    Args:
        layer_type: a subclass of ``nn.Module``.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(2 * x)
        >>> register_layer(Doubled, like=nn.Linear)
        >>> unregister_layer(Doubled)
        >>> kind_of_type(Doubled) is None
        True
    """
    _KINDS.maps[0].pop(layer_type, None)
    _COUPLING.maps[0].pop(layer_type, None)
    _forget()


# What is derived from the declarations and forgotten with each of them.
_derived: list[Callable[[], object]] = []


def _forget() -> None:
    for forget in _derived:
        forget()


def when_declared(forget: Callable[[], object]) -> None:
    """Call ``forget`` after each declaration."""
    _derived.append(forget)


def _affine_kind(matrix: Matrix) -> LayerKind:
    if not isinstance(matrix, Matrix):
        raise TypeError(f"matrix must be a Matrix, as Matrix('weight', 'bias'), got {matrix!r}")
    if matrix.groups != 1 or matrix.bias_rows != slice(None):
        raise ValueError("the matrix of a declared layer has one group and its whole bias; others need a rule")
    names = [name for name in (matrix.weight, matrix.bias) if name is not None]
    return LayerKind(nn.Linear, lambda layer: [matrix], lambda layer: names, declared=True)


def _like(base: type[nn.Module]) -> LayerKind:
    if not isinstance(base, type):
        raise TypeError(f"like must be a type that is known, as nn.Linear, got {base!r}")
    kind = kind_of_type(base)
    if kind is None:
        raise ValueError(
            f"like={base.__name__}, which is no known layer and was not declared: declare it first, or give a matrix "
            "or a rule"
        )
    return replace(kind, declared=True)


_FORWARDS = ("forward", "_conv_forward")


def kind_of_type(layer_type: type[nn.Module]) -> LayerKind | None:
    """The kind of a type, or of the nearest base that has one, if the type has its ``forward``."""
    for base in layer_type.__mro__:
        if (kind := _KINDS.get(base)) is not None:
            same = all(getattr(layer_type, name, None) is getattr(base, name, None) for name in _FORWARDS)
            return kind if same else None
    return None


def nearest_kind(layer_type: type[nn.Module]) -> LayerKind | None:
    """The kind of the nearest base that has one, whatever the type's own ``forward`` is."""
    return next((_KINDS[base] for base in layer_type.__mro__ if base in _KINDS), None)


def couples_samples(layer: nn.Module) -> bool:
    """Whether a sample's outputs depend on the other samples of the batch, as in batch normalisation in training."""
    couples = next((_COUPLING[base] for base in type(layer).__mro__ if base in _COUPLING), None)
    return couples is not None and couples(layer)
