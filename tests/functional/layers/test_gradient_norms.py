import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_struct.functional import (
    GradientNormRecorder,
    gradient_variance,
    norm_test_batch_size,
    per_sample_gradient_norms,
    required_batch_size,
)
from lightning_struct.nn import LDRSubdiagonal
from tests.cases import gaussian


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias)).double()


def loss_of(outputs: Tensor) -> Tensor:
    """A sum over samples of something that is not linear in the outputs."""
    return (outputs.sin() * outputs).sum()


def per_sample_gradients(module: nn.Module, inputs: Tensor) -> Tensor:
    """(n, parameters) by ordinary autograd, one sample at a time."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for x in inputs:
        gradients = torch.autograd.grad(loss_of(module(x[None])), parameters)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows)


def measured(module: nn.Module, inputs: Tensor) -> Tensor:
    with per_sample_gradient_norms(module) as norms:
        loss_of(module(inputs)).backward()
    return norms.squared_norms


def test_gradients_are_those_of_an_ordinary_backward_pass() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    measured(module, inputs)
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss_of(module(inputs)).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, module.parameters(), strict=True))


def beside_a_pass_without_gradients(module: nn.Module, inputs: Tensor) -> None:
    loss = loss_of(module(inputs))
    with torch.no_grad():
        module(gaussian(9, 3, seed=2))
    loss.backward()


def clipped_before_the_norms_are_read(module: nn.Module, inputs: Tensor) -> None:
    loss_of(module(inputs)).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


def in_two_backward_passes(module: nn.Module, inputs: Tensor) -> None:
    for part in (inputs[:3], inputs[3:]):
        loss_of(module(part)).backward()


def beside_gradients_in_the_inputs(module: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    loss = loss_of(module(inputs))
    torch.autograd.grad(loss, inputs, retain_graph=True)
    loss.backward()


def checkpointed(module: nn.Module, inputs: Tensor, reentrant: bool = False) -> None:
    hidden = checkpoint(module[:2], inputs.clone().requires_grad_(), use_reentrant=reentrant)
    loss_of(module[2](hidden)).backward()


@pytest.mark.parametrize(
    "run",
    [beside_a_pass_without_gradients, clipped_before_the_norms_are_read, in_two_backward_passes,
     beside_gradients_in_the_inputs, checkpointed, partial(checkpointed, reentrant=True)],
)  # fmt: skip
def test_each_sample_is_measured_once(run: Callable[[nn.Module, Tensor], None]) -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    with per_sample_gradient_norms(module) as norms:
        run(module, inputs)
    torch.testing.assert_close(norms.squared_norms, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_module_afterwards(fails: bool) -> None:
    module = network()
    try:
        with per_sample_gradient_norms(module):
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_reading_before_a_backward_pass_is_an_error() -> None:
    module = network()
    with per_sample_gradient_norms(module) as norms:
        module(gaussian(5, 3, seed=1))
    with pytest.raises(RuntimeError, match="backward pass"):
        _ = norms.squared_norms


# --- the recorder: whole models --------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """An embedding tied to the decoder, with every layer between that a small Transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.decoder(self.recurrent(x)[0])


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(3, 2),
    )


class Unrolled(nn.Module):
    """Cells of each kind, step by step; the last state of the LSTM's memory is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.gated = nn.RNNCell(3, 4, nonlinearity="relu"), nn.GRUCell(4, 4)
        self.memory = nn.LSTMCell(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        plain = gated = None
        state = (x.new_ones(len(x), 2), x.new_ones(len(x), 2))
        for now in x.unbind(1):
            plain = self.plain(now, plain)
            gated = self.gated(plain, gated)
            state = self.memory(gated, state)
        return torch.cat(state, 1)


def parametrized() -> nn.Module:
    convolution = parametrizations.weight_norm(nn.Conv1d(2, 3, 2))
    return nn.Sequential(convolution, nn.Flatten(), nn.Tanh(), parametrizations.orthogonal(nn.Linear(9, 2)))


class TiedHead(nn.Module):
    """As BERT's: the bias of its decoder is also its own."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(3, 2)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


def frozen(*names: str) -> nn.Module:
    module = network()
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def with_a_frozen_normalization() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    module[1].requires_grad_(False)
    return module


