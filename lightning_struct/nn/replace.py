"""Replacement of the linear layers of a model by structured ones."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.checks import checked, warn
from lightning_struct.functional.layers.registry import hidden_layers
from lightning_struct.nn.attention import StructuredAttention, projections_of, why_not_called, with_own_projections
from lightning_struct.nn.channels import has_linear_weight, in_place_of, is_pointwise, linear_of, why_not_linear
from lightning_struct.nn.report import note_left, reasons_as_text, reasons_for_left
from lightning_struct.nn.selection import Model, Selection, Selector
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.torch_modules import has_state_hooks, take_hooks, weight_makers

_log = logging.getLogger(__name__)

LayerFactory = Callable[..., nn.Module]
"""Called as ``factory(in_features, out_features, bias=bias)``; or a ``from_linear``, called on the layer itself."""
StandsFor = dict[nn.Module, tuple[nn.Linear, nn.MultiheadAttention]]
"""For each projection in memory of its own the one that it stands for, and the attention."""


@checked
def replace_linear(
    model: Model,
    factory: LayerFactory,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> Model:
    """Replace each ``nn.Linear`` of a model by a structured layer, in place.

    For example::

        model = replace_linear(model, functools.partial(LDRSubdiagonal, rank=2), exclude="head")
        model = replace_linear(model, functools.partial(LDRSubdiagonal.from_linear, rank=2))    # near to its weights
        print(replacement_report(model))

    Load a checkpoint of the dense model before, and make the optimizer afterwards, because the old parameters are gone.
    With SGD many classes need a lower learning rate than ``nn.Linear``.

    It also replaces layers that were declared by their matrix
    (:func:`~lightning_struct.functional.layers.registry.register_layer`), and ``Conv1D`` of transformers. A class
    derived from ``nn.Linear`` with a ``forward`` of its own stays, unless it was declared or ``include`` has the full
    name of the layer, or the layer itself. An ``nn.MultiheadAttention`` becomes a
    :class:`~lightning_struct.nn.StructuredAttention`, whose projections can be selected as ``q_proj``, ``k_proj``,
    ``v_proj`` and ``out_proj`` below the name of the attention. A 1 x 1 convolution becomes a
    :class:`~lightning_struct.nn.ChannelLinear`.

    New layers have the device, the dtype, the mode, the hooks and the ``requires_grad`` of the old ones. A layer that
    is used in several places is replaced by one layer in all of them. Replacements are logged at level INFO, and
    :func:`replacement_report` lists them, and the layers that were left.

    Warnings name layers with hooks of ``state_dict`` and ``load_state_dict``, and layers whose weight is normalised,
    pruned or parametrized by ``torch.nn.utils``: neither is carried over. They also name replaced layers that shared a
    weight with another module, such as an embedding, or with each other, and no longer do; and layers that were frozen
    and now have random weights.

    Args:
        model: searched with everything below it. If it is an ``nn.Linear`` itself, the new layer is returned.
        factory: called as ``factory(in_features, out_features, bias=bias)``; or the ``from_linear`` of a class, by
            itself or in a ``functools.partial``, called on the old layer, or on an ``nn.Linear`` with its weight and
            bias.
        include: names ("encoder.0"), patterns ("encoder.*.up"), modules, classes of modules, or functions of (name,
            module). All except functions include everything below them. None: all layers.
        exclude: layers that are left as they are, given likewise.

    Returns:
        ``model``.

    Raises:
        TypeError: the factory is a layer, or refuses a layer, which is named.
        ValueError: nothing is replaced; ``include`` or ``exclude`` has something that is not in the model; or the
            factory refuses a layer, which is named.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = replace_linear(model, functools.partial(LowRank, rank=3), exclude="2")
        >>> [type(layer).__name__ for layer in model]
        ['LowRank', 'ReLU', 'Linear']
    """
    selection = Selection(model, include, exclude)

    def is_wanted(name: str, attention: nn.MultiheadAttention) -> bool:
        reasons = [
            selection.why_not(f"{name}.{part}" if name else part, linear, attention)
            for part, linear in projections_of(attention).items()
        ]
        if all(reasons):
            note_left(attention, f"replace_linear: {reasons[-1]}")
        return not all(reasons)

    with called_attention(model, is_wanted) as (called, stands_for):
        for name, layer in called.named_modules():
            if isinstance(layer, nn.MultiheadAttention) and (reason := why_not_called(layer)) is not None:
                log_left(name, layer, reason)
        places: list[tuple[str, nn.Module]] = []
        kinds = (is_pointwise, has_linear_weight)
        for layer, names in selected_layers(called, selection, stands_for, "replace_linear", *kinds).items():
            linear = linear_of(layer)
            structured = replacement(names[0], linear, factory)
            log_replacement(names[0], linear, structured)
            new = in_place_of(layer, structured)
            take_hooks(new, layer)
            places += [(name, new) for name in names]
        if not places:
            structured_layers = [name for name, layer in model.named_modules() if isinstance(layer, StructuredLinear)]
            reasons = {name or "the model": "it is structured" for name in structured_layers} | reasons_for_left(model)
            raise ValueError(
                "replace_linear replaces nothing: no nn.Linear, attention or 1 x 1 convolution that is included and "
                f"not excluded is in {type(model).__name__}; lightning_struct.functional.register_layer declares "
                f"layers of other types to be linear{reasons_as_text(reasons)}"
            )
        frozen = [name or "the model" for name, layer in places if not any(p.requires_grad for p in layer.parameters())]
        if frozen and not is_from_linear(factory):
            warn(
                f"{', '.join(frozen)}: frozen weights were replaced by random ones, which stay frozen. Leave such "
                "layers out by exclude=..., or begin near to their weights by the from_linear of a class"
            )
        return put_in_place(called, places)


def selected_layers(
    model: nn.Module, selection: Selection, stands_for: StandsFor, caller: str, *kinds: Callable[[nn.Module], bool]
) -> dict[nn.Module, list[str]]:
    """The selected layers, with all of their names. The reasons for which others are left are kept for the report.

    Args:
        model: searched with everything below it, except the inner modules of structured layers.
        selection: of the caller.
        stands_for: see :func:`called_attention`.
        caller: the function that replaces layers, for the reasons.
        *kinds: predicates of the layers that it replaces.
    """
    left = hidden_layers(model, of_other_forwards=True)
    left |= {part for module in model.modules() if isinstance(module, StructuredLinear) for part in module.modules()}
    names: dict[nn.Module, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer in left or not any(is_kind(layer) for is_kind in kinds):
            continue
        if (reason := selection.why_not(name, *stands_for.get(layer, (layer,)))) is not None:
            if layer not in names:
                for unchanged in (layer, *stands_for.get(layer, ())[1:]):  # attention: if it is put back
                    note_left(unchanged, f"{caller}: {reason}")
        elif isinstance(layer, nn.Linear) and (reason := why_not_linear(layer)) and not selection.names(name, layer):
            log_left(name, layer, reason)
        else:
            names.setdefault(layer, []).append(name)
    return names


@contextmanager
def called_attention(
    model: Model, is_wanted: Callable[[str, nn.MultiheadAttention], bool]
) -> Iterator[tuple[Model, StandsFor]]:
    """A context in which attention calls its projections. If none of these is replaced, it is put back at the end.

    Args:
        model: changed in place.
        is_wanted: of the name and the attention; the others stay, as those do that cannot call their projections.

    Yields:
        ``model``, or the caller of its projections if it is attention itself; and for each projection in the memory of
        its own the one that it stands for, and the attention.
    """
    made: dict[nn.MultiheadAttention, StructuredAttention] = {}
    places: list[tuple[str, nn.MultiheadAttention]] = []
    for name, attention in model.named_modules(remove_duplicate=False):
        if (
            isinstance(attention, nn.MultiheadAttention)
            and why_not_called(attention) is None
            and (attention in made or is_wanted(name, attention))
        ):
            made[attention] = made.get(attention) or with_own_projections(attention)
            places.append((name, attention))
    projections = {attention: list(called.children()) for attention, called in made.items()}
    encoders = [(m, m.use_nested_tensor) for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    changed = put_in_place(model, [(name, made[attention]) for name, attention in places])
    try:
        yield (
            changed,
            {
                own: (linear, attention)
                for attention, of in projections.items()
                for own, linear in zip(of, projections_of(attention).values(), strict=True)
            },
        )
    finally:
        unchanged = {attention for attention, of in projections.items() if list(made[attention].children()) == of}
        set_modules(changed, [(name, attention) for name, attention in places if attention in unchanged])
        for encoder, used_nested_tensor in encoders:
            if not any(isinstance(module, StructuredAttention) for module in encoder.modules()):
                encoder.use_nested_tensor = used_nested_tensor


def put_in_place(model: Model, places: list[tuple[str, nn.Module]]) -> Model:
    """The model with modules at places, by their names; the one without a name in place of the model itself.

    Warnings name the losses.
    """
    replaced = [name for name, _ in places]
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    messages = []
    for tied in names.values():  # modules that share a weight, such as an embedding and a head
        gone, others = ([name for name in tied if (name in replaced) == is_gone] for is_gone in (True, False))
        if gone and others:
            messages.append(f"{', '.join(gone)}: the weight is no longer shared with {', '.join(others)}")
        elif len({model.get_submodule(name) for name in gone}) > 1:
            messages.append(f"{' and '.join(gone)} no longer share one weight")
    for name in replaced:
        old, shown = model.get_submodule(name), name or "the model"
        if has_state_hooks(old):
            messages.append(f"{shown}: hooks of state_dict and load_state_dict are not carried over to the new layer")
        if makers := weight_makers(old):
            messages.append(f"{shown}: {' and '.join(makers)} of its weight is not carried over to the new layer")
    for message in messages:
        warn(message)
    return set_modules(model, places)


def set_modules(model: Model, places: list[tuple[str, nn.Module]]) -> Model:
    """The model with modules at places, by their names, without warnings; the one without a name in place of it."""
    for name, replacement in places:  # only when all are made: an error leaves the model as it was
        if name:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, StructuredAttention) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False  # nested tensors are for the path that reads the weights
    itself = next((module for name, module in places if not name), model)
    return cast("Model", itself)  # another class for a layer that is no part of a model: to type checkers the same


def replacement(name: str, linear: nn.Linear, factory: LayerFactory) -> nn.Module:
    """The layer in place of an ``nn.Linear``: on its device, in its dtype and mode, trained if that one is.

    Raises:
        TypeError: a layer is given as the factory, or it makes none.
        TypeError, ValueError: the factory refuses the layer, which is named, or makes one that does not fit.
    """
    check_makes_layers(factory)
    try:
        check_has_shape(linear.weight)
        if is_from_linear(factory):
            layer = factory(linear)
        else:
            layer = factory(linear.in_features, linear.out_features, bias=linear.bias is not None)
            if not isinstance(layer, nn.Module):
                raise TypeError(f"the factory has made no layer, but {layer!r}: let it return one")
            for of in ("in_features", "out_features"):
                made, asked = getattr(layer, of, None), getattr(linear, of)
                if isinstance(made, int) and made != asked:
                    raise ValueError(f"the factory was asked for {of}={asked}, but has made {layer}")
            if linear.bias is not None and getattr(layer, "bias", linear.bias) is None:
                raise ValueError(f"the factory was asked for bias=True, but has made {layer}: let it hand bias on")
            layer = layer.to(linear.weight.device, linear.weight.dtype).train(linear.training)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        way_out = f"; exclude={name!r} leaves this layer as it is" if name else ""
        raise kind(f"{name or 'the model'}: {error}{way_out}") from error
    for of_layer, parameter in layer.named_parameters():
        of_linear = linear.bias if of_layer == "bias" and linear.bias is not None else linear.weight
        parameter.requires_grad_(parameter.requires_grad and of_linear.requires_grad)
    return layer


def check_has_shape(weight: Tensor) -> None:
    """Raise a ValueError for the weight of a lazy layer that was not called yet."""
    if is_lazy(weight):
        raise ValueError("its weight has no shape yet: run the model once")


def log_replacement(name: str, old: nn.Module, new: nn.Module) -> None:
    """Log at level INFO the replacement of a layer."""
    if isinstance(new, StructuredLinear):
        error = "" if new.approximation_error is None else f", relative error {new.approximation_error:.3g}"
        ratio = new.compression_ratio
        times = f"{ratio:.1f} times fewer" if ratio >= 1 else f"{1 / ratio:.1f} times more"
        described = f"{new}, {times} parameters{error}"
    else:
        described = f"{type(new).__name__}({new.extra_repr()})"
    _log.info("%s: %s -> %s", name or "the model", old, described)


def log_left(name: str, layer: nn.Module, reason: str) -> None:
    """Log at level INFO why a layer stays as it is, and keep that for the report."""
    _log.info("%s is left as it is: %s", name or "the model", reason)
    note_left(layer, reason)


def check_makes_layers(factory: LayerFactory) -> None:
    """Raise a TypeError for a layer in place of its factory, and for a factory that takes other arguments."""
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise TypeError(f"the factory is a layer, but must make layers: give {name}, or functools.partial({name}, ...)")
    if is_from_linear(factory):
        return
    called = factory if isinstance(factory, functools.partial) else functools.partial(factory)
    try:
        signature = inspect.signature(called.func)
    except (TypeError, ValueError):  # such as a class in C, whose own error says enough
        return
    try:
        signature.bind(*called.args, 1, 1, **{**called.keywords, "bias": True})
    except TypeError as error:
        raise TypeError(
            f"the factory cannot be called as factory(in_features, out_features, bias=...): {error}. Give a class, "
            "functools.partial(CLASS, ...) with arguments of that class, or a function that hands bias on, too"
        ) from error


def is_from_linear(factory: LayerFactory) -> bool:
    """Whether a factory is the ``from_linear`` of a class, by itself or in a ``functools.partial``."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return getattr(factory, "__name__", "") == "from_linear"
