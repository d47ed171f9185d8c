from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional import Linearization, linearize
from tests.cases import CASES, Case, dense_jacobian, flat, gaussian, mlp, random_like, shared_layer_mlp, trainable

COVERED = [pytest.param(case, backend, id=f"{case}-{backend}") for case in CASES for backend in case.backends]
PER_SAMPLE = [param for param in COVERED if param.values[0].per_sample]
BACKENDS = ["layer_rules", "double_backward"]


def named(case: Case) -> pytest.param:
    return pytest.param(case, id=case.name)


@cache
def linearized(case: Case, backend: str) -> tuple[nn.Module, Tensor, Linearization]:
    """Module, inputs and linearization of a case, made once: recurrent layers and attention take seconds.

    The backend is left to be chosen where it is the one that should be.
    """
    module, inputs = case.make()
    named = None if backend == case.backends[0] else backend
    return module, inputs, linearize(module, trainable(module), inputs, backend=named)


@pytest.mark.parametrize(("case", "backend"), COVERED)
def test_products_equal_the_dense_jacobian(case: Case, backend: str) -> None:
    module, inputs, linearization = linearized(case, backend)
    assert linearization.backend == backend
    check_products(linearization, module, inputs)


def check_products(linearization: Linearization, module: nn.Module, inputs: Tensor) -> None:
    jacobian = dense_jacobian(module, inputs).flatten(0, 1)
    v, u = random_like(trainable(module)), gaussian(*linearization.outputs.shape, seed=2)
    torch.testing.assert_close(linearization.jvp(v).reshape(-1), jacobian @ flat(v), rtol=0, atol=1e-10)
    torch.testing.assert_close(flat(linearization.vjp(u)), jacobian.T @ u.reshape(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("case", "backend"), PER_SAMPLE)
def test_per_sample_products_equal_the_dense_jacobian(case: Case, backend: str) -> None:
    module, inputs, linearization = linearized(case, backend)
    jacobian = dense_jacobian(module, inputs)
    u = gaussian(*linearization.outputs.shape, seed=2)
    gradients = torch.einsum("nop,no->np", jacobian, u.flatten(1))
    squares = gradients.square()
    torch.testing.assert_close(flat(linearization.squared_vjp(u)), squares.sum(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(linearization.squared_norms(u), squares.sum(1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [named(c) for c in CASES if c.name in ("mlp", "conv", "lstm", "batch_norm_eval")])
def test_chunks_give_the_same_products(case: Case) -> None:
    module, inputs, whole = linearized(case, case.backends[0])
    chunked = linearize(module, trainable(module), inputs, chunk_size=2)
    v, u = random_like(trainable(module)), gaussian(*whole.outputs.shape, seed=2)
    found, expected = (
        [of.outputs, of.jvp(v), flat(of.vjp(u)), flat(of.squared_vjp(u)), of.squared_norms(u)]
        for of in (chunked, whole)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_taken_at_the_given_point_not_at_the_weights_of_the_module(backend: str) -> None:
    torch.manual_seed(0)
    module, inputs = mlp().double(), torch.randn(6, 4, dtype=torch.float64)
    params = random_like(trainable(module))
    linearization = linearize(module, params, inputs, backend=backend)
    module.load_state_dict(params)
    check_products(linearization, module, inputs)


@pytest.mark.parametrize("backend", [None, "double_backward"])
def test_dropout_keeps_one_mask_in_all_products(backend: str | None) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2)).double()
    params, inputs = trainable(module), torch.randn(6, 4, dtype=torch.float64)
    linearization = linearize(module, params, inputs, backend=backend)
    v, u = random_like(params), torch.randn(6, 2, dtype=torch.float64)
    left, right = (u * linearization.jvp(v)).sum(), flat(linearization.vjp(u)) @ flat(v)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=0)


def test_buffers_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: b.clone() for name, b in module.named_buffers()}
    linearization = linearize(module, trainable(module), torch.randn(6, 4))
    linearization.jvp(trainable(module))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name


class Net(nn.Module):
    """Two layers and something between them, or beside them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 2), nn.Linear(2, 4), between
        self.metric = nn.Softmax(1)  # is not called

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


@pytest.mark.parametrize(
    ("between", "backend"),
    [(nn.Sigmoid(), "layer_rules"), (lambda x: 2 * x, "double_backward"), (lambda x: x.mul_(2), "double_backward")],
    ids=["a layer", "a product", "a product in place"],
)
def test_layer_rules_are_used_where_nothing_happens_between_the_layers(between: Any, backend: str) -> None:
    module = Net(between)
    assert linearize(module, trainable(module), torch.randn(3, 4)).backend == backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_registered_twice_keeps_its_parameters(backend: str) -> None:
    module = shared_layer_mlp()
    own = list(module.parameters())
    linearization = linearize(module, trainable(module), torch.randn(3, 4), backend=backend)
    linearization.jvp(trainable(module))
    linearization.squared_norms(linearization.outputs)
    assert [id(p) for p in module.parameters()] == [id(p) for p in own]


def test_layer_rules_are_not_used_through_layers_without_gradients() -> None:
    class HalfTrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.features(x)
            return self.head(features)

    module = HalfTrained().double()
    linearization = linearize(module, trainable(module), torch.ones(5, 3, dtype=torch.float64))
    assert linearization.backend == "double_backward"
    products = linearization.vjp(torch.ones(5, 2, dtype=torch.float64))
    assert not products["features.weight"].any() and products["head.weight"].any()


def test_bfloat16_autocast_products_are_near_the_float32_ones() -> None:
    torch.manual_seed(0)
    module, inputs = mlp(), torch.randn(6, 4)
    params = trainable(module)
    v, u = random_like(params), torch.randn(6, 2)
    exact = linearize(module, params, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = linearize(module, params, inputs)
        tangent, gradients = rounded.jvp(v), rounded.vjp(u)
    assert rounded.backend == "layer_rules"
    torch.testing.assert_close(tangent.float(), exact.jvp(v), rtol=0.05, atol=0.05)
    torch.testing.assert_close(flat(gradients), flat(exact.vjp(u)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("module", "params", "options", "error", "message"),
    [
        (mlp(), None, {"backend": "linearize"}, ValueError, "one of layer_rules, double_backward or None.*'linearize'"),
        (nn.PReLU(), None, {"backend": "layer_rules"}, ValueError, "chain of Linear"),
        (mlp(), {}, {}, ValueError, "frozen"),
        (nn.RNN(4, 3), None, {"backend": "double_backward"}, TypeError, "wrap it"),
        (nn.BatchNorm1d(4), None, {"chunk_size": 2}, ValueError, "leave chunk_size out"),
        (nn.PReLU(), {"wieght": torch.ones(1)}, {}, ValueError, "PReLU has no wieght: params are named as by named_"),
    ],
    ids=["backend", "chain", "frozen", "tuple", "chunks", "name"],
)
def test_what_cannot_be_linearised_is_named_with_the_remedy(
    module: nn.Module, params: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        linearize(module, trainable(module) if params is None else params, torch.randn(3, 4), **options)


def test_an_operation_without_a_second_derivative_is_named() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.bag(x)

    module = Bag()
    linearization = linearize(module, trainable(module), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match=r"_embedding_bag_backward.* by nn\.Embedding and a sum or mean"):
        linearization.jvp(random_like(trainable(module), seed=0))


@pytest.mark.parametrize(
    ("v", "error", "message"),
    [
        (
            {"weight": torch.ones(4, 2)},
            ValueError,
            r"keys \['weight'\], expected .* \['bias', 'we",
        ),
        (
            {"weight": torch.ones(4, 2), "bias": torch.ones(1)},
            ValueError,
            r"\(1,\)\], expected \[\(4, 2\), \(4",
        ),
        ([torch.ones(4, 2)], TypeError, "v must be a tensor or a dict of tensors, got list"),
    ],
    ids=["missing", "shape", "list"],
)
@pytest.mark.parametrize("options", [{"backend": "layer_rules"}, {"backend": "double_backward"}, {"chunk_size": 2}])
def test_vectors_of_another_structure_are_refused(options: Any, v: Any, error: type[Exception], message: str) -> None:
    module = nn.Linear(2, 4)
    linearization = linearize(module, trainable(module), torch.ones(3, 2), **options)
    with pytest.raises(error, match=message):
        linearization.jvp(v)
    for product in (linearization.vjp, linearization.squared_vjp, linearization.squared_norms):
        with pytest.raises(ValueError, match=r"u has the shapes \[\(3, 1\)\], expected \[\(3, 4\)\]"):
            product(torch.ones(3, 1))


def test_a_module_that_writes_in_place_into_new_memory_is_linearised() -> None:
    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            rotated = x.new_empty(x.shape)
            rotated[:, 1:].copy_(x[:, :-1])
            rotated[:, :1].copy_(x[:, -1:])
            return torch.tanh(self.linear(rotated))

    torch.manual_seed(0)
    module, x = Rotating().double(), torch.randn(3, 4, dtype=torch.float64)
    check_products(linearize(module, trainable(module), x), module, x)
