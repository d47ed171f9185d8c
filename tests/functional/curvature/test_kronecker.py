import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional.curvature.kronecker import (
    NotPositiveDefinite,
    diagonal_root,
    kronecker_root,
    second_moments,
    unchecked_roots,
    with_inverses,
)
from lightning_struct.functional.layers.per_sample.contributions import Convolution, Dense, Lookup, Outer, Uncovered
from lightning_struct.functional.layers.probes import probe_layers
from tests.cases import CASES, Case, First, trainable


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(groups: int, size: int, seed: int = 0) -> Tensor:
    rows = gaussian(groups, size, 2 * size, seed=seed)
    return rows @ rows.mT / size


# --- second moments --------------------------------------------------------------------------------------------------


def outer_products(rows: Tensor) -> Tensor:
    """Of rows (positions, size), one by one."""
    return sum((torch.outer(row, row) for row in rows), torch.zeros(rows.shape[1], rows.shape[1], dtype=rows.dtype))


def with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


@pytest.mark.parametrize("groups", [1, 3])
def test_moments_of_a_product_are_sums_of_outer_products_over_samples_and_positions(groups: int) -> None:
    inputs, cotangents = gaussian(4, 3, 5), gaussian(4, 3, 6, seed=1)
    use = Outer(inputs, cotangents)
    moments = second_moments(use, groups=groups, bias=True)
    for group, mine in enumerate(cotangents.reshape(12, 6).chunk(groups, 1)):
        torch.testing.assert_close(moments.inputs[group], outer_products(with_one(inputs.reshape(12, 5))))
        torch.testing.assert_close(moments.outputs[group], outer_products(mine))
    assert moments.positions.tolist() == [12] * groups
    diagonal = second_moments(use, groups=groups, bias=True, diagonal_inputs=True, diagonal_outputs=True)
    torch.testing.assert_close(diagonal.inputs, moments.inputs.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(diagonal.outputs, moments.outputs.diagonal(dim1=1, dim2=2))


def test_moments_of_a_bias_are_those_of_the_samples_shares_and_a_table_has_none() -> None:
    shares = gaussian(6, 3)
    moments = second_moments(Dense(shares))
    assert (moments.inputs.tolist(), moments.positions.tolist()) == ([[[6.0]]], [6])
    torch.testing.assert_close(moments.outputs[0], outer_products(shares))
    with pytest.raises(Uncovered, match="Lookup is no product"):
        second_moments(Lookup(torch.zeros(2, 1, dtype=torch.long), gaussian(2, 1, 3), 4))


@pytest.mark.parametrize("groups", [1, 2])
def test_moments_of_a_convolution_are_sums_over_patches(groups: int) -> None:
    images, cotangents = gaussian(3, 4, 6, 5), gaussian(3, 2, 6, 3, seed=1)
    use = Convolution(images, cotangents, (3, 3), (1, 2), (1, 1), ((1, 1), (1, 1)), groups)
    moments = second_moments(use, groups=groups, bias=True)
    for group in range(groups):
        channels = images[:, 4 // groups * group : 4 // groups * (group + 1)]
        patches = F.unfold(channels, 3, padding=1, stride=(1, 2)).transpose(1, 2).flatten(0, 1)
        rows = cotangents[:, 2 // groups * group : 2 // groups * (group + 1)].movedim(1, -1).flatten(0, 2)
        torch.testing.assert_close(moments.inputs[group], outer_products(with_one(patches)))
        torch.testing.assert_close(moments.outputs[group], outer_products(rows))
    assert moments.positions.tolist() == [3 * 6 * 3] * groups


SHARES = {
    "dense": Dense(gaussian(5, 3, 2)),
    "outer": Outer(gaussian(5, 4, 3), gaussian(5, 4, 2, seed=1)),
    "lookup": Lookup(torch.tensor([[1, 2, 1], [0, 0, 0], [2, 1, 3]]), gaussian(3, 3, 2), 5),
    "convolution": Convolution(gaussian(3, 2, 5), gaussian(3, 4, 3, seed=1), (3,), (1,), (1,), ((0, 0),), 2),
}


@pytest.mark.parametrize("name", SHARES)
def test_squared_shares_are_the_squares_of_each_samples_share(name: str) -> None:
    use = SHARES[name]
    expected = use.per_sample(slice(None)).square().sum(0)
    torch.testing.assert_close(use.squared_shares(), expected)


# --- roots -----------------------------------------------------------------------------------------------------------


def dense_of(factor: Tensor, group: int) -> Tensor:
    return factor[group] if factor.ndim == 3 else torch.diag(factor[group])


@pytest.mark.parametrize("diagonal_inputs", [False, True])
@pytest.mark.parametrize("diagonal_outputs", [False, True])
def test_the_root_is_one_of_the_product_of_the_damped_factors(diagonal_inputs: bool, diagonal_outputs: bool) -> None:
    inputs, outputs, damping = 0.01 * positive(2, 5), 0.3 * positive(2, 3, seed=1), 0.3
    if diagonal_inputs:
        inputs = inputs.diagonal(dim1=1, dim2=2)
    if diagonal_outputs:
        outputs = outputs.diagonal(dim1=1, dim2=2)
    root = kronecker_root(inputs, outputs, damping)
    x, y = gaussian(2, 3, 5, seed=2), gaussian(2, 3, 5, seed=3)
    torch.testing.assert_close((root.solve(y) * x).sum(), (y * root.solve_transpose(x)).sum())
    solved = root.solve(root.solve_transpose(x))
    for group in range(2):
        a, g = dense_of(inputs, group), dense_of(outputs, group)
        ratio = math.sqrt((a.trace() / 5) / (g.trace() / 3))
        a, g = a + ratio * damping * torch.eye(5), g + damping / ratio * torch.eye(3)
        torch.testing.assert_close(g @ solved[group] @ a, x[group])


@pytest.mark.parametrize("diagonal", ["neither", "inputs", "outputs"])
@pytest.mark.parametrize("damping", [1e-4, 0.3], ids=["ill_conditioned", "well_conditioned"])
def test_solve_normal_is_both_solves(damping: float, diagonal: str) -> None:
    inputs = torch.full((2, 5, 5), 1e4, dtype=torch.float64)
    outputs = positive(2, 3, seed=1)
    inputs = inputs.diagonal(dim1=1, dim2=2) if diagonal == "inputs" else inputs
    outputs = outputs.diagonal(dim1=1, dim2=2) if diagonal == "outputs" else outputs
    ((root, _, has_inverses),) = unchecked_roots([(inputs, outputs)], damping)
    root = with_inverses(root) if has_inverses else root
    x = gaussian(2, 3, 5, seed=2)
    torch.testing.assert_close(root.solve_normal(x), root.solve(root.solve_transpose(x)), rtol=1e-4, atol=1e-7)


def test_solve_normal_does_without_an_inverse_that_float32_would_make_useless() -> None:
    inputs = torch.full((1, 200, 200), 1e4) + 1e-3 * torch.eye(200)
    other = torch.eye(3)[None], torch.eye(2)[None]
    assert unchecked_roots([(inputs, other[1]), other], 1.0)[1][2]
    assert not unchecked_roots([(inputs, other[1]), other], 1e-4)[0][2]
    root = kronecker_root(inputs, torch.eye(2)[None], 1e-4)
    x = inputs[:, :1].expand(1, 2, 200)  # along the largest eigenvalue, 2e6
    quotient = (x * x / 2e6).sum().item()
    inverse = torch.cholesky_inverse(root.inputs)
    assert (x @ inverse * x).sum().item() != pytest.approx(quotient, rel=0.1)  # even its sign depends on the machine
    assert (x * root.solve_normal(x)).sum().item() == pytest.approx(quotient, rel=1e-3)


def test_factors_whose_quotient_is_out_of_range_have_a_root() -> None:
    root = kronecker_root(torch.eye(3)[None] * 1e20, torch.eye(2)[None] * 1e-20, damping=1.0)
    torch.testing.assert_close(root.solve_normal(torch.ones(1, 2, 3)), torch.full((1, 2, 3), 0.25))


@pytest.mark.parametrize("zero", ["inputs", "outputs", "both"])
def test_a_factor_of_zeros_leaves_the_damping(zero: str) -> None:
    inputs, outputs = positive(1, 4), positive(1, 3, seed=1)
    inputs = inputs * 0 if zero != "outputs" else inputs
    outputs = outputs * 0 if zero != "inputs" else outputs
    root = kronecker_root(inputs, outputs, 0.5)
    x = gaussian(1, 3, 4, seed=2)
    solved = root.solve(root.solve_transpose(x))[0]
    damped_inputs, damped_outputs = inputs[0] + 0.5 * torch.eye(4), outputs[0] + 0.5 * torch.eye(3)
    torch.testing.assert_close(damped_outputs @ solved @ damped_inputs, x[0])


def test_a_factor_that_float32_cannot_factor_is_factored_in_float64() -> None:
    inputs = torch.full((1, 8, 8), 1e4)  # in float32 the damping vanishes beside its entries
    outputs = torch.full((1, 1, 1), 1e4)
    assert torch.linalg.cholesky_ex(inputs + 1e-4 * torch.eye(8))[1].any()
    x = gaussian(1, 1, 8).float()
    root = kronecker_root(inputs, outputs, 1e-4)
    assert (root.inputs.dtype, root.solve(x).isfinite().all().item()) == (torch.float32, True)


def test_a_factor_that_float64_cannot_factor_either_is_an_error() -> None:
    with pytest.raises(NotPositiveDefinite, match="4 rows is not positive definite, in float64 either"):
        kronecker_root(-positive(1, 4).float(), positive(1, 3).float(), 1e-3)


@pytest.mark.parametrize("spoil", ["nothing", "triangle", "sign", "diagonal"])
def test_a_root_that_nobody_looked_at_says_whether_it_is_good(spoil: str) -> None:
    inputs, outputs = positive(2, 4), positive(2, 3, seed=1)
    diagonal, x = outputs.diagonal(dim1=1, dim2=2).clone(), gaussian(2, 3, seed=4)
    of_diagonal = diagonal_root(diagonal, 0.5)
    torch.testing.assert_close(of_diagonal.solve(of_diagonal.solve_transpose(x)), x / (diagonal + 0.25))
    torch.testing.assert_close(of_diagonal.solve_normal(x), x / (diagonal + 0.25))
    if spoil == "diagonal":
        diagonal[1, 2] = math.nan
    elif spoil == "sign":
        inputs[1] *= -1
    elif spoil != "nothing":
        inputs[1, 2, 0] = math.nan
    others = positive(1, 4, seed=5), positive(1, 4, seed=6)  # of the size of the first factor, and factored beside it
    (root, good, _), (_, *second), (other, *third) = unchecked_roots([(inputs, diagonal), (diagonal,), others], 0.5)
    assert (good, second, third) == (spoil == "nothing", [spoil != "diagonal", False], [True, True])
    assert torch.equal(other.inputs, kronecker_root(*others, 0.5).inputs)
    if spoil == "nothing":
        assert torch.equal(root.inputs, kronecker_root(inputs, diagonal, 0.5).inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_in_a_factor_are_errors(value: float) -> None:
    spoilt = positive(1, 4)
    spoilt[0, 1, 2] = value
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        kronecker_root(spoilt, positive(1, 3), 1.0)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        kronecker_root(positive(1, 3), spoilt.diagonal(dim1=1, dim2=2) * value, 1.0)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        diagonal_root(spoilt, 1.0)


# --- what a back-propagated vector finds -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "tied_functional"], ids=str)
def test_the_uses_of_a_parameter_add_up_to_its_gradient(case: Case) -> None:
    module, inputs = case.make()
    cotangent = torch.randn_like(module(inputs))
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    layers = [
        layer
        for layer in module.modules()
        if list(layer.parameters(recurse=False))
        and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    ]
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    probe = probe_layers(module, (inputs,), layers, parameters, lambda outputs: cotangent)
    expected = torch.autograd.grad(module(inputs), list(parameters.values()), cotangent)
    found = {p: torch.zeros_like(p) for p in parameters.values()}
    for layer, name, use in probe.uses:
        found[layer.get_parameter(name)] += use.total()
    for (name, p), g in zip(parameters.items(), expected, strict=True):
        torch.testing.assert_close(found[p], g, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(probe.gradients[name], g, rtol=1e-9, atol=1e-11)
    if case.name != "batch_norm_train":
        assert all(torch.equal(b, buffers[name]) for name, b in module.named_buffers())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_dropout_inside_a_layer_has_the_mask_of_the_run() -> None:
    torch.manual_seed(0)
    net = First(nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5)).double()
    parameters = dict(net.named_parameters())
    probe = probe_layers(net, (gaussian(5, 6, 4),), [net.inner], parameters, torch.ones_like)
    assert len(probe.uses) == len(trainable(net))
    for _, name, use in probe.uses:
        torch.testing.assert_close(use.total(), probe.gradients[f"inner.{name}"])
