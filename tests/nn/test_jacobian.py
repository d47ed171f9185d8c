import pytest
import torch
from torch import nn

from lightning_struct.nn import jacobian_norms
from tests.nn.layers import FACTORIES, NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(("_padded", "_without_corners"))])
def test_norms_are_the_largest_singular_values_of_the_jacobian(name):
    torch.manual_seed(0)
    layer = FACTORIES[name](7, 5, dtype=torch.float64)
    norms = jacobian_norms(layer, iterations=200 if name == "randomized_hadamard" else 50)
    assert list(norms) == [key for key, _ in layer.named_parameters() if key != "bias"]
    entries, weights = layer.to_dense().flatten(), [getattr(layer, key) for key in norms]
    rows = [torch.autograd.grad(entry, weights, retain_graph=True) for entry in entries]
    for (key, norm), gradients in zip(norms.items(), zip(*rows, strict=True), strict=True):
        jacobian = torch.stack(gradients).reshape(len(entries), -1)
        largest = torch.linalg.matrix_norm(jacobian, 2).item()
        assert norm == pytest.approx(largest, rel=1e-3), key


@pytest.mark.slow
def test_twenty_iterations_are_near():
    torch.manual_seed(0)
    layer = FACTORIES["ldr_sd"](20, 20)
    twenty, many = jacobian_norms(layer), jacobian_norms(layer, 60)
    assert all(0.9 * many[key] < twenty[key] <= 1.001 * many[key] for key in many)


def test_frozen_parameters_are_left_out_and_random_numbers_are_left_alone():
    layer = FACTORIES["low_rank"](7, 5)
    layer.H.requires_grad_(False)
    state = torch.get_rng_state()
    assert list(jacobian_norms(layer)) == ["G"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dense_weight_moves_its_matrix_as_far_as_itself():
    assert jacobian_norms(nn.Linear(4, 4)) == {"weight": 1.0}
