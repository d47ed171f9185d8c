"""Every structured class as small cases, and its matrix by the formula of the class, from dense factors."""

import math
import re
from functools import partial

import torch
from torch import nn

from lightning_struct.functional import Matrix, register_layer
from lightning_struct.nn import STRUCTURED_CLASSES
from lightning_struct.nn.classic import GeneratorLinear

_NAMES = {"LDRSubdiagonal": "ldr_sd", "LDRTridiagonal": "ldr_td", "PrunedLinear": "pruned"}
_ARGUMENTS = {"Monarch": {"blocks": 3}, "RandomizedHadamard": {"terms": 2}, "PrunedLinear": {"parameters": 30}}
_VARIANTS = {
    "ldr_sd_without_corners": ("LDRSubdiagonal", {"corner": "zero"}),
    "ldr_sd_padded": ("LDRSubdiagonal", {"pad": "square"}),
    "ldr_td_without_corners": ("LDRTridiagonal", {"corner": "zero"}),
    "toeplitz_like_padded": ("ToeplitzLike", {"pad": "square"}),
    "hankel_like_padded": ("HankelLike", {"pad": "square"}),
    "low_rank_padded": ("LowRank", {"pad": "square"}),
    "monarch_of_rank_2": ("Monarch", {"blocks": 2, "rank": 2}),
}


def _factory(name, **arguments):
    layer_class = STRUCTURED_CLASSES[name]
    of_class = {"rank": 2} if issubclass(layer_class, GeneratorLinear) else _ARGUMENTS.get(name, {})
    return partial(layer_class, **of_class | arguments)


# Each is called as factory(in_features, out_features, ...).
CLASSES = {_NAMES.get(n, re.sub("(?<=[a-z])([A-Z])", r"_\1", n).lower()): _factory(n) for n in STRUCTURED_CLASSES}
FACTORIES = CLASSES | {variant: _factory(name, **arguments) for variant, (name, arguments) in _VARIANTS.items()}
NAMES = list(FACTORIES)
SIZES = [(12, 12), (12, 7), (7, 12), (33, 3), (3, 33), (1, 5), (5, 1), (1, 1)]
"""Inputs and outputs."""


def make(name, in_features=12, out_features=7, **options):
    """A layer of a case in float64, with operators and a bias that are not those of the start."""
    factory, smallest = FACTORIES[name], min(in_features, out_features)
    most = {"rank": smallest, "blocks": smallest, "parameters": in_features * out_features}
    arguments = {key: min(value, most[key]) if key in most else value for key, value in factory.keywords.items()}
    torch.manual_seed(0)
    layer = factory.func(in_features, out_features, **{"dtype": torch.float64, **arguments, **options})
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith(("_a", "_b", "bias")):
                parameter.add_(torch.randn_like(parameter), alpha=1 if key == "bias" else 0.1)
    return layer


def linear_of(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


class Conv1D(nn.Module):
    """As that of transformers."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


register_layer(Conv1D, Matrix("weight", "bias", transposed=True))


class Dense(nn.Module):
    """The reference for a layer: x Mᵀ + b with :func:`dense_matrix`, differentiable in the parameters of the layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = x @ dense_matrix(self.layer).T
        return y if self.layer.bias is None else y + self.layer.bias


def reference(layer, x):
    return Dense(layer)(x)


def dense_matrix(layer):
    """M, (out_features, in_features), by the formula of the class, with gradients to the parameters."""
    return _FORMULAS[type(layer).__name__](layer)[: layer.out_features, : layer.in_features]


def krylov_sum(A, B, G, H, powers):
    """Equation (2) of Thomas et al., Σ_i K(A, g_i) K(B, h_i)ᵀ = Σ_j Aʲ G (Bʲ H)ᵀ."""
    M = 0
    for _ in range(powers):
        M, G, H = M + G @ H.T, A @ G, B @ H
    return M


def cyclic(below, corner):
    """The matrix with entries below the diagonal, and a corner at the upper right."""
    unit = below.new_zeros(len(below) + 1, len(below) + 1)
    unit[0, -1] = 1
    return torch.diag(below, -1) + corner * unit


def shift(generators, corner):
    return cyclic(generators.new_ones(len(generators) - 1), corner)


def hadamard(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _ldr(operator):
    def matrix(layer):
        A, B = operator(layer, "a"), operator(layer, "b")
        return krylov_sum(A, B, layer.G, layer.H, min(len(A), len(B)))

    return matrix


def _subdiagonal(layer, side):
    corner = getattr(layer, f"corner_{side}")
    return cyclic(getattr(layer, f"subdiagonal_{side}"), 0 if corner is None else corner)


def _tridiagonal(layer, side):
    below, diagonal, above, corners = (
        getattr(layer, f"{entries}_{side}") for entries in ("subdiagonal", "diagonal", "superdiagonal", "corners")
    )
    corners = (0, 0) if corners is None else corners
    return cyclic(below, corners[0]) + torch.diag(diagonal) + cyclic(above, corners[1]).T


def _toeplitz(layer, transposed=False):
    Z = shift(layer.H, -1)
    powers = min(len(layer.G), len(layer.H))
    return krylov_sum(shift(layer.G, 1), Z.T if transposed else Z, layer.G, layer.H, powers)


def _circulant(layer):
    rows, columns = torch.arange(layer.out_features)[:, None], torch.arange(layer.in_features)
    return layer.column[(rows - columns) % len(layer.column)]


def _fastfood(layer):
    left, right = hadamard(layer.length)[: layer.out_features], hadamard(layer.length)[:, : layer.in_features]
    return layer.S[:, None] * left[:, : len(layer.G)] @ (layer.G[:, None] * right[layer.order] * layer.B)


def _randomized_hadamard(layer):
    left, right = hadamard(layer.length)[: layer.out_features], hadamard(layer.length)[:, : layer.in_features]
    return sum(
        T[:, None] * left[:, : len(g)] @ (g[:, None] * right[order % layer.length] * S)
        for T, S, g, order in zip(layer.output_signs, layer.input_signs, layer.G, layer.order, strict=True)
    )


def _pruned(layer):
    entries = layer.values.new_zeros(layer.out_features * layer.in_features)
    return entries.scatter(0, layer.places, layer.values).view(layer.out_features, layer.in_features)


def _monarch(layer):
    """P L Pᵀ R: L and R as block-diagonal matrices, P as indices."""
    b, r, s = layer.blocks, layer.rank, layer.L.shape[1]
    between = torch.arange(b * b * r).view(b, b, r).transpose(0, 1).flatten()  # from (k, l, t) to (l, k, t)
    outputs = torch.arange(b * s).view(b, s).T.flatten()  # from (l, s) to (s, l)
    return (torch.block_diag(*layer.L) @ torch.block_diag(*layer.R)[between])[outputs]


_FORMULAS = {
    "LDRSubdiagonal": _ldr(_subdiagonal),
    "LDRTridiagonal": _ldr(_tridiagonal),
    "ToeplitzLike": _toeplitz,
    "HankelLike": partial(_toeplitz, transposed=True),
    "VandermondeLike": lambda of: krylov_sum(torch.diag(of.nodes), shift(of.H, 0), of.G, of.H, len(of.H)),
    "CauchyLike": lambda of: of.G @ of.H.T / (of.row_nodes[:, None] - of.column_nodes),
    "LowRank": lambda of: of.G @ of.H.T,
    "Monarch": _monarch,
    "Circulant": _circulant,
    "Fastfood": _fastfood,
    "RandomizedHadamard": _randomized_hadamard,
    "PrunedLinear": _pruned,
}
