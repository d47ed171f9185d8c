"""SHF with Kronecker factors: they change how fast the subproblem is solved, and nothing else."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.optim import CG, LSMR, SHF, Kronecker, LevenbergMarquardt, memory
from lightning_struct.optim.shf.outputs.preconditioner import KroneckerFactors
from tests.cases import CASES, Case, First, mlp, shared_layer_mlp, trainable
from tests.optim.helpers import RecordingLoss, dense_direction, dense_model, gaussian
from tests.optim.shf.test_shf import batch, network, take, weights


def make(module: nn.Module, loss: Any = "mse", **options: Any) -> SHF:
    return SHF(module, loss, **{"damping": 0.5, "preconditioner": "kronecker", **options})


def factors(optimizer: SHF) -> dict[str, dict[str, Tensor]]:
    return optimizer.state["shf"]["factors"]


# --- the subproblem is the true one ----------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "solver",
    [LSMR(maxiter=400, atol=1e-14), CG(maxiter=400, progress_tolerance=0.0)],
    ids=["lsmr", "cg"],
)
@pytest.mark.parametrize(("center", "l2"), [("start", 0.0), ("start", 0.1), ("origin", 0.1)])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_the_directions_of_two_steps_are_those_of_the_dense_problem(
    solver: LSMR | CG, center: Any, l2: float, loss: str
) -> None:
    module, damping = network(), 0.7
    rule = LevenbergMarquardt(damping, drop=None, center=center)
    optimizer = make(module, loss, solver=solver, damping=rule, l2=l2, warm_start=0.5)
    start = torch.zeros_like(weights(module))
    for seed in (1, 2):
        inputs, targets = batch(seed=seed)
        targets = targets.argmax(1) if loss == "cross_entropy" else targets
        model, before = dense_model(module, loss, inputs, targets), weights(module)
        identity = torch.eye(len(before), dtype=before.dtype)
        expected = dense_direction(model, before, start, damping=damping, center=center, weight=identity, l2=l2)
        report = take(optimizer, (inputs, targets))
        assert report.step_length == 1.0
        if not (isinstance(solver, CG) and l2 == 0):  # CG goes back to an earlier iterate
            torch.testing.assert_close(optimizer.state["shf"]["direction"], expected, rtol=0, atol=1e-8)
        start = optimizer.param_groups[0]["warm_start"] * optimizer.state["shf"]["direction"]


def test_curvature_of_a_share_of_the_batch_goes_with_the_gradient_of_all() -> None:
    module, damping = network(), 0.7
    optimizer = make(
        module,
        solver=CG(curvature_share=0.3, progress_tolerance=0.0, maxiter=400),
        damping=LevenbergMarquardt(initial=damping, drop=None),
        l2=0.1,
    )
    (inputs, targets), before = batch(), weights(module)
    gradient = dense_model(module, "mse", inputs, targets).gradient + 0.1 * before
    first = dense_model(module, "mse", inputs[:4], targets[:4]).gauss_newton  # 0.3 of 12, rounded up
    matrix = first + (0.1 + damping**2) * torch.eye(len(before), dtype=before.dtype)
    report = take(optimizer, (inputs, targets))
    direction = optimizer.state["shf"]["direction"]
    torch.testing.assert_close(direction, torch.linalg.solve(matrix, -gradient), rtol=0, atol=1e-8)
    predicted = gradient @ direction + 0.5 * direction @ (first @ direction) + 0.05 * direction @ direction
    change = (report.loss_after - report.loss_before) / predicted.item()
    assert (report.batch_size, report.reduction_ratio) == (12, pytest.approx(change, rel=1e-6))


def cases_of_layers() -> Any:
    """Without those that are made of the others."""
    slow = {"attention": [pytest.mark.slow], "gru": [pytest.mark.slow]}
    return [pytest.param(c, marks=slow.get(c.name, [])) for c in CASES if c.name not in ("transformer", "lstm_stacked")]


@pytest.mark.parametrize("case", cases_of_layers(), ids=str)
def test_every_layer_takes_the_step_that_it_takes_without_factors(case: Case) -> None:
    module, inputs = case.make()
    plain = copy.deepcopy(module)
    targets = torch.randn_like(module(inputs)).detach()
    plain.load_state_dict(module.state_dict())
    options: dict[str, Any] = {"solver": LSMR(maxiter=500, atol=1e-13), "l2": 0.01, "backend": "double_backward"}
    take(make(module, **options), (inputs, targets))
    take(make(plain, preconditioner=None, **options), (inputs, targets))
    torch.testing.assert_close(weights(module), weights(plain), rtol=0, atol=1e-8)


# --- the factors ---


def explicit_factors(
    module: nn.Module, loss: RecordingLoss, name: str, data: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Of the Linear layers of an MLP: inputs with a one, and Jᵀ S u of their biases, sample by sample."""
    model = dense_model(module, name, *data)
    probes = torch.einsum("nkp,nkl,nl->np", model.jacobian, model.roots, loss.probe)
    places = dict(zip(trainable(module), probes.split([t.numel() for t in trainable(module).values()], 1), strict=True))
    expected, rows = {}, data[0]
    for i, layer in enumerate(module):
        if isinstance(layer, nn.Linear):
            with_one = F.pad(rows, (0, 1), value=1.0)
            expected[f"{i}.inputs"] = torch.stack([torch.outer(a, a) for a in with_one]).mean(0)
            expected[f"{i}.outputs"] = torch.stack([torch.outer(f, f) for f in places[f"{i}.bias"]]).mean(0)
        rows = layer(rows).detach()
    return expected


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
def test_factors_are_means_of_outer_products_and_are_averaged_over_steps(name: str) -> None:
    module, loss = network(), RecordingLoss(name)
    optimizer = make(module, loss, preconditioner=Kronecker(decay=0.8))
    average: dict[str, Tensor] = {}
    for seed in (1, 2, 3):
        inputs, targets = batch(seed=seed)
        targets = targets.argmax(1) if name == "cross_entropy" else targets
        before = copy.deepcopy(module)
        take(optimizer, (inputs, targets))
        new = explicit_factors(before, loss, name, (inputs, targets))
        average = {key: 0.8 * average.get(key, t) + 0.2 * t for key, t in new.items()}
        for key, expected in average.items():
            layer, side = key.split(".")
            torch.testing.assert_close(factors(optimizer)[f"{layer}.weight"][side][0], expected, rtol=1e-10, atol=1e-12)


