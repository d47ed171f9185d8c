"""Sensitivity of a structured matrix to its weights."""

from __future__ import annotations

import torch
from torch import nn

from lightning_struct.nn.structured import StructuredLinear


def jacobian_norms(layer: StructuredLinear | nn.Linear, iterations: int = 20) -> dict[str, float]:
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
    weights = {name: getattr(layer, name) for name in layer.weight_names}
    trained = {name: weight for name, weight in weights.items() if weight is not None and weight.requires_grad}
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
