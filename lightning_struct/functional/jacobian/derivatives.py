"""Partial derivatives of a function of points, one coordinate at a time, as in differential equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp

from lightning_struct.functional.checks import checked, require_real

# Waves of a periodic coordinate that a network sees.
_HARMONICS = 4


_ByCoordinate: TypeAlias = Mapping[int, Tensor]
# Periods by coordinate, or coordinates with period 2.
Periodic: TypeAlias = Mapping[int, float] | Sequence[int]


class _Derivatives(NamedTuple):
    values: Tensor
    first: _ByCoordinate
    second: _ByCoordinate


class Derivatives(_Derivatives):
    """A function's values at n points, and its derivatives by coordinate: all tensors are (n,), or (n, k).

    It unpacks as ``values, first, second``.

    Attributes:
        values: of the function.
        first: ∂u/∂x_i by i, for every coordinate that was asked for.
        second: ∂²u/∂x_i² by i, for those that were asked for twice or thrice.
        third: ∂³u/∂x_i³ by i, for those that were asked for thrice.
    """

    third: _ByCoordinate

    def __new__(  # noqa: PYI034
        cls, values: Tensor, first: _ByCoordinate, second: _ByCoordinate, third: _ByCoordinate = MappingProxyType({})
    ) -> Derivatives:
        derivatives = super().__new__(cls, values, first, second)
        derivatives.third = third
        return derivatives


@checked
def partial_derivatives(
    function: Callable[[Tensor], Tensor],
    points: Tensor,
    *,
    once: Sequence[int] = (),
    twice: Sequence[int] = (),
    thrice: Sequence[int] = (),
) -> Derivatives:
    """Values of a function at points, with its first and pure second and third derivatives along coordinates.

    The derivatives are taken forwards, by ``torch.func.jvp``, all points and all outputs at once; they can be
    differentiated in the function's parameters, by autograd and by ``torch.func``.

    Args:
        function: maps points (n, d) to values (n,), or (n, k) for k > 1 functions, each row by itself. An object with a
            method ``partial_derivatives(points, once, twice)`` is asked for them.
        points: (n, d), floating dtype.
        once: coordinates of first derivatives.
        twice: coordinates of first and second derivatives.
        thrice: coordinates of first, second and third derivatives.

    Returns:
        Derivatives: values and derivatives by coordinate, (n,) or (n, k), in the dtype of the values.

    Raises:
        TypeError: coordinates that are no list.
        ValueError: the points are not (n, d), or have no such coordinate; the function's values are neither (n,) nor
            (n, k) with k > 1.

    Example:
        >>> points = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> values, first, second = partial_derivatives(lambda x: x[:, 0] ** 2 * x[:, 1], points, once=[1], twice=[0])
        >>> values, first[0], first[1], second[0]
        (tensor([ 2., 36.]), tensor([ 4., 24.]), tensor([1., 9.]), tensor([4., 8.]))
    """
    _check_coordinates(points, once=once, twice=twice, thrice=thrice)
    own = getattr(function, "partial_derivatives", None)
    if own is not None:
        return own(points, once, twice, *([thrice] if thrice else []))
    if torch.is_inference_mode_enabled():  # torch 2.6 gives derivatives of zero here
        with torch.inference_mode(False), torch.no_grad():
            return partial_derivatives(function, points.clone(), once=once, twice=twice, thrice=thrice)
    values = function(points)
    of_several = values.ndim == 2 and len(values) == len(points) and values.shape[1] > 1
    if values.shape != points.shape[:1] and not of_several:
        returned = f"the function returns values {tuple(values.shape)} at {len(points)} points"
        raise ValueError(f"{returned}, but must return one number for each: squeeze its last dimension")
    orders = {**dict.fromkeys(once, 1), **dict.fromkeys(twice, 2), **dict.fromkeys(thrice, 3)}
    found: list[dict[int, Tensor]] = [{}, {}, {}]
    for coordinate, order in orders.items():
        for of_order, derivative in zip(found, _along(function, points, coordinate, order), strict=False):
            of_order[coordinate] = derivative
    return Derivatives(values, *found)


def _along(function: Callable[[Tensor], Tensor], points: Tensor, coordinate: int, order: int) -> tuple[Tensor, ...]:
    """The derivatives of orders 1 to ``order`` along a coordinate."""
    along = torch.zeros_like(points).index_fill(1, torch.tensor([coordinate], device=points.device), 1.0)
    if order == 1:
        return (jvp(function, (points,), (along,))[1],)
    lower, slopes = jvp(lambda x: _along(function, x, coordinate, order - 1), (points,), (along,))[:2]
    return (*lower, slopes[-1])


@checked
def laplacian(function: Callable[[Tensor], Tensor], points: Tensor, coordinates: Sequence[int] | None = None) -> Tensor:
    """Sum of the pure second derivatives of a function at points: (n,), or (n, k).

    Args:
        function: maps points (n, d) to values (n,), or (n, k) for k > 1 functions, each row by itself. An object with a
            method ``laplacian(points, coordinates)`` is asked for it.
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
    if not twice:
        raise ValueError(f"coordinates must name one of points {tuple(points.shape)} at least, got {coordinates!r}")
    if hasattr(function, "laplacian"):
        return function.laplacian(points, twice)
    return torch.stack(list(partial_derivatives(function, points, twice=twice).second.values())).sum(0)