def test_factors_of_a_layer_that_is_used_twice_are_of_both_uses() -> None:
    torch.manual_seed(0)
    shared = shared_layer_mlp().double()
    inputs = gaussian(12, 4, seed=1)
    optimizer = make(shared)
    take(optimizer, (inputs, gaussian(12, 4, seed=2)))
    twice = factors(optimizer)["0.weight"]["inputs"][0]
    torch.manual_seed(0)
    module = shared_layer_mlp().double()
    rows = torch.cat([inputs, module[:2](inputs).detach()])
    rows = F.pad(rows, (0, 1), value=1.0)
    torch.testing.assert_close(twice, rows.T @ rows / len(rows))


def test_a_norm_has_the_diagonal_of_its_samples_squared_probes() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)).double()
    before, loss, data = copy.deepcopy(module), RecordingLoss("mse"), batch()
    optimizer = make(module, loss)
    take(optimizer, data)
    squares = dense_model(before, "mse", *data).squared_probes(loss.probe)
    sizes = [t.numel() for t in trainable(before).values()]
    expected = dict(zip(trainable(before), squares.split(sizes), strict=True))
    for name in ("1.weight", "1.bias"):
        torch.testing.assert_close(factors(optimizer)[name]["diagonal"], expected[name])


class Offset(nn.Module):
    """A parameter outside of any layer that torch knows, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(4))
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.offset)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))  # a number, without dimensions
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


@pytest.mark.parametrize(("build", "name"), [(Offset, "offset"), (Scale, "scale")])
def test_a_parameter_outside_of_layers_has_the_mean_of_its_squared_probe(build: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    module = build().double()
    before, loss, data = copy.deepcopy(module), RecordingLoss("mse"), batch()
    optimizer = make(module, loss)
    take(optimizer, data)
    (gradient,) = torch.autograd.grad(before(data[0]), before.get_parameter(name), loss.probe)
    expected = (gradient.square().mean() / 12).expand(gradient.shape)
    torch.testing.assert_close(factors(optimizer)[name]["diagonal"], expected)


def test_factors_are_updated_every_so_many_steps() -> None:
    optimizer = make(network(), preconditioner=Kronecker(interval=3))
    seen = []
    for seed in range(5):
        take(optimizer, batch(seed=seed))
        seen.append(factors(optimizer)["0.weight"]["inputs"].clone())
    assert [torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [True, True, False, True]


# --- which block a parameter is in -----------------------------------------------------------------------------------


def forms(optimizer: SHF) -> dict[str, str]:
    """Of the summary: the form by the parameters of each block."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in optimizer.summary().splitlines()[1:-1]]
    return {parameters: form for parameters, form, _ in lines}


