"""Models and data that the tests share: one of each kind of layer, small, float64, with smooth outputs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model, its input, and which backends cover it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    backends: tuple[str, ...] = ("double_backward",)  # the first is the one that is chosen
    per_sample: bool = True

    def make(self, seed: int = 0) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(seed)
        module = self.build().double()
        inputs = self.inputs()
        return module, inputs.double() if inputs.is_floating_point() else inputs

    def __str__(self) -> str:
        return self.name


class First(nn.Module):
    """The first output of a module that returns several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class TiedEncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.encoder(x)) @ self.weight


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def nested_mlp() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.GELU()), nn.Identity(), nn.Sequential(nn.Linear(3, 2)))


def shared_layer_mlp() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Sigmoid(), layer, nn.Softplus())


def tied_weight_mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid())
    model[2].weight = model[0].weight
    return model


def frozen_mlp() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def convolution(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(2, 2, 3, **options), nn.Tanh(), nn.Flatten())  # type: ignore[arg-type]


def normalised(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), layer(), nn.Tanh(), nn.Linear(4, 2))


def batch_norm_eval() -> nn.Module:
    model = normalised(lambda: nn.BatchNorm1d(4))()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    return model.eval()


def vectors() -> Tensor:
    return torch.randn(6, 4)


def sequences() -> Tensor:
    return torch.randn(5, 3, 4)


def images() -> Tensor:
    return torch.randn(4, 2, 5, 5)


EVERY = ("layer_rules", "double_backward")
CASES = (
    Case("mlp", mlp, vectors, EVERY),
    Case("mlp_sequence", mlp, sequences, EVERY),
    Case("nested_mlp", nested_mlp, vectors, EVERY),
    Case("shared_layer", shared_layer_mlp, vectors, EVERY),
    Case("tied_weight", tied_weight_mlp, vectors, EVERY),
    Case("frozen", frozen_mlp, vectors, EVERY),
    Case("flatten", lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.SiLU()), sequences, EVERY),
    Case("no_bias", lambda: nn.Sequential(nn.Linear(4, 3, bias=False), nn.ELU()), vectors, EVERY),
    Case("residual", Residual, vectors),
    Case("tied_functional", TiedEncoderDecoder, vectors),
    Case("conv", convolution(padding=1), images),
    Case("conv_strided", convolution(stride=2, dilation=2, groups=2), images),
    Case("conv_circular", convolution(padding=1, padding_mode="circular"), images),
    Case("conv1d", lambda: nn.Sequential(nn.Conv1d(3, 2, 2), nn.Sigmoid()), sequences),
    Case("layer_norm", normalised(lambda: nn.LayerNorm(4)), vectors),
    Case("group_norm", normalised(lambda: nn.GroupNorm(2, 4)), vectors),
    Case("batch_norm_eval", batch_norm_eval, vectors),
    Case("batch_norm_train", normalised(lambda: nn.BatchNorm1d(4)), vectors, per_sample=False),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), lambda: torch.randint(0, 7, (5, 3))),
    Case("rnn", lambda: First(nn.RNN(4, 3, batch_first=True)), sequences),
    Case("gru", lambda: First(nn.GRU(4, 3, batch_first=True)), sequences),
    Case("lstm", lambda: First(nn.LSTM(4, 2, batch_first=True)), sequences),
    Case(
        "lstm_stacked", lambda: First(nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True)),
        lambda: torch.randn(3, 2, 4),
    ),
    Case("attention", SelfAttention, sequences),
    Case(
        "transformer", lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, activation="gelu"), sequences,
    ),
)  # fmt: skip


def gaussian(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers in float64, the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in vector.values()])


def random_like(vector: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in vector.items()}


def dense_jacobian(module: nn.Module, inputs: Tensor) -> Tensor:
    """(n, outputs per sample, parameters) by ordinary reverse-mode autograd, one row at a time."""
    module = copy.deepcopy(module)  # buffers of the original stay as they are
    parameters = [p for p in module.parameters() if p.requires_grad]
    outputs = module(inputs)
    rows = []
    for value in outputs.reshape(-1):
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows).reshape(outputs.shape[0], -1, rows[0].numel())


class Triangular:
    """A preconditioner C, (n, n) and lower triangular, as an object with the two solves that a solver asks for."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def solve(self, y: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.matrix, y[:, None], upper=False)[:, 0]

    def solve_transpose(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.matrix.T, x[:, None], upper=True)[:, 0]


def triangular(n: int, seed: int) -> Tensor:
    return gaussian(n, n, seed=seed).tril(-1) * 0.3 + torch.diag(gaussian(n, seed=seed + 1).abs() + 1.0)
