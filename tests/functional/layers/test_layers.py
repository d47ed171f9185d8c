"""Layers that are declared once are served everywhere: gradient norms, RLS, Kronecker factors, replace_linear."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_struct.functional import GradientNormRecorder, linearize, per_sample_gradient_norms, register_layer
from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.kinds import Matrix, couples_samples
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Dense
from lightning_struct.functional.layers.per_sample.layer_contributions import has_rule
from lightning_struct.functional.layers.registry import kind_of, unregister_layer
from lightning_struct.nn import LowRank, replace_linear
from lightning_struct.optim import RLS, SHF
from tests.cases import gaussian as inputs


class Transposed(nn.Module):
    """As transformers' Conv1D."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Renamed(nn.Module):
    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.kernel, self.offset = nn.Parameter(torch.randn(units, width)), nn.Parameter(torch.randn(units))

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.kernel.t() + self.offset


class OwnForward(nn.Module):
    """As the Linear of PyTorch Geometric: with the names of torch's, and not derived from it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.linear(x, self.weight, self.bias)


class Memory(nn.LSTM):
    """As the LSTM of pytorch-forecasting's DeepAR: with a forward, and an argument, of its own."""

    def forward(self, x: Tensor, hx: Any = None, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x, hx)
        packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=False)
        output, final = super().forward(packed, hx)
        return pad_packed_sequence(output, batch_first=self.batch_first)[0], final


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class RootMeanSquare(nn.Module):
    """As the norms of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), 1e-3

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def scale_shares(call: LayerCall) -> dict[str, Contribution]:
    shares = call.input * call.cotangent  # as in docs/register_layer.md
    return {"factor": Dense(shares.reshape(len(shares), -1, shares.shape[-1]).sum(1))}


DECLARATIONS: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "transposed": (Transposed, lambda: register_layer(Transposed, Matrix("weight", "bias", transposed=True))),
    "renamed": (Renamed, lambda: register_layer(Renamed, Matrix("kernel", "offset"))),
    "own forward": (OwnForward, lambda: register_layer(OwnForward, like=nn.Linear)),
}
AFFINE = pytest.mark.parametrize("name", list(DECLARATIONS))


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    yield
    for layer_type in (Transposed, Renamed, OwnForward, Memory, Scale, RootMeanSquare):
        unregister_layer(layer_type)


def declared(name: str, in_features: int, out_features: int) -> nn.Module:
    layer_type, declare = DECLARATIONS[name]
    declare()
    return layer_type(in_features, out_features).double()


def linear_like(layer: nn.Module) -> nn.Linear:
    """torch's Linear with the weights of a declared layer."""
    weight, bias = (p.detach() for p in layer.parameters())
    weight = weight.t() if isinstance(layer, Transposed) else weight
    linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    linear.load_state_dict({"weight": weight, "bias": bias})
    return linear


def pair(name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Two networks that compute the same, with a declared layer and with torch's Linear."""
    torch.manual_seed(0)
    layer, head = declared(name, 12, 9), nn.Linear(9, 2).double()
    return nn.Sequential(layer, nn.Tanh(), head), nn.Sequential(linear_like(layer), nn.Tanh(), copy.deepcopy(head))


def largest_difference(ours: nn.Sequential, plain: nn.Sequential) -> float:
    pairs = zip(linear_like(ours[0]).parameters(), plain[0].parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def assert_norms_are_those_of_autograd(module: nn.Module, *batch: Tensor | None) -> None:
    """``batch``: the arguments of the module, with the samples in the first dimension."""

    def loss(*args: Tensor | None) -> Tensor:
        outputs = module(*args)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).sin().square().sum()

    with per_sample_gradient_norms(module) as norms:
        loss(*batch).backward()
    expected = []
    for i in range(len(norms.squared_norms)):
        sample = [None if tensor is None else tensor[i : i + 1] for tensor in batch]
        gradients = torch.autograd.grad(loss(*sample), list(module.parameters()))
        expected.append(sum(gradient.square().sum() for gradient in gradients))
    torch.testing.assert_close(norms.squared_norms, torch.stack(expected), rtol=1e-10, atol=0)  # type: ignore[arg-type]


# --- affine layers ---------------------------------------------------------------------------------------------------


@AFFINE
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)], ids=["rows", "positions"])
def test_norms_of_a_declared_layer_are_those_of_per_sample_autograd(name: str, shape: tuple[int, ...]) -> None:
    layer = declared(name, 4, 6)
    assert has_rule(layer)
    assert_norms_are_those_of_autograd(layer, inputs(*shape))


