"""The matrices that layers prepare in eval mode: made anew after any change of parameters, no larger than said."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization

from lightning_struct.nn import LDRSubdiagonal, Monarch, ToeplitzLike
from lightning_struct.nn.structured import StructuredLinear

FORMS = {
    "dense": lambda: LDRSubdiagonal(12, 12, dtype=torch.float64),
    "spectra": lambda: LDRSubdiagonal(12, 12, method="scaled", dtype=torch.float64),
    "toeplitz": lambda: ToeplitzLike(12, 12, 2, dtype=torch.float64),
    "monarch": lambda: Monarch(12, 12, dtype=torch.float64),
}


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def train_a_step(layer, optimizer):
    """In eval mode, as where the statistics of batch normalization are frozen."""
    layer(torch.ones(3, 12, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_by_data(layer):
    """By an optimizer that leaves no trace at the parameters."""
    layer(torch.ones(3, 12, dtype=torch.float64)).square().sum().backward()
    for parameter in layer.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)


def within_inference_mode(layer):
    with torch.inference_mode():
        first(layer).mul_(2)


def first(layer):
    return layer._parameters[layer.weight_names[0]]


def replace_first(layer):
    setattr(layer, layer.weight_names[0], nn.Parameter(2 * first(layer).detach()))


def doubled_state(layer):
    return {name: 2 * tensor for name, tensor in layer.state_dict().items() if name != "choice"}


CHANGES = {
    "SGD": lambda layer: train_a_step(layer, torch.optim.SGD(layer.parameters(), 0.1)),
    "Adam, all tensors at once": lambda layer: train_a_step(
        layer, torch.optim.Adam(layer.parameters(), 0.1, foreach=True)
    ),
    "optimizer through .data": train_by_data,
    "new memory": lambda layer: vector_to_parameters(
        2 * parameters_to_vector(layer.parameters()).detach(), layer.parameters()
    ),
    "load_state_dict": lambda layer: layer.load_state_dict(doubled_state(layer), strict=False),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(
        doubled_state(layer), strict=False, assign=True
    ),
    "inference mode": within_inference_mode,
    "new parameter": replace_first,
    "parametrization": lambda layer: register_parametrization(layer, layer.weight_names[0], Doubled()),
    "through a view": lambda layer: first(layer).detach().view(-1)[0].add_(0.1),
    "reset_parameters": StructuredLinear.reset_parameters,
    "bias": lambda layer: nn.init.ones_(layer.bias),
}


def expected(layer, x):
    return x @ layer.to_dense().detach().T + layer.bias.detach()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_a_change_of_the_parameters_is_seen_by_the_next_product(form, change):
    torch.manual_seed(0)
    layer, x = FORMS[form]().eval(), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        before = layer(x)
    CHANGES[change](layer)
    with torch.no_grad():
        after = layer(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected(layer, x))


@pytest.mark.parametrize("form", FORMS)
def test_what_another_process_writes_to_shared_parameters_is_seen_by_the_next_product(form):
    layer, x = FORMS[form]().eval().share_memory(), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        numbers = first(layer).detach().numpy()
        numbers *= 2  # which the parameter does not notice either
        torch.testing.assert_close(layer(x), expected(layer, x))


@pytest.mark.parametrize("form", FORMS)
def test_other_parameters_than_its_own_are_taken_where_they_are_given(form):
    layer, other, x = FORMS[form]().eval(), FORMS[form](), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        own = layer(x)
        parameters = dict(other.named_parameters())
        torch.testing.assert_close(torch.func.functional_call(layer, parameters, (x,)), expected(other, x))
        torch.testing.assert_close(layer(x), own)
        stacked = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in parameters.items()}
        both = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (x,)))(stacked)
        torch.testing.assert_close(both[0], expected(other, x))


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_does_not_take_what_its_original_kept(form):
    layer, x = FORMS[form]().eval(), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        before = layer(x)
        twin = copy.deepcopy(layer)
        first(twin).mul_(2)
        torch.testing.assert_close(twin(x), expected(twin, x))
        torch.testing.assert_close(layer(x), before)
        state = layer.state_dict()
    layer.train()
    assert state.keys() == layer.state_dict().keys() == FORMS[form]().state_dict().keys()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_a_layer_that_kept_nothing(form):
    layer = FORMS[form]().eval()
    other, x = copy.deepcopy(layer), torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer(x)
    gradients, others = (torch.autograd.grad(module(x).sum(), [x, *module.parameters()]) for module in (layer, other))
    torch.testing.assert_close(gradients, others)
    with torch.no_grad():
        layer(x)
    layer.training = True  # without train()
    torch.testing.assert_close(torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]), others)


def test_a_compiled_layer_takes_the_parameters_as_they_are():
    layer, x = FORMS["dense"]().eval(), torch.randn(3, 12, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
            torch.testing.assert_close(compiled(x), layer(x))
            layer.G.mul_(2)
    torch.compiler.reset()


def test_each_size_of_batch_takes_the_form_that_multiplies_it_faster():
    """Both are kept, and no third one; what is kept in eval mode is dropped with it."""
    layer = LDRSubdiagonal(1024, 1024, rank=4)
    layer.eval()
    methods = []
    with torch.no_grad():
        for rows in (4, 64, 4, 5, 64):
            x = torch.randn(rows, 1024)
            torch.testing.assert_close(layer(x), expected(layer, x), rtol=1e-4, atol=1e-4)
            methods.append(layer.method_in_use)
    assert methods == ["scaled", "dense", "scaled", "scaled", "dense"]
    assert layer.train()._prepared is None


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_layer_follows_a_change_of_its_buffers_in_place(form, rows):
    frozen, x = FORMS[form]().freeze(), torch.randn(rows, 12, dtype=torch.float64)
    frozen(x)
    with torch.no_grad():
        for buffer in frozen.buffers():
            buffer.add_(0.5 * torch.rand_like(buffer))
    torch.testing.assert_close(frozen(x), x @ frozen.to_dense().T + frozen.bias)


def of_other_buffers(frozen, x):
    """The product of a frozen layer with twice its floating-point buffers in place of them."""
    return functional_call(frozen, {name: 2 * buffer for name, buffer in frozen.named_buffers()}, (x,))


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_layer_multiplies_by_the_buffers_of_a_functional_call(form):
    layer, x = FORMS[form](), torch.randn(5, 12, dtype=torch.float64)
    twice, buffers = layer.freeze(), dict(layer.freeze().named_buffers())
    for buffer in twice.buffers():
        buffer.mul_(2)
    frozen, expected = layer.freeze(), twice(x)
    own = frozen(x)
    torch.testing.assert_close(of_other_buffers(frozen, x), expected)
    torch.testing.assert_close(frozen(x), own)
    many = {name: torch.stack([buffer, 2 * buffer]) for name, buffer in buffers.items()}
    mapped = torch.vmap(lambda some: functional_call(frozen, some, (x,)))(many)
    torch.testing.assert_close(mapped, torch.stack([own, expected]))
    graph = make_fx(lambda some: functional_call(frozen, some, (x,)))(buffers)
    torch.testing.assert_close(graph({name: 2 * buffer for name, buffer in buffers.items()}), expected)


def test_gradients_reach_the_buffers_of_a_functional_call():
    frozen, x = Monarch(12, 12, bias=False, dtype=torch.float64).freeze(), torch.randn(5, 12, dtype=torch.float64)
    frozen(x)
    given = {name: buffer.clone().requires_grad_() for name, buffer in frozen.named_buffers()}

    def product(*buffers):
        return functional_call(frozen, dict(zip(given, buffers, strict=True)), (x,))

    torch.autograd.gradcheck(product, [*given.values()])
