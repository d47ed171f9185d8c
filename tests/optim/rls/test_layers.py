"""RLS of every kind of layer against its plain definition, float64, to 1e-12 over six steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_struct.optim import RLS
from tests.cases import First
from tests.optim.rls.reference import Reference, recorded_rows
from tests.optim.rls.twins import descend, first_step, weights

STEPS = 6


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    """Two layers with one weight and a bias each, and a third without a bias, which read different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x[:3])))))


class Recurrent(nn.Module):
    def __init__(self, kind, packed=False, initial=False, **options):
        super().__init__()
        self.layer = kind(3, 4, **options)
        self.packed, self.initial = packed, initial

    def forward(self, x):
        batch_first = self.layer.batch_first
        inputs = x if batch_first or x.ndim == 2 else x.transpose(0, 1)
        hx = None
        if self.initial:
            levels = self.layer.num_layers * (1 + self.layer.bidirectional)
            hx = torch.linspace(-1, 1, levels * len(x) * 4, dtype=x.dtype).view(levels, len(x), 4)
            hx = (hx, hx.flip(1)) if isinstance(self.layer, nn.LSTM) else hx
        if self.packed:
            lengths = torch.tensor([2, 5, 3, 1])[: len(x)]
            inputs = pack_padded_sequence(inputs, lengths, batch_first=batch_first, enforce_sorted=False)
        output = self.layer(inputs, hx)[0]
        return output.data if self.packed else output


def seed_of(index):
    return torch.Generator().manual_seed(100 + index)


def inputs(*shape):
    """Batches with a mean that is not zero."""
    return lambda step: torch.randn(shape, generator=seed_of(step), dtype=torch.float64) + 0.5


CONVOLUTIONS = [
    ("conv1d", lambda: nn.Conv1d(3, 4, 3), inputs(5, 3, 9)),
    ("conv2d", lambda: nn.Conv2d(3, 4, 3, padding=1), inputs(5, 3, 6, 5)),
    ("conv3d", lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1)), inputs(3, 2, 4, 5, 6)),
    ("strided_dilated", lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 3), dilation=(2, 1), padding=2), inputs(5, 3, 8, 7)),
    ("groups", lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), inputs(5, 4, 5, 5)),
    ("depthwise", lambda: nn.Conv2d(3, 6, 2, groups=3, bias=False), inputs(5, 3, 5, 5)),
    ("same_even", lambda: nn.Conv2d(2, 3, (4, 2), padding="same", dilation=(1, 2)), inputs(4, 2, 6, 7)),
    ("reflect", lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), inputs(4, 2, 5, 6)),
    ("circular", lambda: nn.Conv1d(2, 3, 4, padding=3, stride=2, padding_mode="circular"), inputs(4, 2, 6)),
    ("circular_same", lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), inputs(4, 2, 6, 5)),
    ("channels_last", lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), inputs(5, 3, 6, 6)),
]

LINEAR = [
    ("linear", lambda: nn.Linear(4, 3), inputs(9, 4)),
    ("vector", lambda: nn.Linear(4, 3), inputs(4)),
    ("positions", lambda: nn.Linear(4, 3, bias=False), inputs(2, 5, 3, 4)),
    ("few_rows", lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 12, bias=False)), inputs(3, 20)),
    ("in_place", lambda: nn.Sequential(nn.Linear(20, 15), nn.ReLU(inplace=True), nn.Linear(15, 12)), inputs(3, 20)),
    ("twice", Twice, inputs(7, 4)),
    ("tied", Tied, inputs(7, 4)),
]

RECURRENT = [
    (f"{kind.__name__}_{name}", lambda kind=kind, options=options: Recurrent(kind, **options), inputs(*shape))
    for kind in (nn.RNN, nn.LSTM, nn.GRU)
    for name, options, shape in [
        ("plain", {}, (4, 5, 3)),
        ("batch_first_no_bias", {"batch_first": True, "bias": False}, (4, 5, 3)),
        ("stacked", {"num_layers": 3, "batch_first": True}, (2, 5, 3)),
        ("bidirectional", {"num_layers": 2, "bidirectional": True, "initial": True}, (2, 5, 3)),
        ("packed", {"num_layers": 2, "bidirectional": True, "packed": True, "batch_first": True}, (4, 5, 3)),
        ("packed_initial", {"num_layers": 2, "packed": True, "initial": True}, (4, 5, 3)),
        ("one_sequence", {"num_layers": 2}, (5, 3)),
    ]
] + [("RNN_relu", lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2), inputs(3, 4, 3))]


