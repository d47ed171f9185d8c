"""Declarations of layers, and questions to a layer: its kind, the parameters that its ``forward`` uses, its names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.checks import checked
from lightning_struct.functional.layers import kinds
from lightning_struct.functional.layers.calls import LayerCall


@checked
def register_layer(
    layer_type: type[nn.Module] | None = None,
    matrix: kinds.Matrix | None = None,
    *,
    like: type[nn.Module] | None = None,
    rule: kinds.ContributionRule | None = None,
    couples_samples: bool | Callable[[Any], bool] | None = None,
) -> Any:
    """Declare a type of layers, once for per-sample gradient norms, Kronecker factors, RLS and ``replace_linear``.

    Exactly one of ``matrix``, ``like`` and ``rule`` describes a layer of the type. The declaration holds for
    the type and for its subclasses that do not override ``forward``, and replaces an earlier one. Declare before an
    optimizer or a recorder is made.

    - ``register_layer(Transposed, Matrix("weight", "bias", transposed=True))``: an affine map y = x Wᵀ + b over the
      last dimension of the first argument, under these names. It is served wherever ``nn.Linear`` is. ``Conv1D`` of
      transformers is declared so already.
    - ``register_layer(MyLSTM, like=nn.LSTM)``: a call has the result of ``nn.LSTM`` for the same arguments, with
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
        >>> from lightning_struct.functional import Matrix
        >>> from lightning_struct.functional.layers.kinds import kind_of_type
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
    kind: kinds.LayerKind | None = None
    if matrix is not None:
        if matrix.groups != 1 or matrix.bias_rows != slice(None):
            raise ValueError("the matrix of a declared layer has one group and its whole bias; others need a rule")
        names = [name for name in (matrix.weight, matrix.bias) if name is not None]
        kind = kinds.LayerKind(nn.Linear, lambda layer: [matrix], lambda layer: names, declared=True)
    elif like is not None:
        known = kinds.kind_of_type(like)
        if known is None:
            remedy = "declare it first, or give a matrix or a rule"
            raise ValueError(f"like={like.__name__}, which is no known layer and was not declared: {remedy}")
        kind = replace(known, declared=True)
    elif rule is not None:
        if not callable(rule):
            raise TypeError(f"rule must be a function of a LayerCall, got {rule!r}")
        kind = kinds.LayerKind(None, parameters=lambda layer: layer._parameters, rule=rule, declared=True)
    unregister_layer(layer_type)
    if kind is not None:
        kinds.KINDS[layer_type] = kind
    if couples_samples is not None:
        kinds.COUPLING[layer_type] = couples_samples if callable(couples_samples) else lambda _: bool(couples_samples)
    return None


@checked
def unregister_layer(layer_type: type[nn.Module]) -> None:
    """Take back a declaration of a type by :func:`register_layer`; nothing if it was not declared.

    Args:
        layer_type: a subclass of ``nn.Module``.

    Example:
        >>> from lightning_struct.functional.layers.kinds import kind_of_type
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(2 * x)
        >>> register_layer(Doubled, like=nn.Linear)
        >>> unregister_layer(Doubled)
        >>> kind_of_type(Doubled) is None
        True
    """
    kinds.KINDS.maps[0].pop(layer_type, None)
    kinds.COUPLING.maps[0].pop(layer_type, None)


def kind_of(layer: nn.Module) -> kinds.LayerKind | None:
    """The kind of the layer's type, or of the base whose ``forward`` it has; None without one.

    Raises:
        ValueError: the type was declared by a matrix that the layer does not have.
    """
    kind = kinds.kind_of_type(type(layer))
    if kind is not None and kind.is_affine and kind.declared:
        for matrix in kind.matrices(layer):
            _check_matrix(layer, matrix)
    return kind