def test_the_summary_names_every_parameter_its_form_and_the_memory() -> None:
    module = nn.Sequential(
        nn.Embedding(7, 4),
        nn.Linear(4, 6),
        nn.LayerNorm(6),
        First(nn.LSTM(6, 3, batch_first=True)),
        First(nn.MultiheadAttention(3, 1)),
    )
    optimizer = make(module)
    assert forms(optimizer) == {
        "0.weight": "diagonal",
        "1.weight, 1.bias": "kronecker: 5 inputs x 6 outputs",
        "2.weight": "diagonal",
        "2.bias": "diagonal",
        "3.inner.weight_ih_l0, 3.inner.bias_ih_l0": "kronecker: 7 inputs x 12 outputs",
        "3.inner.weight_hh_l0, 3.inner.bias_hh_l0": "kronecker: 4 inputs x 12 outputs",
        "4.inner.in_proj_weight, 4.inner.in_proj_bias": "kronecker: 3 groups of 4 inputs x 3 outputs",
        "4.inner.out_proj.weight, 4.inner.out_proj.bias": "kronecker: 4 inputs x 3 outputs",
    }
    numbers = 28 + 25 + 36 + 12 + 49 + 144 + 16 + 144 + 3 * (16 + 9) + 16 + 9
    assert optimizer.summary().splitlines()[-1].split() == ["total", f"{2 * 4 * numbers / 1024:.1f}", "KiB"]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens.long() % 7).mean(1))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    module[2].weight = module[0].weight
    return module


FORMS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str]]] = {
    "a side above the largest size": (
        mlp,
        Kronecker(max_size=5),
        {
            "0.weight, 0.bias": "kronecker: 5 inputs x 5 outputs",
            "2.weight, 2.bias": "kronecker: 6 inputs (diagonal) x 3 outputs",
            "4.weight, 4.bias": "kronecker: 4 inputs x 2 outputs",
        },
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.ConvTranspose1d(2, 2, 3), nn.Flatten()),
        "kronecker",
        {"1.weight": "diagonal", "1.bias": "diagonal"},
    ),
    "tied weights, which keep their own biases": (
        tied,
        "kronecker",
        {
            "0.weight": "kronecker: 4 inputs x 4 outputs",
            "0.bias": "kronecker: 1 inputs x 4 outputs",
            "2.bias": "kronecker: 1 inputs x 4 outputs",
            "3.weight, 3.bias": "kronecker: 5 inputs x 2 outputs",
        },
    ),
    "a weight that is also an embedding": (
        LanguageModel,
        "kronecker",
        {"embedding.weight": "diagonal", "head.bias": "kronecker: 1 inputs x 7 outputs"},
    ),
}


@pytest.mark.parametrize(("build", "preconditioner", "expected"), FORMS.values(), ids=FORMS)
def test_each_parameter_has_a_block_of_the_right_form_and_trains(
    build: Callable[[], nn.Module], preconditioner: Any, expected: dict[str, str]
) -> None:
    torch.manual_seed(0)
    module, inputs = build().double(), gaussian(12, 4, seed=1)
    optimizer = make(module, preconditioner=preconditioner)
    assert forms(optimizer) == expected
    report = take(optimizer, (inputs, torch.zeros_like(module(inputs))))
    assert report.loss_after < report.loss_before
    if preconditioner != "kronecker":
        assert factors(optimizer)["2.weight"]["inputs"].shape == (1, 6)


