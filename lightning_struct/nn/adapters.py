"""Adapters: structured matrices that are trained beside the frozen weights of a model, and merged into them."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_struct.functional.checks import NotFinite, checked, warn
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.registry import hidden_layers, kind_of, plain_name
from lightning_struct.nn.attention import PROJECTIONS
from lightning_struct.nn.channels import CONVOLUTIONS, as_filters, has_filters, has_linear_weight, linear_of
from lightning_struct.nn.ldr import LearnedOperatorLinear
from lightning_struct.nn.replace import LayerFactory, check_has_shape, check_makes_layers, is_from_linear, set_modules
from lightning_struct.nn.report import note_left, reasons_as_text
from lightning_struct.nn.selection import Model, Selection, Selector, is_at_or_below, sharing_weights
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.torch_modules import (
    add_parametrization,
    is_sharded,
    remove_parametrizations,
    set_values,
    whole,
)
from lightning_struct.nn.updates import AdaptedLinear, Sides, StructuredUpdate, UpdatedWeight, check_options, updated

_log = logging.getLogger(__name__)


_KEPT = "_values_of_base"  # of trained parameters by their names, in modules; in no state_dict
_HEADS = ("head", "heads", "lm_head", "classifier", "score", "fc")
Trained = str | nn.Module | type[nn.Module]
"""A name or a pattern of modules or parameters, a module, or a class of modules."""


@checked
def add_adapters(
    model: Model,
    factory: LayerFactory,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    train: Trained | Iterable[Trained] = (),
    name: str = "default",
    scale: float | None = None,
    dropout: float = 0.0,
    learned_diagonals: Sides = "none",
) -> Model:
    """Freeze a model, and add a trainable structured update to the weight of each linear layer, in place.

    For example::

        model = add_adapters(model, RandomizedHadamard, learned_diagonals="outputs", train="head")
        optimizer = torch.optim.Adam(adapter_parameter_groups(model, lr=0.1))
        ...
        save_adapters(model, "adapters")
        model = merge_adapters(model)

    Until it is trained, the model gives the same outputs as before. Linear layers are ``nn.Linear``, layers that were
    declared to be linear (as transformers' ``Conv1D``), convolutions, transposed or not (as a matrix from patches to
    channels), and the projections of ``nn.MultiheadAttention``, which are selected as ``q_proj``, ``k_proj``,
    ``v_proj`` and ``out_proj`` below its name; and an ``nn.Embedding`` whose full name is in ``include``. Each becomes
    an :class:`AdaptedLinear` whose ``base`` is the old layer, with its hooks and its parameters; only attention stays,
    with parametrized weights. A layer that is used in several places gets one adapter. :func:`replacement_report` says
    why other layers with weights get none.

    Further calls add adapters to other layers and projections, and leave parameters that require gradients alone. With
    another ``name`` they add another adapter, also to layers that have one: see :func:`set_adapter`. Batch
    norms still update their statistics in training, frozen or not: :func:`adapter_state_dict` includes these buffers.
    On the meta device the adapters have no values either; after ``to_empty``, call ``reset_parameters`` of their
    modules. Load the weights of the base before: afterwards they have other names, such as ``0.base.weight``.

    Args:
        model: searched with everything below it. If it is a linear layer itself, the new layer is returned.
        factory: called as ``factory(in_features, out_features, bias=False)``; makes a :class:`StructuredLinear`. Not a
            ``from_linear``, since an adapter starts at zero.
        include: names ("encoder.0"), patterns ("encoder.*.up"), modules, classes of modules, or functions of (name,
            module). All except functions include everything below them. None: all layers but output layers
            (``get_output_embeddings`` of transformers, or named head, heads, lm_head, classifier, score or fc, of
            which several layers below it the last one), those that share their weight with another module, and routers
            (gate or router beside experts).
        exclude: layers that get no adapter, given likewise.
        train: further weights to train: names or patterns of modules ("head") and of parameters ("*.bias"), modules,
            and classes of modules.
        name: of the adapter, an identifier. A layer has one update for each name; the new one is active.
        scale, dropout, learned_diagonals: as for :class:`AdaptedLinear`. Dropout is of linear layers and 1 x 1
            convolutions alone.

    Returns:
        ``model``.

    Raises:
        TypeError: the factory is a layer, or makes something other than a :class:`StructuredLinear`; ``train`` has
            something else.
        ValueError: no layer gets an adapter; a layer, which is named, cannot have one; an argument has something that
            is not in the model.

    Example:
        >>> from lightning_struct.nn import RandomizedHadamard
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = add_adapters(model, RandomizedHadamard, include="0", learned_diagonals="outputs")
        >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        128
    """
    check_makes_layers(factory)
    if is_from_linear(factory):
        raise ValueError("an adapter starts at zero, near to no weight: give the class instead of its from_linear")
    check_options(scale, learned_diagonals, dropout)
    if not name.isidentifier():
        raise ValueError(f"the name of an adapter must be an identifier, such as 'french', but is {name!r}")
    selection = Selection(model, include, exclude)
    trained = _parameters_named(model, train)
    places, reasons = _places(model, selection, name, _left_alone(model) if include is None else {})
    if not places:
        raise ValueError(
            "add_adapters adds nothing: no nn.Linear, convolution or nn.MultiheadAttention that is included, not "
            f"excluded and without an adapter is in {type(model).__name__}; lightning_struct.functional.register_layer "
            f"declares layers of other types to be linear{reasons_as_text(reasons)}"
        )
    adapted: dict[nn.Module, AdaptedLinear | dict[str, UpdatedWeight]] = {}
    for place, layer, parts in places:
        if layer in adapted:
            continue
        try:
            new = _adapted(layer, factory, name, parts, dropout, scale=scale, learned_diagonals=learned_diagonals)
        except (TypeError, ValueError) as error:
            way_out = f". exclude={place!r} leaves it as it is" if place else ""
            raise type(error)(f"no adapter for {place or 'the model'}: {error}{way_out}") from error
        adapted[layer] = new
        _log.info("%s gets %s", place or "the model", new)

    if not has_adapters(model):  # only now: an error leaves the model as it was
        model.requires_grad_(False)
    train_whole(model, trained)
    for layer, new in adapted.items():
        if isinstance(layer, AdaptedLinear):
            assert isinstance(new, AdaptedLinear)
            setattr(layer, f"update_{name}", new.update)
        for weight, added in {} if isinstance(new, AdaptedLinear) else new.items():
            module, attribute, present = _weight_of(layer, weight)
            if present is None:
                add_parametrization(module, attribute, added)
            else:
                present.add(added)
    for module, (method, of_base) in product(model.modules(), _OF_TRANSFORMERS.items()):
        if callable(getattr(type(module), method, None)):
            vars(module)[method] = partial(of_base, module)
    new_layers = [(place, adapted[layer]) for place, layer, _ in places if not isinstance(layer, AdaptedLinear)]
    model = set_modules(model, [(place, new) for place, new in new_layers if isinstance(new, AdaptedLinear)])
    if any(update.name != name for update in _updates(model)):
        set_adapter(model, name)
    return model


@checked
def set_adapter(model: nn.Module, name: str) -> None:
    """Make one of several adapters the active one: it alone is added, trained, merged and saved.

    A layer that this adapter was not added to computes as its base. Weights that ``train=`` of :func:`add_adapters`
    named are the same for all adapters, and stay trained.

    Args:
        model: after :func:`add_adapters`.
        name: of an adapter; the first one is "default" unless it was named.

    Raises:
        ValueError: the model has no adapter of that name.

    Example:
        >>> from lightning_struct.nn import Circulant, LowRank
        >>> model = add_adapters(nn.Sequential(nn.Linear(8, 8)), LowRank)
        >>> model = add_adapters(model, Circulant, name="other")
        >>> set_adapter(model, "default")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['0.update.adapter.G', '0.update.adapter.H']
    """
    require_adapters(model)
    updates = _updates(model)
    names = dict.fromkeys(update.name for update in updates)
    if name not in names:
        raise ValueError(f"{type(model).__name__} has no adapter {name!r}: it has {', '.join(map(repr, names))}")
    for update in updates:
        update.is_enabled = update.name == name
        update.requires_grad_(update.is_enabled)


@checked
def delete_adapter(model: nn.Module, name: str) -> None:
    """Remove one of several adapters, in place. If it was the active one, the first of the others is active now.

    Args:
        model: after :func:`add_adapters`.
        name: of an adapter.

    Raises:
        ValueError: the model has no adapter of that name, or no other one: see :func:`unload_adapters`.

    Example:
        >>> from lightning_struct.nn import Circulant, LowRank
        >>> model = add_adapters(nn.Sequential(nn.Linear(8, 8)), LowRank)
        >>> model = add_adapters(model, Circulant, name="other")
        >>> delete_adapter(model, "default")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['0.update.adapter.column']
    """
    require_adapters(model)
    active = [update.name for update in _updates(model) if update.is_enabled and update.name != name]
    others = [update.name for update in _updates(model) if update.name != name]
    if not others:
        raise ValueError(f"no adapter but {name!r} is there: unload_adapters removes it, merge_adapters merges it")
    set_adapter(model, name)  # an error if there is none
    bases = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, AdaptedLinear):
            module.remove_update(name)
            bases += [] if module.updates else [(path, module.base)]
        elif _has_updated_weights(module) and all(update.name == name for update in _updates(module)):
            remove_parametrizations(module)
        elif isinstance(module, UpdatedWeight):
            module.remove_updates(name)
    set_modules(model, bases)
    set_adapter(model, [*active, *others][0])


@checked
def unload_adapters(model: Model) -> Model:
    """Remove all adapters without adding them to the weights, in place: the model is its base again.

    Weights that ``train=`` of :func:`add_adapters` has named get their values from before, and still require gradients.

    Args:
        model: after :func:`add_adapters`.

    Returns:
        ``model``; the base if it is an adapted layer itself.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> unload_adapters(add_adapters(nn.Sequential(nn.Linear(8, 8)), LowRank))
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
        )
    """
    require_adapters(model)
    _reshard(model)
    for _, _, trained, value in _kept(model):
        set_values(trained, value)
    for update in _updates(model):
        update.is_enabled = False
    return merge_adapters(model)


@checked
def merge_adapters(model: Model) -> Model:
    """Add the updates of the active adapter to the weights, and remove all adapters, in place.

    The model computes the same as before, to rounding, and has the modules and names from before :func:`add_adapters`.
    Frozen parameters stay frozen. The merged weights are new parameters: another module that shared a weight with a
    merged layer, such as an embedding, keeps the old one. One warning names such layers, and the configuration of a
    model of transformers says from now on that its embeddings are not tied. To merge for a while, see
    :func:`merged_adapters`; to keep the adapted model as well, merge a ``copy.deepcopy``.

    Args:
        model: after :func:`add_adapters`.

    Returns:
        ``model``; the base if it is an adapted layer itself.

    Raises:
        ValueError: the model has no adapters; an adapter, or its sum with a weight, holds NaN or infinity, as beyond
            the range of float16; or a weight is parametrized or quantised, so that nothing can be added to it. The
            model then stays as it was.

    Example:
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> model = add_adapters(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), LDRSubdiagonal)
        >>> merge_adapters(model)
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
          (1): ReLU()
        )
    """
    require_adapters(model)
    is_whole = not _reshard(model)
    untied = _weights_to_untie(model)
    if not is_whole and (untied or any(map(_has_updated_weights, model.modules()))):
        raise ValueError(
            "adapters of attention and of weights that modules share cannot be merged while they are sharded: "
            "save_adapters, and merge where load_adapters has a whole model"
        )
    merged = _with_merged_weights(model)
    for module in merged.modules():
        vars(module).pop(_KEPT, None)
        for own in _OF_TRANSFORMERS:
            if isinstance(vars(module).get(own), partial):
                delattr(module, own)
        config = getattr(module, "config", None)
        if untied and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
    if untied:
        warn(
            f"merged weights are no longer shared: {'; '.join(untied)}. The other modules keep the weight without the "
            "update, and config.tie_word_embeddings, if there is one, is False now"
        )
    return merged


@checked
@contextmanager
def merged_adapters(model: Model) -> Iterator[Model]:
    """Run a model with the updates of its active adapter in its weights, within a ``with`` statement.

    The model is as fast as its base there. Afterwards it has its weights and adapters again, bit for bit.

    Args:
        model: after :func:`add_adapters`.

    Yields:
        ``model``; the base if it is an adapted layer itself.

    Raises:
        ValueError: as :func:`merge_adapters`.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> model = add_adapters(nn.Sequential(nn.Linear(8, 8)), LowRank)
        >>> with merged_adapters(model):
        ...     print(model)
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
        )
        >>> type(model[0]).__name__
        'AdaptedLinear'
    """
    require_adapters(model)
    if _reshard(model):
        raise ValueError("sharded weights have updates for good only: call merge_adapters, perhaps after save_adapters")
    linear = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, AdaptedLinear)]
    weights = [(layer.base, {**layer.base._parameters}, {**layer.base._buffers}) for _, layer in linear]
    parametrized = [m for m in model.modules() if _has_updated_weights(m)]
    before = [(m, type(m), m._parameters, {**m._modules}) for m in parametrized]
    merged = _with_merged_weights(model)
    try:
        yield merged
    finally:
        for base, parameters, buffers in weights:
            base._parameters.update(parameters)
            base._buffers.update(buffers)
        for module, of_class, parameters, modules in before:
            module.__class__, module._parameters, module._modules = of_class, parameters, modules
        set_modules(merged, linear)  # type: ignore[arg-type]


@torch.no_grad()
def _with_merged_weights(model: Model) -> Model:
    """The model with enabled updates in its weights, and without all adapters; an error leaves it as it was."""
    named = list(model.named_modules(remove_duplicate=False))
    linear = [(name, layer) for name, layer in named if isinstance(layer, AdaptedLinear)]
    for name, layer in linear:
        if layer.active is not None:
            _check_can_merge(name, layer)
    for name, update in named:
        if not isinstance(update, StructuredUpdate) or not update.is_enabled:
            continue
        if any(p.is_meta for p in update.parameters()):
            raise ValueError(f"the adapter {name} is on the meta device: load its weights first")
        if wrong := [part for part, p in update.named_parameters() if not whole(p).isfinite().all()]:
            raise NotFinite(
                f"the adapter {name} holds NaN or infinity in {', '.join(wrong)}, and is not added to the weights: "
                "load an earlier state by load_adapter_state_dict"
            )
    adapted = {layer: name for name, layer in linear if layer.active is not None}
    attention = [(name, module) for name, module in named if _has_updated_weights(module)]
    sums = {layer: _merged(layer) for layer in adapted if not any(map(is_sharded, layer.parameters()))}
    of_linear = ((adapted[layer], merged) for layer, merged in sums.items())
    of_attention = ((name, getattr(module, part)) for name, module in attention for part in module.parametrizations)
    for name, merged in chain(of_linear, of_attention):
        if not bool(merged.isfinite().all()):
            raise NotFinite(
                f"the weight of {name or 'the model'} with its adapter added is not finite: it is too large for its "
                "dtype, or damaged. Leave the adapter in, or convert the model first, as by model.float()"
            )
    for layer in adapted:
        _set_weight(layer.base, sums.pop(layer) if layer in sums else _merged(layer))
    model = set_modules(model, [(name, layer.base) for name, layer in linear])
    for _, module in attention:
        remove_parametrizations(module)
    return model


def _reshard(model: nn.Module) -> bool:
    """Whether FSDP2 shards parameters of a model. They are sharded afterwards, also those that a forward has left."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()
    return any(map(is_sharded, model.parameters()))


