from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional.layer_call import LayerCall
from lightning_struct.functional.per_sample.attention import attention_contributions
from lightning_struct.functional.per_sample.contributions import Contribution, Uncovered, squared_norms
from lightning_struct.functional.randomness import random_state, restored_random_state

WIDTH, HEADS, QUERIES, KEYS, SAMPLES = 4, 2, 3, 5, 4


def gaussian(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)  # biases start at zero
    return layer


def self_attention(keys: int = QUERIES) -> tuple[Tensor, Tensor, Tensor]:
    return (gaussian(SAMPLES, keys, WIDTH),) * 3


def cross_attention(kdim: int = WIDTH, vdim: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    return (
        gaussian(SAMPLES, QUERIES, WIDTH),
        gaussian(SAMPLES, KEYS, kdim, seed=2),
        gaussian(SAMPLES, KEYS, vdim, seed=3),
    )


def loss_of(outputs: tuple[Tensor, Tensor | None], which: tuple[int, ...] = (0,)) -> Tensor:
    """A sum over samples of something that is not linear in the outputs."""
    return torch.stack([(outputs[i].sin() * outputs[i]).sum() for i in which]).sum()


def measured(
    layer: nn.MultiheadAttention,
    inputs: tuple[Tensor, ...],
    which: tuple[int, ...] = (0,),
    samples: int | None = None,
    **options: Any,
) -> dict[str, Contribution]:
    state = random_state(*inputs)
    outputs = layer(*inputs, **options)
    tensors = [tensor for tensor in outputs if tensor is not None]
    cotangents = torch.autograd.grad(loss_of(outputs, which), tensors, allow_unused=True)
    with restored_random_state(state):
        return attention_contributions(LayerCall(layer, inputs, options, outputs, cotangents, samples))


def alone(inputs: tuple[Tensor, ...], options: dict[str, Any], one: slice) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments for some samples."""
    query = inputs[0][one]
    same = inputs[0] is inputs[1] is inputs[2]
    mine = dict(options)
    if (padding := options.get("key_padding_mask")) is not None:
        mine["key_padding_mask"] = padding[one]
    if (mask := options.get("attn_mask")) is not None and mask.dim() == 3:
        mine["attn_mask"] = mask.unflatten(0, (-1, HEADS))[one].flatten(0, 1)
    return (query,) * 3 if same else tuple(tensor[one] for tensor in inputs), mine


def assert_shares(
    layer: nn.MultiheadAttention,
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    which: tuple[int, ...] = (0,),
    size: int = 1,
) -> None:
    """Every sample's share of every parameter's gradient is the gradient of its own loss."""
    contributions = measured(layer, inputs, which, None if size == 1 else SAMPLES // size, **options)
    parameters = dict(layer.named_parameters())
    assert contributions.keys() == parameters.keys()
    gradients = []
    for start in range(0, SAMPLES, size):
        mine, masks = alone(inputs, options, slice(start, start + size))
        loss = loss_of(layer(*mine, **masks), which)
        gradients.append(torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True))
    for (name, parameter), expected in zip(parameters.items(), zip(*gradients, strict=True), strict=True):
        shares = contributions[name].per_sample(slice(None))
        assert shares.shape == (len(gradients), *parameter.shape)
        torch.testing.assert_close(
            shares, torch.stack(expected), rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
        norms = torch.stack(expected).flatten(1).square().sum(1)
        torch.testing.assert_close(squared_norms([contributions[name]]), norms, rtol=1e-10, atol=1e-10)


def padding(keys: int) -> Tensor:
    """Of the sequences another number of keys each, the first has all."""
    return torch.arange(keys)[None] >= torch.tensor([keys, 2, 1, 3])[:, None]


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def masks(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> dict[str, dict[str, Any]]:
    return {
        "no mask": {},
        "bool": {"attn_mask": causal(queries, keys)},
        "float": {"attn_mask": gaussian(queries, keys, seed=7).to(dtype)},
        "of each head": {"attn_mask": gaussian(SAMPLES * HEADS, queries, keys, seed=7).to(dtype)},
        "causal": {"attn_mask": causal(queries, keys), "is_causal": True},
        "padding": {"key_padding_mask": padding(keys)},
        "float padding": {
            "key_padding_mask": torch.zeros(SAMPLES, keys, dtype=dtype).masked_fill(padding(keys), -math.inf)
        },
        "both": {"attn_mask": causal(queries, keys), "key_padding_mask": padding(keys), "is_causal": True},
    }


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("mask", list(masks(1, 1)))
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_shares_are_those_of_per_sample_autograd(
    kind: str, mask: str, options: dict[str, Any], need_weights: bool
) -> None:
    inputs = self_attention() if kind == "self" else cross_attention()
    given = masks(QUERIES, inputs[1].shape[1])[mask] | {"need_weights": need_weights}
    assert_shares(make(**options), inputs, given)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kdim", "vdim"), [(3, 4), (4, 2), (3, 2)])
def test_keys_and_values_may_have_other_widths(kdim: int, vdim: int, bias: bool) -> None:
    assert_shares(make(kdim=kdim, vdim=vdim, bias=bias), cross_attention(kdim, vdim), {})


def test_keys_may_be_the_values() -> None:
    query, key, _ = cross_attention()
    assert_shares(make(), (query, key, key), {})


def test_the_sequence_may_come_first() -> None:
    layer = make()
    expected = measured(layer, cross_attention())
    layer.batch_first = False
    contributions = measured(layer, tuple(tensor.transpose(0, 1) for tensor in cross_attention()))
    for name, contribution in expected.items():
        torch.testing.assert_close(contributions[name].per_sample(slice(None)), contribution.per_sample(slice(None)))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("which", [(1,), (0, 1)])
def test_the_weights_may_get_a_gradient(which: tuple[int, ...], average: bool) -> None:
    assert_shares(make(add_bias_kv=True), cross_attention(), {"average_attn_weights": average}, which)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("mask", list(masks(1, 1)))
def test_dropout_is_repeated(mask: str, need_weights: bool, dtype: torch.dtype, batch_first: bool) -> None:
    layer, inputs = make(dropout=0.4).to(dtype), tuple(tensor.to(dtype) for tensor in self_attention(SAMPLES))
    layer.batch_first = batch_first
    options = masks(SAMPLES, SAMPLES, dtype)[mask] | {"need_weights": need_weights}
    torch.manual_seed(5)
    contributions = measured(layer, inputs, **options)
    torch.manual_seed(5)
    loss_of(layer(*inputs, **options)).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(contributions[name].total(), parameter.grad)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
def test_another_mask_of_dropout_is_noticed(need_weights: bool) -> None:
    layer, inputs = make(dropout=0.1), self_attention()
    outputs = layer(*inputs, need_weights=need_weights)
    cotangents = [gaussian(*outputs[0].shape), None]
    with pytest.raises(Uncovered, match="dropout cannot be repeated"):
        attention_contributions(LayerCall(layer, inputs, {"need_weights": need_weights}, outputs, cotangents, None))


def test_dropout_in_evaluation_draws_nothing() -> None:
    assert_shares(make(dropout=0.5).eval(), self_attention(), {})


def test_several_sequences_may_be_one_sample() -> None:
    assert_shares(make(add_bias_kv=True), cross_attention(), {}, size=2)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_projections_are_those_of_the_gradient(kind: str) -> None:
    layer, inputs = make(), self_attention() if kind == "self" else cross_attention()
    contribution = measured(layer, inputs)["in_proj_weight"]
    left, right = gaussian(3 * WIDTH), gaussian(WIDTH, seed=2)
    torch.testing.assert_close(contribution.projection(left, right), left @ contribution.total() @ right)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
def test_under_autocast_the_attention_is_the_one_that_was_trained(need_weights: bool) -> None:
    layer, inputs = make(dropout=0.4).float(), tuple(tensor.float() for tensor in cross_attention())
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        contributions = measured(layer, inputs, need_weights=need_weights)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(layer(*inputs, need_weights=need_weights))
    loss.backward()
    for name, parameter in layer.named_parameters():
        difference = torch.linalg.vector_norm(contributions[name].total() - parameter.grad)
        assert difference < 0.03 * torch.linalg.vector_norm(parameter.grad) + 0.01, name


def test_one_sequence_without_a_batch_is_not_covered() -> None:
    layer, sequence = make(), gaussian(QUERIES, WIDTH)
    outputs = layer(sequence, sequence, sequence)
    with pytest.raises(Uncovered, match="one sequence without a batch dimension"):
        attention_contributions(LayerCall(layer, (sequence,) * 3, {}, outputs, [gaussian(QUERIES, WIDTH), None], None))


def test_sequences_that_are_not_samples_are_not_covered() -> None:
    with pytest.raises(Uncovered, match="4 sequences, which is no multiple of 3 samples"):
        measured(make(), self_attention(), samples=3)