def _check_matrix(layer: nn.Module, matrix: kinds.Matrix) -> None:
    """Raise unless the layer has the matrix. Pruning leaves other things in place of parameters."""
    declared = f"{type(layer).__name__} was declared by {matrix}"
    for name in (matrix.weight, matrix.bias):
        if name is not None and not hasattr(layer, name):
            has = ", ".join(name for name, _ in layer.named_parameters(recurse=False)) or "none"
            raise ValueError(f"{declared}, but has no parameter {name!r}; its own parameters: {has}")
    weight, bias = (layer._parameters.get(name or "") for name in (matrix.weight, matrix.bias))
    if weight is None or is_lazy(weight):
        return
    shape = tuple(weight.shape)
    if weight.ndim != 2:
        raise ValueError(f"{declared}, but {matrix.weight!r} has shape {shape}: a matrix has 2 dimensions")
    if bias is not None and bias.shape != (shape[1 if matrix.transposed else 0],):
        stored = f"stored as {'(in, out)' if matrix.transposed else '(out, in)'} = {shape}"
        added = f"{matrix.bias!r} of shape {tuple(bias.shape)}"
        raise ValueError(f"{declared}, but {added} is no bias of {matrix.weight!r}, {stored}: is it transposed?")


def has_plain_parameters(layer: nn.Module, kind: kinds.LayerKind) -> bool:
    """Whether the layer's own parameters are those of its kind: not parametrized, pruned or joined by others."""
    return "parametrizations" not in layer._modules and layer._parameters.keys() <= set(kind.parameters(layer))


def is_affine(layer: nn.Module) -> bool:
    """Whether the layer computes the same as ``nn.Linear``, as far as is known, or was declared by its matrix."""
    kind = kind_of(layer)
    return kind is not None and kind.is_affine


def as_linear(layer: nn.Module) -> nn.Linear:
    """An ``nn.Linear`` with the weight and the bias of an affine layer, sharing their memory.

    An ``nn.Linear`` is returned itself, whatever its ``forward`` is.
    """
    kind = kind_of(layer)
    if isinstance(layer, nn.Linear) and (kind is None or not kind.declared):
        return layer
    if kind is None or not kind.is_affine:
        raise TypeError(f"the layer must compute as nn.Linear does (register_layer can declare so), got {layer!r:.80}")
    (matrix,) = kind.matrices(layer)
    weight = getattr(layer, matrix.weight)
    bias = None if matrix.bias is None else getattr(layer, matrix.bias)
    return linear_with(weight.t() if matrix.transposed else weight, bias, layer.training)


