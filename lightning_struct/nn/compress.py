"""Compression of a trained model to a size or a loss: which layers, which class and which rank, by their cost."""

import functools
import inspect
import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.checks import checked, is_real
from lightning_struct.functional.torch_tools import in_eval_mode
from lightning_struct.nn.approximation import progress_bar
from lightning_struct.nn.candidates import (
    Option,
    least_increase,
    low_rank_near_outputs,
    observed_outputs,
    smallest_within,
)
from lightning_struct.nn.channels import as_matrix, in_place_of
from lightning_struct.nn.monarch import Monarch
from lightning_struct.nn.replace import (
    LayerFactory,
    called_attention,
    log_left,
    put_in_place,
    replacement,
    selected_layers,
    set_modules,
)
from lightning_struct.nn.report import note_left, reasons_as_text, reasons_for_left
from lightning_struct.nn.selection import Model, Selection, Selector, sharing_weights
from lightning_struct.nn.torch_modules import take_hooks

_log = logging.getLogger(__name__)

_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the numbers of a layer by one of its matrices of low rank
BatchLoss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch, ()."""
Candidates = Callable[[nn.Linear], Iterable[LayerFactory]]


@checked
def compress(
    model: Model,
    data: Iterable[Any] | Tensor,
    *,
    budget: float | None = None,
    max_loss_increase: float | None = None,
    loss: BatchLoss | None = None,
    candidates: Candidates | None = None,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> Model:
    """Make a trained model smaller by structured layers, for a given number of parameters or rise of the loss.

    For example::

        batches = list(itertools.islice(loader, 8))
        model = compress(model, batches, budget=0.25)    # a quarter of its parameters
        model = compress(model, batches, max_loss_increase=0.02, loss=error_rate)    # or two points of accuracy
        print(replacement_report(model))
        trainer.fit(module, loader)    # the chosen matrices are only a starting point: fine-tune

    It may replace ``nn.Linear`` and layers that are declared or recognised as linear, convolutions without groups (as a
    matrix from patches to channels), and the projections of ``nn.MultiheadAttention``. A layer that shares its weight
    with another module, such as a head tied to an embedding, stays.

    For each layer and each candidate, the loss is measured with only that layer replaced. Within the budget, the choice
    with the smallest sum of increases is taken: a model that fits stays as it is. Of many layers it may be a little
    more than the smallest. For ``max_loss_increase`` budgets are bisected, and each choice is measured as a whole. Low
    rank approximates the *outputs* on the data, by their principal components, instead of the weight.

    This takes a pass over the data for each layer and candidate, with a progress bar on a terminal. Losses before and
    after are logged at level INFO.

    Args:
        model: changed in place. It is measured in eval mode, without gradients; its modes are restored afterwards. What
            ``torch.compile`` has compiled is measured as it is in Python, and compiled anew at its next call.
        data: batches, a few hundred samples; all are kept in memory. A tensor is one batch.
        budget: parameters of the whole compressed model: up to 1 as a share of the present number, above as a number.
        max_loss_increase: instead of ``budget``: how much larger the mean of ``loss`` over the data may be.
        loss: called as ``loss(model, batch)``, returns () for a batch; batches count alike, whatever their sizes. With
            the error rate, ``max_loss_increase`` is a loss of accuracy. None: the change of the outputs, ‖f̂(x) -
            f(x)‖² / ‖f(x)‖², where x is the batch or its first item; it needs no labels.
        candidates: function that returns, for an ``nn.Linear``, its possible replacements: classes or their
            ``from_linear``, in partials. A candidate with an infinite or undefined loss is left out. None: low rank
            with 1/2, 1/3, 1/4, 1/6, ... to 1/64 of the parameters of the layer, and Monarch matrices of 2, 4, 8 and 16
            blocks.
        include, exclude: as in :func:`~lightning_struct.nn.replace_linear`.

    Returns:
        ``model``; the new layer if it is a layer itself.

    Raises:
        ValueError: neither or both of ``budget`` and ``max_loss_increase`` are given, or one is out of range; ``loss``
            returns more than one number; the budget is below the smallest possible size, which is named; there are no
            data, or the loss on them is not finite; without ``loss``, the outputs for a batch are zero; a name is not
            in the model; a parameter has no values, on the meta device, or no shape yet.
        TypeError: ``candidates`` is no function; ``loss`` returns no number; or ``loss`` is not given, and the outputs
            are not a tensor, the model needs more arguments, or a batch is neither a tensor nor a sequence.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = compress(model, [torch.randn(32, 64)], budget=0.5)
        >>> sum(parameter.numel() for parameter in model.parameters()) <= 0.5 * 4810
        True
    """
    check_goal(budget, max_loss_increase)
    _check_has_values(model)
    batches = [data] if isinstance(data, Tensor) else list(data)
    if not batches:
        raise ValueError("compress measures losses on data, but data has no batches")
    parameters = _count(model)
    selection = Selection(model, include, exclude)
    with called_attention(model, lambda name, _: bool(name)) as (_, stands_for):
        names = selected_layers(model, selection, stands_for, "compress", lambda layer: as_matrix(layer) is not None)
        places = _places(model, names)
        measured = functools.partial(_mean_loss, batches=batches, loss=loss or _output_change(model, batches))
        with observed_outputs([model.get_submodule(n[0]) for n in places] if candidates is None else []) as moments:
            start = measured(model)
        if start == float("inf"):
            raise ValueError("the loss of the model on data is not finite: give a trained model, and finite data")
        options = _measured_options(model, places, candidates, moments, measured, start)

        def chosen_layers(choice: Sequence[int]) -> list[tuple[str, nn.Module]]:
            picked = zip(places, options, choice, strict=True)
            return [(name, layer) for names, of, i in picked if (layer := of[i].layer) is not None for name in names]

        def increase(choice: Sequence[int]) -> float:
            with _replaced(model, chosen_layers(choice)) as compressed:
                return measured(compressed) - start

        if max_loss_increase is not None:
            choice = smallest_within(options, max_loss_increase, increase)
        else:
            assert budget is not None
            allowed = int(budget * parameters) if budget <= 1 else int(budget)
            others = parameters - sum(of[0].parameters for of in options)
            smallest = others + sum(min(option.parameters for option in of) for of in options)
            if allowed < smallest:
                raise ValueError(
                    f"budget={budget} allows {allowed:,} parameters, but with these candidates and layers the smallest "
                    f"model has {smallest:,} of {parameters:,}: {others:,} are in other layers. Give a larger "
                    "budget, or further candidates="
                )
            choice = least_increase(options, allowed - others)
        for (name, *_), index in zip(places, choice, strict=True):
            if index == 0:
                layer = model.get_submodule(name)
                for left in (layer, *stands_for.get(layer, ())[1:]):  # attention is put back without replacements
                    note_left(left, "compress chose no replacement")
        compressed = put_in_place(model, chosen_layers(choice))
    foreseen = start + sum(of[index].loss_increase for of, index in zip(options, choice, strict=True))
    _log.info(
        f"compressed from {parameters:,} to {_count(compressed):,} parameters, {sum(map(bool, choice))} of "
        f"{len(places)} layers: loss {start:.4g} before, {measured(compressed):.4g} now, {foreseen:.4g} by the sum of "
        "single layers"
    )
    return compressed


def default_candidates(linear: nn.Linear, moment: Tensor | None = None) -> list[LayerFactory]:
    """Low rank with 1/2 to 1/64 of the numbers of ``linear``, and Monarch matrices of 2 to 16 blocks.

    Args:
        linear: the layer.
        moment: of its outputs, see :func:`~lightning_struct.nn.output_moments.observed_outputs`.
    """
    m, n = linear.out_features, linear.in_features
    ranks = {max(1, m * n // ((m + n) * part)) for part in _PARTS}
    blocks = [count for count in (2, 4, 8, 16) if count <= min(m, n)]
    monarch = [functools.partial(Monarch.from_linear, blocks=count, refine=0) for count in blocks]
    return [*low_rank_near_outputs(linear, sorted(ranks), moment), *monarch]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_goal(budget: float | None, max_loss_increase: float | None) -> None:
    """Check the goal of a compression.

    Raises:
        ValueError: neither or both are given, or one is out of range or no number.
    """
    if (budget is None) == (max_loss_increase is None):
        both = "both are" if budget is not None else "neither is"
        raise ValueError(
            f"compress needs one goal, but {both} given: budget=0.25 for a quarter of the parameters, or "
            "max_loss_increase=0.02 for the smallest model whose loss has risen by no more"
        )
    if budget is None:
        assert max_loss_increase is not None
        if not (is_real(max_loss_increase) and max_loss_increase >= 0):
            raise ValueError(f"max_loss_increase must be a number that is not negative, but is {max_loss_increase!r}")
    elif not (is_real(budget) and 0 < budget < float("inf")):
        raise ValueError(f"budget must be positive and finite, parameters or a share of them, but is {budget!r}")


def _check_has_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} of {type(model).__name__} has no shape yet: run the model once")
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} of {type(model).__name__} is on the meta device, where it has no values: compress "
                "measures losses, and needs a trained model. Load the weights first (to_empty, then load_state_dict); "
                "or take replace_linear with a class such as LowRank, whose weights are drawn"
            )


def _places(model: nn.Module, names: dict[nn.Module, list[str]]) -> list[list[str]]:
    """The names of each selected layer that shares its weight with no other module."""
    shared = sharing_weights(model)
    for layer in [layer for layer in names if layer in shared]:
        log_left(names.pop(layer)[0], layer, "another module has its weight, too")
    if not names:
        raise ValueError(
            f"compress finds no layer in {type(model).__name__} that is included and not excluded: no linear layer, no "
            "convolution without groups, no projection of attention, that has a weight of its own and is not "
            f"structured already. Recurrent layers stay as they are{reasons_as_text(reasons_for_left(model))}"
        )
    return list(names.values())


def _measured_options(
    model: nn.Module,
    places: Sequence[list[str]],
    candidates: Candidates | None,
    moments: Mapping[nn.Module, Tensor],
    measured: Callable[[nn.Module], float],
    start: float,
) -> list[list[Option]]:
    """For each layer: as it is, and the candidates that are smaller, each with its cost."""
    every: list[list[Option]] = []
    with progress_bar(len(places), "layer") as bar:
        for names in places:
            bar.set_description(names[0] or "the model", refresh=False)
            old = model.get_submodule(names[0])
            linear = as_matrix(old)
            assert linear is not None
            options = [Option(None, linear.weight.numel(), 0.0)]
            of_layer = default_candidates(linear, moments.get(old)) if candidates is None else candidates(linear)
            for factory in of_layer:
                structured = replacement(names[0], linear, factory)
                size = sum(parameter.numel() for name, parameter in structured.named_parameters() if name != "bias")
                if size >= linear.weight.numel():
                    continue
                new = in_place_of(old, structured)
                take_hooks(new, old)
                with _replaced(model, [(name, new) for name in names]) as changed:
                    loss = measured(changed)
                if loss == float("inf"):
                    _log.info("%s as %s: the loss is not finite", names[0] or "the model", structured)
                    continue
                options.append(Option(new, size, max(0.0, loss - start)))
                _log.info("%s as %s: loss %+.4g", names[0] or "the model", structured, loss - start)
            every.append(sorted(options, key=lambda option: -option.parameters))  # of equal costs the largest is taken
            bar.update(1)
    return every


@contextmanager
def _replaced(model: nn.Module, new: list[tuple[str, nn.Module]]) -> Iterator[nn.Module]:
    """The model with other layers at some places."""
    old = [(name, model.get_submodule(name)) for name, _ in new]
    set_modules(model, new)
    try:
        yield next((layer for name, layer in new if not name), model)
    finally:
        set_modules(model, old)


def _output_change(model: nn.Module, batches: Sequence[Any]) -> BatchLoss:
    """The loss that is the relative change of the outputs from those of now."""

    def outputs(of: nn.Module, batch: Any) -> Tensor:
        name, remedy = type(of).__name__, "give loss=, a function of model and batch"
        if not isinstance(batch, Tensor | tuple | list):
            got = type(batch).__name__
            raise TypeError(f"a batch is a {got}, no tensor or sequence that begins with the inputs: {remedy}")
        x = batch if isinstance(batch, Tensor) else batch[0]
        try:
            inspect.signature(of.forward).bind(x)
        except TypeError as error:
            raise TypeError(f"{name} cannot be called with the inputs alone ({error}): {remedy}") from error
        y = of(x)
        if not isinstance(y, Tensor):
            raise TypeError(f"the outputs of {name} are no tensor, but a {type(y).__name__}: {remedy}")
        return y

    with _measuring(model):
        before = {id(batch): outputs(model, batch) for batch in batches}
    for y in before.values():
        if not y.any():
            raise ValueError(
                f"the outputs of {type(model).__name__} for a batch are {'zero' if y.numel() else 'empty'}, and "
                "have no relative change: train the model first, leave the batch out, or give loss="
            )

    def change(of: nn.Module, batch: Any) -> Tensor:
        target = before[id(batch)]
        return (outputs(of, batch) - target).square().sum() / target.square().sum()

    return change


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    # A compiled graph would be compiled again for each candidate, and runs no hooks that came after it.
    with torch.no_grad(), in_eval_mode(model), torch.compiler.set_stance("force_eager"):
        yield


def _mean_loss(model: nn.Module, batches: Sequence[Any], loss: BatchLoss) -> float:
    value = 0.0
    with _measuring(model):
        for batch in batches:
            of_batch = loss(model, batch)
            if isinstance(of_batch, Tensor) and of_batch.numel() != 1:
                shape = tuple(of_batch.shape)
                raise ValueError(f"loss returns a tensor {shape} for a batch: make it one number, its mean")
            try:
                value += float(of_batch)
            except (TypeError, ValueError) as error:
                got = reprlib.repr(of_batch)
                raise TypeError(f"loss returns {got} for a batch: make it one number, its mean") from error
    value /= len(batches)
    return value if abs(value) < float("inf") else float("inf")
