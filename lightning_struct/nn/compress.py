"""Compression of a trained model to a size or a loss, by low ranks that take equal shares of the layers' parameters."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.checks import NotNegative, Positive, checked
from lightning_struct.functional.torch_tools import in_eval_mode
from lightning_struct.nn.approximation import relative_error, truncated_factors
from lightning_struct.nn.channels import CONVOLUTIONS, as_matrix, in_place_of
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.replace import (
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

_FEW = 0.1  # of the parameters of all layers: a first or last layer with no more stays as it is
_BISECTIONS = 10  # of the share, each with a pass over the data
_LARGEST = 2048  # outputs; the eigenvectors of a larger moment take longer than a minute
_WEIGHT_SHARE = 0.01  # of the moment of outputs under white inputs: directions that the data lack are not lost
BatchLoss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch, ()."""


@checked
def compress(
    model: Model,
    data: Iterable[Any] | Tensor,
    *,
    budget: Positive | None = None,
    max_loss_increase: NotNegative | None = None,
    loss: BatchLoss | None = None,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> Model:
    """Make a trained model smaller by low ranks, for a given number of parameters or rise of the loss.

    For example::

        batches = list(itertools.islice(loader, 8))
        model = compress(model, batches, budget=0.25)    # a quarter of its parameters
        model = compress(model, batches, max_loss_increase=0.02, loss=error_rate)    # or two points of accuracy
        print(replacement_report(model))
        trainer.fit(module, loader)    # the low ranks are only a starting point: fine-tune

    It may replace ``nn.Linear`` and layers that are declared to be linear, convolutions without groups (as a
    matrix from patches to channels), and the projections of ``nn.MultiheadAttention``. A layer that shares its weight
    with another module, such as a head tied to an embedding, stays.

    Each layer becomes a :class:`LowRank` of the largest rank within one share of its parameters, the same share for all
    layers. Without ``include``, the layers that are called first and last stay if there is room for them and they have
    at most a tenth of these parameters each: a head of ten outputs has no rank to spare. The *outputs* of a layer on
    the data are approximated, by their principal components, instead of its weight. A model that fits stays as it is.

    The size takes a pass over the data before and one after; ``max_loss_increase`` bisects the share, and takes ten
    more. Losses before and after are logged at level INFO.

    Args:
        model: changed in place. It is measured in eval mode, without gradients; its modes are restored afterwards. What
            ``torch.compile`` has compiled is measured as it is in Python, and compiled anew at its next call.
        data: batches, a few hundred samples; all are kept in memory. A tensor is one batch.
        budget: parameters of the whole compressed model: up to 1 as a share of the present number, above as a number.
        max_loss_increase: instead of ``budget``: how much larger the mean of ``loss`` over the data may be.
        loss: called as ``loss(model, batch)``, returns () for a batch; batches count alike, whatever their sizes. With
            the error rate, ``max_loss_increase`` is a loss of accuracy. None: the change of the outputs, ‖f̂(x) -
            f(x)‖² / ‖f(x)‖², where x is the batch or its first item; it needs no labels.
        include, exclude: as in :func:`~lightning_struct.nn.replace_linear`.

    Returns:
        ``model``; the new layer if it is a layer itself.

    Raises:
        ValueError: neither or both of ``budget`` and ``max_loss_increase`` are given, or one is out of range; ``loss``
            returns more than one number; the budget is below the smallest possible size, which is named; there are no
            data, or the loss on them is not finite; without ``loss``, the outputs for a batch are zero; a name is not
            in the model; a parameter has no values, on the meta device, or no shape yet.
        TypeError: ``loss`` is not given, and the outputs are no tensor, or a batch is neither a tensor nor a sequence.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = compress(model, [torch.randn(32, 64)], budget=0.5)
        >>> sum(parameter.numel() for parameter in model.parameters()) <= 0.5 * 4810
        True
    """
    if (budget is None) == (max_loss_increase is None):
        both = "both are" if budget is not None else "neither is"
        raise ValueError(
            f"compress needs one goal, but {both} given: budget=0.25 for a quarter of the parameters, or "
            "max_loss_increase=0.02 for the smallest model whose loss has risen by no more"
        )
    _check_has_values(model)
    batches = [data] if isinstance(data, Tensor) else list(data)
    if not batches:
        raise ValueError("compress measures losses on data, but data has no batches")
    parameters = _count(model)
    selection = Selection(model, include, exclude)
    with called_attention(model, lambda name, _: bool(name)) as (_, stands_for):
        names = selected_layers(model, selection, stands_for, "compress", lambda layer: as_matrix(layer) is not None)
        _leave_shared(model, names)
        measured = functools.partial(_mean_loss, batches=batches, loss=loss or _output_change(model, batches))
        with _observed_outputs(names) as moments:
            start = measured(model)
        if start == float("inf"):
            raise ValueError("the loss of the model on data is not finite: give a trained model, and finite data")
        layers = {layer: _LowRanks(of_names, layer, moments.get(layer)) for layer, of_names in names.items()}
        ends = {end: layers.pop(end) for end in (_small_ends(names, list(moments)) if include is None else ())}

        def size(share: float) -> int:
            return parameters - sum(of.saved(share) for of in layers.values())

        def chosen(share: float) -> list[tuple[str, nn.Module]]:
            return [place for of in layers.values() if of.saved(share) for place in of.places(share)]

        def increase(share: float) -> float:
            with _replaced(model, chosen(share)) as compressed:
                return measured(compressed) - start

        if max_loss_increase is not None:
            share = 0.0 if increase(0.0) <= max_loss_increase else 1.0
            if share:
                _, share = _bisected(lambda share: increase(share) <= max_loss_increase, _BISECTIONS)
        else:
            assert budget is not None
            allowed = int(budget * parameters) if budget <= 1 else int(budget)
            if allowed < size(0.0):  # no room for whole ends
                layers, ends = layers | ends, {}
            if allowed < size(0.0):
                raise ValueError(
                    f"budget={budget} allows {allowed:,} parameters, but with rank 1 in these layers the model has "
                    f"{size(0.0):,} of {parameters:,}: give a larger budget, or include further layers"
                )
            share = 1.0 if allowed >= parameters else _bisected(lambda share: size(share) > allowed, 50)[0]
        left = dict.fromkeys(ends, "compress: the first or last layer, which include does not name")
        whole = "compress: the model fits as it is" if share == 1 else "compress: low rank makes it no smaller"
        left |= {layer: whole for layer, of in layers.items() if not of.saved(share)}
        for layer, reason in left.items():
            for itself in (layer, *stands_for.get(layer, ())[1:]):  # attention is put back without replacements
                note_left(itself, reason)
        compressed = put_in_place(model, chosen(share))
    _log.info(
        f"compressed from {parameters:,} to {_count(compressed):,} parameters, layers to {share:.3g} of theirs: loss "
        f"{start:.4g} before, {measured(compressed):.4g} now"
    )
    return compressed


def _bisected(is_enough: Callable[[float], bool], steps: int) -> tuple[float, float]:
    """Two near shares between 0 and 1, the first not enough and the second enough."""
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low, high


class _LowRanks:
    """The replacements of a layer by low ranks, near to its outputs on the data.

    The matrix M of rank r with the least Σ ‖M x - W x‖² is U Uᵀ W, U the first r eigenvectors of Σ y yᵀ, y = W x
    (principal components). A small share of W Wᵀ is added to that: if all inputs are of equal power, M is the
    truncated singular value decomposition.

    Args:
        names: of the layer in the model.
        layer: one with a matrix, (m, n).
        moment: Σ y yᵀ, (m, m), float64. None: the truncated singular value decomposition.
    """

    def __init__(self, names: list[str], layer: nn.Module, moment: Tensor | None) -> None:
        linear = as_matrix(layer)
        assert linear is not None
        self._names, self._layer, self._linear, self._moment = names, layer, linear, moment

    def _rank(self, share: float) -> int:
        m, n = self._linear.weight.shape
        return max(1, int(share * m * n / (m + n)))

    def saved(self, share: float) -> int:
        """Parameters that the layer has less with a share of them; 0: it stays as it is."""
        weight = self._linear.weight
        return max(0, weight.numel() - self._rank(share) * sum(weight.shape)) if share < 1 else 0

    def places(self, share: float) -> list[tuple[str, nn.Module]]:
        """The layer of low rank, at each of the names."""
        make = functools.partial(self.from_linear, rank=self._rank(share))
        new = in_place_of(self._layer, replacement(self._names[0], self._linear, make))
        take_hooks(new, self._layer)
        return [(name, new) for name in self._names]

    @functools.cached_property
    def _components(self) -> Tensor:
        """The eigenvectors of the moment, or of W Wᵀ, (m, up to m), by falling eigenvalues."""
        weight, moment = self._linear.weight.detach().double(), self._moment
        if moment is None or not bool(moment.isfinite().all()) or not moment.trace() > 0:
            return torch.linalg.svd(weight, full_matrices=False)[0]
        of_weight = weight @ weight.T
        total = of_weight.trace()
        mixed = moment / moment.trace() + (_WEIGHT_SHARE * of_weight / total if total > 0 else 0)
        return torch.linalg.eigh(mixed)[1].flip(1)

    def from_linear(self, linear: nn.Linear, rank: int) -> LowRank:  # by this name it is called with the layer
        weight = linear.weight.detach().double()
        if not bool(weight.isfinite().all()):
            raise ValueError("the weight has NaN or infinite entries")
        U = self._components[:, :rank]
        with torch.random.fork_rng(devices=[]):
            layer = LowRank(linear.in_features, linear.out_features, rank, bias=linear.bias is not None)
        layer.to(linear.weight.device, linear.weight.dtype)
        G, H = truncated_factors(U.T @ weight, rank)
        with torch.no_grad():
            layer.G.copy_(U @ G)
            layer.H.copy_(H)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        layer.approximation_error = relative_error(layer.to_dense().double(), weight)
        return layer.train(linear.training)


@contextmanager
def _observed_outputs(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Tensor | None]]:
    """The sums of y yᵀ, (m, m) in float64, over outputs y = W x of layers, without bias, in the order of their calls.

    None of a layer with more than 2,048 outputs.
    """
    moments: dict[nn.Module, Tensor | None] = {}

    def note(layer: Any, args: Any, y: Any) -> None:
        before = moments.pop(layer, None)
        moments[layer] = before
        if not isinstance(y, Tensor):
            return
        y = y.detach().movedim(-1 - len(layer.kernel_size), -1) if type(layer) in CONVOLUTIONS else y.detach()
        if y.shape[-1] <= _LARGEST:
            bias = getattr(layer, "bias", None)
            y = (y if bias is None else y - bias).reshape(-1, y.shape[-1]).double()  # also of a single sample
            moments[layer] = y.T @ y if before is None else before + y.T @ y

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def _small_ends(layers: Iterable[nn.Module], called: Sequence[nn.Module]) -> set[nn.Module]:
    """The layers that are called first and last, if they are small beside all of them."""
    sizes = {layer: linear.weight.numel() for layer in layers if (linear := as_matrix(layer)) is not None}
    return {end for end in (*called[:1], *called[-1:]) if sizes[end] <= _FEW * sum(sizes.values())}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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


def _leave_shared(model: nn.Module, names: dict[nn.Module, list[str]]) -> None:
    """Take the layers that share their weight with another module out of ``names``."""
    shared = sharing_weights(model)
    for layer in [layer for layer in names if layer in shared]:
        log_left(names.pop(layer)[0], layer, "another module has its weight, too")
    if not names:
        raise ValueError(
            f"compress finds no layer in {type(model).__name__} that is included and not excluded: no linear layer, no "
            "convolution without groups, no projection of attention, that has a weight of its own and is not "
            f"structured already. Recurrent layers stay as they are{reasons_as_text(reasons_for_left(model))}"
        )


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
            value += float(of_batch)
    value /= len(batches)
    return value if abs(value) < float("inf") else float("inf")