def tied_and_called_twice() -> nn.Module:
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = layer.weight
    return nn.Sequential(layer, nn.Tanh(), other, nn.Tanh(), layer)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    # 3 x 4 and 4 x 2 weights: the Gram matrices are the smaller way for up to 2 positions, the product for more than 3.
    **{str(n): (network, gaussian(*n, 3, seed=1)) for n in ((5,), (5, 1), (5, 2), (5, 3), (5, 2, 3), (1,))},
    "no bias": (lambda: network(bias=False), gaussian(5, 3, seed=1)),
    "frozen weight": (lambda: frozen("0.weight"), gaussian(5, 1, 3, seed=1)),
    "frozen bias": (lambda: frozen("0.bias"), gaussian(5, 2, 3, seed=1)),
    "frozen layer": (lambda: frozen("0.weight", "0.bias"), gaussian(5, 7, 3, seed=1)),
    "frozen normalization": (with_a_frozen_normalization, gaussian(5, 3, seed=1)),
    "tied": (tied_and_called_twice, gaussian(5, 2, 3, seed=1)),
    "tied head": (TiedHead, gaussian(5, 3, seed=1)),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)), gaussian(5, 3, seed=1)),
    "language model": (LanguageModel, torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(1))),
    "convolutional": (convolutional, gaussian(5, 2, 6, 6, seed=1)),
    "cells": (Unrolled, gaussian(5, 3, 3, seed=1)),
    "parametrized": (parametrized, gaussian(5, 2, 4, seed=1)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), gaussian(5, 3, 4, seed=1)
    ),
}  # fmt: skip


def model(name: str) -> tuple[nn.Module, Tensor]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    return make().double(), inputs


@pytest.mark.filterwarnings("ignore:these layers have no rule")
@pytest.mark.parametrize("name", list(MODELS))
def test_squared_norms_are_those_of_per_sample_autograd_and_the_shares_add_up_to_the_gradient(name: str) -> None:
    module, inputs = model(name)
    with GradientNormRecorder(module, check=True) as recorder:
        loss_of(module(inputs)).backward()
    total = sum(norms.squared_norms[0] for norms in recorder.results())
    sums = recorder.checksums()
    assert list(sums) == [parameter for parameter, p in module.named_parameters() if p.requires_grad]
    assert all(of_parameter.relative_error <= 1e-12 for of_parameter in sums.values())
    recorder.verify()
    assert not recorder.uncovered
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:these layers have no rule")
def test_a_spectral_norm_that_goes_on_with_its_iteration_is_measured_as_it_was() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, vectors = gaussian(5, 3, seed=1), module[0].parametrizations.weight[0]
    found = measured(module, inputs)
    after_the_call = vectors._u.clone()
    expected = per_sample_gradients(module.eval(), inputs).square().sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(vectors._u, after_the_call)


def test_sparse_gradients_of_an_embedding_are_measured_and_checked() -> None:
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)).double()
    tokens = torch.tensor([[0, 1, 1], [2, 1, 0]])
    with GradientNormRecorder(module, check=True) as recorder:
        loss_of(module(tokens)).backward()
    dense = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).double()
    dense.load_state_dict(module.state_dict())
    expected = per_sample_gradients(dense, tokens).square().sum(1)
    recorder.verify()
    total = sum(norms.squared_norms[0] for norms in recorder.results())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_parameters_that_get_no_gradient_are_not_among_the_results() -> None:
    module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "detached": nn.Linear(3, 2)})
    with GradientNormRecorder(module) as recorder:
        x = torch.randn(5, 3)
        (module["used"](x) + module["detached"](x).detach()).sum().backward()
    assert [norms.name for norms in recorder.results()] == ["used.weight", "used.bias"]


def test_a_parameter_that_is_unfrozen_later_is_measured() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    module[0].requires_grad_(False)
    with GradientNormRecorder(module) as recorder:
        module[0].requires_grad_(True)
        loss_of(module(inputs)).backward()
    assert len(recorder.results()) == 4


def test_a_layer_that_is_pruned_later_is_measured() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    with GradientNormRecorder(module, check=True) as recorder:
        for name in ("weight", "bias"):
            nn.utils.prune.random_unstructured(module[0], name, 2)
        loss_of(module(inputs)).backward()
    recorder.verify()
    measured = {norms.parameter: norms.squared_norms[0] for norms in recorder.results()}
    gradients = per_sample_gradients(module, inputs)
    assert torch.allclose(sum(measured.values()), gradients.square().sum(1)) and len(measured) == 4


