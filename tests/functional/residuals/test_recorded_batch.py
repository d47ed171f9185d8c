"""Records of functions as graphs of operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from lightning_struct.functional.residuals import recorded_batch
from lightning_struct.functional.residuals.recorded_batch import Replayed, recorded_graph

W, X = torch.tensor([2.0, -1.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
FACTORS = torch.tensor([3.0, 5.0])


def by_autograd(w: Tensor, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(((x * w).sin() ** 2).sum(), x, create_graph=True)[0] * w


def in_a_new_tensor(w: Tensor, x: Tensor) -> Tensor:
    result = torch.zeros(3)
    for i, row in enumerate(x):
        result[i] = row @ w
    return result


def in_a_list_of_numbers(w: Tensor, x: Tensor) -> Tensor:
    numbers = torch.tensor([1.0, 1.0])
    first = numbers[:1]
    numbers.mul_(w)
    return x * first


def with_a_clock(w: Tensor, x: Tensor) -> Tensor:
    time, total = torch.tensor(0.0), x
    while time < 1.0:
        total = total + time * w
        time += 0.25
    return total


def with_a_number_that_is_written_to(w: Tensor, x: Tensor) -> Tensor:
    return x * torch.tensor(2.0).mul_(w[0])


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "parts": lambda w, x: torch.cat([a * w[0] for a in x.split(2)]),
    "forward derivative": lambda w, x: jvp(lambda y: (y * w).tanh(), (x,), (torch.ones_like(x),))[1],
    "constant": lambda w, x: x * w * FACTORS.square(),
    "constant result": lambda w, x: 2 * FACTORS,
    "random numbers": lambda w, x: x * w * torch.rand(3, 2) + torch.rand_like(FACTORS),
    "autograd": by_autograd,
    "new tensor": in_a_new_tensor,
    "list of numbers": in_a_list_of_numbers,
    "clock": with_a_clock,
    "written number": with_a_number_that_is_written_to,
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_a_record_computes_what_its_function_does(name: str, mode: Callable[[], torch.no_grad]) -> None:
    if (name, mode) == ("autograd", torch.inference_mode):
        pytest.skip("there is no autograd in inference mode")
    with mode():
        of_record = {"w": W.clone()}, {}, [X.clone()]
        graph = recorded_graph(lambda params, _, tensors: CASES[name](params["w"], *tensors), *of_record)
        for w, x in ((W, X), (W + 1, X.sin()), (W.cos(), 2 * X)):  # it is the same from call to call
            torch.manual_seed(0)
            expected = CASES[name](w, x)
            torch.manual_seed(0)
            torch.testing.assert_close(graph(w, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("can_be_captured", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_record_that_is_replayed_in_its_own_memory_computes_the_same(
    name: str, can_be_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = []

    def captured(function: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Tensor] | None:
        """Without a GPU: like a CUDA graph, it works in the memory of its first run."""
        captures.append(result := function())
        return (lambda: result.copy_(function()), result) if can_be_captured else None

    monkeypatch.setattr(recorded_batch, "captured", captured)
    of_record = {"w": W.clone()}, {}, [X.clone()]
    graph = recorded_graph(lambda params, _, tensors: CASES[name](params["w"], *tensors), *of_record)
    with torch.no_grad():
        record, points = Replayed(graph), [(W, X), (W + 1, X.sin()), (W.cos(), 2 * X), (-W, X + 1)]
        seeded = [(torch.manual_seed(0), record(w, x))[1] for w, x in points]
        expected = [(torch.manual_seed(0), graph(w, x))[1] for w, x in points]
        assert all(map(torch.equal, seeded, expected))  # and no call has changed the result of another
        assert len(captures) == (name != "random numbers")


@pytest.mark.parametrize(
    "read", [lambda x: x[0, 0].item(), lambda x: bool(x.sum() > 0), lambda x: torch.equal(x, x + 1)]
)
def test_operations_that_depend_on_values_are_not_recorded(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="depend on the values of tensors"):
        recorded_graph(lambda params, _, tensors: read(params["w"] * tensors[0]), {"w": W}, {}, [X])
