"""Ways of training that leave every step as it is: stopped and resumed, copied, checkpointed, compiled, disturbed."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from lightning_struct.optim import RLS, LowRankP
from tests.cases import First
from tests.optim.helpers import gaussian
from tests.optim.rls.twins import ADAM, weights

STEPS = 5


class Everything(nn.Module):
    """Layers whose inputs RLS reads in different ways, and one for the auxiliary optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv1d(2, 3, 3, padding=1, stride=2), nn.LayerNorm(5)
        self.recurrent, self.head = nn.LSTM(5, 4, num_layers=2, batch_first=True), nn.Linear(12, 2)

    def forward(self, x):
        x = self.norm(self.convolution(x.view(-1, 2, 10)))
        return self.head(self.recurrent(x)[0].flatten(1))


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


OTHER, BATCHES = gaussian(5, 20, seed=99), [gaussian(5, 20, seed=step) + 0.5 for step in range(STEPS)]


def loss_of(module, step=None):
    inputs = (OTHER if step is None else BATCHES[step]).to(next(module.parameters()).dtype)
    outputs = module(inputs)
    return 0.5 * (outputs - outputs.detach().sin()).square().sum() / len(inputs)


def plain(module, optimizer, step):
    optimizer.zero_grad()
    loss_of(module, step).backward()
    optimizer.step()


def zeroed_after_the_forward_pass(module, optimizer, step):
    """As Lightning does."""

    def closure():
        loss = loss_of(module, step)
        optimizer.zero_grad()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def after(disturb):
    """A step after a pass that is no part of its gradient."""

    def way(module, optimizer, step):
        disturb(module, optimizer)
        plain(module, optimizer, step)

    return way


def cleared_by(clear):
    """As in a GAN: the discriminator's layers are called for the generator's loss, and its gradients then dropped."""

    def way(module, optimizer, step):
        clear(module)
        loss_of(module).backward()
        clear(module)
        loss_of(module, step).backward()
        optimizer.step()

    return way


def within(context):
    def way(module, optimizer, step):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        with context():
            optimizer.step()

    return way


def on_another_default_device(module, optimizer, step):
    with torch.device("meta"):
        plain(module, optimizer, step)


def without_gradients(module, optimizer):
    with torch.no_grad():
        loss_of(module)


def looked_at(module, optimizer):
    torch.autograd.grad(loss_of(module), list(module.parameters()))


def looked_at_twice(module, optimizer):
    inputs = BATCHES[0].to(next(module.parameters()).dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), [module.head.weight])


def by_functions(module, optimizer):
    values = {name: parameter.detach() for name, parameter in module.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(module, p, (BATCHES[0].to(p["head.bias"]),)).sum())(values)


def in_copies(module, optimizer):
    for copied in (AveragedModel(module), pickle.loads(pickle.dumps(module))):
        loss_of(copied).backward()


def forgotten(module, optimizer):
    loss_of(module).backward()
    optimizer.zero_grad()


def saved_and_loaded(module, optimizer, make):
    file = io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make()
    other.load_state_dict(saved["module"])
    resumed.load_state_dict(saved["optimizer"])
    return other, resumed


@dataclass(frozen=True)
class Way:
    step: Callable[..., Any] = plain
    wrap: Callable[[Any], Any] = lambda module: module
    between: Callable[..., Any] = lambda module, optimizer, make: (module, optimizer)
    tolerance: float = 0.0


WAYS = {
    "saved and loaded": Way(between=saved_and_loaded),
    "pickled": Way(between=lambda module, optimizer, make: pickle.loads(pickle.dumps((module, optimizer)))),
    "copied": Way(between=lambda module, optimizer, make: copy.deepcopy((module, optimizer))),
    "checkpointed": Way(wrap=partial(Checkpointed, use_reentrant=False)),
    "checkpointed, reentrant": Way(wrap=partial(Checkpointed, use_reentrant=True), tolerance=1e-6),
    "zeroed after the forward pass": Way(zeroed_after_the_forward_pass),
    "cleared by the module": Way(cleared_by(nn.Module.zero_grad)),
    "filled with zeros": Way(cleared_by(partial(nn.Module.zero_grad, set_to_none=False))),
    "cleared by another optimizer": Way(cleared_by(lambda module: torch.optim.SGD(module.parameters()).zero_grad())),
    "in inference mode": Way(within(torch.inference_mode)),
    "on another default device": Way(on_another_default_device),
    "beside a pass without backward": Way(after(lambda module, optimizer: loss_of(module))),
    "beside a pass without gradients": Way(after(without_gradients)),
    "beside a pass that is forgotten": Way(after(forgotten)),
    "beside gradients that are looked at": Way(after(looked_at)),
    "beside second derivatives": Way(after(looked_at_twice)),
    "beside functions": Way(after(by_functions)),
    "beside passes of copies": Way(after(in_copies)),
}
FORMS = [{}, {"form": "rank1"}, {"forgetting": 0.95}, {"form": LowRankP(rank=2), "weight_decay": 0.01}]


def trained(way, dtype, options):
    def make():
        module = Everything().to(dtype)
        return module, RLS(module, momentum=0.5, auxiliary=ADAM, **options)

    module, optimizer = make()
    for step in range(STEPS):
        way.step(way.wrap(module), optimizer, step)
        module, optimizer = way.between(module, optimizer, make)
    return weights(module)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_step_is_that_of_a_plain_loop(name, options, dtype):
    if name.startswith("saved by") and "weight_decay" in options:
        options = {name: value for name, value in options.items() if name != "weight_decay"}
    found, expected = trained(WAYS[name], dtype, options), trained(Way(), dtype, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=WAYS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 12)), "aot_eager"),
        (lambda: First(nn.GRU(20, 4, 2)), "eager"),
    ],
    ids=["layers", "levels"],
)
def test_compiled_modules_and_steps_train_alike(build, backend):
    torch.manual_seed(0)
    module = build().double()
    reference = copy.deepcopy(module)
    optimizer, plain_optimizer = RLS(compiled := torch.compile(module, backend=backend)), RLS(reference)
    assert "_orig_mod" not in optimizer.summary()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for number in range(3):
        optimizer.zero_grad()
        loss_of(compiled, number).backward()
        step()
        plain(reference, plain_optimizer, number)
    torch.testing.assert_close(weights(module), weights(reference), rtol=0, atol=1e-12)
