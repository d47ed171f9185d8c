"""Products with the Jacobian by rules of recurrent layers and, where there is none, by torch's kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_struct.functional import Linearization, linearize
from lightning_struct.functional.jacobian.layer_derivatives import layer_derivatives
from tests.cases import dense_jacobian, flat, gaussian, random_like, trainable


class Reader(nn.Module):
    """All that a recurrent layer returns, after a linear layer: each sample's outputs and its last states."""

    def __init__(
        self, layer: nn.RNNBase, call: Callable[[nn.RNNBase, Tensor], Any] = lambda layer, x: layer(x)
    ) -> None:
        super().__init__()
        self.before, self.layer, self._call = nn.Linear(3, 3), layer, call

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        outputs, states = self._call(self.layer, x if self.layer.batch_first else x.transpose(0, 1))
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([outputs.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)], 1)


def linearized(module: nn.Module, inputs: Tensor) -> Linearization:
    return linearize(module, trainable(module), inputs, backend="double_backward")


def check_products(module: nn.Module, inputs: Tensor) -> None:
    """The values and both products against torch's kernels and the dense Jacobian by them."""
    linearization, jacobian = linearized(module, inputs), dense_jacobian(module, inputs).flatten(0, 1)
    v, u = random_like(trainable(module)), gaussian(*linearization.outputs.shape, seed=2)
    torch.testing.assert_close(linearization.outputs, module(inputs).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(linearization.jvp(v).reshape(-1), jacobian @ flat(v), rtol=0, atol=1e-10)
    torch.testing.assert_close(flat(linearization.vjp(u)), jacobian.T @ u.reshape(-1), rtol=0, atol=1e-10)


def reader(kind: type[nn.RNNBase], call: Any = None, **options: Any) -> Reader:
    torch.manual_seed(0)
    layer = kind(3, 4, **options)
    return (Reader(layer) if call is None else Reader(layer, call)).double()


TWO_LEVELS: dict[str, Any] = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (kind, options)
            for kind in (nn.RNN, nn.LSTM, nn.GRU)
            for options in ({"batch_first": True, **TWO_LEVELS}, {"bias": False})
        ),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.LSTM, {"proj_size": 2, **TWO_LEVELS}),
    ],
    ids=str,
)
def test_products_equal_the_dense_jacobian(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    check_products(reader(kind, **options), gaussian(2, 3, 3, seed=1))


@pytest.mark.covering(1)
@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_frozen_weights_of_a_layer_are_constants(kind: type[nn.RNNBase], frozen: str) -> None:
    module = reader(kind)
    module.layer.get_parameter(frozen).requires_grad_(False)
    check_products(module, gaussian(2, 3, 3, seed=1))


def one_after_another(layer: nn.RNNBase, x: Tensor) -> Any:
    _, states = layer(x)
    return layer(x, states)


def from_zero(layer: nn.RNNBase, x: Tensor) -> Any:
    return layer(x, x.new_zeros(1, x.shape[1], layer.hidden_size))


def packed(layer: nn.RNNBase, x: Tensor) -> Any:
    outputs, states = layer(pack_padded_sequence(x, torch.tensor([3, 2])))
    return pad_packed_sequence(outputs)[0], states


def doubled(layer: nn.RNNBase, x: Tensor) -> Any:
    outputs, states = layer(x)
    return outputs.mul_(2.0), states


CALLS = [(nn.LSTM, doubled), (nn.LSTM, one_after_another), (nn.RNN, from_zero), (nn.GRU, packed)]


@pytest.mark.parametrize(("kind", "call"), CALLS)
def test_calls_of_any_kind_are_those_of_torch(kind: type[nn.RNNBase], call: Any) -> None:
    check_products(reader(kind, call), gaussian(2, 3, 3, seed=1))


def test_a_layer_whose_weights_are_parametrized_is_linearised_in_their_parameters() -> None:
    module = reader(nn.GRU)
    weight_norm(module.layer, "weight_hh_l0")
    check_products(module, gaussian(2, 3, 3, seed=1))


def test_a_layer_keeps_its_forward_and_its_hooks() -> None:
    module, seen = reader(nn.GRU), []
    module.layer.register_forward_hook(lambda layer, args, output: seen.append(output[0].shape))
    linearized(module, gaussian(2, 3, 3, seed=1))
    assert seen == [(3, 2, 4)]
    assert "forward" not in vars(module.layer)


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    class Doubled(nn.GRU):
        def forward(self, *args: Any) -> Any:
            outputs, states = super().forward(*args)
            return 2 * outputs, states

    torch.manual_seed(0)
    check_products(Reader(Doubled(3, 4)).double(), gaussian(2, 3, 3, seed=1))


def test_under_autocast_a_layer_is_that_of_torch() -> None:
    layer = nn.GRU(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(torch.ones(4, 5, 3))
        with layer_derivatives(layer):
            found = layer(torch.ones(4, 5, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