@pytest.mark.parametrize("name", ["(5, 2)", "convolutional", "transformer"])
def test_under_autocast_the_shares_add_up_to_the_gradient_but_for_its_rounding(name: str) -> None:
    module, inputs = model(name)
    module, inputs = module.float(), inputs.float()
    expected = per_sample_gradients(module, inputs).square().sum(1)
    if name == "transformer":  # whose masks of the forward pass are repeated
        module.self_attn.dropout = module.dropout.p = 0.5
    with GradientNormRecorder(module, check=True) as recorder:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(module(inputs).float())
        loss.backward()
    recorder.verify()
    assert not recorder.uncovered
    norms = [of_parameter.squared_norms[0] for of_parameter in recorder.results()]
    assert all(of_parameter.dtype == torch.float32 for of_parameter in norms)
    if name != "transformer":
        torch.testing.assert_close(sum(norms), expected, rtol=0.05, atol=0.05)


def test_the_wrapper_of_distributed_training_may_be_called_in_place_of_the_module(tmp_path: Path) -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(module)
        with per_sample_gradient_norms(module) as norms:
            loss_of(wrapper(inputs)).backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(norms.squared_norms, expected, rtol=1e-12, atol=1e-12)


# --- the recorder: what cannot be measured ---------------------------------------------------------------------------


class Borrowing(nn.Module):
    """Uses the weight of a layer outside of it, and inside too if told so."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(3, 3, bias=False), inside

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x) if self.inside else x, self.layer.weight)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.repeat(3, 1))


class Positions(nn.Module):
    """Reads (n, T) tokens at T positions, which come first within it if told so; T may be n by chance."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(9, 3), nn.Embedding(8, 3), nn.Linear(3, 2)
        self.first, self.calls = first, 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.total += tokens.sum()
        embedded = (self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))).tanh()
        return self.head(embedded.transpose(0, 1)).transpose(0, 1) if self.first else self.head(embedded)


@pytest.mark.parametrize("first", [False, True], ids=["samples first", "positions first"])
def test_as_many_positions_as_samples_are_told_apart_by_another_run_without_a_trace(first: bool) -> None:
    torch.manual_seed(0)
    module, tokens = Positions(first).double(), torch.randint(0, 9, (5, 5))
    module.positions.requires_grad_(False)
    with GradientNormRecorder(module) as recorder:
        loss_of(module(tokens)).backward()
    assert (module.calls, module.total) == (1, tokens.sum())
    found = sum(norms.squared_norms[0] for norms in recorder.results())
    torch.testing.assert_close(found, per_sample_gradients(module, tokens).square().sum(1), rtol=1e-10, atol=1e-12)


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).t())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Borrowing(inside=False), "layer.weight: it is used outside of its own layer"),
        (lambda: Borrowing(inside=True), "layer.weight: its gradient is not the sum of the samples' shares"),
        (Positions, r"^[^;]*positions.weight: its tensor of shape \(5,\) is the same whatever the number of samples"),
        (Transposing, r"second.weight: .*\(4, 5\).*5 rows.*must be the batch"),
        (Flattened, r"layer.weight: .*\(15, 3\).*5 rows"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "weight: it is complex; bias: it is complex"),
    ],
    ids=["outside", "outside and inside", "positions", "other batches", "flattened", "complex"],
)
def test_what_cannot_be_measured_is_named(make: Callable[[], nn.Module], message: str) -> None:
    module = make()
    with per_sample_gradient_norms(module) as norms:
        tokens = torch.zeros(5, 5, dtype=torch.int64)
        inputs = torch.randn(5, 3, dtype=next(module.parameters()).dtype)
        module(tokens if isinstance(module, Positions) else inputs).abs().square().sum().backward()
    with pytest.raises(ValueError, match=message):
        _ = norms.squared_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_check_finds_a_penalty_and_a_use_outside_of_the_layer_beside_one_inside(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Borrowing(inside=True), nn.Linear(3, 2)).to(dtype)
    with GradientNormRecorder(module, check=True, uncovered="skip") as recorder:
        (loss_of(module(gaussian(5, 3, seed=1).to(dtype))) + module[1].weight.square().sum()).backward()
    recorder.verify()
    assert list(recorder.uncovered) == ["0.layer.weight", "1.weight"]
    assert [norms.name for norms in recorder.results()] == ["1.bias"]