def as_convolution(layer):
    """The convolution, of images with zeros between their places, that computes what a transposed convolution does."""
    dimensions = len(layer.kernel_size)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    plain = kind(layer.in_channels, layer.out_channels, layer.kernel_size, 1, 0, layer.dilation, layer.groups)
    plain.weight = nn.Parameter(in_the_order_of_a_convolution(layer, layer.weight.detach()))
    plain.bias = copy.deepcopy(layer.bias)
    steps = [slice(None, None, stride) for stride in layer.stride]
    edges = [d * (k - 1) - p for d, k, p in zip(layer.dilation, layer.kernel_size, layer.padding, strict=True)]
    pads = [(edge, edge + more) for edge, more in zip(edges, layer.output_padding, strict=True)]

    def spread(_, args):
        (images,) = args
        sizes = [(n - 1) * s + 1 for n, s in zip(images.shape[-dimensions:], layer.stride, strict=True)]
        with_zeros = images.new_zeros(*images.shape[:-dimensions], *sizes)
        with_zeros[(..., *steps)] = images
        return F.pad(with_zeros, [p for pair in reversed(pads) for p in pair])

    plain.register_forward_pre_hook(spread)
    return plain


def in_the_order_of_a_convolution(layer, weight):
    turned = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return turned.flip(tuple(range(2, turned.ndim)))


TRANSPOSED = [
    ("2d", lambda: nn.ConvTranspose2d(3, 4, 3, 2, padding=1, output_padding=1), inputs(4, 3, 4, 3)),
    ("3d", lambda: nn.ConvTranspose3d(2, 3, (1, 2, 3), (1, 2, 1), padding=(0, 1, 0)), inputs(3, 2, 2, 3, 3)),
    ("groups", lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), inputs(4, 4, 3, 3)),
    ("dilated", lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 3), (1, 0), (1, 2), dilation=(2, 1)), inputs(4, 2, 4, 3)),
    ("no_bias", lambda: nn.ConvTranspose1d(2, 3, 4, 2, bias=False), inputs(4, 2, 5)),
    ("no_batch", lambda: nn.ConvTranspose2d(2, 3, 3), inputs(2, 3, 4)),
]


CASES = LINEAR + CONVOLUTIONS + RECURRENT
OPTIONS = {"ratio": 0.3, "gradient_scale": 0.5, "momentum": 0.4, "l1": 1e-3}


def loss(module, batch):
    outputs = module(batch)
    return 0.5 * (outputs - outputs.detach().sin()).square().mean()


def largest_difference(build, batches, micro_batches=1, **options):
    """Between the weights after training by the optimizer and by its definition."""
    torch.manual_seed(0)
    module = build().double()
    plain = copy.deepcopy(module)
    train(module, plain, batches, micro_batches, **options)
    return (weights(module) - weights(plain)).abs().max().item()


def train(module, plain, batches, micro_batches=1, **options):
    """A module by the optimizer, and another, that computes the same, by its definition."""
    optimizer, reference = RLS(module, max_gain=None, **options), Reference(**options)
    for step in range(STEPS):
        module.zero_grad()
        plain.zero_grad()
        passes = []
        for i in range(micro_batches):
            loss(module, batches(step * micro_batches + i)).backward()
            with recorded_rows(plain) as rows:
                loss(plain, batches(step * micro_batches + i)).backward()
            passes.append(rows)
        reference.step(*passes)
        optimizer.step()