def linear_with(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Linear:
    """An ``nn.Linear`` with this weight (out, in) and bias, parameters or views of them, sharing their memory."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias is not None, device="meta").train(training)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return linear


def coupling_layer(module: nn.Module) -> str | None:
    """The name of the first layer that couples samples of a batch, or its type if it is ``module``; or None."""
    for name, layer in module.named_modules():
        if kinds.couples_samples(layer):
            return name or type(layer).__name__
    return None


def hidden_layers(module: nn.Module, *, of_other_forwards: bool = False) -> set[nn.Module]:
    """Layers from ``module`` down that are never called: others use their parameters, as attention its ``out_proj``.

    Args:
        module: searched with everything below it.
        of_other_forwards: also below layers that override the ``forward`` of their kind, which may call them or not.
    """
    hidden: set[nn.Module] = set()
    for layer in module.modules():
        kind = kind_of(layer)
        if kind is None and of_other_forwards:
            kind = kinds.nearest_kind(type(layer))
        if kind is not None:
            hidden.update(kind.hidden_layers(layer))
    return hidden


def called_layers(module: nn.Module) -> list[nn.Module]:
    """All modules from ``module`` down but the :func:`hidden_layers`."""
    hidden = hidden_layers(module)
    return [layer for layer in module.modules() if layer not in hidden]


def owned_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a call of ``layer`` uses itself, by name; not those of layers that it calls."""
    own = dict(layer.named_parameters(recurse=False))
    if (parametrizations := getattr(layer, "parametrizations", None)) is not None:
        own.update(parametrizations.named_parameters("parametrizations"))
    kind = kind_of(layer)
    if kind is not None and has_plain_parameters(layer, kind):
        names = {child: name for name, child in layer.named_modules()}
        for hidden in kind.hidden_layers(layer):
            own.update(hidden.named_parameters(names[hidden]))
    return own


def padding(layer: Any) -> list[tuple[int, int]]:
    """(before, after) of each dimension of a convolution's images."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(number), int(number)) for number in layer.padding]


def base_call(call: LayerCall) -> LayerCall:
    """The same call with the arguments that the base of the layer's kind takes.

    Raises:
        ValueError: an argument that the base does not have is given, and is not its default.
    """
    kind, forward = kind_of(call.layer), type(call.layer).forward
    if call.of_base or kind is None or kind.base is None or forward is kind.base.forward:
        return call
    known = list(inspect.signature(kind.base.forward).parameters)[1:]
    signature = inspect.signature(forward)
    bound = signature.bind(call.layer, *call.args, **call.kwargs).arguments
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        parameter = signature.parameters[name]
        default = parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= value
        elif not args and not kwargs:
            args.append(value)  # the first, whatever its name is
        elif name in known or not (value is default or (not isinstance(value, Tensor) and bool(value == default))):
            kwargs[name] = value
    if unknown := " or ".join(sorted(kwargs.keys() - set(known))):
        layer_type, base = type(call.layer).__name__, kind.base.__name__
        raise ValueError(f"{layer_type} is known to be like {base}, which has no argument {unknown}")
    return replace(call, args=tuple(args), kwargs=kwargs)


# --- names -----------------------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A name without the additions of torch.compile."""
    return name.replace("_orig_mod.", "")


def plain_named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()`` without the wrappers of torch.compile."""
    for name, child in module.named_modules():
        if not isinstance(getattr(child, "_orig_mod", None), nn.Module):
            yield plain_name(name + ".")[:-1], child


def excluded_modules(
    module: nn.Module, exclude: Sequence[str | nn.Module], argument: str = "exclude"
) -> set[nn.Module]:
    """All modules that are named, with or without ``_orig_mod.``, or given, and those below them.

    Raises:
        ValueError: one of them is no module of ``module``; the message names the ``argument``.
        TypeError: one of them is neither a module nor a name.
    """
    by_name, known = dict(plain_named_modules(module)), set(module.modules())
    several = isinstance(exclude, Iterable) and not isinstance(exclude, str | nn.Module)
    excluded: set[nn.Module] = set()
    for item in exclude if several else [exclude]:
        if not isinstance(item, str | nn.Module):
            what = f"{type(item).__name__} {getattr(item, '__name__', '')}".rstrip()
            raise TypeError(f"{argument} has this {what}, but takes modules or the full names of modules")
        found = by_name.get(plain_name(item)) if isinstance(item, str) else item
        if found is None or found not in known:
            what = repr(item) if isinstance(item, str) else f"this {type(item).__name__}"
            remedy = "it takes modules or the full names of modules"
            remedy += _names_instead_of(item, by_name) if isinstance(item, str) else ""
            raise ValueError(f"{argument} has {what}, which is no module of {type(module).__name__}: {remedy}")
        excluded.update(found.modules())
    return excluded


def _names_instead_of(pattern: str, names: Iterable[str]) -> str:
    """The end of an error about a name: the remedy if it is a pattern or a part of a name, else empty."""
    there = [name for name in names if name]
    if not set(pattern) & set("*?["):
        longer = [name for name in there if name.endswith(f".{pattern}")]
        return f"; there is {' and '.join(map(repr, longer[:5]))}" if longer else ""
    matching = [name for name in there if fnmatchcase(name, pattern)]
    listed = matching or there
    some = ", ".join(map(repr, listed[:5])) + (", ..." if len(listed) > 5 else "")
    return f", no patterns; {'it matches' if matching else 'there are'} {some or 'none'}"