@AFFINE
@pytest.mark.parametrize("rows", [3, 30])
def test_rls_trains_a_declared_layer_as_a_linear_of_the_same_weights(name: str, rows: int) -> None:
    ours, plain = pair(name)
    for module in (ours, plain):
        optimizer = RLS(module, momentum=0.4, l1=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            module(inputs(rows, 12, seed=step) + 0.5).square().mean().backward()
            optimizer.step()
    assert largest_difference(ours, plain) <= 1e-12


@AFFINE
def test_kronecker_factors_of_a_declared_layer_are_those_of_a_linear(name: str) -> None:
    ours, plain = pair(name)
    factors = []
    for module in (ours, plain):
        optimizer = SHF(module, "mse", damping=0.1, preconditioner="kronecker", backend="double_backward", seed=0)
        assert "kronecker: 13 inputs x 9 outputs" in optimizer.summary()  # the bias is a column
        optimizer.step(inputs=inputs(20, 12), targets=inputs(20, 2, seed=9))
        of_blocks = optimizer.state_dict()["state"]["shf"]["factors"].values()
        factors.append([factor for block in of_blocks for factor in block.values()])
    torch.testing.assert_close(factors[0], factors[1], rtol=0, atol=1e-12)
    assert largest_difference(ours, plain) <= 1e-8


@AFFINE
def test_replace_linear_takes_a_declared_layer_and_makes_structured_ones_near_to_it(name: str) -> None:
    layer = declared(name, 12, 9)
    near = replace_linear(nn.Sequential(layer), partial(LowRank.from_linear, rank=9))
    assert isinstance(near[0], LowRank) and near[0].bias is not None and near[0].bias.dtype == torch.float64
    torch.testing.assert_close(near(inputs(5, 12)), layer(inputs(5, 12)), rtol=0, atol=1e-10)


def test_a_class_may_be_declared_where_it_is_defined() -> None:
    @register_layer(like=nn.Linear)
    class Cast(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.to(self.weight.dtype))

    assert has_rule(Cast(3, 2))
    assert_norms_are_those_of_autograd(Cast(4, 3).double(), inputs(5, 4))


def test_a_declaration_holds_for_subclasses_with_the_same_forward_alone() -> None:
    class Wider(Transposed):
        pass

    class Squared(Transposed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square()

    declared("transposed", 2, 2)
    assert kind_of(Wider(2, 2)) is not None
    assert kind_of(Squared(2, 2)) is None


def test_a_declaration_replaces_all_of_an_earlier_one_and_can_be_taken_back() -> None:
    register_layer(OwnForward, like=nn.Linear, couples_samples=True)
    layer = OwnForward(2, 2)
    assert couples_samples(layer)
    register_layer(OwnForward, like=nn.Linear)
    assert not couples_samples(layer) and kind_of(layer).declared
    unregister_layer(OwnForward)
    assert kind_of(layer) is None
    register_layer(Scale, couples_samples=True)
    assert couples_samples(Scale(2))


# --- layers like others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 6, 1, 4, 5])], ids=["whole", "padded"])
def test_rls_sees_what_the_kernel_of_a_recurrent_layer_reads(lengths: Tensor | None, levels: int) -> None:
    register_layer(Memory, like=nn.LSTM)
    weights = []
    for kind in (Memory, nn.LSTM):
        torch.manual_seed(0)
        layer = kind(3, 4, num_layers=levels, batch_first=True).double()
        optimizer = RLS(layer)
        for step in range(3):
            optimizer.zero_grad()
            batch: Any = inputs(5, 6, 3, seed=step)
            if kind is Memory:
                outputs = layer(batch, None, lengths)[0]
            elif lengths is None:
                outputs = layer(batch)[0]
            else:
                outputs = layer(pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False))[0].data
            outputs.square().sum().backward()
            optimizer.step()
        weights.append(nn.utils.parameters_to_vector(layer.parameters()))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-12)


def test_a_call_with_an_argument_that_the_base_does_not_have_is_not_measured() -> None:
    register_layer(OwnForward, like=nn.Linear)
    layer = OwnForward(3, 4).double()
    with GradientNormRecorder(layer, uncovered="skip") as recorder:
        layer(inputs(5, 3), scale=2.0).sum().backward()
    assert "like Linear, which has no argument scale" in recorder.uncovered["weight"]


@pytest.fixture
def memory() -> Memory:
    register_layer(Memory, like=nn.LSTM)
    return Memory(3, 4, batch_first=True).double()