def test_the_check_takes_rounding_for_what_it_is_where_a_gradient_vanishes() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))  # the bias has no effect
    with GradientNormRecorder(module, check=True) as recorder, pytest.warns(UserWarning, match="couples the samples"):
        loss_of(module(torch.randn(8, 2, 5, 5))).backward()
    recorder.verify()
    assert not recorder.uncovered


def test_a_parameter_that_is_differentiated_twice_is_named() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1).requires_grad_()
    with GradientNormRecorder(module, uncovered="skip") as recorder:
        outputs = module(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        (loss_of(outputs) + slope.square().sum()).backward()
    assert set(recorder.uncovered) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "differentiated twice" in recorder.uncovered["0.weight"]


def test_two_backward_passes_through_one_forward_pass_are_refused() -> None:
    module = network()
    with per_sample_gradient_norms(module) as norms:
        outputs = module(gaussian(5, 3, seed=1))
        outputs.sum().backward(retain_graph=True)
        loss_of(outputs).backward()
    with pytest.raises(ValueError, match="two backward passes went through the same forward pass"):
        _ = norms.squared_norms


class Scaling(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.factor, self.dropout = nn.Parameter(torch.ones(3)), dropout

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.factor.exp(), self.dropout)


def test_a_layer_without_a_rule_is_run_again_and_named_once() -> None:
    module, inputs = nn.Sequential(nn.Linear(3, 3), Scaling(), nn.ReLU(inplace=True)).double(), gaussian(5, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    with GradientNormRecorder(module) as recorder:
        with pytest.warns(UserWarning, match=r"no rule.*: 1 \(Scaling\)$"):
            loss_of(module(inputs)).backward()
        module.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(module(inputs)).backward()
    total = sum(norms.squared_norms[0] for norms in recorder.results())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_nobody_is_asked_to_declare_a_structured_layer() -> None:
    module, inputs = nn.Sequential(LDRSubdiagonal(3, 3), nn.Tanh(), Scaling()).double(), gaussian(5, 3, seed=1)
    with GradientNormRecorder(module), pytest.warns(UserWarning, match=r"takes longer: 2 \(Scaling\)$"):
        loss_of(module(inputs)).backward()


@pytest.mark.filterwarnings("ignore:these layers have no rule")
def test_a_layer_that_cannot_be_run_again_is_uncovered_and_the_others_are_measured() -> None:
    module = nn.Sequential(nn.Linear(3, 3), Scaling(dropout=0.5))
    with GradientNormRecorder(module, uncovered="skip") as recorder:
        loss_of(module(torch.randn(5, 3))).backward()
    assert list(recorder.uncovered) == ["1.factor"]
    assert [norms.name for norms in recorder.results()] == ["0.weight", "0.bias"]


class Greedy(Scaling):
    """Runs out of memory when all samples are run again at once, while ``fails``."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and torch._C._functorch.is_batchedtensor(x):
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:these layers have no rule")
def test_a_layer_that_ran_out_of_memory_is_measured_in_the_next_batch() -> None:
    module = nn.Sequential(nn.Linear(3, 3), Greedy())
    with GradientNormRecorder(module, uncovered="skip") as recorder:
        loss_of(module(torch.randn(5, 3))).backward()
        assert "too much memory" in recorder.uncovered["1.factor"]
        module.zero_grad()
        module[1].fails = False
        loss_of(module(torch.randn(5, 3))).backward()
    assert recorder.uncovered == {}


# --- the recorder: several backward passes ---------------------------------------------------------------------------


def test_backward_passes_are_appended_until_the_gradients_are_none() -> None:
    module = network()
    with GradientNormRecorder(module, check=True) as recorder:
        for n in (5, 4):
            loss_of(module(gaussian(n, 3, seed=n))).backward()
        assert [[len(norms) for norms in result.squared_norms] for result in recorder.results()] == [[5, 4]] * 4
        assert all(sums.relative_error <= 1e-12 for sums in recorder.checksums().values())
        module.zero_grad()
        loss_of(module(gaussian(3, 3, seed=3))).backward()
    assert [[len(norms) for norms in result.squared_norms] for result in recorder.results()] == [[3]] * 4


def test_reset_forgets_what_was_measured_of_some_or_all_parameters() -> None:
    module = network()
    with GradientNormRecorder(module) as recorder:
        loss_of(module(gaussian(5, 3, seed=1))).backward()
    recorder.reset([module[0].weight])
    assert [norms.name for norms in recorder.results()] == ["0.bias", "2.weight", "2.bias"]
    recorder.reset()
    assert not recorder.results()


def test_a_parameter_may_become_covered_when_its_gradient_is_none_again() -> None:
    module = network()
    with GradientNormRecorder(module, uncovered="skip") as recorder:
        (module[0].weight.sum() + 0 * loss_of(module[2](gaussian(5, 4, seed=1)))).backward()
        assert list(recorder.uncovered) == ["0.weight"]
        module.zero_grad()
        loss_of(module(gaussian(5, 3, seed=1))).backward()
    assert not recorder.uncovered


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: nn.Linear(3, 2), torch.randn(0, 4, 3)),
        (lambda: nn.Conv2d(3, 2, 3), torch.randn(0, 3, 5, 5)),
        (lambda: nn.Embedding(5, 2), torch.zeros(0, 4, dtype=torch.long)),
        (lambda: nn.LayerNorm(3), torch.randn(0, 3)),
        (lambda: nn.LSTM(3, 2, batch_first=True), torch.randn(0, 4, 3)),
    ],
)
def test_a_batch_of_no_samples_has_no_norms(layer: Callable[[], nn.Module], inputs: Tensor) -> None:
    module = layer()
    with per_sample_gradient_norms(module) as norms:
        outputs = module(inputs)
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    assert norms.squared_norms.shape == (0,)


def test_the_number_of_samples_may_change_from_batch_to_batch() -> None:
    module = nn.Linear(3, 2).double()
    with GradientNormRecorder(module) as recorder:
        for n in (4, 5):
            recorder.samples = n
            loss_of(module(gaussian(7, n, 3, seed=1))).backward()  # the sequence first
    assert [len(norms) for norms in recorder.results()[0].squared_norms] == [4, 5]


def test_a_copy_of_the_module_is_not_measured() -> None:
    module = network()
    with GradientNormRecorder(module) as recorder:
        loss_of(copy.deepcopy(module)(gaussian(5, 3, seed=1))).backward()
    assert not recorder.results()


def test_estimates_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    module, inputs, estimates = nn.Conv2d(6, 7, 3).double(), gaussian(20, 6, 8, 8, seed=1), []
    with GradientNormRecorder(module, probes=2, seed=1) as recorder:
        for seed in (1, 2, 1):
            recorder.reseed(seed)
            module.zero_grad()
            loss_of(module(inputs)).backward()
            estimates.append(recorder.results()[0].squared_norms[0])
    assert torch.equal(estimates[0], estimates[2]) and not torch.equal(estimates[0], estimates[1])


def test_a_number_of_probes_below_one_is_named() -> None:
    with pytest.raises(ValueError, match=r"probes must be a whole number >= 1 .*got 0"):
        GradientNormRecorder(network(), probes=0)


# --- the variance, and the batch size read off it --------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 40])
def test_variance_is_the_sum_of_the_componentwise_sample_variances(n: int) -> None:
    module, inputs = network(), gaussian(n, 3, seed=1)
    gradients = per_sample_gradients(module, inputs)
    variance = gradient_variance(measured(module, inputs), gradients.mean(0).square().sum().item())
    assert variance == pytest.approx(gradients.var(0, correction=1).sum().item(), rel=1e-12)


def test_variance_of_equal_gradients_is_zero_and_of_one_sample_an_error() -> None:
    norms = torch.full((7,), 0.1, dtype=torch.float64)
    assert gradient_variance(norms, 0.1 * (1 + 1e-12)) == 0.0  # not negative by rounding
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        gradient_variance(torch.ones(1), 1.0)


sizes = st.integers(2, 100_000)
positive = st.floats(1e-6, 1e6)
thetas = st.floats(0.01, 2.0)


@given(positive, positive, st.one_of(st.none(), sizes), thetas)
@settings(max_examples=200)
def test_the_size_passes_the_norm_test_and_one_less_does_not(
    variance: float, squared_norm: float, dataset_size: int | None, theta: float
) -> None:
    def error_over_bound(n: int) -> float:
        """The two sides of (13), with the squared norm, as a ratio."""
        left = 1.0 if dataset_size is None else (dataset_size - n) / (dataset_size - 1)
        return variance / n * left / (theta**2 * squared_norm)

    n = required_batch_size(variance, squared_norm, dataset_size, theta)
    assert 1 <= n and (dataset_size is None or n <= dataset_size)
    assert error_over_bound(n) <= 1 + 1e-9
    assert n == 1 or error_over_bound(n - 1) > 1 - 1e-9


@pytest.mark.parametrize(
    ("variance", "squared_norm", "dataset_size", "expected"),
    [
        (0.0, 1.0, 100, 1),
        (1.0, 0.0, 100, 100),
        (0.0, 0.0, 100, 100),
        (1.0, 1.0, 1, 1),
        (5.0, 1.0, None, 20),
    ],
)
def test_sizes_at_the_edges(variance: float, squared_norm: float, dataset_size: int | None, expected: int) -> None:
    assert required_batch_size(variance, squared_norm, dataset_size, theta=0.5) == expected
    with pytest.raises(ZeroDivisionError, match="the mean gradient is zero, .*: give dataset_size"):
        required_batch_size(1.0, 0.0, None, theta=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0, 100, 0.0), "theta must be > 0, got 0.0"),
        ((-1.0, 1.0, 100, 0.5), "variance .* got -1.0"),
        ((math.nan, 1.0, 100, 0.5), "variance .* got nan"),
        ((1.0, math.nan, 100, 0.5), "mean_gradient_squared_norm must be a finite real number .* nan"),
        ((1.0, 1.0, 0, 0.5), "dataset_size must be a whole number >= 1 .*got 0"),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_named(arguments: tuple[float, float, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        required_batch_size(*arguments)


def test_the_norm_test_reads_the_size_off_the_norms_of_one_batch() -> None:
    norms = torch.tensor([1.0, 2.0, 3.0])
    size = norm_test_batch_size(norms, torch.tensor(0.5), dataset_size=50, theta=0.5)
    variance = (6.0 - 3 * 0.5) / 2
    assert size == math.ceil(50 * variance / (variance + 49 * 0.25 * 0.5))


# Random projections and processes


def projected_norms(rows: slice, **options: Any) -> Tensor:
    """What is estimated for a layer with many positions, of some rows of a batch."""
    torch.manual_seed(0)
    layer, inputs = nn.Conv2d(8, 8, 3, dtype=torch.float64), gaussian(6, 8, 12, 12, seed=1)[rows]
    with GradientNormRecorder(layer, probes=2, **options) as recorder:
        layer(inputs).tanh().sum().backward()
    return recorder.results()[0].squared_norms[0]


def test_processes_take_the_projections_that_one_process_takes():
    whole = projected_norms(slice(None))
    parts = [projected_norms(slice(rank, None, 2), part=(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.stack(parts, 1).flatten(), whole, rtol=1e-10, atol=0)


def test_uses_by_different_samples_are_measured_one_after_the_other():
    torch.manual_seed(0)
    layer, labelled, unlabelled = nn.Linear(3, 2).double(), gaussian(4, 3, seed=1), gaussian(6, 3, seed=2)
    with GradientNormRecorder(layer, samples={4, 6}) as recorder:
        (loss_of(layer(labelled)) + loss_of(layer(unlabelled))).backward()
    expected = per_sample_gradients(layer, torch.cat([labelled, unlabelled])).square().sum(1)
    torch.testing.assert_close(sum(norms.squared_norms[0] for norms in recorder.results()), expected)


class Attention(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x * self.factor, x, x)


def test_attention_in_a_module_without_a_rule_brings_no_warning_of_torch():
    module = Attention()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with per_sample_gradient_norms(module) as recorder:
            module(torch.randn(3, 2, 5, 3)).square().sum().backward()
    assert len(recorder.squared_norms) == 3
    assert not [str(warning.message) for warning in said if "performance drop" in str(warning.message)]
