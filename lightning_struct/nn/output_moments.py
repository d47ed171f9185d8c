"""Matrices of low rank that are near to the outputs of a layer on data, rather than to its weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.nn.approximation import relative_error, truncated_factors
from lightning_struct.nn.channels import CONVOLUTIONS
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.replace import LayerFactory

_LARGEST = 2048  # outputs; the eigenvectors of a larger moment take longer than a minute
_WEIGHT_SHARE = 0.01  # of the moment of outputs under white inputs: directions that the data lack are not lost


@contextmanager
def observed_outputs(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """The sums of y yᵀ, (m, m) in float64, over outputs y = W x of layers, without bias, while they are called."""
    moments: dict[nn.Module, Tensor] = {}

    def note(layer: Any, args: Any, y: Any) -> None:
        if not isinstance(y, Tensor):
            return
        y = y.detach().movedim(-1 - len(layer.kernel_size), -1) if type(layer) in CONVOLUTIONS else y.detach()
        bias = getattr(layer, "bias", None)
        y = (y if bias is None else y - bias).reshape(-1, y.shape[-1]).double()  # also of a single sample
        moments[layer] = moments[layer] + y.T @ y if layer in moments else y.T @ y

    handles = [layer.register_forward_hook(note) for layer in layers if _outputs(layer) <= _LARGEST]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def low_rank_near_outputs(linear: nn.Linear, ranks: Sequence[int], moment: Tensor | None) -> list[LayerFactory]:
    """Factories of :class:`LowRank` near to a layer, of several ranks.

    The matrix M of rank r with the least Σ ‖M x - W x‖² is U Uᵀ W, U the first r eigenvectors of Σ y yᵀ, y = W x
    (principal components). A small share of W Wᵀ is added to that: where all inputs are of equal power, M is the
    truncated singular value decomposition.

    Args:
        linear: the layer.
        ranks: r of each.
        moment: Σ y yᵀ, (m, m), float64. None: the truncated singular value decomposition.
    """
    components: list[Tensor] = []  # all of them, when they are first needed

    def from_linear(linear: nn.Linear, rank: int) -> LowRank:  # by this name it is called with the layer
        weight = linear.weight.detach().double()
        if not bool(weight.isfinite().all()):
            raise ValueError("the weight has NaN or infinite entries")
        if not components:
            components.append(_principal_outputs(weight, moment))
        U = components[0][:, :rank]
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

    return [partial(from_linear, rank=rank) for rank in ranks]


def _principal_outputs(weight: Tensor, moment: Tensor | None) -> Tensor:
    """The eigenvectors of the moment, or of W Wᵀ, (m, up to m), by falling eigenvalues."""
    if moment is None or not bool(moment.isfinite().all()) or not moment.trace() > 0:
        return torch.linalg.svd(weight, full_matrices=False)[0]
    of_weight = weight @ weight.T
    total = of_weight.trace()
    mixed = moment / moment.trace() + (_WEIGHT_SHARE * of_weight / total if total > 0 else 0)
    return torch.linalg.eigh(mixed)[1].flip(1)


def _outputs(layer: Any) -> int:
    return layer.weight.shape[0] if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) else _LARGEST