def tanh_network_derivatives(
    layers: Sequence[nn.Module],
    points: Tensor,
    once: Sequence[int],
    twice: Sequence[int],
    thrice: Sequence[int] = (),
    periodic: Periodic = (),
) -> Derivatives:
    """Derivatives of ``Linear`` layers with ``Tanh`` between them, carried from layer to layer.

    The numbers are those of :func:`partial_derivatives`, several times sooner: all derivatives pass a layer in one
    product, the first one at no cost for each point.

    Args:
        layers: ``Linear`` and ``Tanh``.
        points: (n, d).
        once: coordinates of first derivatives.
        twice: coordinates of first and second derivatives.
        thrice: coordinates of first, second and third derivatives.
        periodic: coordinates that the layers see as :func:`periodic_inputs` has them.

    Raises:
        TypeError: another layer.
    """
    coordinates = list(dict.fromkeys(chain(thrice, twice, once)))  # those of the highest derivatives come first
    count, highest = len({*thrice, *twice}), len(set(thrice))
    values, *orders = _through_tanh_network(
        layers, points, coordinates, lambda squares: squares[:count], highest, periodic
    )
    return Derivatives(values[0], *(dict(zip(coordinates, order, strict=False)) for order in orders))


def tanh_network_laplacian(
    layers: Sequence[nn.Module], points: Tensor, coordinates: Sequence[int], periodic: Periodic = ()
) -> Tensor:
    """:func:`laplacian` of such layers, carried as one sum: (n,), or (n, k) for k outputs.

    Args:
        layers: ``Linear`` and ``Tanh``.
        points: (n, d).
        coordinates: those of space, at least one.
        periodic: coordinates that the layers see as :func:`periodic_inputs` has them.

    Raises:
        TypeError: another layer.
    """
    parts = _through_tanh_network(
        layers, points, coordinates, lambda squares: squares.sum(0, keepdim=True), 0, periodic
    )
    return parts[2][0]


def periodic_inputs(points: Tensor, periodic: Periodic, along: int | None = None, order: int = 0) -> Tensor:
    """Points with cos 2πjx/p and sin 2πjx/p, j = 1 to 4, in place of coordinates x with period p: (n, d + 7 periodic).

    Args:
        points: (n, d).
        periodic: the periods by coordinate, or the coordinates with period 2.
        along: coordinate of the derivative; None for the values themselves.
        order: of the derivative.
    """
    harmonics = torch.arange(1, _HARMONICS + 1, device=points.device, dtype=points.dtype)
    inputs = []
    for i, x in enumerate(points.split(1, dim=1)):
        if along is not None and along % points.shape[1] != i:
            inputs.append(x.new_zeros(len(x), 2 * _HARMONICS if i in periodic else 1))
        elif i in periodic:
            waves = 2 * math.pi / (periodic[i] if isinstance(periodic, Mapping) else 2.0) * harmonics
            angles = x * waves + order * math.pi / 2  # each derivative turns cosine and sine by a quarter
            inputs += [waves**order * angles.cos(), waves**order * angles.sin()]
        else:
            inputs.append(torch.full_like(x, float(order == 1)) if order else x)
    return torch.cat(inputs, dim=1)