def _weights_to_untie(model: nn.Module) -> list[str]:
    """The adapted layers whose weight other modules share, with the names of these."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name.rpartition(".")[0])
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
    untied = []
    for layer, name in layers.items():
        shared = holders.get(layer.base._parameters.get("weight"), [])  # type: ignore[arg-type]
        others = [other for other in shared if model.get_submodule(other) is not layer.base]
        if layer.active is not None and others:
            untied.append(f"{name} with {', '.join(others)}")
    return untied


def _save_base(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``save_pretrained`` of a model with adapters, as transformers has it: of the base by its own names."""
    if not has_adapters(model):  # within merged_adapters
        return type(model).save_pretrained(model, *args, **kwargs)
    warn(
        f"save_pretrained of {type(model).__name__} saves the base, by the names that from_pretrained reads, without "
        "its adapters: save_adapters(model, folder) saves them"
    )
    with disable_adapters(model), merged_adapters(model) as base:
        return type(base).save_pretrained(base, *args, **kwargs)


def _resize_base(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``resize_token_embeddings`` of a model with adapters, as transformers has it, if it does not touch them."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if adapted := [layer.base for layer in ends if isinstance(layer, AdaptedLinear)]:
        raise ValueError(
            f"resize_token_embeddings cannot resize the adapter of {adapted[0]}: call it before add_adapters, or after "
            "merge_adapters or unload_adapters"
        )
    return type(model).resize_token_embeddings(model, *args, **kwargs)


_OF_TRANSFORMERS = {"save_pretrained": _save_base, "resize_token_embeddings": _resize_base}


@checked
def adapter_state_dict(model: nn.Module) -> dict[str, Any]:
    """The part of ``model.state_dict()`` that differs from the base: all but the frozen parameters of the base.

    These are the adapters, other trained parameters, and the buffers.

    Args:
        model: after :func:`add_adapters`.

    Returns:
        name -> value, with the names that they have without ``torch.compile``.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = add_adapters(model, LowRank, include="0", train="2")
        >>> list(adapter_state_dict(model))
        ['0.update.scale', '0.update.adapter.G', '0.update.adapter.H', '2.weight', '2.bias']
    """
    require_adapters(model)
    frozen = frozen_parameter_names(model)
    return {plain_name(name): value for name, value in model.state_dict().items() if plain_name(name) not in frozen}


@checked
def load_adapter_state_dict(model: Model, state_dict: Mapping[str, Any]) -> Model:
    """Load a result of :func:`adapter_state_dict` into a model with the same base and the same adapters.

    Args:
        model: after :func:`add_adapters` with the same arguments.
        state_dict: the names, of a compiled model or not, and the values.

    Returns:
        ``model``.

    Raises:
        ValueError: the model has no adapters; or it has others, and the first names that differ are given.
        RuntimeError: a shape differs.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> base = nn.Linear(8, 8)
        >>> trained, other = add_adapters(base, LowRank), add_adapters(base, LowRank)
        >>> other = load_adapter_state_dict(other, adapter_state_dict(trained))
        >>> torch.equal(other.update.adapter.H, trained.update.adapter.H)
        True
    """
    require_adapters(model)
    state_dict = {plain_name(name): value for name, value in state_dict.items()}
    expected = adapter_state_dict(model).keys()
    missing, unknown = sorted(expected - state_dict.keys()), sorted(state_dict.keys() - expected)
    if names := missing or unknown:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{', '.join(names[:3])}{more} are {'missing in the state_dict' if missing else 'not in the model'}: call "
            "add_adapters with the arguments that made these adapters, and freeze the same parameters"
        )
    own_names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({own_names[name]: value for name, value in state_dict.items()}, strict=False)
    return model


