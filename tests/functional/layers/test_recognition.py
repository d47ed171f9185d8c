"""Layers of unknown types are served by the rules of what they compute, and else by none."""

import contextlib
import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional import per_sample_gradient_norms
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.registry import kind_of
from lightning_struct.nn import LowRank, replace_linear
from lightning_struct.optim import RLS
from tests.cases import gaussian
from tests.functional.layers.test_layers import Memory, RootMeanSquare, Transposed, assert_norms_are_those_of_autograd


class LayerDrop(nn.Linear):
    """Draws from the generators of Python and NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() + numpy.random.random() < 1 else x


def test_measuring_a_layer_leaves_the_generators_of_python_and_numpy_alone() -> None:
    numbers = []
    for measured in (False, True):
        random.seed(0)
        numpy.random.seed(0)
        model = nn.Sequential(LayerDrop(3, 3), nn.Linear(3, 1))
        with per_sample_gradient_norms(model) if measured else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(torch.randn(4, 3)).sum().backward()
        numbers.append((random.random(), numpy.random.random()))
    assert numbers[0] == numbers[1]


class GemmaNorm(RootMeanSquare):
    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class LengthNorm(nn.Module):
    """The usual small class: ‖x‖ in place of the mean square, its own names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.g


class FastLayerNorm(nn.LayerNorm):
    """As timm's ``LayerNorm``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """As timm's: over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ChannelScale(nn.Module):
    """Of the second dimension, with any number of others behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * self.gamma.view(shape) + self.beta.view(shape)


class NormOfAnything(nn.LayerNorm):
    """Over the channels, which images have in the second dimension and all else in the last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4 else super().forward(x)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class GraphLinear(nn.Module):
    """As the ``Linear`` of PyTorch Geometric."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PaddedConv(nn.Conv2d):
    """As timm's ``Conv2dSame`` where nothing is to be padded."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def randomized(layer: nn.Module) -> nn.Module:
    layer = layer.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer


RECOGNIZED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Llama's norm": (lambda: RootMeanSquare(4), gaussian(5, 3, 4)),
    "Gemma's norm": (lambda: GemmaNorm(4), gaussian(5, 2, 3, 4)),
    "norm by length": (lambda: LengthNorm(4), gaussian(5, 4)),
    "layer norm": (lambda: FastLayerNorm(4), gaussian(5, 3, 4)),
    "layer norm of images": (lambda: LayerNorm2d(4), gaussian(5, 4, 3, 2)),
    "layer scale": (lambda: LayerScale(4), gaussian(5, 3, 4)),
    "channel scale of rows": (lambda: ChannelScale(4), gaussian(5, 4)),
    "channel scale of sequences": (lambda: ChannelScale(4), gaussian(5, 4, 4)),
    "channel scale of images": (lambda: ChannelScale(4), gaussian(5, 4, 3, 2)),
    "norm of images or rows, of images": (lambda: NormOfAnything(4), gaussian(5, 4, 3, 4)),
    "norm of images or rows, of sequences": (lambda: NormOfAnything(4), gaussian(5, 3, 4)),
    "norm of volumes": (lambda: RootMeanSquare(4), gaussian(5, 2, 3, 2, 4)),
    "temperature": (lambda: Temperature(), gaussian(5, 3, 4)),
    "transposed weight": (lambda: Transposed(4, 3), gaussian(5, 2, 4)),
    "no bias": (lambda: GraphLinear(4, 3), gaussian(5, 2, 4)),
    "convolution": (lambda: PaddedConv(2, 3, 3, padding=1), gaussian(4, 2, 5, 5)),
    "lstm": (lambda: Memory(3, 4, num_layers=2, batch_first=True), gaussian(5, 6, 3)),
}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_norms_of_a_recognized_layer_are_those_of_autograd_without_a_second_run(name: str) -> None:
    make, inputs = RECOGNIZED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_norms_are_those_of_autograd(randomized(make()), inputs)


def test_an_lstm_that_packs_its_sequences_is_measured_in_the_call_of_its_base() -> None:
    layer = randomized(Memory(3, 4, batch_first=True))
    assert_norms_are_those_of_autograd(layer, gaussian(4, 6, 3), None, torch.tensor([6, 2, 5, 1]))
    assert type(layer) is Memory


def test_an_lstm_is_of_its_own_type_again_where_its_forward_fails() -> None:
    layer = Memory(3, 4)
    with per_sample_gradient_norms(layer), pytest.raises(RuntimeError):
        layer(torch.ones(2, 5, 2))
    assert type(layer) is Memory


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledRecurrence(nn.GRU):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(2 * x)


class Sharpened(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.gamma * x)


class Centered(LayerScale):
    """Couples the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.gamma


class Counting(LayerScale):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.gamma * self.calls


class Noisy(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x) * self.gamma


class Failing(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not with these inputs")


OTHERS = {
    "another product": lambda: Doubled(4, 4),
    "another recurrence": lambda: DoubledRecurrence(4, 4),
    "not affine": lambda: Sharpened(4),
    "samples together": lambda: Centered(4),
    "a state": lambda: Counting(4),
    "random": lambda: Noisy(4),
    "an error": lambda: Failing(4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_is_not_recognized(name: str) -> None:
    layer = OTHERS[name]()
    before, state = copy.deepcopy(vars(layer)), torch.get_rng_state()
    assert kind_of(layer) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(layer).keys() == before.keys() and vars(layer).get("calls") == before.get("calls")


def test_dropout_inside_of_a_recurrent_layer_hides_nothing() -> None:
    assert kind_of(Memory(3, 4, num_layers=2, dropout=0.5)) is not None


def test_recognition_goes_by_configuration_and_follows_a_setting_that_changes() -> None:
    layer = PaddedConv(2, 3, 3, padding="same", padding_mode="zeros")
    recognized = [kind_of(layer) is not None]
    layer.padding_mode = "circular"
    assert [*recognized, kind_of(layer) is not None] == [True, False]


def test_a_layer_with_another_below_it_is_not_taken_for_one_without() -> None:
    layers = LayerScale(3), LayerScale(3)
    layers[1].below = nn.Tanh()
    assert [kind_of(layer) is not None for layer in layers] == [True, False]


def test_a_recognized_type_is_not_kept_alive() -> None:
    class Passing(LayerScale):
        pass

    assert kind_of(Passing(3)) is not None
    reference = weakref.ref(Passing)
    del Passing
    gc.collect()
    assert reference() is None


def test_a_recognized_matrix_is_trained_replaced_and_told_from_its_transpose() -> None:
    assert "0.weight  full  5 x 5" in RLS(nn.Sequential(Transposed(4, 3))).summary()
    model = replace_linear(nn.Sequential(Transposed(4, 3)), lambda i, o, bias: LowRank(i, o, rank=1, bias=bias))
    assert model(torch.ones(2, 4)).shape == (2, 3)
    kind = kind_of(Transposed(4, 4))
    assert kind is not None and list(kind.matrices(None)) == [Matrix("weight", "bias", transposed=True)]
