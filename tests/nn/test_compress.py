import itertools
import logging
from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.nn import LowRank, Monarch, StructuredLinear, compress
from lightning_struct.nn.compress import Option, least_increase


def low_rank_network():
    """A network whose first layer has rank 2, and whose second one has full rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(24, 2) @ torch.randn(2, 24) / 5)
        model[2].weight.copy_(torch.linalg.qr(torch.randn(24, 24)).Q)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 24, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(2)]


def ranks(linear):
    return [partial(LowRank.from_linear, rank=rank) for rank in (1, 2, 6) if rank <= min(linear.weight.shape)]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("budget", [0.7, 0.3, 900])
def test_model_is_within_the_budget(budget):
    model = low_rank_network()
    whole = size(model)
    assert compress(model, batches(), budget=budget) is model
    assert size(model) <= (budget if budget > 1 else budget * whole)


def test_layer_that_costs_nothing_is_compressed_first():
    model = low_rank_network()
    x = batches()[0][0]
    before = model(x)
    compress(model, batches(), budget=0.65, candidates=ranks, exclude="4")
    assert isinstance(model[0], LowRank) and model[0].rank == 2 and type(model[2]) is nn.Linear
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_whole_budget_leaves_a_layer_that_would_lose():
    model = low_rank_network()
    compress(
        model, batches(), budget=1.0, candidates=ranks, include="2", loss=lambda m, b: m(b[0])[0, 0] * 0 + weight_of(m)
    )
    assert type(model[2]) is nn.Linear


def weight_of(model):
    """Less for the layer as it was than for any other."""
    return torch.tensor(float(isinstance(model[2], StructuredLinear)))


def test_loss_is_called_as_it_is_documented():
    model = low_rank_network()
    seen = []

    def loss(of, batch):
        assert of is model and not of.training and not torch.is_grad_enabled()
        seen.append(batch)
        return of(batch).square().mean()

    data = [x for x, _ in batches()]
    compress(model.train(), data, budget=0.5, loss=loss, candidates=ranks)
    assert model.training and {id(batch) for batch in seen} == {id(batch) for batch in data}


def test_best_choice_is_found():
    generator = torch.Generator().manual_seed(0)
    for allowed in (60, 100, 150):
        layers = [
            [
                Option(
                    None, int(torch.randint(5, 40, (), generator=generator)), float(torch.rand((), generator=generator))
                )
                for _ in range(4)
            ]
            for _ in range(4)
        ]
        every = [
            choice
            for choice in itertools.product(range(4), repeat=4)
            if sum(layer[i].parameters for layer, i in zip(layers, choice, strict=True)) <= allowed
        ]
        if every:
            best = min(every, key=lambda c: sum(layer[i].loss_increase for layer, i in zip(layers, c, strict=True)))
            assert tuple(least_increase(layers, allowed)) == best


def test_rounding_never_exceeds_the_budget():
    layers = [[Option(None, 100_003, 0.0), Option(None, 50_001, 1.0)] for _ in range(3)]
    assert least_increase(layers, 150_003) == [1, 1, 1]
    assert sum(layers[0][i].parameters for i in least_increase(layers, 260_000)) <= 260_000


def test_shared_layer_is_counted_once_and_stays_shared():
    torch.manual_seed(0)
    linear = nn.Linear(24, 24)
    model = compress(nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(24, 3)), batches(), budget=0.5)
    assert model[0] is model[2] and isinstance(model[0], LowRank | Monarch)


def test_linear_layer_itself_gives_the_new_one():
    torch.manual_seed(0)
    assert isinstance(compress(nn.Linear(24, 12), batches(), budget=0.5), LowRank | Monarch)


def test_losses_before_and_after_are_logged(caplog):
    with caplog.at_level(logging.INFO, "lightning_struct"):
        compress(low_rank_network(), batches(), budget=0.5, candidates=ranks)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[-1].startswith("compressed from 1,275 to ") and any(
        "0 as LowRank" in message for message in messages
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget must be positive"),
        ({"budget": 100}, "allows 100 parameters, but .* smallest model has 174 of 1,275"),
        ({"budget": 0.5, "include": "head"}, "include names 'head', which is not in Sequential"),
        ({"budget": 0.5, "include": "1"}, "compress finds no linear layer"),
        (
            {"budget": 0.5, "candidates": lambda linear: [partial(LowRank.from_linear, rank=99)]},
            "0: rank must be at most",
        ),
    ],
)
def test_errors_say_what_is_wrong_and_leave_the_model_as_it_was(options, message):
    model = low_rank_network()
    with pytest.raises(ValueError, match=message):
        compress(model, batches(), **options)
    assert not any(isinstance(module, StructuredLinear) for module in model.modules())


def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="data has no batches"):
        compress(low_rank_network(), [], budget=0.5)