def test_a_layer_that_is_not_called_is_named_once() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.linear(x, self.hidden.weight, self.hidden.bias).tanh())

    torch.manual_seed(0)
    module = Functional().double()
    optimizer = make(module)
    with pytest.warns(UserWarning, match=r"layers of hidden\.weight, hidden\.bias in this batch"):
        report = take(optimizer, batch())
    assert report.loss_after < report.loss_before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(optimizer, batch(seed=2))


# --- what they are for -----------------------------------------------------------------------------------------------


def test_a_regression_of_one_output_takes_a_few_iterations() -> None:
    """G is 1 then, and G ⊗ A the Gauss-Newton matrix itself."""
    scales, iterations = torch.logspace(0, 3, 20, dtype=torch.float64), []
    data = (gaussian(100, 20, seed=1) * scales, gaussian(100, 1, seed=2))
    for preconditioner in ("kronecker", None):
        options = {"damping": 1e-4, "solver": LSMR(damping_space="x", maxiter=2000, atol=1e-8)}
        optimizer = make(nn.Linear(20, 1).double(), preconditioner=preconditioner, **options)
        iterations.append(take(optimizer, data).solver_iterations)
    assert iterations[0] <= 4 and iterations[1] > 25


def test_bfloat16_autocast_keeps_float32_factors() -> None:
    module, (inputs, targets) = network(torch.float32), batch(dtype=torch.float32)
    optimizer = make(module, solver=LSMR(maxiter=10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = take(optimizer, (inputs, targets))
    assert report.loss_after < report.loss_before
    assert {t.dtype for block in factors(optimizer).values() for t in block.values()} == {torch.float32}


# --- saving, loading, copying ----------------------------------------------------------------------------------------


def test_factors_of_other_options_are_refused() -> None:
    module = network()
    optimizer = make(module)
    take(optimizer, batch(seed=1))
    other = make(module, preconditioner=Kronecker(max_size=5))
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(
        ValueError, match="averages of the Kronecker factors are of another network, or of other options"
    ):
        take(other, batch(seed=2))


def test_a_block_that_float32_cannot_factor_is_factored_in_float64_beside_the_others() -> None:
    module = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 2, bias=False))
    kronecker = KroneckerFactors(module, dict(module.named_parameters()), Kronecker())
    factors = {
        "0.weight": {"inputs": torch.full((1, 8, 8), 1e4), "outputs": torch.full((1, 3, 3), 1e4)},
        "1.weight": {"inputs": torch.eye(3)[None], "outputs": torch.eye(2)[None]},
    }
    x = gaussian(30, seed=0).float()
    solved = kronecker.preconditioner(factors, 1e-4).solve(x)
    assert solved.isfinite().all()
    torch.testing.assert_close(solved[24:], x[24:] / (1 + 1e-4))
    factors["1.weight"]["inputs"] = -torch.eye(3)[None]
    with pytest.raises(FloatingPointError, match=r"block 1\.weight: the damped factor of 3 rows is not positive"):
        kronecker.preconditioner(factors, 1e-4)


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_factor_that_overflows_is_an_error_that_names_its_parameters_and_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    for parameter in (module[0].weight, module[0].bias, module[1].bias):
        nn.init.zeros_(parameter)
    before = weights(module)
    inputs, targets = torch.full((6, 4), 1e20), torch.full((6, 2), 1e-20)  # the gradient is of the size of one
    optimizer = make(module)
    with pytest.raises(
        FloatingPointError, match=r"block 0\.weight, 0\.bias: the curvature factor holds NaN or infinity"
    ):
        take(optimizer, (inputs, targets))
    assert torch.equal(weights(module), before)
    assert take(optimizer, (inputs * 1e-20, torch.ones(6, 2))).step_length > 0


def test_too_little_memory_is_an_error_that_names_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 500)
    with pytest.raises(
        MemoryError, match=r"take 1\.8 KiB, but 0\.5 KiB are free on cpu; the largest: 0\.weight 0\.8 KiB"
    ):
        make(network())


def test_only_kronecker_factors_have_a_summary() -> None:
    with pytest.raises(ValueError, match="only preconditioner='kronecker' has a summary, not 'diagonal'"):
        make(network(), preconditioner="diagonal").summary()