@checked
def adapter_parameter_groups(model: nn.Module, lr: float, operator_factor: float = 0.1) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer such as Adam: the learned operators of the adapters at a lower rate.

    An entry of an operator is a factor in up to half of all paths through its matrix: entries that move together move M
    far more than those of G and H do.

    Args:
        model: the groups have its parameters that require gradients.
        lr: learning rate of all parameters except the operators.
        operator_factor: learning rate of the operators, as a multiple of ``lr``.

    Returns:
        One group, and another one for the operators if there are any.

    Raises:
        ValueError: the model has no adapters, or a rate is negative or infinite.

    Example:
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> model = add_adapters(nn.Linear(8, 8), LDRSubdiagonal)
        >>> [(len(group["params"]), group["lr"]) for group in adapter_parameter_groups(model, lr=0.01)]
        [(2, 0.01), (4, 0.001)]
    """
    for name, rate in (("lr", lr), ("operator_factor", operator_factor)):
        if not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be a finite number that is not negative, but is {rate!r}")
    require_adapters(model)
    with_operators = [u.adapter for u in _updates(model) if isinstance(u.adapter, LearnedOperatorLinear)]
    operators = {p for layer in with_operators for name, p in layer.named_parameters() if name not in ("G", "H")}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if (p in operators) == is_of_operators], "lr": rate}
        for is_of_operators, rate in ((False, lr), (True, lr * operator_factor))
    ]
    return [group for group in groups if group["params"]]


@checked
@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Run a model without its adapters, as its base, within a ``with`` statement.

    Weights that ``train=`` of :func:`add_adapters` has named have their former values; their modules keep a copy of
    these. Buffers, such as the statistics of batch norms, stay as they are.

    Args:
        model: after :func:`add_adapters`.

    Raises:
        ValueError: the model has no adapters.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> layer, x = add_adapters(nn.Linear(8, 8), LowRank, scale=1.0), torch.ones(8)
        >>> with torch.no_grad():
        ...     layer.update.adapter.G.fill_(1.0)
        Parameter containing:...
        >>> with disable_adapters(layer):
        ...     torch.equal(layer(x), layer.base(x))
        True
        >>> torch.equal(layer(x), layer.base(x))
        False
    """
    require_adapters(model)
    updates = _updates(model)
    before = [update.is_enabled for update in updates]
    kept = _kept(model)
    if kept and _reshard(model):
        raise ValueError(
            "the weights that train= names are sharded, and cannot be those of the base for a while: call the base "
            "itself, a copy from before fully_shard"
        )
    for update in updates:
        update.is_enabled = False
    for module, name, trained, value in kept:
        setattr(module, name, nn.Parameter(value.to(trained.device, trained.dtype), requires_grad=False))
    try:
        yield
    finally:
        for module, name, trained, _ in kept:
            setattr(module, name, trained)
        for update, was_enabled in zip(updates, before, strict=True):
            update.is_enabled = was_enabled


