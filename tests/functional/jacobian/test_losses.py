import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional import BinaryCrossEntropy, CrossEntropy, GaussNewtonLoss, SquaredError
from lightning_struct.functional.jacobian.losses import get_loss
from tests.cases import gaussian


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of one sample, the mean over its positions."""
    classes = output.shape[-1]
    flat = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    return F.cross_entropy(output.reshape(-1, classes), flat)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(3))


def cross_entropy_without_0(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


def indices(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def padded(index: int = -100) -> Tensor:
    """Labels of three sequences of 5, 2 and 3 positions."""
    lengths = torch.tensor([5, 2, 3])
    return torch.where(torch.arange(5) < lengths[:, None], labels(3, 5).clamp_min(1), index)


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of one sample, the mean over its outputs."""
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def events(*shape: int) -> Tensor:
    return gaussian(*shape, seed=4) > 0


CASES = {
    "mse": (SquaredError(), squared_error, gaussian(3, 4, seed=0), gaussian(3, 4, seed=1)),
    "mse_positions": (SquaredError(), squared_error, gaussian(3, 2, 4, seed=0), gaussian(3, 2, 4, seed=1)),
    "class_indices": (CrossEntropy(), cross_entropy, gaussian(3, 4, seed=0), labels(3)),
    "class_indices_positions": (CrossEntropy(), cross_entropy, gaussian(3, 5, 4, seed=0), labels(3, 5)),
    "class_indices_grid": (CrossEntropy(), cross_entropy, gaussian(2, 2, 3, 4, seed=0), labels(2, 2, 3)),
    "padded": (CrossEntropy(), cross_entropy, gaussian(3, 5, 4, seed=0), padded()),
    "padded_by_0": (CrossEntropy(ignore_index=0), cross_entropy_without_0, gaussian(3, 5, 4, seed=0), padded(0)),
    "probabilities": (CrossEntropy(), cross_entropy, gaussian(3, 4, seed=0), gaussian(3, 4, seed=1).softmax(-1)),
    "probabilities_positions": (
        CrossEntropy(),
        cross_entropy,
        gaussian(3, 5, 4, seed=0),
        gaussian(3, 5, 4).softmax(-1),
    ),
    "two_classes": (BinaryCrossEntropy(), binary_cross_entropy, gaussian(3, 1, seed=0), events(3, 1)),
    "labels": (BinaryCrossEntropy(), binary_cross_entropy, gaussian(3, 2, 4, seed=0), events(3, 2, 4).long()),
    "pixels": (BinaryCrossEntropy(), binary_cross_entropy, gaussian(3, 4, seed=0), gaussian(3, 4, seed=1).sigmoid()),
}


def columns(product: Any, loss: GaussNewtonLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """(n, k, k): each sample's matrix, column by column, from its product with unit vectors."""
    size = outputs[0].numel()
    unit = torch.eye(size, dtype=outputs.dtype).view(size, *outputs.shape[1:])
    products = [product(loss)(outputs, targets, e.expand_as(outputs)).flatten(1) for e in unit]
    return torch.stack(products, dim=2)


@pytest.mark.parametrize(("loss", "of_one", "outputs", "targets"), CASES.values(), ids=CASES)
def test_the_value_s_r_and_s_s_transpose_are_those_of_each_samples_loss(
    loss: GaussNewtonLoss, of_one: Any, outputs: Tensor, targets: Tensor
) -> None:
    expected = torch.stack([of_one(output, target) for output, target in zip(outputs, targets, strict=True)]).mean()
    torch.testing.assert_close(loss.value(outputs, targets), expected, rtol=1e-14, atol=0)
    product = loss.sqrt_hessian(outputs, targets, loss.residual(outputs, targets))
    root = columns(lambda loss: loss.sqrt_hessian, loss, outputs, targets)
    for s, gradient, output, target in zip(root, product, outputs, targets, strict=True):
        expected = torch.func.grad(lambda z, t=target: of_one(z, t))(output)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)
        hessian = torch.func.hessian(lambda z, t=target: of_one(z, t))(output).reshape(s.shape)
        torch.testing.assert_close(s @ s.T, hessian, rtol=0, atol=1e-10)
    transposed = columns(lambda loss: loss.sqrt_hessian_transpose, loss, outputs, targets)
    torch.testing.assert_close(transposed, root.mT, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "expected"),
    [
        (CrossEntropy(), [[200.0, -200.0, 0.0]], [0], [[0.0, 0.0, 0.0]]),
        (CrossEntropy(), [[200.0, -200.0, 0.0]], [1], [[1.0, -1.0, 0.0]]),
        (BinaryCrossEntropy(), [[200.0, -200.0]], [[False, True]], [[0.5, -0.5]]),
    ],
)
def test_the_gradient_survives_probabilities_that_underflow(
    loss: GaussNewtonLoss, outputs: Any, targets: Any, expected: Any, dtype: torch.dtype
) -> None:
    outputs, targets = torch.tensor(outputs, dtype=dtype), torch.tensor(targets)
    product = loss.sqrt_hessian(outputs, targets, loss.residual(outputs, targets))
    torch.testing.assert_close(product, torch.tensor(expected, dtype=dtype), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "loss", [SquaredError(), CrossEntropy(), BinaryCrossEntropy()], ids=lambda loss: type(loss).__name__
)
def test_the_sum_over_a_large_float32_batch_is_better_than_float32(loss: GaussNewtonLoss) -> None:
    """A sum in float32 is up to 6e-8 off here, near the relative decrease (ftol) that ends the solver."""
    outputs = torch.rand(2000, 256, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros_like(outputs)
    value = loss.value(outputs, targets)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(loss.value(outputs.double(), targets.double()).item(), rel=5e-9)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "expected"),
    [
        (CrossEntropy(), [[30.0, 0.0, 1.0]], [0], math.log1p(math.exp(-30) + math.exp(-29))),
        (CrossEntropy(), [[-2000.0, 0.0, 1.0]], [0], 2000 + math.log(1 + math.e)),
        (BinaryCrossEntropy(), [[30.0, -25.0]], [[1, 0]], (math.log1p(math.exp(-30)) + math.log1p(math.exp(-25))) / 2),
        (BinaryCrossEntropy(), [[-2000.0]], [[1]], 2000.0),
    ],
)
def test_float32_keeps_the_digits_of_tiny_and_of_large_losses(
    loss: GaussNewtonLoss, outputs: Any, targets: Any, expected: float
) -> None:
    assert loss.value(torch.tensor(outputs), torch.tensor(targets)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [(CrossEntropy(), labels(200)), (BinaryCrossEntropy(), events(200, 4))],
    ids=["classes", "events"],
)
def test_the_value_of_bfloat16_outputs_is_theirs_to_the_digits_of_float32(
    loss: GaussNewtonLoss, targets: Tensor
) -> None:
    outputs = gaussian(200, 4, seed=0).bfloat16()
    expected = loss.value(outputs.double(), targets).item()
    assert loss.value(outputs, targets).item() == pytest.approx(expected, rel=1e-6)