def test_an_lstm_that_packs_its_sequences_is_measured_in_the_call_of_its_base(memory: Memory) -> None:
    assert_norms_are_those_of_autograd(memory, inputs(4, 6, 3), None, torch.tensor([6, 2, 5, 1]))
    assert type(memory) is Memory


def test_an_lstm_is_of_its_own_type_again_where_its_forward_fails(memory: Memory) -> None:
    with per_sample_gradient_norms(memory), pytest.raises(RuntimeError):
        memory(torch.ones(2, 5, 2).double())
    assert type(memory) is Memory


def test_the_matrix_of_transformers_needs_no_declaration() -> None:
    assert kind_of(Transposed(4, 3)) is None
    of_transformers = {"__module__": "transformers.pytorch_utils", "forward": Transposed.forward}
    Conv1D: Any = type("Conv1D", (Transposed,), of_transformers)
    layer = Conv1D(4, 3).double()
    assert_norms_are_those_of_autograd(layer, inputs(5, 2, 4))
    assert "0.weight  full  5 x 5" in RLS(nn.Sequential(layer.float())).summary()
    assert kind_of(type("Doubled", (Conv1D,), {"forward": lambda self, x: 2 * x})(4, 3)) is None


def test_the_norms_of_transformers_are_declared_in_one_line() -> None:
    register_layer(RootMeanSquare, like=nn.RMSNorm)
    assert_norms_are_those_of_autograd(RootMeanSquare(4).double(), inputs(5, 3, 4))


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "declare",
    [lambda: register_layer(Scale, rule=scale_shares), lambda: register_layer(Scale)(scale_shares)],
    ids=["argument", "decorator"],
)
@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4), (5, 2, 3, 4)], ids=str)
def test_a_rule_of_ones_own_is_used(declare: Callable[[], Any], shape: tuple[int, ...]) -> None:
    declare()
    assert_norms_are_those_of_autograd(nn.Sequential(nn.Linear(4, 3), Scale(3)).double(), inputs(*shape))


def test_a_rule_that_returns_other_shapes_is_an_error() -> None:
    register_layer(Scale, rule=lambda call: {"factor": Dense(call.input)})
    layer = Scale(3).double()
    message = r"rule declared for Scale .*\(2, 3\).*\(3,\)"
    with per_sample_gradient_norms(layer), pytest.raises(ValueError, match=message):
        layer(inputs(5, 2, 3)).sum().backward()


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: register_layer(int, like=nn.Linear), TypeError, "declares a type of nn.Module"),
        (lambda: register_layer(Scale, like=nn.Softmax), ValueError, "like=Softmax, which is no known layer"),
        (lambda: register_layer(Scale, Matrix("factor", groups=2)), ValueError, "one group"),
        (lambda: register_layer(Scale, Matrix("factor"), like=nn.Linear), ValueError, "has matrix and like: give one"),
    ],
)
def test_mistaken_declarations_are_refused(declare: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        declare()


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (Matrix("kernel"), "has no parameter 'kernel'; its own parameters: weight, bias"),
        (Matrix("weight", "offset"), "has no parameter 'offset'"),
        (Matrix("bias"), r"'bias' has shape \(3,\): a matrix has 2 dimensions"),
        (Matrix("weight", "bias"), r"no bias of 'weight'.*is it transposed\?"),
    ],
)
def test_layers_without_what_was_declared_are_refused(matrix: Matrix, message: str) -> None:
    register_layer(Transposed, matrix)
    with pytest.raises(ValueError, match=message):
        RLS(Transposed(4, 3))


# --- what torch's layers are -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:these layers have no rule")
def test_sync_batch_norm_couples_samples_for_everyone() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    assert couples_samples(module[1]) and not couples_samples(module.eval()[1])
    module.train()
    with GradientNormRecorder(module, uncovered="skip"), pytest.warns(UserWarning, match="couples the samples"):
        module(torch.randn(5, 3)).sum().backward()
    linearization = linearize(module, dict(module.named_parameters()), torch.randn(5, 3), backend="double_backward")
    with pytest.raises(ValueError, match="1 normalises over the batch"):
        linearization.squared_norms(torch.ones(5, 3))


@pytest.mark.parametrize("name", ["0.0", "0._orig_mod.0"])
def test_compiled_modules_are_excluded_by_their_plain_names(name: str) -> None:
    inner = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    module = nn.Sequential(inner, nn.Linear(3, 2))
    assert "0.0" not in RLS(module, exclude=[name], auxiliary=partial(torch.optim.SGD, lr=0.1)).summary()
