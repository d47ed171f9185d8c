"""What a trace of the forward derivative must not contain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional import linearize
from tests.cases import dense_jacobian, flat, random_like, trainable


class InPlaceIntoNewMemory(nn.Module):
    """Rotates its input by writing into memory that was not initialised, as circular padding does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rotated = x.new_empty(x.shape)
        rotated[:, 1:].copy_(x[:, :-1])
        rotated[:, :1].copy_(x[:, -1:])
        return torch.tanh(self.linear(rotated))


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(InPlaceIntoNewMemory(), id="copy"),
        pytest.param(
            nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular")),
            id="circular",
        ),
    ],
)
def test_a_trace_that_writes_in_place_is_refused_though_memory_may_happen_to_hold_the_right_values(
    module: nn.Module,
) -> None:
    with pytest.raises(ValueError, match="in place"):
        linearize(module, trainable(module), torch.randn(3, 4), backend="linearize")


def test_without_a_name_such_a_module_is_linearised_by_a_kept_graph() -> None:
    torch.manual_seed(0)
    module, x = InPlaceIntoNewMemory().double(), torch.randn(3, 4, dtype=torch.float64)
    params = trainable(module)
    linearization = linearize(module, params, x)
    v = random_like(params)
    assert linearization.backend == "double_backward"
    expected = dense_jacobian(module, x).flatten(0, 1) @ flat(v)
    torch.testing.assert_close(linearization.jvp(v).reshape(-1), expected, rtol=0, atol=1e-12)


def test_a_counter_that_is_only_counted_up_is_no_hindrance() -> None:
    """num_batches_tracked of a batch norm in training mode."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert linearize(module, trainable(module), torch.randn(5, 4), backend="linearize").backend == "linearize"