def train_whole(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters require gradients, and keep their values in the modules that have them."""
    copies = {p: p.detach().clone() for p in parameters if not p.is_meta}
    for module in model.modules():
        kept = {name: copies[p] for name, p in module._parameters.items() if p is not None and p in copies}
        if kept:
            vars(module)[_KEPT] = kept | vars(module).get(_KEPT, {})
    for parameter in parameters:
        parameter.requires_grad_()


def _kept(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, Tensor]]:
    """The trained parameters by module and name, with their values in the base."""
    named = [(m, name, value) for m in model.modules() for name, value in vars(m).get(_KEPT, {}).items()]
    return [(m, name, p, value) for m, name, value in named if (p := m._parameters.get(name)) is not None]


def updated_projections(attention: nn.MultiheadAttention) -> list[tuple[str, StructuredUpdate]]:
    """The updates of the weights of attention, with the names of its projections."""
    blocks = [(part, _weight_of(attention, name)[2], row) for part, (name, row) in _blocks_of(attention).items()]
    return [(part, update) for part, present, row in blocks if present for update in present.of_row(row)]


def has_adapters(model: nn.Module) -> bool:
    """Whether :func:`add_adapters` has added something that is not merged yet."""
    return bool(_updates(model))


def frozen_parameter_names(model: nn.Module) -> set[str]:
    """The names of the frozen parameters of the base, as before torch.compile; tied ones by all names."""
    of_adapters = {parameter for update in _updates(model) for parameter in update.parameters()}
    return {
        plain_name(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and parameter not in of_adapters
    }


def _updates(model: nn.Module) -> list[StructuredUpdate]:
    return [module for module in model.modules() if isinstance(module, StructuredUpdate)]


def _has_updated_weights(module: nn.Module) -> bool:
    """Whether an :class:`UpdatedWeight` parametrizes a weight of the module; then all that are parametrized."""
    if not parametrize.is_parametrized(module):
        return False
    return any(isinstance(part, UpdatedWeight) for part in module.parametrizations.modules())  # type: ignore[union-attr]


def require_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model without adapters."""
    if not has_adapters(model):
        raise ValueError(f"{type(model).__name__} has no adapters: call add_adapters first")


def _parameters_named(model: nn.Module, selectors: Trained | Iterable[Trained]) -> list[nn.Parameter]:
    """The parameters that names, patterns, modules and classes stand for."""
    if isinstance(selectors, str | nn.Module | type) or not isinstance(selectors, Iterable):
        selectors = [selectors]
    selected: list[nn.Parameter] = []
    for selector in selectors:
        if isinstance(selector, str):
            named = model.named_parameters(remove_duplicate=False)  # tied ones have several names
            found = [parameter for name, parameter in named if is_at_or_below(name, selector)]
        elif isinstance(selector, nn.Module):
            found = [*selector.parameters()] if selector in {*model.modules()} else []
        elif isinstance(selector, type) and issubclass(selector, nn.Module):
            found = [p for module in model.modules() if isinstance(module, selector) for p in module.parameters()]
        else:
            kinds = "names of modules and parameters, patterns, modules and their classes"
            raise TypeError(f"train takes {kinds}, but has {selector!r}")
        if not found:
            raise ValueError(f"train names {selector!r}, which has no parameters in {type(model).__name__}")
        selected += found
    return selected


def _left_alone(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that get no adapter unless ``include`` names them, with the reason."""
    name_it = "name it in include to adapt it"
    found = dict.fromkeys(sharing_weights(model), f"another module has its weight, too: {name_it}")
    inside = {part for layer in model.modules() if isinstance(layer, AdaptedLinear) for part in layer.modules()}
    inside -= {layer for layer in inside if isinstance(layer, AdaptedLinear)}

    def last(module: nn.Module) -> list[nn.Module]:
        """The last layer with a matrix from the module down; of a list of modules, that of each."""
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return [layer for head in module.children() for layer in last(head)]
        kinds = StructuredLinear | AdaptedLinear
        layers = [m for m in module.modules() if isinstance(m, kinds) or has_linear_weight(m) or has_filters(m)]
        return [layer for layer in layers if layer not in inside][-1:]

    for name, module in model.named_modules():
        if hasattr(module, "experts"):
            routers = [layer for part, layer in module.named_children() if part in ("gate", "router")]
            found |= dict.fromkeys(routers, f"it chooses experts: {name_it}")
        output = getattr(module, "get_output_embeddings", lambda: None)()
        heads = last(module) if name.rpartition(".")[2].strip("_") in _HEADS else [output]
        found |= {head: f"it is an output layer: {name_it}" for head in heads if head is not None and head not in found}
    return found


def _places(
    model: nn.Module, selection: Selection, adapter: str, left_alone: Mapping[nn.Module, str]
) -> tuple[list[tuple[str, nn.Module, list[str]]], dict[str, str]]:
    """Places of selected layers without an adapter of a name, and the reasons why other layers with matrices get none.

    Returns:
        Name, layer, and projections of attention of each place, of which a layer may have several; and the reasons by
        the names of layers.
    """
    adapters = [layer for layer in model.modules() if isinstance(layer, AdaptedLinear | StructuredUpdate)]
    below = {module for layer in adapters for module in layer.modules()} - set(adapters)
    below |= {*_updates(model), *hidden_layers(model, of_other_forwards=True)}
    places: list[tuple[str, nn.Module, list[str]]] = []
    reasons: dict[str, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer in below:
            continue
        parts: list[str] = []
        reason = None  # also for a layer without a matrix
        if isinstance(layer, AdaptedLinear):
            has_one = any(update.name == adapter for update in layer.updates)
            reason = "it has an adapter" if has_one else selection.why_not(name, layer.base, layer)
            reason = reason or left_alone.get(layer) or left_alone.get(layer.base)
            parts = [name] if reason is None else []
        elif isinstance(layer, nn.MultiheadAttention):
            adapted = {part for part, update in updated_projections(layer) if update.name == adapter}
            for part, size in zip(PROJECTIONS, (layer.embed_dim, layer.kdim, layer.vdim, layer.embed_dim), strict=True):
                linear = nn.Linear(size, layer.embed_dim, device="meta")
                if part not in adapted and selection.has(f"{name}.{part}" if name else part, linear, layer):
                    parts.append(part)
            reason = "it has an adapter" if adapted else selection.why_not(name, layer)
        elif isinstance(layer, StructuredLinear):
            reason = "it is structured"
        elif isinstance(layer, nn.Embedding) and not (selection.names(name, layer) and has_filters(layer)):
            reason = "it is an embedding: its full name in include adapts it"
        elif has_linear_weight(layer) or has_filters(layer):
            reason = selection.why_not(name, layer) or left_alone.get(layer)
            parts = [name] if reason is None else []
        elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            reason = "it is recurrent"
        elif isinstance(layer, CONVOLUTIONS):
            reason = "its weight is made by others"
        elif ".quantized." in type(layer).__module__ and hasattr(layer, "weight"):
            reason = "it is quantised"
        elif any(p is not None and p.ndim == 3 and len(p) > 1 for p in layer._parameters.values()):
            reason = "a parameter has three dimensions, as those of experts have"
        if parts:
            places.append((name, layer, parts))
        elif reason is not None:
            reasons[name or "the model"] = reason
            note_left(layer, f"add_adapters: {reason}")
    return places, reasons


def _adapted(
    layer: nn.Module, factory: LayerFactory, adapter_name: str, parts: list[str], dropout: float, **options: Any
) -> AdaptedLinear | dict[str, UpdatedWeight]:
    """The layer that takes the place of ``layer`` or of its base, or parametrizations of an attention's weights."""

    def adapter(weight: Tensor, in_features: int, out_features: int) -> StructuredLinear:
        made = factory(in_features, out_features, bias=False)
        # There is no Fourier transform in half precision.
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
        return made.to(weight.device, dtype).train(layer.training)  # type: ignore[return-value]

    if not isinstance(layer, nn.MultiheadAttention):
        base = layer.base if isinstance(layer, AdaptedLinear) else layer
        linear = linear_of(base)
        check_has_shape(linear.weight)
        made = adapter(linear.weight, linear.in_features, linear.out_features)
        new = AdaptedLinear(base, made, dropout=dropout, **options).train(layer.training)
        new.update.name = adapter_name
        return new
    if kind_of(layer) is None:
        raise ValueError(f"the forward of {type(layer).__name__} is its own")
    updates: dict[str, dict[str, StructuredUpdate]] = {}
    for part, (name, row) in _blocks_of(layer).items():
        if part not in parts:
            continue
        module, attribute, present = _weight_of(layer, name)
        if parametrize.is_parametrized(module) and not _has_updated_weights(module):
            undo = "undo that first (torch.nn.utils.parametrize.remove_parametrizations)"
            raise ValueError(f"{name}, which has {part}, or a weight beside it is parametrized: {undo}")
        weight = getattr(module, attribute)
        update = StructuredUpdate(adapter(weight, weight.shape[1], layer.embed_dim), **options)
        update.name = adapter_name
        key = f"{row}_{adapter_name}" if present and present.of_row(row) else str(row)
        updates.setdefault(name, {})[key] = update
    return {name: UpdatedWeight(of_rows) for name, of_rows in updates.items()}


def _blocks_of(attention: nn.MultiheadAttention) -> dict[str, tuple[str, int]]:
    """For each projection the name of its weight, and the first of its ``embed_dim`` rows there."""
    kind = kind_of(attention)
    blocks: dict[str, tuple[str, int]] = {}
    for matrix in () if kind is None else kind.matrices(attention):
        parts = PROJECTIONS[:3] if matrix.groups == 3 else [matrix.weight.replace(".", "_").removesuffix("_weight")]
        blocks |= {part: (matrix.weight, index * attention.embed_dim) for index, part in enumerate(parts)}
    return blocks


def _weight_of(attention: nn.Module, name: str) -> tuple[nn.Module, str, UpdatedWeight | None]:
    """The module that has a weight of attention, its attribute there, and the parametrization that adds updates."""
    path, _, attribute = name.rpartition(".")
    module = attention.get_submodule(path)
    if not parametrize.is_parametrized(module, attribute):
        return module, attribute, None
    parts = module.parametrizations[attribute]  # type: ignore[index]
    return module, attribute, next((part for part in parts if isinstance(part, UpdatedWeight)), None)


def _matrix_of(layer: nn.Module) -> Matrix:
    """The names of the matrix of the base of an adapter."""
    kind = kind_of(layer)
    return next(iter(kind.matrices(layer) if kind else ()), Matrix("weight"))  # the last one is that of an embedding


def _check_can_merge(name: str, layer: AdaptedLinear) -> None:
    cannot = f"the adapter of {name or 'the model'} cannot be added to its weight"
    is_structured = isinstance(layer.base, StructuredLinear)
    if is_structured:
        raise ValueError(
            f"{cannot}: its base is a {type(layer.base).__name__}, whose matrix is made of few numbers. Leave the "
            "adapter in, or merge it before the base is replaced"
        )
    kind = kind_of(layer.base)
    tensors = layer.base._parameters | layer.base._buffers  # torch leaves a frozen weight without its norm as a buffer
    is_known = kind is not None or has_filters(layer.base)
    weight = tensors.get(_matrix_of(layer.base).weight) if is_known else None
    own = layer.base._parameters.get("weight")
    if own is not None and (not own.is_floating_point() or not type(own).__module__.startswith("torch.")):
        raise ValueError(
            f"{cannot}, which is quantised: load_adapters beside the base in full precision, merge there, and quantise "
            "the result; or leave the adapter in"
        )
    if kind is None and own is not None and own.shape == (layer.out_features, layer.in_features):
        raise ValueError(
            f"{cannot}: {type(layer.base).__name__} has a forward of its own, as with an activation, and the "
            "adapter adds to its result. Leave the adapter in; or declare by register_layer that it computes as "
            "nn.Linear does, or leave the layer out by exclude=... of add_adapters"
        )
    if weight is None or not weight.is_floating_point() or weight.numel() != layer.in_features * layer.out_features:
        raise ValueError(
            f"the weight of {f'{name}.base' if name else 'the base'} cannot be added to: it is parametrized or pruned. "
            "Undo that first (torch.nn.utils.parametrize.remove_parametrizations), or leave the adapter in"
        )


def _merged(layer: AdaptedLinear) -> Tensor:
    matrix = _matrix_of(layer.base)
    assert layer.active is not None
    for module in layer.active.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_sharded(parameter):
                setattr(module, name, nn.Parameter(whole(parameter)))
    update = layer.active.to_dense()
    update = as_filters(layer.base, update) if has_filters(layer.base) else update.T if matrix.transposed else update
    return updated(whole(getattr(layer.base, matrix.weight)), update)


def _set_weight(base: nn.Module, merged: Tensor) -> None:
    name = _matrix_of(base).weight
    weight = getattr(base, name)
    if is_sharded(weight):  # the parameters of FSDP2 must stay
        set_values(weight, merged)
        return
    is_parameter = isinstance(weight, nn.Parameter)
    setattr(base, name, nn.Parameter(merged, weight.requires_grad) if is_parameter else merged)
