import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.prune import l1_unstructured
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_struct.functional import CrossEntropy, SquaredError
from lightning_struct.optim import LSMR, SHF, LevenbergMarquardt, StepReport, WarmStart
from lightning_struct.optim.shf.settings import SOLVERS
from tests.cases import CASES, Case, dense_jacobian, flat, mlp, trainable
from tests.optim.helpers import gaussian


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


def batch(n: int = 12, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draws from one distribution: the targets are those of a teacher, with noise."""
    inputs = gaussian(n, 4, seed=seed)
    targets = (inputs @ gaussian(4, 2, seed=99)).tanh() + 0.1 * gaussian(n, 2, seed=seed + 1)
    return inputs.to(dtype), targets.to(dtype)


def take(optimizer: SHF, data: tuple[Any, Tensor]) -> StepReport:
    return optimizer.step(inputs=data[0], targets=data[1])


def weights(module: nn.Module) -> Tensor:
    return flat(trainable(module)).clone()


def without_seconds(report: StepReport) -> StepReport:
    return replace(report, seconds={})


def mean_loss(module: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return 0.5 * (module(data[0]) - data[1]).square().sum().item() / len(data[1])


def changed(**methods: Callable[[Tensor], Tensor]) -> SquaredError:
    """A loss of the user's own: the squared error, with functions of what some of its methods return."""

    def after(name: str) -> Callable[..., Tensor]:
        return lambda *args: methods[name](getattr(SquaredError, name)(*args))

    return type("Changed", (SquaredError,), {name: after(name) for name in methods})()


# --- dropout, batch normalisation, and other things in the network ---------------------------------------------------


class FunctionalDropout(nn.Module):
    """A chain of Linear layers by its modules, with a dropout that shows in its forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation, self.second = nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.activation(self.first(x)), 0.5, self.training))


DROPOUTS = {
    "layer": lambda: nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 2)),
    "functional": FunctionalDropout,
}


def random_states_of_forwards(module: nn.Module) -> list[torch.Tensor]:
    """Filled with the state of the CPU's generator at the start of each forward pass."""
    states: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    return states


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_both_losses_of_a_step_are_with_the_dropout_masks_of_one_forward(name: str, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    before = copy.deepcopy(module)
    states = random_states_of_forwards(module)
    report = take(SHF(module, "mse", damping=3.0, preconditioner=None, chunk_size=chunk_size), data)

    def loss_with_those_masks(network: nn.Module) -> float:
        torch.set_rng_state(states[0])
        chunks = zip(*(t.split(chunk_size or len(t)) for t in data), strict=True)
        return sum(mean_loss(network, chunk) * len(chunk[0]) for chunk in chunks) / len(data[0])

    assert report.loss_before == pytest.approx(loss_with_those_masks(before), rel=1e-12)
    assert report.loss_after == pytest.approx(loss_with_those_masks(module), rel=1e-12)


def test_the_global_random_state_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 2))
    optimizer = SHF(module, "mse", damping=1.0, solver=LSMR(maxiter=2))
    before = torch.get_rng_state()
    optimizer.step(inputs=torch.ones(8, 4), targets=torch.zeros(8, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_every_step_draws_new_dropout_masks(name: str, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    optimizer = SHF(module, "mse", damping=1e6, preconditioner=None, chunk_size=chunk_size)
    first, second = take(optimizer, data), take(optimizer, data)
    assert abs(first.loss_before - second.loss_before) > 1e-3  # the weights moved by less than 1e-10


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_variance_under_dropout_is_that_of_the_gradients_with_the_masks_of_the_step(name: str) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    before = copy.deepcopy(module)
    states = random_states_of_forwards(module)
    report = take(SHF(module, "mse", damping=1e6, preconditioner=None), data)
    torch.set_rng_state(states[0])
    loss = 0.5 * (before(data[0]) - data[1]).square().sum(1)
    gradients = [torch.autograd.grad(value, list(before.parameters()), retain_graph=True) for value in loss]
    rows = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in gradients])
    assert report.gradient_variance == pytest.approx(rows.var(0).sum().item(), rel=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case.per_sample], ids=str)
def test_the_variance_is_that_of_the_gradients_of_the_samples(case: Case) -> None:
    module, inputs = case.make()
    module.eval()
    with torch.no_grad():
        targets = module(inputs) + 0.1
    jacobian = dense_jacobian(module, inputs)
    rows = torch.einsum("nkp,nk->np", jacobian, (module(inputs) - targets).detach().flatten(1))
    report = take(
        SHF(module, "mse", damping=1e6, preconditioner=None, solver=LSMR(maxiter=1), backend=case.backends[-1]),
        (inputs, targets),
    )
    assert report.gradient_variance == pytest.approx(rows.var(0).sum().item(), rel=1e-8)


