"""Reports: structured and other layers of a model, and the sensitivity of a matrix to its weights."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_struct.functional.checks import Size, checked
from lightning_struct.functional.layers.registry import hidden_layers
from lightning_struct.nn.attention import why_not_called
from lightning_struct.nn.channels import CONVOLUTIONS, has_linear_weight, why_not_linear, why_not_pointwise
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.updates import AdaptedLinear, StructuredUpdate

_NEVER_REPLACED: tuple[tuple[Any, str], ...] = (
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), "it is a transposed convolution"),
    (nn.LSTM, "it is recurrent: put a StructuredLSTM in its place"),
    ((nn.RNNBase, nn.RNNCellBase), "it is recurrent"),
    (nn.Bilinear, "it is bilinear: it has a matrix for each output"),
)
_left: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The last reason for leaving a layer."""


def note_left(layer: nn.Module, reason: str) -> None:
    """Keep the reason for which a layer was left as it is, for the report. Copies of the layer do not have it."""
    _left[layer] = reason


class ReplacementReport(str):
    """A table of structured layers and of the layers that were left, as text.

    Attributes:
        skipped: the reason for which a layer with a matrix was left as it is, by its name.
    """

    skipped: dict[str, str]


@checked
def replacement_report(model: nn.Module) -> ReplacementReport:
    """A table of the structured layers below ``model``, and the layers with matrices that were left, with the reasons.

    Its columns are the name, the class with its arguments, the parameters of the matrix, those of a dense one,
    the compression ratio, and the relative error of those that were made from a trained layer. The last row has all
    parameters of the model, biases and other layers too; adapters have taken the place of nothing there. With adapters
    a line below has the number of trained parameters.

    Args:
        model: any.

    Returns:
        The table as a string, whose ``skipped`` has the reasons by the names of the layers that were left.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> report = replacement_report(nn.Sequential(Circulant(64, 64), nn.Conv2d(3, 5, 3, padding=1)))
        >>> report.splitlines()[1].split()
        ['0', 'Circulant', '64', '4,096', '64.0']
        >>> report.splitlines()[2].split()
        ['the', 'whole', 'model', '268', '4,300', '16.0']
        >>> report.skipped
        {'1': 'its kernel is larger than one pixel: replace_conv and compress take it'}
    """
    rows: list[tuple[str, ...]] = [("layer", "class", "parameters", "dense", "compression", "error")]
    structured = {name: layer for name, layer in model.named_modules() if isinstance(layer, StructuredLinear)}

    def place(named: tuple[str, StructuredLinear]) -> tuple[str, str, int, int]:
        """The same for layers that follow each other in a list and are alike."""
        name, layer = named
        above = name.rpartition(".")[0]
        is_in_list = isinstance(model.get_submodule(above), nn.ModuleList)
        return above if is_in_list else name, _class_of(layer), layer.in_features, layer.out_features

    for _, group in groupby(structured.items(), place):
        names, layers = zip(*group, strict=True)
        name, of = names[0] or "(model)", _class_of(layers[0])
        if len(layers) > 1:
            name, of = f"{name}-{names[-1].rpartition('.')[2]}", f"{len(layers):,} x {of}"
        parameters = sum(layer.weight_parameters for layer in layers)
        dense = sum(layer.in_features * layer.out_features for layer in layers)
        errors = [layer.approximation_error for layer in layers if layer.approximation_error is not None]
        error = f"{max(errors):.3g}" if errors else ""
        rows.append((name, of, f"{parameters:,}", f"{dense:,}", f"{layers[0].compression_ratio:.1f}", error))
    if structured:
        now = sum(parameter.numel() for parameter in model.parameters())
        adapters = {update.adapter for update in model.modules() if isinstance(update, StructuredUpdate)}
        replacing = set(structured.values()) - adapters
        saved = sum(layer.in_features * layer.out_features - layer.weight_parameters for layer in replacing)
        rows.append(("the whole model", "", f"{now:,}", f"{now + saved:,}", f"{(now + saved) / now:.1f}", ""))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    lines = [layout.format(*row) for row in rows]
    if structured and adapters:
        lines.append(f"{trained:,} of {now:,} parameters are trained ({trained / now:.2%})")
    skipped = reasons_for_left(model)
    lines += [f"{name} is left as it is: {reason}" for name, reason in skipped.items()]
    report = ReplacementReport("\n".join(lines))
    report.skipped = skipped
    return report