@pytest.mark.parametrize(("build", "batches"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_steps_are_those_of_the_definition(build, batches):
    assert largest_difference(build, batches, **OPTIONS) <= 1e-12


@pytest.mark.parametrize(("build", "batches"), [c[1:] for c in TRANSPOSED], ids=[c[0] for c in TRANSPOSED])
def test_a_transposed_convolution_is_trained_as_the_convolution_that_computes_the_same(build, batches):
    torch.manual_seed(0)
    layer = build().double()
    plain = as_convolution(layer)
    torch.testing.assert_close(layer(batches(0)), plain(batches(0)), rtol=0, atol=1e-12)
    train(layer, plain, batches)
    torch.testing.assert_close(in_the_order_of_a_convolution(layer, layer.weight), plain.weight, rtol=0, atol=1e-12)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias, plain.bias, rtol=0, atol=1e-12)


def test_the_size_of_the_outputs_may_be_given_to_a_transposed_convolution():
    layer = nn.ConvTranspose1d(2, 3, 3, 2).double()
    larger = copy.deepcopy(layer)
    larger.output_padding = (1,)
    for module, options in ((layer, {"output_size": [10]}), (larger, {})):
        first_step(module, lambda module, options=options: module(inputs(4, 2, 4)(0), **options).square().mean())
    assert torch.equal(layer.weight, larger.weight)


class Shared(nn.Module):
    """One layer for each part of the inputs (M, parts, ...)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.stack([self.layer(part) for part in x.unbind(1)], 1)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("layer", "weight", "shape", "length"),
    [
        (lambda: nn.Linear(3, 2, bias=False), "layer.weight", (3,), 5),
        (lambda: nn.Conv1d(3, 2, 1, bias=False), "layer.weight", (3, 7), 5),
        (lambda: First(nn.RNN(3, 2, bias=False, batch_first=True)), "layer.inner.weight_ih_l0", (7, 3), 35),
    ],
    ids=["linear", "convolution", "recurrent"],
)
def test_rows_of_all_uses_in_a_pass_count(layer, weight, shape, length, micro_batches):
    """T is the number of rows of a sample: P along inputs of ones is 1/(1 + kT·3)."""
    module = Shared(layer()).double()
    optimizer = RLS(module, ratio=0.1)
    for _ in range(micro_batches):
        module(torch.ones(4, 5, *shape, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    along = optimizer.state["rls"][weight]["P"][0].sum() / 3
    assert along.item() == pytest.approx(1 / (1 + 0.3 * length), rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "few_rows", "twice", "tied", "groups", "LSTM_stacked"])
def test_micro_batches_are_one_batch(name):
    build, batches = next(c[1:] for c in CASES if c[0] == name)
    assert largest_difference(build, batches, micro_batches=3, **OPTIONS) <= 1e-12


def test_forgetting_is_that_of_the_definition_while_p_has_not_grown():
    build, batches = next(c[1:] for c in CASES if c[0] == "conv2d")
    assert largest_difference(build, batches, forgetting=0.95) <= 1e-12


@pytest.mark.parametrize("max_gain", [None, 2.0])
def test_positions_are_samples_if_the_loss_or_the_scale_is_divided_by_their_number(max_gain):
    """In place of T_L, equations (80) to (86), for a loss that is summed over 5 positions."""

    def trained(divisor, scale, flat=False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

        def loss(step):
            outputs = module(inputs(4, 5, 3)(step).flatten(0, int(flat)))
            return 0.5 * (outputs - 1).square().sum() / (4 * divisor)

        descend(module, RLS(module, gradient_scale=scale, max_gain=max_gain), loss, range(4))
        return weights(module)

    flat = trained(5, 1.0, flat=True)
    torch.testing.assert_close(trained(5, 1.0), flat, rtol=0, atol=1e-12)
    torch.testing.assert_close(trained(1, 0.2), flat, rtol=0, atol=1e-12)


def test_input_and_recurrent_weights_can_have_scales_of_their_own():
    """Equation (97)."""
    module, scales = nn.LSTM(3, 4).double(), {"weight_hh_l0": 0.5}
    whole, half = (
        first_step(copy.deepcopy(module), lambda changed: changed(inputs(4, 5, 3)(0))[0].square().mean(), **options)
        for options in ({}, {"gradient_scale": scales})
    )
    assert torch.equal(half["weight_ih_l0"], whole["weight_ih_l0"])
    torch.testing.assert_close(half["weight_hh_l0"], 0.5 * whole["weight_hh_l0"])


@pytest.mark.parametrize(
    "other", [lambda: nn.MultiheadAttention(4, 2), lambda: nn.LSTMCell(4, 3), lambda: nn.GRUCell(4, 3)]
)
def test_cells_and_attention_are_trained_by_the_auxiliary_optimizer(other):
    module = nn.ModuleList([nn.Linear(4, 3), other()])
    of_others = RLS(module, auxiliary=torch.optim.SGD).auxiliary.param_groups[0]["params"]
    assert set(of_others) == set(module[1].parameters())
    with pytest.raises(ValueError, match="RLS does not train 1"):
        RLS(module)