class Borrowing(nn.Module):
    """Uses a weight outside of the layer that owns it too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.layer.weight) + self.layer(x)


def test_a_variance_that_takes_single_samples_is_announced_and_right() -> None:
    torch.manual_seed(0)
    module, (inputs, _) = Borrowing().double(), batch()
    targets = torch.zeros(len(inputs), 4, dtype=torch.float64)
    jacobian = dense_jacobian(module, inputs)
    rows = torch.einsum("nkp,nk->np", jacobian, module(inputs).detach())
    with pytest.warns(UserWarning, match="the layers' shares of layer.weight do not add up to its gradient"):
        report = take(SHF(module, "mse", damping=1.0, preconditioner=None, solver=LSMR(maxiter=1)), (inputs, targets))
    assert report.gradient_variance == pytest.approx(rows.var(0).sum().item(), rel=1e-9)


def batch_normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_a_step_with_batch_norm_is_that_of_the_batch_statistics_which_are_updated_once() -> None:
    module, data = batch_normalised(), batch()
    once = copy.deepcopy(module)
    before = mean_loss(once, data)
    report = take(SHF(module, "mse", damping=300.0, preconditioner=None), data)
    assert module[1].num_batches_tracked == 1
    torch.testing.assert_close(module[1].running_mean, once[1].running_mean, rtol=0, atol=1e-15)
    torch.testing.assert_close(module[1].running_var, once[1].running_var, rtol=0, atol=1e-15)
    assert report.loss_before == pytest.approx(before, rel=1e-12)
    assert report.loss_after == pytest.approx(mean_loss(copy.deepcopy(module), data), rel=1e-12)
    assert report.reduction_ratio == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_has_no_variance_of_per_sample_gradients(training: bool) -> None:
    module = batch_normalised()
    if not training:  # without running statistics it normalises over the batch in eval mode too
        module[1] = nn.BatchNorm1d(5, track_running_stats=False).double()
        module.eval()
    report = take(SHF(module, "mse", damping=1.0, preconditioner=None), batch())
    assert (report.gradient_variance, report.predicted_batch_size) == (None, None)


class WithBuffer(nn.Module):
    """Changes a buffer in one of several ways."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.net, self.way = network(), way
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.way is not None:
            if self.way == "in place":
                self.table += 1
            elif self.way == "new":
                self.table = self.table + 1
            else:
                self.table.data += 1
        return self.net(x) + self.table[0].detach() * 0


@pytest.mark.parametrize("way", ["in place", "new", "data"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_buffers_that_are_written_in_any_way_and_from_any_step_on_are_updated_once_a_step(
    way: str, steps_before: int
) -> None:
    module = WithBuffer(way if steps_before == 0 else None)
    optimizer = SHF(module, "mse")
    for step in range(steps_before + 3):
        if step == steps_before:
            module.way = "in place" if way == "data" else way  # a later write through .data is not seen
        take(optimizer, batch(seed=step))
        assert (module.table == max(step + 1 - steps_before, 0)).all()
    module.eval()
    take(optimizer, batch())
    assert (module.table == 3).all()


class Stateful(nn.Module):
    """A recurrent network that begins each batch in the state in which the last one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)
        self.register_buffer("state", torch.zeros(1, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.cell(x, self.state.clone())
        if self.training:
            self.state.copy_(state.detach())
        return self.head(outputs)


@pytest.mark.parametrize("settings", [{"damping": 1.0, "preconditioner": None}, {}], ids=["paper", "chosen"])
def test_a_step_reads_the_buffers_that_a_first_forward_reads(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Stateful().double()
    optimizer = SHF(module, "mse", **settings)
    for seed in range(4):
        inputs, targets = gaussian(5, 6, 4, seed=seed) + 1, gaussian(5, 6, 2, seed=seed + 10)
        alike = copy.deepcopy(module)
        loss = 0.5 * (alike(inputs) - targets).square().sum().item() / 5
        assert take(optimizer, (inputs, targets)).loss_before == pytest.approx(loss)
        torch.testing.assert_close(module.state, alike.state)


def warnings_of_a_step(module: nn.Module, loss: Any = "mse", **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        take(SHF(module.double(), loss, **settings), batch())
    return [str(warning.message) for warning in warned]


class Counted(nn.Module):
    """A forward with a Python number, which each call changes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net, self.scale, self.factor = nn.Sequential(network(), nn.PReLU()), 1.0, factor

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= self.factor
        return self.scale * self.net(x)


def test_outputs_that_change_from_call_to_call_are_told() -> None:
    warned = warnings_of_a_step(Counted(1.2))[0]  # the next ones are that no step lowers such a loss
    assert re.search("outputs change from call to call, .* by 20%.*register_buffer", warned)
    assert warnings_of_a_step(Counted(1.001)) == []
    assert warnings_of_a_step(nn.Sequential(network(), nn.PReLU(), nn.Dropout(0.5))) == []


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


class SquaresOnce(Squares):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


class Squaring(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x)))


