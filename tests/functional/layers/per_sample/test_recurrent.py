from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Uncovered
from lightning_struct.functional.layers.per_sample.recurrent import recurrent_contributions
from lightning_struct.functional.randomness import random_state, restored_random_state
from tests.cases import gaussian

IN, HIDDEN, STEPS, SAMPLES = 3, 4, 5, 4
KINDS = {
    "rnn-tanh": lambda **options: nn.RNN(IN, HIDDEN, **options),
    "rnn-relu": lambda **options: nn.RNN(IN, HIDDEN, nonlinearity="relu", **options),
    "lstm": lambda **options: nn.LSTM(IN, HIDDEN, **options),
    "lstm-projected": lambda **options: nn.LSTM(IN, HIDDEN, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(IN, HIDDEN, **options),
}


def make(kind: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](**options).double()


def initial_state(layer: nn.RNNBase, samples: int = SAMPLES) -> Any:
    stacked = layer.num_layers * (1 + layer.bidirectional)
    hidden = gaussian(stacked, samples, layer.proj_size or HIDDEN, seed=2)
    return (hidden, gaussian(stacked, samples, HIDDEN, seed=3)) if layer.mode == "LSTM" else hidden


def flat(outputs: Any) -> list[Tensor]:
    """The tensors among the outputs that can have a gradient."""
    sequence, final = outputs
    data = sequence if isinstance(sequence, Tensor) else sequence.data
    return [data, *(final if isinstance(final, tuple) else (final,))]


def loss_of(outputs: Any, which: list[int]) -> Tensor:
    """A sum over samples of something that is not linear in the outputs."""
    tensors = flat(outputs)
    return torch.stack([(tensors[i].sin() * tensors[i]).sum() for i in which]).sum()


def measured(layer: nn.RNNBase, *args: Any, which: list[int], samples: int | None = None) -> dict[str, Contribution]:
    state = random_state(*layer.parameters())
    outputs = layer(*args)
    cotangents = torch.autograd.grad(loss_of(outputs, which), flat(outputs), allow_unused=True)
    with restored_random_state(state):
        return recurrent_contributions(LayerCall(layer, args, {}, outputs, cotangents, samples))


def assert_shares(layer: nn.RNNBase, contributions: dict[str, Contribution], losses: list[Tensor]) -> None:
    """Every sample's share of every parameter's gradient is the gradient of its own loss."""
    assert contributions.keys() == dict(layer.named_parameters()).keys()
    gradients = [torch.autograd.grad(loss, list(layer.parameters())) for loss in losses]
    for (name, parameter), expected in zip(layer.named_parameters(), zip(*gradients, strict=True), strict=True):
        shares = contributions[name].per_sample(slice(None))
        assert shares.shape == (len(losses), *parameter.shape)
        torch.testing.assert_close(shares, torch.stack(expected), rtol=1e-10, atol=1e-10, msg=name)


def alone(layer: nn.RNNBase, inputs: Tensor, state: Any, sample: int) -> tuple[Any, ...]:
    """The arguments for one sample."""
    one = slice(sample, sample + 1)
    inputs = inputs[one] if layer.batch_first else inputs[:, one]
    if state is None:
        return (inputs,)
    return inputs, tuple(s[:, one] for s in state) if isinstance(state, tuple) else state[:, one]


@pytest.mark.covering(2)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"num_layers": 3},
        {"bidirectional": True},
        {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_shares_are_those_of_per_sample_autograd(kind: str, options: dict[str, Any], with_state: bool) -> None:
    layer = make(kind, **options)
    inputs = gaussian(SAMPLES, STEPS, IN) if layer.batch_first else gaussian(STEPS, SAMPLES, IN)
    state = initial_state(layer) if with_state else None
    which = [0, 1, 2] if layer.mode == "LSTM" else [0, 1]
    contributions = measured(layer, *((inputs,) if state is None else (inputs, state)), which=which)
    losses = [loss_of(layer(*alone(layer, inputs, state, sample)), which) for sample in range(SAMPLES)]
    assert_shares(layer, contributions, losses)


@pytest.mark.parametrize(("kind", "which"), [(kind, [i]) for kind in KINDS for i in range(3 if "lstm" in kind else 2)])
def test_outputs_may_get_no_gradient(kind: str, which: list[int]) -> None:
    layer, inputs = make(kind, num_layers=2, bidirectional=True), gaussian(STEPS, SAMPLES, IN)
    losses = [loss_of(layer(*alone(layer, inputs, None, sample)), which) for sample in range(SAMPLES)]
    assert_shares(layer, measured(layer, inputs, which=which), losses)


@pytest.mark.covering(2)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("enforce_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_sequences_keep_their_order(kind: str, enforce_sorted: bool, with_state: bool) -> None:
    layer = make(kind, num_layers=2, bidirectional=True)
    lengths = [5, 3, 2, 1] if enforce_sorted else [2, 5, 1, 3]
    sequences = [gaussian(length, IN, seed=length) for length in lengths]
    state = initial_state(layer) if with_state else None
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    which = [0, 1, 2] if layer.mode == "LSTM" else [0, 1]
    contributions = measured(layer, *((packed,) if state is None else (packed, state)), which=which)
    losses = [
        loss_of(layer(*alone(layer, sequence[:, None].expand(-1, 9, -1), state, i)), which)
        for i, sequence in enumerate(sequences)
    ]
    assert_shares(layer, contributions, losses)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True, "bias": False}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_dropout_between_layers_is_repeated(
    kind: str, packed: bool, options: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = make(kind, num_layers=3, dropout=0.4, **options).to(dtype)
    inputs: Any = gaussian(SAMPLES, STEPS, IN).to(dtype)
    samples = SAMPLES if layer.batch_first else STEPS
    if packed:
        lengths = torch.tensor([2, 4, 1, 3, 4])[:samples]
        inputs = pack_padded_sequence(inputs, lengths, layer.batch_first, enforce_sorted=False)
    torch.manual_seed(5)
    contributions = measured(layer, inputs, which=[0])
    torch.manual_seed(5)
    loss_of(layer(inputs), [0]).backward()
    for name, parameter in layer.named_parameters():
        assert contributions[name].samples == samples
        torch.testing.assert_close(contributions[name].total(), parameter.grad)


def test_another_mask_of_dropout_is_noticed_and_none_is_drawn_in_evaluation() -> None:
    layer, inputs = make("lstm", num_layers=2, dropout=0.5), gaussian(STEPS, SAMPLES, IN)
    outputs = layer(inputs)
    cotangents = torch.autograd.grad(loss_of(outputs, [0]), flat(outputs), allow_unused=True)
    with pytest.raises(Uncovered, match="dropout cannot be repeated"):
        recurrent_contributions(LayerCall(layer, (inputs,), {}, outputs, cotangents, None))
    layer.eval()
    losses = [loss_of(layer(*alone(layer, inputs, None, sample)), [0]) for sample in range(SAMPLES)]
    assert_shares(layer, measured(layer, inputs, which=[0]), losses)


def test_several_sequences_may_be_one_sample_and_the_cotangents_are_left_as_they_are() -> None:
    layer, inputs = make("lstm"), gaussian(STEPS, SAMPLES, IN)
    losses = [loss_of(layer(inputs[:, pair]), [0]) for pair in (slice(0, 2), slice(2, 4))]
    assert_shares(layer, measured(layer, inputs, which=[0], samples=2), losses)
    cotangents = [gaussian(STEPS, SAMPLES, HIDDEN), None, None]
    recurrent_contributions(LayerCall(layer, (inputs,), {}, layer(inputs), cotangents, None))
    assert torch.equal(cotangents[0], gaussian(STEPS, SAMPLES, HIDDEN))


@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
def test_a_layer_in_bfloat16_is_measured_in_float32(with_state: bool) -> None:
    layer = make("gru").bfloat16()
    args = [gaussian(STEPS, SAMPLES, IN).bfloat16()]
    if with_state:
        args.append(initial_state(layer).bfloat16())
    shares = measured(layer, *args, which=[0])["weight_hh_l0"].per_sample(slice(None))
    exact = measured(layer.double(), *(t.double() for t in args), which=[0])["weight_hh_l0"].per_sample(slice(None))
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.double(), exact, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("shape", "samples", "message"),
    [
        ((STEPS, IN), None, "one sequence without a batch dimension"),
        ((STEPS, SAMPLES, IN), 3, "4 sequences, which is no multiple of 3 samples"),
    ],
)
def test_sequences_that_are_not_samples_are_not_covered(
    shape: tuple[int, ...], samples: int | None, message: str
) -> None:
    with pytest.raises(Uncovered, match=message):
        measured(make("gru"), gaussian(*shape), which=[0], samples=samples)