def reasons_for_left(model: nn.Module) -> dict[str, str]:
    """The layers with matrices that are not structured, by name, and why they are not."""
    hidden = hidden_layers(model, of_other_forwards=True)
    hidden |= {layer.base for layer in model.modules() if isinstance(layer, AdaptedLinear)}
    reasons = {}
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear) or layer in hidden:
            continue
        reason = next((reason for classes, reason in _NEVER_REPLACED if isinstance(layer, classes)), None)
        if isinstance(layer, nn.MultiheadAttention):
            reason = why_not_called(layer)
        elif isinstance(layer, CONVOLUTIONS):
            reason = why_not_pointwise(layer)
        elif has_linear_weight(layer):
            reason = why_not_linear(layer)
        elif reason is None and layer not in _left:
            continue  # it has no matrix
        reasons[name or "(model)"] = _left.get(layer) or reason or "nothing has replaced it"
    return reasons


def reasons_as_text(reasons: Mapping[str, str]) -> str:
    """The end of a sentence that names layers and the reasons, at most five."""
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return "".join(f"; {name}: {reason}" for name, reason in list(reasons.items())[:5]) + more


def _class_of(layer: StructuredLinear) -> str:
    """The class with the arguments that tell its layers apart, as ``LowRank(rank=2)``."""
    arguments = layer.extra_repr().partition(f"bias={layer.bias is not None}")[2].lstrip(", ").replace(" ", "")
    return f"{type(layer).__name__}({arguments})" if arguments else type(layer).__name__


@checked
def jacobian_norms(layer: StructuredLinear | nn.Linear, iterations: Size = 20) -> dict[str, float]:
    """Spectral norms ‖∂M/∂θ‖ of the Jacobian of the matrix M by each parameter θ. An ``nn.Linear`` has 1.

    A small step of θ moves M by up to that many times as much (Frobenius norms). Gradients are larger than those of a
    dense weight by up to the same factor: a step of SGD moves M by up to its square more than that of a dense weight at
    the same rate. An entry of G in a Toeplitz-like matrix stands in as many places as there are rows, one of a
    subdiagonal is a factor of as many.

    By power iteration from a fixed start, in O(mn) memory. The norms are those at the present weights.

    Args:
        layer: any structured layer, or an ``nn.Linear``. Parameters that need no gradient are left out.
        iterations: products with the Jacobian and its transpose. Twenty find the norms to a few per cent.

    Returns:
        The norm for each parameter, by its name in the layer.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> {name: round(norm, 4) for name, norm in jacobian_norms(Circulant(16, 16)).items()}
        {'column': 4.0}
    """
    if isinstance(layer, nn.Linear):
        return {"weight": 1.0} if layer.weight.requires_grad else {}
    layer.check_values()
    weights = ((name, getattr(layer, name)) for name in layer.weight_names)
    trained = {name: weight for name, weight in weights if weight is not None and weight.requires_grad}
    norms = {}
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        matrix = layer.to_dense()
        for name, weight in trained.items():
            # Jᵀu is linear in u, so its derivative in the direction v is J v.
            u = torch.zeros_like(matrix, requires_grad=True)
            (transposed,) = torch.autograd.grad(matrix, weight, u, create_graph=True)
            v = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
            for _ in range(iterations):
                (moved,) = torch.autograd.grad(transposed, u, v / v.norm(), retain_graph=True)
                (v,) = torch.autograd.grad(matrix, weight, moved, retain_graph=True)
            norms[name] = moved.norm().item()
    return norms