def test_a_backward_without_a_derivative_is_told() -> None:
    torch.manual_seed(0)
    (warned,) = warnings_of_a_step(Squaring(SquaresOnce))
    assert re.search("products with the Jacobian .* wrong.*once_differentiable.* by [0-9]+%", warned)
    assert warnings_of_a_step(Squaring(Squares)) == []


def test_spectral_normalisation_follows_the_weights() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(4, 20)), nn.Tanh(), nn.Linear(20, 2)).double()
    optimizer = SHF(module, "mse")
    for seed in range(30):
        take(optimizer, batch(40, seed=seed))
    module.eval()
    assert torch.linalg.matrix_norm(module[0].weight, 2).item() == pytest.approx(1.0, abs=0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize("preconditioner", ["diagonal", "diagonal_sum", "fisher"])
def test_a_preconditioner_of_per_sample_gradients_is_refused_with_batch_norm(preconditioner: str) -> None:
    module = batch_normalised()
    before = copy.deepcopy(module.state_dict())
    optimizer = SHF(module, "mse", damping=1.0, preconditioner=preconditioner)
    with pytest.raises(ValueError, match=rf"'{preconditioner}'.* 1 .*preconditioner=None"):
        take(optimizer, batch())
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


class Neighbours(nn.Module):
    """Adds what each edge brings to its node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        messages, (source, target) = self.first(graph["nodes"]).tanh(), graph["edges"]
        return self.last(torch.zeros_like(messages).index_add(0, target, messages[source]))


def test_a_preconditioner_of_per_sample_gradients_is_refused_where_nodes_depend_on_each_other() -> None:
    torch.manual_seed(0)
    module, (nodes, targets) = Neighbours().double(), batch()
    graph = {"nodes": nodes, "edges": torch.tensor([[0, 1, 2, 5], [1, 2, 0, 4]])}
    with pytest.raises(
        ValueError, match="'diagonal' .* no single sample .IndexError.*preconditioner=None or 'kronecker'"
    ):
        take(SHF(module, "mse", damping=1.0), (graph, targets))
    report = take(SHF(module, "mse", damping=1.0, preconditioner="kronecker"), (graph, targets))
    assert report.loss_after < report.loss_before


def test_frozen_parameters_are_left_alone() -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    module[2].requires_grad_(False)
    before = {name: p.clone() for name, p in module.named_parameters()}
    take(SHF(module, "mse", damping=1.0), batch())
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"0.bias", "4.weight", "4.bias"}


def test_tied_weights_stay_tied_and_move_by_the_sum_of_their_uses() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    module[2].weight = module[0].weight
    report = take(SHF(module, "mse", damping=3.0), batch())
    assert module[2].weight is module[0].weight
    assert report.reduction_ratio == pytest.approx(1.0, abs=0.2)


class OfPadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_single_samples_of_padded_sequences_have_gradients() -> None:
    torch.manual_seed(0)
    module = OfPadded().double()
    inputs, targets = (gaussian(4, 5, 3, seed=1), torch.tensor([2, 5, 1, 3])), gaussian(4, 2, seed=9)
    of_samples = []
    for i in range(4):
        row = slice(i, i + 1)
        loss = 0.5 * (module(inputs[0][row], inputs[1][row]) - targets[row]).square().sum()
        of_samples.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    report = take(SHF.paper(module, "mse", solver=LSMR(maxiter=5)), (inputs, targets))
    assert report.gradient_variance == pytest.approx(torch.stack(of_samples).var(0).sum().item(), rel=1e-6)


def test_inputs_that_forward_does_not_take_are_told() -> None:
    class Masked(nn.Linear):
        def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input) * mask

    inputs, targets = batch()
    optimizer = SHF(Masked(4, 2).double(), "mse")
    with pytest.raises(TypeError, match=r"Masked.forward\(input.*the 1 inputs .* 'mask'.* as a dict, is one"):
        optimizer.step(inputs={"input": inputs, "mask": torch.ones(12, 1)}, targets=targets)
    optimizer.step(inputs=(inputs, torch.ones(12, 1)), targets=targets)


def test_a_step_in_inference_mode_is_refused() -> None:
    optimizer = SHF(network(), "mse")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="take the step outside"):
        take(optimizer, batch())


# --- training --------------------------------------------------------------------------------------------------------


def test_the_maximum_of_iterations_grows_in_the_ratio_of_the_batch_and_never_shrinks() -> None:
    optimizer = SHF(
        network(),
        "mse",
        damping=LevenbergMarquardt(initial=1e-3, drop=None),
        preconditioner=None,
        solver=LSMR(maxiter=6, atol=0.0),
    )
    iterations = [take(optimizer, batch(n, seed=n)).solver_iterations for n in (10, 15, 5, 15, 30)]
    assert iterations == [6, 9, 9, 9, 18]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 0.7 * 1.002**3), (WarmStart(0.9, growth=1.03), 0.95), (WarmStart(0.2, growth=1.0), 0.2), (0.97, 0.97)],
    ids=["the paper's", "to its maximum", "no growth", "above its maximum"],
)
def test_the_warm_start_is_the_given_one_grown(given: WarmStart | float | None, expected: float) -> None:
    optimizer = SHF(network(), "mse", damping=1.0, warm_start=given)
    for seed in range(3):
        take(optimizer, batch(seed=seed))
    assert optimizer.param_groups[0]["warm_start"] == pytest.approx(expected, rel=1e-12)


def test_without_a_drop_the_damping_is_left_alone() -> None:
    optimizer = SHF(network(), "mse", damping=LevenbergMarquardt(initial=2.0, drop=None))
    assert [take(optimizer, batch(seed=seed)).damping for seed in range(3)] == [2.0, 2.0, 2.0]


def test_damping_and_drop_can_be_set_between_steps() -> None:
    optimizer = SHF(network(), "mse", damping=2.0)
    optimizer.damping, optimizer.drop = 8.0, 0.5
    assert take(optimizer, batch()).damping == 8.0
    assert optimizer.damping == 4.0


def test_the_seed_decides_the_signs_of_the_preconditioner() -> None:
    def after_two_steps(seed: int) -> Tensor:
        module = network()
        optimizer = SHF(module, "mse", damping=1.0, solver=LSMR(maxiter=2), seed=seed)
        take(optimizer, batch(seed=1))
        take(optimizer, batch(seed=2))
        return weights(module)

    torch.manual_seed(1)
    first = after_two_steps(0)
    torch.manual_seed(2)
    assert torch.equal(first, after_two_steps(0))
    assert not torch.equal(first, after_two_steps(1))


def test_a_closure_is_called_once_before_the_step() -> None:
    module, calls = network(), []

    def closure() -> None:
        calls.append((weights(module), torch.is_grad_enabled()))

    before = weights(module)
    SHF(module, "mse", damping=1.0).step(closure, inputs=batch()[0], targets=batch()[1])
    ((seen, grad_enabled),) = calls
    assert torch.equal(seen, before) and grad_enabled


def test_the_report_is_kept_and_its_seconds_name_the_phases() -> None:
    optimizer = SHF(network(), "mse", damping=1.0)
    assert optimizer.report is None
    report = take(optimizer, batch())
    assert report is optimizer.report
    assert set(report.seconds) == {"linearize", "precondition", "solve", "line_search", "merit"}
    assert all(seconds >= 0 for seconds in report.seconds.values())


def test_the_predicted_batch_size_is_bounded_by_the_dataset() -> None:
    reports = [take(SHF(network(), "mse", damping=1.0, theta=0.05, dataset_size=size), batch()) for size in (None, 40)]
    stream, finite = (report.predicted_batch_size for report in reports)
    variance, squared = reports[1].gradient_variance, reports[1].gradient_norm ** 2
    assert stream > 40
    assert finite == math.ceil(40 * variance / (variance + 39 * 0.05**2 * squared))


def test_a_batch_of_one_has_no_variance() -> None:
    report = take(SHF(network(), "mse", damping=1.0), batch(1))
    assert (report.gradient_variance, report.predicted_batch_size, report.batch_size) == (None, None, 1)
    assert report.loss_after < report.loss_before


def test_a_preconditioner_object_is_asked_for_both_solves_at_once_by_cg() -> None:
    class Normal:
        calls = 0

        def solve(self, y: dict[str, Tensor]) -> dict[str, Tensor]:
            raise AssertionError

        solve_transpose = solve

        def solve_normal(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            self.calls += 1
            return x

    normal = Normal()
    take(SHF(network(), "mse", damping=1.0, solver="cg", preconditioner=normal), batch())
    assert normal.calls > 0


# --- validation data -------------------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2)).double()


def validation_loss(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    copied = copy.deepcopy(module).eval()
    return sum(mean_loss(copied, data) * len(data[1]) for data in batches) / sum(len(data[1]) for data in batches)


@pytest.mark.parametrize("build", [with_dropout, batch_normalised])
@pytest.mark.parametrize("sizes", [(7, 3), (7, 0)], ids=str)
def test_the_merit_is_the_validation_loss_at_the_new_weights_in_eval_mode(
    build: Callable[[], nn.Module], sizes: tuple[int, int]
) -> None:
    module, validation = build(), [batch(n, seed=50 + n) for n in sizes]
    optimizer = SHF(module, "mse", damping=1.0, l2=0.1, solver=LSMR(maxiter=8), preconditioner=None)
    optimizer.set_validation(validation)
    assert take(optimizer, batch()).merit == pytest.approx(
        validation_loss(module, [data for data in validation if len(data[1])]), rel=1e-12
    )


def test_the_merit_is_that_of_the_step_that_the_line_search_shortened() -> None:
    module, validation = network(), [batch(60, seed=50)]
    optimizer = SHF(module, "mse", damping=0.05, solver=LSMR(maxiter=15, atol=0.0))
    optimizer.set_validation(validation)
    report = take(optimizer, batch(6))
    assert 0.0 < report.step_length < 1.0 and report.merits[-1][0] == report.solver_iterations
    assert report.merit == pytest.approx(validation_loss(module, validation), rel=1e-12)


def test_merits_begin_at_the_start_of_the_solver_and_come_at_growing_intervals() -> None:
    module, validation = with_dropout(), [batch(7, seed=50)]
    optimizer = SHF(
        module, "mse", damping=LevenbergMarquardt(initial=0.01, drop=None), solver=LSMR(maxiter=20, atol=0.0)
    )
    optimizer.set_validation(validation)
    before = validation_loss(module, validation)
    first = take(optimizer, batch(seed=1))
    assert [iteration for iteration, _ in first.merits] == [0, 5, 7, 9, 12, 15, 19, 20]
    assert first.merits[0][1] == pytest.approx(before, rel=1e-12)


def test_the_second_solve_starts_at_the_last_direction_times_the_warm_start() -> None:
    module, validation = network(), [batch(7, seed=50)]
    optimizer = SHF(module, "mse", damping=3.0, warm_start=WarmStart(initial=0.5, growth=1.1))
    optimizer.set_validation(validation)
    before = weights(module)
    report = take(optimizer, batch(seed=1))
    direction = (weights(module) - before) / report.step_length
    second = take(optimizer, batch(seed=2))
    moved = network()
    nn.utils.vector_to_parameters(before + report.step_length * direction + 0.55 * direction, moved.parameters())
    assert second.merits[0][1] == pytest.approx(validation_loss(moved, validation), rel=1e-12)


def test_the_module_is_back_in_the_modes_it_was_in() -> None:
    module = with_dropout().train()
    module[0].eval()
    optimizer = SHF(module, "mse", damping=1.0)
    optimizer.set_validation([batch(7, seed=50)])
    take(optimizer, batch())
    assert [layer.training for layer in module.modules()] == [True, False, True, True, True]


def test_a_validation_loss_that_hardly_falls_ends_the_solver() -> None:
    options: dict[str, Any] = {"solver": LSMR(maxiter=60, miniter=10, ftol=1e-3, atol=0.0), "preconditioner": None}
    optimizer = SHF(network(), "mse", damping=0.1, **options)
    optimizer.set_validation([batch(60)])
    report = take(optimizer, batch(60))
    assert report.stop_reason == "callback"
    assert report.solver_iterations == report.merits[-1][0] < 60


def test_the_last_iterate_is_taken_also_if_another_one_is_better() -> None:
    """Little damping and few samples: the direction overfits them, and the merit rises towards the end of the solve."""
    module, validation = network(), [batch(60, seed=50)]
    optimizer = SHF(module, "mse", damping=0.1, solver=LSMR(maxiter=40, atol=0.0))
    optimizer.set_validation(validation)
    report = take(optimizer, batch(6))
    assert report.step_length == 1.0
    best, last = min(merit for _, merit in report.merits[1:]), report.merits[-1][1]
    assert best < (1 - 1e-6) * last
    assert report.merit == pytest.approx(last, rel=1e-9)


def test_validation_data_can_be_taken_away() -> None:
    optimizer = SHF(network(), "mse", damping=1.0)
    optimizer.set_validation([batch(7, seed=50)])
    optimizer.set_validation(None)
    report = take(optimizer, batch())
    assert (report.merit, report.merits) == (None, ())


@pytest.mark.parametrize("batches", [[], [(torch.zeros(0, 4), torch.zeros(0, 2))]], ids=["none", "empty"])
def test_validation_data_without_samples_is_an_error_and_not_kept(batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = SHF(network(), "mse", damping=1.0)
    with pytest.raises(ValueError, match="no samples"):
        optimizer.set_validation(batches)
    assert take(optimizer, batch()).merit is None


# --- saving, loading, copying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SHF", "Adam"])
def test_a_state_of_another_module_or_optimizer_is_refused(name: str) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.Adam(network().parameters())
    if name == "SHF":
        optimizer = SHF(nn.Sequential(*[nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]).double(), "mse")
        take(optimizer, batch())
    loaded = SHF(network(), "mse")
    expected = "of an SHF that trains 50 weights, and this one" if name == "SHF" else "another optimizer than SHF"
    with pytest.raises(ValueError, match=expected):
        loaded.load_state_dict(optimizer.state_dict())
    assert take(loaded, batch()).loss_after < 1.0


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["lsmr", "cg"])
def test_nan_within_the_solve_is_an_error_that_changes_nothing(solver: str) -> None:
    """Thrice, on a larger batch than the one before: the maximum of iterations must not grow with the failures."""
    module, untouched = network(), network()
    options: dict[str, Any] = {"damping": 0.5, "solver": SOLVERS[solver](maxiter=2)}
    optimizer, other = SHF(module, "mse", **options), SHF(untouched, "mse", **options)
    for o in (optimizer, other):
        take(o, batch(6, seed=1))
    before, honest = weights(module), optimizer.loss
    optimizer.loss = changed(sqrt_hessian_transpose=lambda v: v * math.nan)
    for _ in range(3):
        with pytest.raises(FloatingPointError, match="NaN or infinity"):
            take(optimizer, batch(12, seed=2))
    optimizer.loss = honest
    assert torch.equal(weights(module), before)
    assert without_seconds(take(optimizer, batch(12, seed=2))) == without_seconds(take(other, batch(12, seed=2)))


def test_a_zero_gradient_is_a_warning_of_the_line_that_called_the_step_and_no_step() -> None:
    module = network()
    inputs, _ = batch()
    before, optimizer = weights(module), SHF(module, "mse", damping=1.0)
    optimizer.set_validation([batch(5, seed=9)])
    with pytest.warns(UserWarning, match="gradient of this batch is zero") as caught:
        report = take(optimizer, (inputs, module(inputs).detach()))
    assert caught[0].filename == __file__
    assert (report.stop_reason, report.step_length, report.predicted_batch_size) == ("zero_gradient", 0.0, None)
    assert report.merit == pytest.approx(validation_loss(module, [batch(5, seed=9)]))
    assert torch.equal(weights(module), before)


class Lying(SquaredError):
    """Its value has the opposite sign: along a direction of descent it rises."""

    lies = True

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -super().value(outputs, targets) if self.lies else super().value(outputs, targets)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drop", [0.99, None])
@pytest.mark.parametrize("solver", ["lsmr", "cg"])
def test_without_a_step_that_lowers_the_loss_the_weights_stay_and_the_damping_rises(
    solver: str, drop: float | None
) -> None:
    module, loss = network(), Lying()
    optimizer = SHF(module, loss, damping=LevenbergMarquardt(initial=1.0, drop=drop), solver=solver)
    before = weights(module)
    with pytest.warns(UserWarning, match="no step .* lowers the loss"):
        report = take(optimizer, batch())
    assert (report.stop_reason, report.step_length) == ("line_search", 0.0)
    assert report.loss_after == report.loss_before
    assert torch.equal(weights(module), before)
    assert optimizer.damping > 1.0
    loss.lies = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = take(optimizer, batch())
    assert report.loss_after < report.loss_before == pytest.approx(mean_loss(network(), batch()))


def test_the_damping_after_a_failure_stays_below_its_maximum() -> None:
    optimizer = SHF(network(), Lying(), damping=LevenbergMarquardt(initial=1.0, maximum=2.0))
    with pytest.warns(UserWarning, match="damping 2;"):
        take(optimizer, batch())
    assert optimizer.damping == 2.0


def test_a_start_that_leads_uphill_is_given_up_for_zero_with_the_same_damping() -> None:
    """One iteration with much damping hardly changes the direction, which the targets of the other sign turn uphill."""
    module = network()
    optimizer = SHF(
        module,
        "mse",
        damping=LevenbergMarquardt(initial=0.5, drop=None),
        warm_start=0.9,
        preconditioner=None,
        solver=LSMR(maxiter=1),
    )
    inputs, targets = batch()
    take(optimizer, (inputs, 5 * targets))
    optimizer.damping = 100.0
    fresh = copy.deepcopy(module)
    report = take(optimizer, (inputs, -5 * targets))
    take(SHF(fresh, "mse", damping=100.0, solver=LSMR(maxiter=1), preconditioner=None), (inputs, -5 * targets))
    assert (report.damping, report.solver_iterations, optimizer.damping) == (100.0, 2, 100.0)
    assert report.loss_after < report.loss_before
    assert torch.equal(weights(module), weights(fresh))


def test_a_gradient_whose_norm_overflows_is_an_error_and_changes_nothing() -> None:
    module = nn.Linear(4, 2)
    before, (inputs, targets) = weights(module), batch(dtype=torch.float32)
    with pytest.raises(ValueError, match="the gradient at the current weights has the squared norm inf in torch.float"):
        take(SHF(module, "mse"), (inputs * 1e12, targets * 1e12))
    assert torch.equal(weights(module), before)


def test_layers_that_are_added_later_are_named_once() -> None:
    module = network()
    optimizer = SHF(module, "mse", damping=1.0)
    module.append(nn.Linear(2, 2, dtype=torch.float64))
    data = batch()[0], module(batch()[0]).detach() + 1
    with pytest.warns(UserWarning, match=r"SHF does not train \d.weight, \d.bias, added or unfrozen since"):
        take(optimizer, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(optimizer, data)


class OfNames(nn.Linear):
    def forward(self, of_names: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(of_names["first"])


class Root(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - 100.0).sqrt()


class ToComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


INPUTS, TARGETS = batch()
COMPLEX = torch.ones(12, 2, dtype=torch.complex64)
OVER_BATCH = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 2)).eval()


NAN = torch.full((12, 4), math.nan)
COMPLEX_OUTPUTS = nn.Sequential(nn.Linear(4, 2), ToComplex())
REFUSED_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "dict of targets": ({"targets": {"y": TARGETS}}, "takes targets as one tensor, got dict: "),
    "complex targets": ({"targets": COMPLEX}, "targets are torch.complex64"),
    "whole numbers": ({"targets": TARGETS.long()}, r"targets are torch.int64: give targets.float\(\)"),
    "NaN": ({"inputs": NAN}, "the batch holds NaN or infinity"),
    "infinity": ({"targets": TARGETS / 0}, "the batch holds NaN or infinity"),
    "NaN in a dict": ({"module": OfNames(4, 2), "inputs": {"first": NAN}}, "the batch holds NaN or infinity"),
    "empty": ({"inputs": INPUTS[:0], "targets": TARGETS[:0]}, "batch is empty"),
    "lengths": (
        {"inputs": INPUTS[:6], "targets": TARGETS[:5]},
        "number of samples: 6 rows of inputs, 5 of targets.* in a dict",
    ),
    "without rows": ({"inputs": (INPUTS, torch.tensor(2.0))}, "a tensor without dimensions is among inputs and target"),
    "shape": ({"targets": TARGETS[:, :1]}, r"\(12, 2\) but targets \(12, 1\)"),
    "complex outputs": ({"module": COMPLEX_OUTPUTS}, "returned torch.complex128"),
    "NaN in the outputs": ({"module": Root(4, 2)}, "loss at the current weights is nan"),
    "overflow": ({"targets": TARGETS * 1e200}, "loss at the current weights is inf"),
    "no targets": ({"targets": None}, r"step\(inputs=..., targets=...\)"),
    "no inputs": ({"inputs": None}, r"step\(inputs=..., targets=...\)"),
    "chunks": (
        {"module": OVER_BATCH, "preconditioner": None, "chunk_size": 5},
        "1 normalises over the batch.*leave chunk_size out",
    ),
    "value of another shape": ({"loss": changed(value=lambda v: v.expand(12))}, r"returned a tensor of \(12,\)"),
    "residual of another shape": (
        {"loss": changed(residual=lambda r: r.mean(1))},
        r"residual returned \(12,\)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED_BATCHES.values(), ids=REFUSED_BATCHES)
def test_batches_that_cannot_be_trained_on_are_refused_and_change_nothing(call: dict[str, Any], message: str) -> None:
    given = {"module": network(), "loss": "mse", "damping": 1.0, "inputs": INPUTS, "targets": TARGETS} | call
    names = {name: given.pop(name) for name in ("inputs", "targets")}
    module = given.pop("module").double()
    optimizer, before = SHF(module, given.pop("loss"), **given), weights(module)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step(**{name: value for name, value in names.items() if value is not None})
    assert torch.equal(weights(module), before)


def test_a_batch_without_names_is_told_how_to_be_passed() -> None:
    with pytest.raises(TypeError, match=r"by name, step\(inputs=x, targets=y\); .* got Tensor, Tensor"):
        SHF(network(), "mse").step(INPUTS, TARGETS)  # type: ignore[arg-type]


def test_a_scheduler_is_told_that_there_is_no_learning_rate() -> None:
    optimizer = SHF(network(), "mse")
    optimizer.step(inputs=INPUTS, targets=TARGETS)
    for _ in range(2):
        with pytest.raises(ValueError, match="SHF has no learning rate"):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_wrapper_that_passes_no_batch_on_is_told_to_step_the_optimizer_within() -> None:
    class Prepared:  # as accelerate wraps an optimizer
        def __init__(self, optimizer: SHF) -> None:
            self.optimizer = optimizer

        def step(self, closure: Callable[[], Any] | None = None) -> None:
            self.optimizer.step(closure)

    with pytest.raises(TypeError, match=r"accelerate .* prepared\.optimizer\.step\(inputs="):
        Prepared(SHF(network(), "mse")).step()


def layers(*made: nn.Module) -> nn.Module:
    return nn.Sequential(*made, nn.Linear(4, 2))


REFUSED_MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters": (lambda: network().parameters(), r"the module, which it calls itself.* return SHF\(self, \.\.\.\)"),
    "float16": (lambda: network(torch.float16), "got torch.float16.*bf16-mixed"),
    "dtypes": (lambda: layers(nn.Linear(4, 4).double()), "torch.float32, torch.float64"),
    "sparse gradients": (
        lambda: layers(nn.EmbeddingBag(5, 4, sparse=True)),
        "dense gradients, and those of 0 are sparse: .*sparse=False",
    ),
    "rescaled in the forward": (
        lambda: layers(nn.EmbeddingBag(5, 4, max_norm=1.0)),
        "the forward of 0 rescales its own: .*without max_norm",
    ),
    "scripted": (lambda: layers(torch.jit.script(nn.Linear(4, 4))), "0 is scripted or traced"),
    "lazy": (lambda: layers(nn.LazyLinear(4)), r"0\.weight, 0\.bias have no shape yet: call the module once"),
    "frozen": (lambda: network().requires_grad_(False), r"no parameter that requires a gradient.*requires_grad_\(\)"),
    "devices": (
        lambda: layers(nn.Linear(4, 4, device="meta")),
        r"0\.weight -> meta, .*; move the module by mod",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("make", "message"), REFUSED_MODULES.values(), ids=REFUSED_MODULES)
def test_modules_that_cannot_be_trained_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SHF(make(), "mse")


LOSSES: list[tuple[str, Any, str]] = [
    ("mse", nn.CrossEntropyLoss(), "CrossEntropyLoss lacks value, .* 'cross_entropy'"),
    ("mse", "least_squares", "LeastSquares cannot take the place of SquaredError.*Make a new SHF"),
    ("least_squares", "mse", "SquaredError cannot take the place of LeastSquares.*Make a new SHF"),
    ("mse", "absolute", "got 'absolute'"),
]


@pytest.mark.parametrize(("first", "second", "message"), LOSSES)
def test_a_loss_that_cannot_take_its_place_is_refused_at_once(first: str, second: Any, message: str) -> None:
    optimizer = SHF(network(), first)
    before = optimizer.loss
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.loss = second
    assert optimizer.loss is before


class Hiding(nn.Module):
    """Uses tensors that are not among its parameters, and has one more that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.scales, self.shifts = [nn.Parameter(torch.ones(2).double())], {"a": nn.Parameter(torch.ones(2).double())}
        self.unused = [nn.Parameter(torch.ones(2))]
        object.__setattr__(self, "offset", torch.zeros(2, dtype=torch.float64, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scales[0] + self.shifts["a"] + self.offset


@pytest.mark.parametrize("loss", ["mse", "least_squares"])
def test_parameters_that_nobody_trains_are_named_once(loss: str) -> None:
    optimizer = SHF(Hiding(), loss)
    data = {"inputs": batch()[0]} | ({"targets": batch()[1]} if loss == "mse" else {})
    with pytest.warns(UserWarning, match=r"SHF does not train scales\[0\], shifts\[.a.\], offset:"):
        optimizer.step(**data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(**data)


def test_a_loss_of_ones_own_trains_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = take(SHF(network(), changed(residual=lambda r: r)), batch())
    assert report.loss_after < report.loss_before


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (changed(value=lambda v: 12 * v), "sqrt_hessian of the residual.* 92% from the derivative of the value"),
        (changed(residual=lambda r: 2 * r), "sqrt_hessian of the residual.* 50% from the derivative of the value"),
        (changed(sqrt_hessian_transpose=lambda v: 2 * v), "sqrt_hessian_transpose of Changed .* differs by 50%"),
    ],
    ids=["value", "residual", "transpose"],
)
def test_a_loss_whose_parts_do_not_belong_together_is_warned_of_once(loss: SquaredError, message: str) -> None:
    optimizer = SHF(network(), loss)
    with pytest.warns(UserWarning, match=message):
        take(optimizer, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(optimizer, batch())


def test_another_loss_takes_its_place_by_name() -> None:
    optimizer, other = SHF(network(), "mse", damping=1.0), SHF(network(), "cross_entropy", damping=1.0)
    optimizer.loss = "cross_entropy"
    assert isinstance(optimizer.loss, CrossEntropy)
    inputs, targets = batch()
    assert without_seconds(take(optimizer, (inputs, targets.argmax(1)))) == without_seconds(
        take(other, (inputs, targets.argmax(1)))
    )


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen": (
        lambda module: module[0].requires_grad_(False),
        r"SHF trains 0\.weight, 0\.bias, frozen since.* make a new SHF",
    ),
    "another layer": (lambda module: module.__setitem__(0, nn.Linear(4, 5).double()), "0.weight.* then make SHF"),
    "assigned": (
        lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
        r"others than when SHF was made: 0\.weight.* then make SHF",
    ),
    "pruned": (lambda module: l1_unstructured(module[0], "weight", amount=0.5), r"0\.weight.* then make SHF"),
    "half precision": (lambda module: module.bfloat16(), r"got torch\.bfloat16.*bf16-mixed"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_weights_that_are_no_longer_those_of_the_start_are_named(change: Callable[[Any], Any], message: str) -> None:
    module: Any = network()
    optimizer = SHF(module, "mse")
    change(module)
    dtype = module[2].weight.dtype
    with pytest.raises(ValueError, match=message):
        take(optimizer, batch(dtype=dtype))


def test_a_second_parameter_group_is_refused() -> None:
    optimizer = SHF(network(), "mse", damping=1.0)
    with pytest.raises(ValueError, match="one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