def test_a_sample_in_which_no_position_counts_has_neither_loss_nor_gradient() -> None:
    outputs, targets, loss = gaussian(3, 5, 4, seed=0), padded(), CrossEntropy()
    targets[1] = -100
    others = torch.tensor([0, 2])
    assert loss.value(outputs, targets).item() == pytest.approx(2 / 3 * loss.value(outputs[others], targets[others]))
    gradient = loss.sqrt_hessian(outputs, targets, loss.residual(outputs, targets))
    assert gradient.flatten(1).any(1).tolist() == [True, False, True]


def test_padding_changes_no_loss() -> None:
    outputs, targets, loss = gaussian(3, 5, 4, seed=0), padded(), CrossEntropy()
    longer = F.pad(outputs, (0, 0, 0, 2), value=1.0), F.pad(targets, (0, 2), value=-100)
    assert loss.value(*longer) == loss.value(outputs, targets)
    assert torch.equal(loss.residual(*longer)[:, :5], loss.residual(outputs, targets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_class_indices_may_be_of_any_integer_dtype(dtype: torch.dtype) -> None:
    outputs, targets, loss = gaussian(2, 200, seed=0), indices(156, 3), CrossEntropy()  # 156 = 256 - 100 in uint8
    assert loss.value(outputs, targets.to(dtype)) == loss.value(outputs, targets)
    assert torch.equal(loss.residual(outputs, targets.to(dtype)), loss.residual(outputs, targets))


def test_losses_are_found_by_name() -> None:
    assert isinstance(get_loss("mse"), SquaredError)
    assert isinstance(get_loss("cross_entropy"), CrossEntropy)
    assert isinstance(get_loss("binary_cross_entropy"), BinaryCrossEntropy)
    loss = CrossEntropy()
    assert get_loss(loss) is loss
    with pytest.raises(ValueError, match="'mse', 'cross_entropy', 'binary_cross_entropy', 'least_squares' .* 'hinge'"):
        get_loss("hinge")
    with pytest.raises(TypeError, match="ignore_index .* 'pad'"):
        CrossEntropy(ignore_index="pad")  # type: ignore[arg-type]


def test_an_object_that_lacks_methods_is_refused_with_their_names() -> None:
    class Partial:
        def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.sum()

        def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs

    with pytest.raises(TypeError, match="Partial lacks sqrt_hessian, sqrt_hessian_transpose"):
        get_loss(Partial())  # type: ignore[arg-type]


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["value", "residual"])
@pytest.mark.parametrize(
    ("loss", "shape", "targets", "message"),
    [
        ("mse", (3, 4), torch.zeros(1, 3, 4), r"\(3, 4\) but targets \(1"),
        ("mse", (4, 1), torch.zeros(4), r"must be alike: give targets of shape \(n, 1\), as by targets\[:, None\]"),
        ("cross_entropy", (3, 4), indices(0, 0), "class indices .* or probabilities"),
        ("cross_entropy", (3, 4), indices(0, 0, 0)[:, None], "class indices .* or probabilities"),
        ("cross_entropy", (3, 4), torch.zeros(3, 5), "class indices .* or probabilities"),
        ("cross_entropy", (4,), torch.tensor(1), r"logits \(n, ..., classes\)"),
        ("cross_entropy", (4,), indices(0, 0, 0, 0), "two classes is for 'binary_cross_entropy'"),
        ("cross_entropy", (4, 3), torch.zeros(4, 3).long(), r"one-hot targets .* targets\.float\(\)"),
        ("cross_entropy", (2, 4, 3, 3), labels(2, 3, 3), r"outputs\.movedim\(1, -1\)"),
        ("cross_entropy", (3, 4), indices(0, -1, 2), r"in \[0, 4\), got .*-1"),
        ("cross_entropy", (3, 4), indices(0, 4, 2), r"in \[0, 4\), got .*4"),
        ("binary_cross_entropy", (3, 1), events(3), r"got \(3, 1\) and \(3,\): .* targets\[:, None\]"),
        ("binary_cross_entropy", (2, 1), torch.tensor([[0.5], [2.0]]), r"in \[0, 1\], got .*2"),
    ],
    ids=str,
)
def test_targets_that_do_not_fit_are_refused_with_the_remedy(
    loss: str, shape: tuple[int, ...], targets: Tensor, message: str, method: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(get_loss(loss), method)(gaussian(*shape, seed=0), targets)
