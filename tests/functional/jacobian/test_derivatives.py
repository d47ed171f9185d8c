import pytest
import torch
from torch import nn

from lightning_struct.functional import laplacian, partial_derivatives
from lightning_struct.functional.jacobian.derivatives import (
    periodic_inputs,
    tanh_network_derivatives,
    tanh_network_laplacian,
)


@pytest.fixture
def points():
    return torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def polynomial(x):
    return x[:, 0] ** 3 * x[:, 1] + x[:, 2].sin()


def test_derivatives_are_those_of_calculus(points):
    x, y, z = points.unbind(1)
    values, first, second = partial_derivatives(polynomial, points, once=[1], twice=[0, 2])
    torch.testing.assert_close(values, x**3 * y + z.sin())
    torch.testing.assert_close(dict(first), {0: 3 * x**2 * y, 1: x**3, 2: z.cos()})
    torch.testing.assert_close(dict(second), {0: 6 * x * y, 2: -z.sin()})


def test_derivatives_of_several_functions_and_of_order_three(points):
    x, y, z = points.unbind(1)
    found = partial_derivatives(
        lambda p: torch.stack([polynomial(p), p[:, 2] ** 4], 1), points, once=[1], thrice=[2, 0]
    )
    zero = torch.zeros_like(x)
    assert found.values.shape == (5, 2)
    torch.testing.assert_close(found.first[1], torch.stack([x**3, zero], 1))
    torch.testing.assert_close(found.second[2], torch.stack([-z.sin(), 12 * z**2], 1))
    torch.testing.assert_close(found.third, {2: torch.stack([-z.cos(), 24 * z], 1), 0: torch.stack([6 * y, zero], 1)})


def test_laplacian_is_over_the_coordinates_of_space(points):
    x, y, z = points.unbind(1)
    torch.testing.assert_close(laplacian(polynomial, points), 6 * x * y - z.sin())
    torch.testing.assert_close(laplacian(polynomial, points, coordinates=[0, 1]), 6 * x * y)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("bias", "periodic"), [(True, ()), (False, ()), (True, (0,)), (False, (2, 1))])
@pytest.mark.parametrize(
    ("once", "twice", "thrice"),
    [([], [], []), ([1], [], []), ([], [2, 0], []), ([2, 1], [0, 2], []), ([1], [2], [0]), ([], [], [1, 2])],
)
def test_network_carries_the_derivatives_of_torch(points, once, twice, thrice, bias, periodic):
    torch.manual_seed(0)
    inputs = periodic_inputs(points, periodic).shape[1]
    layers = nn.Sequential(
        nn.Linear(inputs, 6, bias), nn.Tanh(), nn.Linear(6, 4, bias), nn.Tanh(), nn.Linear(4, 1, bias)
    ).double()

    def network(x):
        return layers(periodic_inputs(x, periodic)).squeeze(-1)

    found = tanh_network_derivatives(list(layers), points, once, twice, thrice, periodic)
    expected = partial_derivatives(network, points, once=once, twice=twice, thrice=thrice)
    for order in ("first", "second", "third"):
        ours, reference = (dict(getattr(derivatives, order)) for derivatives in (found, expected))
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.values, expected.values)


@pytest.mark.covering(1)
@pytest.mark.parametrize("periodic", [(), (2,)])
@pytest.mark.parametrize("coordinates", [[0], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("hidden", [1, 2])
def test_network_carries_the_laplacian_of_torch(points, coordinates, hidden, periodic):
    torch.manual_seed(0)
    layers = [
        nn.Linear(periodic_inputs(points, periodic).shape[1], 4),
        nn.Tanh(),
        *[nn.Linear(4, 4), nn.Tanh()] * (hidden - 1),
        nn.Linear(4, 1),
    ]
    network = nn.Sequential(*layers).double()
    expected = laplacian(lambda x: network(periodic_inputs(x, periodic)).squeeze(-1), points, coordinates)
    torch.testing.assert_close(tanh_network_laplacian(list(network), points, coordinates, periodic), expected)


def test_derivatives_can_be_differentiated_in_the_weights(points):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(*weights):
        named = dict(zip(dict(layers.named_parameters()), weights, strict=True))
        return laplacian(lambda x: torch.func.functional_call(layers, named, (x,)).squeeze(-1), points).square().sum()

    assert torch.autograd.gradcheck(loss, tuple(layers.parameters()))


@pytest.mark.parametrize(
    ("function", "shape", "arguments", "message"),
    [
        (polynomial, (5, 3), {"once": [3]}, r"once=\[3\] names coordinate 3 of points \(5, 3\)"),
        (polynomial, (5, 3), {"twice": [0, 7]}, r"twice=\[0, 7\] names coordinate 7"),
        (torch.sin, (5,), {"once": [0]}, r"points are \(n, d\), but these are \(5,\): give \(n, 1\), as points"),
        (torch.sin, (5, 1), {"thrice": [0]}, r"values \(5, 1\) at 5 points, but must .* squeeze"),
        (torch.sin, (5, 2), {"thrice": [2]}, r"thrice=\[2\] names coordinate 2"),
    ],
)
def test_an_error_names_points_and_coordinates(function, shape, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        partial_derivatives(function, torch.zeros(shape), **arguments)


@torch.inference_mode()
def test_derivatives_in_inference_mode():
    points = torch.rand(3, 2, dtype=torch.float64)
    _, first, second = partial_derivatives(lambda x: x[:, 0] ** 2 * x[:, 1], points, once=[1], twice=[0])
    torch.testing.assert_close(first[1], points[:, 0] ** 2)
    torch.testing.assert_close(second[0], 2 * points[:, 1])