def _through_tanh_network(
    layers: Sequence[nn.Module],
    points: Tensor,
    coordinates: Sequence[int],
    of_squares: Callable[[Tensor], Tensor],
    thrice: int,
    periodic: Periodic,
) -> list[Tensor]:
    """Values (1, n), first derivatives (k, n), second derivatives or sums of them (c, n), and third ones, if any.

    All have the outputs as another dimension, if there are several.

    Args:
        layers, points, periodic: see :func:`tanh_network_derivatives`.
        coordinates: the k of the first derivatives.
        of_squares: linear map (k, n, units) -> (c, n, units), from the squares of first derivatives to those sums of
            them that drive the second derivatives.
        thrice: number of the coordinates, from the first on, of third derivatives.
    """
    if others := {part.weight.dtype for part in layers if isinstance(part, nn.Linear)} - {points.dtype}:
        raise TypeError(f"points are {points.dtype}, and the network has weights of {others.pop()}: convert one")
    if periodic and coordinates:
        orders = range(1, 4 if thrice else 3)
        along = [[periodic_inputs(points, periodic, i, order) for i in coordinates] for order in orders]
        first, second, *third = map(torch.stack, along)
        parts = [periodic_inputs(points, periodic)[None], first, of_squares(second), *(z[:thrice] for z in third)]
    else:
        value = periodic_inputs(points, periodic) if periodic else points
        first = value.new_zeros(len(coordinates), 1, value.shape[1])  # the same at all points, up to the first Tanh
        for row, coordinate in enumerate(coordinates):
            first[row, 0, coordinate] = 1.0
        parts = [value[None], first, torch.zeros_like(of_squares(first))]
        if thrice:
            parts.append(torch.zeros_like(first[:thrice]))
    of_points = bool(periodic and coordinates)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if of_points and layer.out_features > 1:
                parts = list((torch.cat(parts) @ layer.weight.mT).split([len(part) for part in parts]))
            else:
                parts = [part @ layer.weight.mT for part in parts]
            if layer.bias is not None:
                parts[0] = parts[0] + layer.bias
        elif isinstance(layer, nn.Tanh):
            value, first, second, *third = parts[0].tanh(), *parts[1:]
            slope = 1 - value * value
            # (tanh z)'' = tanh' z'' + tanh'' (z')², tanh'' = -2 tanh tanh', and the third is (6 tanh² - 2) tanh'
            parts = [value, slope * first, slope * (second - 2 * value * of_squares(first * first))]
            for z in third:
                cubes = (6 * value * value - 2) * first[:thrice] ** 3
                parts.append(slope * (z - 6 * value * first[:thrice] * second[:thrice] + cubes))
            of_points = True
        else:
            raise TypeError(f"only Linear and Tanh are differentiated so, not {type(layer).__name__}")
    return [part.expand(-1, len(points), -1).squeeze(-1) for part in parts]


def _check_coordinates(points: Tensor, **given: Sequence[int]) -> None:
    if points.ndim != 2:
        raise ValueError(f"points are (n, d), but these are {tuple(points.shape)}: give (n, 1), as points[:, None]")
    require_real(points=points)
    d = points.shape[1]
    for name, coordinates in given.items():
        if isinstance(coordinates, int):
            raise TypeError(f"{name}={coordinates} must be a list of coordinates: {name}=[{coordinates}]")
        if unknown := [coordinate for coordinate in coordinates if not -d <= coordinate < d]:
            raise ValueError(f"{name}={list(coordinates)} names coordinate {unknown[0]} of points ({len(points)}, {d})")
