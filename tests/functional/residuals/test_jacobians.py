"""Jacobians of residuals: as matrices, and as the outer products of their rows."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_struct.data import Heat, Poisson
from lightning_struct.functional.residuals.jacobians import DenseJacobian, FactoredJacobian, Jacobian, jacobian_form
from lightning_struct.functional.residuals.residual_rows import BatchResiduals, RowRecords
from lightning_struct.models import PhysicsInformedNetwork
from tests.cases import gaussian, trainable


class TwoOutputs(nn.Module):
    """Two residuals of each point, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = nn.Linear(2, 24), nn.Linear(24, 24), nn.Linear(24, 2, bias=False)

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.again(self.again(self.first(points["interior"]).tanh()).tanh()).tanh()
        return {"interior": self.last(hidden), "boundary": self.last(self.first(points["boundary"]).tanh())[:, 0]}


class Transposed(nn.Module):
    """One weight that is used as it is, and turned round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.shift = nn.Parameter(torch.randn(20, 24)), nn.Parameter(torch.randn(20))

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = points["interior"].repeat(1, 10)
        return {"interior": ((rows + self.shift) @ self.weight).tanh() @ self.weight.mT @ self.shift}


def wide(equation: Poisson | Heat) -> nn.Module:
    torch.manual_seed(0)
    return PhysicsInformedNetwork(equation, [48, 40])


def as_sequential(equation: Poisson | Heat) -> nn.Module:
    """Derivatives by torch.func, through layers that know nothing of them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 1), nn.Flatten(0))
    return PhysicsInformedNetwork(equation, network=layers)


MODULES = {
    "forward Laplacian": lambda: wide(Poisson(2)),
    "partial derivatives": lambda: wide(Heat()),
    "torch.func": lambda: as_sequential(Poisson(2)),
    "two outputs": TwoOutputs,
    "transposed": Transposed,
}


