"""Each rule against autograd with the cotangents of all samples but one set to zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_struct.functional.layers.calls import LayerCall, SampleCount, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import Uncovered
from lightning_struct.functional.layers.per_sample.layer_contributions import contributions, has_rule
from lightning_struct.functional.layers.registry import owned_parameters
from lightning_struct.nn import LDRSubdiagonal
from tests.cases import gaussian


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """In float64, with parameters none of which is 0 or 1."""
    torch.manual_seed(0)
    layer = make().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def assert_shares_are_right(
    layer: nn.Module, *args: Any, samples: SampleCount = None, sample_dimension: int = 0, rows: int = 1
) -> None:
    """``rows``: in the dimension of the samples, of each sample."""
    outputs = layer(*args)
    tensors = tensors_in(outputs)
    cotangents = [gaussian(*tensor.shape, seed=2 + i) for i, tensor in enumerate(tensors)]
    shares = contributions(
        LayerCall(layer, args, {}, [tensor.detach() for tensor in tensors], [c.clone() for c in cotangents], samples)
    )
    parameters = {name: p for name, p in owned_parameters(layer).items() if p.requires_grad}
    assert list(shares) == list(parameters)
    n = tensors[0].shape[sample_dimension] // rows
    expected: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(n):
        ones = []
        for cotangent in cotangents:
            one = torch.zeros_like(cotangent)
            chosen = slice(i * rows, (i + 1) * rows)
            one.movedim(sample_dimension, 0)[chosen] = cotangent.movedim(sample_dimension, 0)[chosen]
            ones.append(one)
        gradients = torch.autograd.grad(tensors, list(parameters.values()), ones, retain_graph=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            expected[name].append(gradient)
    for name, gradients in expected.items():
        reference, share = torch.stack(gradients), shares[name]
        torch.testing.assert_close(share.per_sample(slice(None)), reference, rtol=1e-10, atol=1e-12, msg=name)
        torch.testing.assert_close(
            share.squared_norms(), reference.reshape(n, -1).square().sum(1), rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(share.total(), reference.sum(0), rtol=1e-10, atol=1e-12)
        total = reference.sum(0).flatten(1) if reference.ndim > 2 else reference.sum(0).reshape(-1, 1)
        left, right = gaussian(3, total.shape[0]), gaussian(3, total.shape[1])
        projections = (left @ total @ right.t()).diagonal()
        torch.testing.assert_close(share.projections(left, right), projections, rtol=1e-10, atol=1e-12)


class LikeLinear(nn.Linear):
    """Another type with the forward of its base."""


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(3, 4), gaussian(5, 3)),
    "subclass of linear": (lambda: LikeLinear(3, 4), gaussian(5, 3)),
    "linear, positions": (lambda: nn.Linear(3, 4), gaussian(5, 7, 3)),
    "linear without bias": (lambda: nn.Linear(3, 4, bias=False), gaussian(5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), gaussian(4, 2, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), gaussian(4, 2, 5, 6)),
    "conv2d to fewer channels": (lambda: nn.Conv2d(4, 2, 3, padding=1), gaussian(4, 4, 5, 6)),
    "conv2d to fewer channels, wide padding": (lambda: nn.Conv2d(4, 2, 3, padding=4), gaussian(4, 4, 5, 6)),
    "conv2d to fewer channels, dilated": (lambda: nn.Conv2d(4, 2, 3, padding=1, dilation=2), gaussian(4, 4, 5, 6)),
    "conv2d to fewer channels, groups": (lambda: nn.Conv2d(8, 4, 3, padding=1, groups=2), gaussian(3, 8, 5, 6)),
    "conv2d to fewer channels, stride": (lambda: nn.Conv2d(4, 2, 3, stride=2), gaussian(4, 4, 6, 6)),
    "conv2d of few positions": (lambda: nn.Conv2d(6, 8, 3), gaussian(4, 6, 4, 3)),
    "conv2d of one position": (lambda: nn.Conv2d(3, 4, 3), gaussian(4, 3, 3, 3)),
    "conv2d, stride, dilation": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 3), (1, 2), (2, 1)), gaussian(4, 2, 9, 8)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), gaussian(3, 4, 5, 5)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), gaussian(3, 4, 5, 5)),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), gaussian(4, 2, 6, 6)),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), gaussian(4, 2, 5, 6)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), gaussian(4, 2, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1), gaussian(3, 2, 4, 5, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1), gaussian(4, 2, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), gaussian(4, 4, 3, 4)),
    "conv_transpose2d, output padding over the stride": (
        lambda: nn.ConvTranspose2d(4, 3, 3, output_padding=1, dilation=2), gaussian(4, 4, 3, 4)
    ),
    "embedding": (lambda: nn.Embedding(4, 3), integers(4, 5, 6)),
    "embedding, padding": (lambda: nn.Embedding(4, 3, padding_idx=2), integers(4, 5, 6)),
    "embedding, frequencies": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), integers(4, 5, 6)),
    "embedding_bag": (lambda: nn.EmbeddingBag(4, 3), integers(4, 5, 6)),
    "embedding_bag, sum, padding": (lambda: nn.EmbeddingBag(4, 3, mode="sum", padding_idx=2), integers(4, 5, 6)),
    "embedding_bag, mean, padding": (lambda: nn.EmbeddingBag(4, 3, padding_idx=2), integers(4, 5, 6)),
    "embedding_bag, frequencies": (
        lambda: nn.EmbeddingBag(4, 3, mode="sum", scale_grad_by_freq=True), integers(4, 5, 6)
    ),
    "layer_norm": (lambda: nn.LayerNorm(4), gaussian(5, 4)),
    "layer_norm, positions": (lambda: nn.LayerNorm(4), gaussian(5, 3, 4)),
    "layer_norm without bias": (lambda: nn.LayerNorm(4, bias=False), gaussian(5, 4)),
    "rms_norm": (lambda: nn.RMSNorm(4), gaussian(5, 3, 4)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), gaussian(5, 4, 3, 3)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), gaussian(4, 3, 3, 3)),
    "batch_norm1d, training": (lambda: nn.BatchNorm1d(3), gaussian(5, 3)),
    "batch_norm1d, training, positions": (lambda: nn.BatchNorm1d(3), gaussian(5, 3, 4)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(3).eval(), gaussian(5, 3, 2, 2)),
    "batch_norm2d without statistics": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(), gaussian(5, 3, 2, 2)
    ),
    "prelu": (lambda: nn.PReLU(), gaussian(5, 3)),
    "prelu of channels": (lambda: nn.PReLU(3), gaussian(5, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_the_shares_of_a_layer_with_a_rule(case: str) -> None:
    make, inputs = CASES[case]
    layer = made(make)
    assert has_rule(layer)
    assert_shares_are_right(layer, inputs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [[], [11]], ids=["offsets", "offsets and the end"])
def test_bags_of_different_lengths(mode: str, last: list[int]) -> None:
    layer = made(lambda: nn.EmbeddingBag(5, 3, mode=mode, padding_idx=1, include_last_offset=bool(last)))
    assert_shares_are_right(layer, integers(5, 11), torch.tensor([0, 4, 4, 5, *last]))


def test_bags_with_weights_of_their_rows() -> None:
    layer = made(lambda: nn.EmbeddingBag(5, 3, mode="sum", padding_idx=1))
    assert_shares_are_right(layer, integers(5, 4, 6), None, gaussian(4, 6))
    assert_shares_are_right(layer, integers(5, 24), torch.tensor([0, 3, 9]), gaussian(24))


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", ["linear", "conv2d", "layer_norm", "batch_norm2d", "conv_transpose2d"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_have_no_shares(case: str, frozen: str) -> None:
    make, inputs = CASES[case]
    layer = made(make)
    layer.get_parameter(frozen).requires_grad_(False)
    assert_shares_are_right(layer, inputs)


@pytest.mark.parametrize(
    ("make", "inputs", "samples"),
    [
        (lambda: nn.Linear(3, 4), gaussian(7, 5, 3), 5),
        (lambda: nn.Linear(3, 4), gaussian(7, 5, 3), [4, 5]),
        (lambda: nn.Embedding(4, 3), integers(4, 7, 5), 5),
        (lambda: nn.PReLU(), gaussian(7, 5, 3), 5),
    ],
    ids=["linear", "linear, several sizes", "embedding", "prelu"],
)
def test_the_samples_are_in_the_second_dimension_where_the_sequence_comes_first(
    make: Callable[[], nn.Module], inputs: Tensor, samples: SampleCount
) -> None:
    assert_shares_are_right(made(make), inputs, samples=samples, sample_dimension=1)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Linear(3, 4), gaussian(6, 3)),
        (lambda: nn.Linear(3, 4), gaussian(6, 5, 3)),
        (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2), gaussian(6, 2, 5, 5)),
        (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), gaussian(6, 4, 3, 3)),
        (lambda: nn.LayerNorm((2, 3)), gaussian(6, 2, 3)),
        (lambda: nn.Embedding(4, 3), integers(4, 6, 5)),
        (lambda: nn.EmbeddingBag(4, 3), integers(4, 6, 5)),
        (lambda: nn.BatchNorm2d(2), gaussian(6, 2, 3, 3)),
        (lambda: nn.PReLU(2), gaussian(6, 2, 3)),
    ],
    ids=["linear", "linear, positions", "conv2d", "conv_transpose2d", "layer_norm", "embedding",
         "embedding_bag", "batch_norm, as many channels as samples", "prelu, as many channels as samples"],
)  # fmt: skip
def test_consecutive_rows_belong_to_one_sample(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    assert_shares_are_right(made(make), inputs, samples=2, rows=3)


def test_rows_may_belong_to_samples_in_any_order_and_have_positions() -> None:
    layer, inputs, cotangents = made(lambda: nn.Linear(3, 4)), gaussian(5, 2, 3), gaussian(5, 2, 4, seed=2)
    sample_of_row = torch.tensor([2, 0, 2, 1, 2])
    shares = contributions(LayerCall(layer, (inputs,), {}, None, [cotangents], samples=3, rows={5: sample_of_row}))
    expected = torch.einsum("rto,rti->roi", cotangents, inputs)
    expected = torch.zeros(3, 4, 3, dtype=torch.float64).index_add(0, sample_of_row, expected)
    torch.testing.assert_close(shares["weight"].per_sample(slice(None)), expected)


def test_inputs_may_be_given_by_keyword() -> None:
    layer = made(lambda: nn.Linear(3, 4))
    shares = contributions(LayerCall(layer, (), {"input": gaussian(5, 3)}, None, [gaussian(5, 4)]))
    assert shares["weight"].samples == 5


# --- layers without a rule -------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Elementwise, in a subclass with a buffer and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"scaled": (x + self.offset) * self.factor, "both": [x * y * self.factor.exp()]}


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.exponent.exp()


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight), self.bias)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.weight * x * self.count


class Dropping(Remembering):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.weight * x)


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(3, 4).double())


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Scale, (gaussian(5, 3), gaussian(5, 1))),
        (Scale, (gaussian(5, 2, 3), gaussian(3))),
        (Temperature, (gaussian(5, 3),)),
        (lambda: Cosine(3, 4), (gaussian(5, 3),)),
        (lambda: nn.Bilinear(3, 2, 4), (gaussian(5, 3), gaussian(5, 2))),
        (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (gaussian(5, 3),)),
        (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)).eval(), (gaussian(5, 3),)),
        (weight_normed, (gaussian(5, 3),)),
        (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), (gaussian(5, 3),)),
    ],
    ids=["two inputs", "common input", "scalar", "subclass", "bilinear", "weight_norm", "spectral_norm",
         "old weight_norm", "pruned"],
)  # fmt: skip
def test_the_shares_of_a_layer_without_a_rule(make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    layer = made(make)
    assert not has_rule(layer)
    assert_shares_are_right(layer, *inputs)


def test_a_parameter_without_entries_has_shares_without_entries() -> None:
    layer = made(lambda: LDRSubdiagonal(1, 4))
    assert layer.subdiagonal_b.shape == (0,)
    assert_shares_are_right(layer, gaussian(5, 1))


@pytest.mark.parametrize(
    ("inputs", "samples", "sample_dimension", "rows"),
    [
        ((gaussian(2, 5, 3), gaussian(2, 5, 1)), 5, 1, 1),
        ((gaussian(2, 5, 3), gaussian(3)), {4, 5}, 1, 1),
        ((gaussian(10, 3), gaussian(10, 1)), 5, 0, 2),
        ((gaussian(10, 2, 3), gaussian(3)), 5, 0, 2),
    ],
    ids=["sequence first", "sequence first, common input", "rows", "rows of positions, common input"],
)
def test_the_samples_of_a_layer_without_a_rule_are_sought_as_with_a_rule(
    inputs: tuple[Tensor, ...], samples: SampleCount, sample_dimension: int, rows: int
) -> None:
    assert_shares_are_right(made(Scale), *inputs, samples=samples, sample_dimension=sample_dimension, rows=rows)


UNCOVERED: dict[str, tuple[Callable[[], nn.Module], Tensor, SampleCount, dict[int, Tensor], str]] = {
    "vector": (lambda: nn.Linear(3, 4), gaussian(3), None, {}, r"\(3,\)"),
    "other number": (lambda: nn.Linear(3, 4), gaussian(5, 3), 3, {}, r"\(5, 3\)"),
    "ambiguous": (lambda: nn.Linear(3, 4), gaussian(6, 3), [2, 3], {}, r"\(6, 3\).* 2 or 3 samples"),
    "positions first": (lambda: nn.Linear(3, 4), gaussian(10, 3), 5, {}, r"\(10, 3\) may have positions or samples"),
    "one image": (lambda: nn.Conv2d(2, 3, 3), gaussian(2, 5, 5), None, {}, r"\(2, 5, 5\)"),
    "positions": (lambda: nn.Embedding(8, 3), torch.arange(8), 4, {}, r"\(8,\)"),
    "one sequence": (lambda: nn.InstanceNorm1d(3, affine=True), gaussian(3, 5), None, {}, r"\(3, 5\)"),
    "without a rule, other number": (Temperature, gaussian(7, 3), 5, {}, "samples"),
    "without a rule, ambiguous": (Temperature, gaussian(7, 3), {4, 5}, {}, "samples"),
    "without a rule, rows": (Temperature, gaussian(10, 3), 5, {10: integers(5, 10)}, "samples"),
    "dropout": (Dropping, gaussian(5, 3), None, {}, "random numbers"),
    "state": (Remembering, gaussian(5, 3), None, {}, "another output"),
}


@pytest.mark.parametrize("case", UNCOVERED)
def test_calls_that_cannot_be_read_by_sample_are_uncovered(case: str) -> None:
    make, inputs, samples, rows, message = UNCOVERED[case]
    layer = made(make)
    outputs = layer(inputs).detach()
    state = [buffer.clone() for buffer in layer.buffers()]
    with pytest.raises(Uncovered, match=message):
        contributions(
            LayerCall(
                layer, (inputs,), {}, outputs, [torch.ones_like(outputs)], samples, rows, case == "positions first"
            )
        )
    assert state == list(layer.buffers())  # running it again leaves its state alone


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_what_a_layer_gives_the_next_time_is_compared_in_units_of_its_outputs(size: float) -> None:
    layer, inputs = made(Temperature), size * gaussian(5, 3)
    outputs = layer(inputs).detach()
    rounded, other = outputs * (1 + 1e-12), outputs * 1.001
    assert contributions(LayerCall(layer, (inputs,), {}, rounded, [torch.ones_like(outputs)]))
    with pytest.raises(Uncovered, match="another output"):
        contributions(LayerCall(layer, (inputs,), {}, other, [torch.ones_like(outputs)]))
