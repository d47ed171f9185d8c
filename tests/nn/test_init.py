import pytest
import torch

from lightning_struct.nn import sparse_normal_


@pytest.mark.parametrize(("in_features", "connections"), [(784, 20), (256, 10), (49, 7), (10, 10), (6, 20), (5, 1)])
def test_every_unit_has_the_asked_number_of_incoming_connections(in_features, connections):
    weight = sparse_normal_(torch.nn.Linear(in_features, 30).weight, connections)
    assert ((weight != 0).sum(dim=1) == min(connections, in_features)).all()


def drawn():
    torch.manual_seed(0)
    return sparse_normal_(torch.empty(1000, 784, dtype=torch.float64), 20, std=1.5)


def test_nonzero_weights_have_the_asked_spread_at_other_places_in_each_unit_that_the_seed_gives():
    weight = drawn()
    nonzero = weight[weight != 0]
    assert abs(nonzero.mean()) < 0.05 and abs(nonzero.std() - 1.5) < 0.05
    assert len({tuple(unit.nonzero().flatten().tolist()) for unit in weight}) == 1000
    assert torch.equal(drawn(), weight)


def test_weight_is_filled_in_place_and_still_a_parameter():
    layer = torch.nn.Linear(20, 4)
    assert sparse_normal_(layer.weight, 5) is layer.weight and layer.weight.requires_grad and layer.weight.is_leaf


@pytest.mark.parametrize(
    ("weight", "connections", "std", "message"),
    [
        (torch.empty(3), 2, 1.0, r"shape \(3,\)"),
        (torch.empty(3, 4), 0, 1.0, "connections must be a whole number >= 1, got 0"),
        (torch.empty(3, 4), 2, -1.0, "std must be a finite number > 0, got -1.0"),
    ],
)
def test_wrong_arguments_are_named(weight, connections, std, message):
    with pytest.raises(ValueError, match=message):
        sparse_normal_(weight, connections, std)
