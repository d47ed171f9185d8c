"""Partial derivatives of a function of points, one coordinate at a time, as in differential equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import jvp

from lightning_struct.functional.checks import checked


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


@runtime_checkable
class HasLaplacian(Protocol):
    """A function with a Laplacian of its own, which :func:`laplacian` then takes."""

    def laplacian(self, points: Tensor, coordinates: Sequence[int]) -> Tensor:
        """The Laplacian, as :func:`laplacian` returns it."""


@checked
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

    Returns:
        Derivatives: values (n,) and derivatives (n,) by coordinate, in the dtype of the values.

    Raises:
        TypeError: coordinates that are no list.
        ValueError: the points are not (n, d), or have no such coordinate; the function's values are not (n,).

    Example:
        >>> points = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> values, first, second = partial_derivatives(lambda x: x[:, 0] ** 2 * x[:, 1], points, once=[1], twice=[0])
        >>> values, first[0], first[1], second[0]
        (tensor([ 2., 36.]), tensor([ 4., 24.]), tensor([1., 9.]), tensor([4., 8.]))
    """
    _check_coordinates(points, once=once, twice=twice)
    if isinstance(function, DifferentiatesItself):
        return function.partial_derivatives(points, once, twice)
    if torch.is_inference_mode_enabled():  # in which derivatives are zero by torch 2.6
        with torch.inference_mode(False), torch.no_grad():
            return partial_derivatives(function, points.clone(), once=once, twice=twice)
    values = function(points)
    first: dict[int, Tensor] = {}
    second: dict[int, Tensor] = {}
    if values.shape != points.shape[:1]:
        several = values.ndim == 2 and values.shape[1] > 1
        remedy = "take them one by one, as lambda x: u(x)[:, 0]" if several else "squeeze its last dimension"
        returned = f"the function returns values {tuple(values.shape)} at {len(points)} points"
        raise ValueError(f"{returned}, but must return one number for each: {remedy}")
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


@checked
def laplacian(function: Callable[[Tensor], Tensor], points: Tensor, coordinates: Sequence[int] | None = None) -> Tensor:
    """Sum of the pure second derivatives of a function at points: (n,).

    Args:
        function: maps points (n, d) to values (n,), each row by itself.
        points: (n, d), floating dtype.
        coordinates: those of space; None for all.

    Raises:
        TypeError, ValueError: as :func:`partial_derivatives`.

    Example:
        >>> laplacian(lambda x: (x**2).sum(1), torch.rand(4, 3))
        tensor([6., 6., 6., 6.])
    """
    _check_coordinates(points, coordinates=() if coordinates is None else coordinates)
    twice = range(points.shape[1]) if coordinates is None else coordinates
    if isinstance(function, HasLaplacian):
        return function.laplacian(points, twice)
    return torch.stack(list(partial_derivatives(function, points, twice=twice).second.values())).sum(0)


def tanh_network_derivatives(
    layers: Sequence[nn.Module], points: Tensor, once: Sequence[int], twice: Sequence[int]
) -> Derivatives:
    """Derivatives of ``Linear`` layers with ``Tanh`` between them, carried from layer to layer.

    The numbers are those of :func:`partial_derivatives`, several times sooner: all derivatives pass a layer in one
    product, the first one at no cost for each point.

    Args:
        layers: ``Linear`` and ``Tanh``, the last with one output.
        points: (n, d).
        once: coordinates of first derivatives.
        twice: coordinates of first and second derivatives.

    Raises:
        TypeError: another layer.
    """
    coordinates = list(dict.fromkeys(chain(twice, once)))  # those of second derivatives come first
    count = len(set(twice))
    values, first, second = _through_tanh_network(layers, points, coordinates, lambda squares: squares[:count])
    by_coordinate = dict(zip(coordinates, first, strict=True))
    return Derivatives(values, by_coordinate, dict(zip(coordinates[:count], second, strict=True)))


def tanh_network_laplacian(layers: Sequence[nn.Module], points: Tensor, coordinates: Sequence[int]) -> Tensor:
    """:func:`laplacian` of such layers, carried as one sum: (n,).

    Args:
        layers: ``Linear`` and ``Tanh``, the last with one output.
        points: (n, d).
        coordinates: those of space, at least one.

    Raises:
        TypeError: another layer.
    """
    return _through_tanh_network(layers, points, coordinates, lambda squares: squares.sum(0, keepdim=True))[2][0]


def _through_tanh_network(
    layers: Sequence[nn.Module], points: Tensor, coordinates: Sequence[int], of_squares: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Values (n,), first derivatives (k, n), and second derivatives or sums of them (c, n).

    Args:
        layers, points: see :func:`tanh_network_derivatives`.
        coordinates: the k of the first derivatives.
        of_squares: linear map (k, n, units) -> (c, n, units), from the squares of first derivatives to those sums of
            them that drive the second derivatives.
    """
    first = points.new_zeros(len(coordinates), 1, points.shape[1])  # the same at all points, up to the first Tanh
    for row, coordinate in enumerate(coordinates):
        first[row, 0, coordinate] = 1.0
    parts = [points[None], first, torch.zeros_like(of_squares(first))]
    of_points = False
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if of_points and layer.out_features > 1:
                parts = list((torch.cat(parts) @ layer.weight.mT).split([len(part) for part in parts]))
            else:
                parts = [part @ layer.weight.mT for part in parts]
            if layer.bias is not None:
                parts[0] = parts[0] + layer.bias
        elif isinstance(layer, nn.Tanh):
            value, first, second = parts[0].tanh(), parts[1], parts[2]
            slope = 1 - value * value
            # (tanh z)'' = tanh' z'' + tanh'' (z')², tanh'' = -2 tanh tanh'
            parts = [value, slope * first, slope * (second - 2 * value * of_squares(first * first))]
            of_points = True
        else:
            raise TypeError(f"only Linear and Tanh are differentiated so, not {type(layer).__name__}")
    value, first, second = (part.squeeze(-1).expand(-1, len(points)) for part in parts)
    return value[0], first, second


def _check_coordinates(points: Tensor, **given: Sequence[int]) -> None:
    if points.ndim != 2:
        raise ValueError(f"points are (n, d), but these are {tuple(points.shape)}: give (n, 1), as points[:, None]")
    d = points.shape[1]
    for name, coordinates in given.items():
        if isinstance(coordinates, int):
            raise TypeError(f"{name}={coordinates} must be a list of coordinates: {name}=[{coordinates}]")
        if unknown := [coordinate for coordinate in coordinates if not -d <= coordinate < d]:
            raise ValueError(f"{name}={list(coordinates)} names coordinate {unknown[0]} of points ({len(points)}, {d})")


def _unit(points: Tensor, coordinate: int) -> Tensor:
    """The unit vector along a coordinate, at each of the points."""
    return torch.zeros_like(points).index_fill(1, torch.tensor([coordinate], device=points.device), 1.0)