@cache
def problem(name: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """A module, its weights, and points by block."""
    module = MODULES[name]().double()
    points = {"interior": gaussian(7, 2, seed=0), "boundary": gaussian(4, 2, seed=1)}
    if name == "transposed":
        del points["boundary"]
    return module, {name: p.detach() for name, p in trainable(module).items()}, points


@cache
def batch(name: str) -> tuple[BatchResiduals, dict[str, Tensor]]:
    module, params, points = problem(name)
    return BatchResiduals(RowRecords(module), params, (points,)), params


@cache
def reference(name: str) -> Tensor:
    module, params, points = problem(name)

    def residuals(*weights: Tensor) -> Tensor:
        blocks = functional_call(module, dict(zip(params, weights, strict=True)), (points,))
        return torch.cat([block.reshape(-1) for block in blocks.values()])

    return torch.cat([j.flatten(1) for j in torch.autograd.functional.jacobian(residuals, tuple(params.values()))], 1)


def kept_weights(of_batch: BatchResiduals, params: dict[str, Tensor]) -> set[str]:
    counts = of_batch.product_counts()
    assert counts is not None
    return {name for name in params if all(name in of_block for of_block in counts)}


@pytest.mark.parametrize("name", MODULES)
def test_every_weight_matrix_is_found(name: str) -> None:
    of_batch, params = batch(name)
    matrices = {weight for weight, p in params.items() if p.ndim == 2}
    if name == "two outputs":
        matrices -= {"again.weight"}  # which one of the blocks does not have
    assert kept_weights(of_batch, params) == matrices


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_the_jacobian_is_that_of_autograd(name: str, kept: bool) -> None:
    of_batch, params = batch(name)
    jacobian = of_batch.jacobian(params, kept_weights(of_batch, params) if kept else ())
    assert isinstance(jacobian, FactoredJacobian) == kept
    torch.testing.assert_close(jacobian.dense(), reference(name), rtol=1e-11, atol=1e-11)


def factored(name: str) -> tuple[Jacobian, Tensor]:
    of_batch, params = batch(name)
    return of_batch.jacobian(params, kept_weights(of_batch, params)), reference(name)


@pytest.mark.parametrize("name", MODULES)
def test_products_with_outer_products(name: str) -> None:
    jacobian, dense = factored(name)
    assert jacobian.shape == dense.shape
    d, u = gaussian(dense.shape[1], seed=2), gaussian(len(dense), seed=3)
    torch.testing.assert_close(jacobian.product(d), dense @ d)
    torch.testing.assert_close(jacobian.transposed_product(u), dense.mT @ u)
    torch.testing.assert_close(jacobian.gram_of_rows().tril(), (dense @ dense.mT).tril())


def test_the_gram_matrix_of_a_float32_jacobian_is_float64() -> None:
    module, params, points = problem("two outputs")
    module = copy.deepcopy(module).float()
    params = {name: p.float() for name, p in params.items()}
    points = {name: at.float() for name, at in points.items()}
    of_batch = BatchResiduals(RowRecords(module), params, (points,))
    jacobian = of_batch.jacobian(params, kept_weights(of_batch, params))
    dense, gram = jacobian.dense().double(), jacobian.gram_of_rows()
    torch.testing.assert_close(gram.tril(), (dense @ dense.mT).tril(), rtol=1e-6, atol=1e-6)
    assert gram.dtype == torch.float64


def test_a_product_with_the_rows_of_one_block() -> None:
    jacobian, dense = factored("forward Laplacian")
    rows, u = slice(7, 11), gaussian(4, seed=2)
    torch.testing.assert_close(jacobian.transposed_product(u, rows), dense[rows].mT @ u)


def test_gradients_of_samples_with_several_rows() -> None:
    jacobian, dense = factored("two outputs")
    u = gaussian(14, seed=2)
    gradients = torch.einsum("nk,nkp->np", u.view(7, 2), dense[:14].view(7, 2, -1))
    torch.testing.assert_close(jacobian.squared_norms(u, 7, slice(0, 14)), gradients.square().sum())


def test_gradients_of_samples_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_struct.functional.residuals.jacobians._NUMBERS_AT_ONCE", 11)
    dense, u = gaussian(21, 5, seed=0), gaussian(21, seed=1)
    gradients = torch.einsum("nk,nkp->np", u.view(7, 3), dense.view(7, 3, -1))
    torch.testing.assert_close(DenseJacobian(dense).squared_norms(u, 7, slice(0, 21)), gradients.square().sum())


def test_rows_are_scaled_in_place() -> None:
    jacobian, dense = factored("two outputs")
    scale = gaussian(len(dense), seed=2)
    jacobian.scale_rows(scale)
    torch.testing.assert_close(jacobian.dense(), scale[:, None] * dense)


SHAPES = {"wide": (256, 256), "narrow": (20, 20), "least": (4, 4), "bias": (256,)}
SIZES = {name: torch.Size(shape) for name, shape in SHAPES.items()}
COUNTS = [{"wide": 4, "narrow": 4, "least": 4}, {"wide": 1, "narrow": 1, "least": 1}]


def test_outer_products_are_kept_where_they_make_the_gram_matrix_cheaper() -> None:
    form = jacobian_form(COUNTS, [90, 10], SIZES, for_gram=True)
    assert form.kept == ("wide",)
    assert form.numbers == 370 * 512 + 100 * (400 + 16 + 256)
    assert form.cost < 256 * 256


def test_outer_products_are_kept_where_they_are_fewer_numbers() -> None:
    form = jacobian_form(COUNTS, [90, 10], SIZES, for_gram=False)
    assert form.kept == ("wide", "narrow")  # in the order of the weights, as processes gather them
    assert form.numbers == 370 * (512 + 40) + 100 * (16 + 256)


def test_outer_products_are_in_one_order_in_all_processes_whatever_the_order_of_their_names() -> None:
    of_batch, params = batch("forward Laplacian")
    kept = [name for name, p in params.items() if p.ndim == 2]
    first, second = (of_batch.jacobian(params, names).parts() for names in (kept, kept[::-1]))
    assert len(first) == len(second) > 2 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
