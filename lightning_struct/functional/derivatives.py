"""Partial derivatives of a function of points, one coordinate at a time: what differential equations are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import jvp


class Derivatives(NamedTuple):
    """A function's values at n points, and its derivatives by coordinate: all tensors are (n,).

    Attributes:
        values: of the function.
        first: ∂u/∂x_i by i, for every coordinate that was asked for.
        second: ∂²u/∂x_i² by i, for those that were asked for twice.
    """

    values: Tensor
    first: Mapping[int, Tensor]
    second: Mapping[int, Tensor]


@runtime_checkable
class DifferentiatesItself(Protocol):
    """A function with derivatives of its own, which :func:`partial_derivatives` then takes."""

    def partial_derivatives(self, points: Tensor, once: Sequence[int], twice: Sequence[int]) -> Derivatives:
        """The derivatives, as :func:`partial_derivatives` returns them."""


def partial_derivatives(
    function: Callable[[Tensor], Tensor], points: Tensor, *, once: Sequence[int] = (), twice: Sequence[int] = ()
) -> Derivatives:
    """Values of a function at points, with its first and pure second derivatives along coordinates.

    The derivatives are taken forwards, by ``torch.func.jvp``, all points at once; they can be differentiated in the
    function's parameters, by autograd and by ``torch.func``.

    Args:
        function: maps points (n, d) to values (n,), each row by itself.
        points: (n, d), floating dtype.
        once: coordinates of first derivatives.
        twice: coordinates of first and second derivatives.

    Raises:
        ValueError: the function's values are not (n,).

    Example:
        >>> points = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> values, first, second = partial_derivatives(lambda x: x[:, 0] ** 2 * x[:, 1], points, once=[1], twice=[0])
        >>> values, first[0], first[1], second[0]
        (tensor([ 2., 36.]), tensor([ 4., 24.]), tensor([1., 9.]), tensor([4., 8.]))
    """
    if isinstance(function, DifferentiatesItself):
        return function.partial_derivatives(points, once, twice)
    values = function(points)
    first: dict[int, Tensor] = {}
    second: dict[int, Tensor] = {}
    if values.shape != points.shape[:1]:
        raise ValueError(
            f"the function returns values {tuple(values.shape)} at {len(points)} points, where one number for each is "
            "needed: squeeze its last dimension"
        )
    for coordinate in twice:
        along = _unit(points, coordinate)

        def slope(x: Tensor, along: Tensor = along) -> Tensor:
            return jvp(function, (x,), (along,))[1]

        slopes, curvatures = jvp(slope, (points,), (along,))[:2]
        first[coordinate], second[coordinate] = slopes, curvatures
    for coordinate in once:
        if coordinate not in first:
            first[coordinate] = jvp(function, (points,), (_unit(points, coordinate),))[1]
    return Derivatives(values, first, second)


def laplacian(function: Callable[[Tensor], Tensor], points: Tensor, coordinates: Sequence[int] | None = None) -> Tensor:
    """Sum of the pure second derivatives of a function at points: (n,).

    Args:
        function: maps points (n, d) to values (n,), each row by itself.
        points: (n, d), floating dtype.
        coordinates: those of space; None for all.

    Example:
        >>> laplacian(lambda x: (x**2).sum(1), torch.rand(4, 3))
        tensor([6., 6., 6., 6.])
    """
    twice = range(points.shape[1]) if coordinates is None else coordinates
    return torch.stack(list(partial_derivatives(function, points, twice=twice).second.values())).sum(0)


def tanh_network_derivatives(
    layers: Sequence[nn.Module], points: Tensor, once: Sequence[int], twice: Sequence[int]
) -> Derivatives:
    """Derivatives of ``Linear`` layers with ``Tanh`` between them, carried from layer to layer.

    The numbers are those of :func:`partial_derivatives`, several times sooner: all derivatives pass a layer in one
    product.

    Args:
        layers: ``Linear`` and ``Tanh``, the last with one output.
        points: (n, d).
        once: coordinates of first derivatives.
        twice: coordinates of first and second derivatives.

    Raises:
        TypeError: another layer.
    """
    coordinates = list(dict.fromkeys(chain(twice, once)))  # those of second derivatives come first
    count, firsts = len(set(twice)), len(coordinates)
    # (1 + firsts + count, n, units): values, first derivatives, second derivatives
    directions = torch.stack([_unit(points, coordinate) for coordinate in coordinates]) if coordinates else None
    rows = (
        points[None]
        if directions is None
        else torch.cat([points[None], directions, torch.zeros_like(directions[:count])])
    )
    for layer in layers:
        if isinstance(layer, nn.Linear):
            rows = rows @ layer.weight.mT
            if layer.bias is not None:
                rows = torch.cat([rows[:1] + layer.bias, rows[1:]])
        elif isinstance(layer, nn.Tanh):
            value = rows[:1].tanh()
            slope = 1 - value * value
            first, second = rows[1 : 1 + firsts], rows[1 + firsts :]
            # (tanh z)'' = tanh' z'' + tanh'' (z')², tanh'' = -2 tanh tanh'
            rows = torch.cat([value, slope * first, slope * (second - 2 * value * first[:count] * first[:count])])
        else:
            raise TypeError(f"only Linear and Tanh are differentiated so, not {type(layer).__name__}")
    values, first, second = rows.squeeze(-1).split([1, firsts, count])
    return Derivatives(
        values[0],
        dict(zip(coordinates, first, strict=True)),
        dict(zip(coordinates, second, strict=False)),
    )


def _unit(points: Tensor, coordinate: int) -> Tensor:
    """The unit vector along a coordinate, at each of the points."""
    return torch.zeros_like(points).index_fill(1, torch.tensor([coordinate], device=points.device), 1.0)
