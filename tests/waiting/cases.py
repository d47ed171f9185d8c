"""Steps on the stand-in device, and how often the host waited for it.

They have a process of their own, since the stand-in registers itself as the accelerator of torch.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import GrowingBatchSize
from lightning_struct import nn as structured
from lightning_struct.callbacks import NoiseEstimator
from lightning_struct.functional import per_sample_gradient_norms
from lightning_struct.optim import RLS, SHF
from lightning_struct.optim.shf.settings import LSMR, Kronecker
from tests.cases import First
from tests.waiting.standin import DEVICE, StandInDevice

_STEPS = 2


class Curve(nn.Module):
    """Residuals of a small network that is fitted to a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.sin())[:, 0]


class Tagger(nn.Module):
    """A recurrent network, with a class for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0].transpose(0, 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def labels(*shape: int) -> Tensor:
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(1))


# name -> module, loss, inputs, targets, whether with the paper's settings, options
SHF_CASES: dict[str, tuple[Callable[[], nn.Module], str, Tensor, Tensor | None, bool, dict[str, Any]]] = {
    "mse": (mlp, "mse", numbers(32, 4), numbers(32, 3), False, {}),
    "lsmr": (mlp, "mse", numbers(32, 4), numbers(32, 3), False, {"solver": LSMR(maxiter=9)}),
    "cross-entropy": (mlp, "cross_entropy", numbers(32, 4), labels(32), False, {}),
    "binary cross-entropy": (mlp, "binary_cross_entropy", numbers(32, 4), labels(32, 3).clamp_max(1), False, {}),
    "convolutions": (cnn, "cross_entropy", numbers(16, 1, 6, 6), labels(16), False, {"preconditioner": Kronecker()}),
    "recurrent": (Tagger, "cross_entropy", numbers(8, 5, 4), labels(8, 5), False, {}),
    "paper": (mlp, "cross_entropy", numbers(32, 4), labels(32), True, {}),
    "exact residuals": (Curve, "least_squares", numbers(20, 1).double(), None, False, {"solver": "exact"}),
    "residuals by lsmr": (Curve, "least_squares", numbers(20, 1).double(), None, False, {"solver": "lsmr"}),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    name: lambda name=name: getattr(structured, name)(16, 16)  # type: ignore[misc]
    for name in (
        *("LDRSubdiagonal", "LDRTridiagonal", "ToeplitzLike", "HankelLike", "VandermondeLike", "CauchyLike"),
        *("LowRank", "Circulant", "Fastfood", "RandomizedHadamard", "Monarch"),
    )
}
LAYERS |= {
    "PrunedLinear": lambda: structured.PrunedLinear(16, 16, parameters=40),
    "adapters": lambda: structured.add_adapters(nn.Sequential(nn.Linear(16, 16)), structured.LowRank),
    "StructuredLSTM": lambda: First(structured.StructuredLSTM(16, 8, structured.LowRank)),
    "BlockStructured": lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), blocks()),
}


def blocks() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    return structured.replace_conv(network, structured.LowRank, example=torch.zeros(1, 1, 4, 4))


def shf_steps(name: str) -> list[dict[str, Any]]:
    """Steps of SHF: iterations of the solver, losses tried by the line search or for other dampings, and waits."""
    build, loss, inputs, targets, paper, options = SHF_CASES[name]
    torch.manual_seed(0)
    found = []
    with StandInDevice() as device:
        module, x = device.move(build()), device.tensor(inputs)
        optimizer = (SHF.paper if paper else SHF)(module, loss, **options)
        for _ in range(_STEPS):
            y = None if targets is None else device.tensor(targets)
            device.reset()
            report = optimizer.step(inputs=x, targets=y)
            found.append({"iterations": report.solver_iterations, **device.found()})
    return found


def rls_steps(build: Callable[[], nn.Module], inputs: Tensor, **options: Any) -> list[dict[str, Any]]:
    """Steps of RLS."""
    return gradient_steps(lambda m: RLS(m, auxiliary=partial(torch.optim.SGD, lr=1e-2), **options), build, inputs)


def gradient_steps(
    make: Callable[[nn.Module], torch.optim.Optimizer], build: Callable[[], nn.Module], inputs: Tensor
) -> list[dict[str, Any]]:
    """Steps of an optimizer that takes gradients."""
    torch.manual_seed(0)
    found = []
    with StandInDevice() as device:
        module = device.move(build())
        optimizer = make(module)
        x, y = device.tensor(inputs), device.tensor(labels(len(inputs)))
        for _ in range(_STEPS):
            device.reset()
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            found.append(device.found())
    return found


def recursive_steps() -> list[dict[str, Any]]:
    """Updates of a layer that learns in closed form."""
    found = []
    with StandInDevice() as device:
        layer = device.move(structured.RecursiveLinear(4, 3))
        layer.reset_parameters()  # makes the state of the recursion, which is no buffer
        x, y = device.tensor(numbers(32, 4)), device.tensor(numbers(32, 3))
        for _ in range(_STEPS):
            device.reset()
            layer.update(x, y)
            found.append(device.found())
    return found


def layer_steps(name: str) -> list[dict[str, Any]]:
    """Steps of gradient descent of a structured layer, then its second forward pass in eval mode."""
    torch.manual_seed(0)
    found = []
    with StandInDevice() as device:
        layer, x = device.move(LAYERS[name]()), device.tensor(numbers(8, 16))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(_STEPS):
            device.reset()
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            found.append(device.found())
            optimizer.step()
        with torch.no_grad():
            layer.eval()(x)  # prepares the weights for the calls to come
            device.reset()
            layer(x)
        found.append(device.found())
    return found


def norm_steps() -> list[dict[str, Any]]:
    """Backward passes with the gradient norms of single samples."""
    torch.manual_seed(0)
    found = []
    with StandInDevice() as device:
        module, x, y = device.move(mlp()), device.tensor(numbers(32, 4)), device.tensor(labels(32))
        for _ in range(_STEPS):
            device.reset()
            with per_sample_gradient_norms(module) as norms:
                F.cross_entropy(module(x), y).backward()
            norms.squared_norms  # noqa: B018
            found.append(device.found())
    return found


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, data: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(data[0]), data[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OnStandIn(SingleDeviceStrategy):
    """A strategy whose module is on the device already."""

    def model_to_device(self) -> None:
        pass


class AnyDevice(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        pass


class Counting(L.Callback):
    def __init__(self, device: StandInDevice) -> None:
        self.device, self.found = device, []  # type: ignore[var-annotated]

    def on_train_batch_start(self, *args: Any) -> None:
        self.device.reset()

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(self.device.found())


def growing_steps(kind: str) -> list[dict[str, Any]]:
    """Steps of a fit with GrowingBatchSize, which measures every fourth one."""
    torch.manual_seed(0)
    with StandInDevice() as device:
        module, counting = device.move(Classifier()), Counting(device)
        growing = GrowingBatchSize(estimator=NoiseEstimator(kind, every_n_steps=4))
        trainer = L.Trainer(
            strategy=OnStandIn(device=DEVICE, accelerator=AnyDevice()),
            max_epochs=2,
            callbacks=[growing, counting],
            accumulate_grad_batches=2 if kind == "parts" else 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(numbers(256, 4), labels(256)), batch_size=16))
    return counting.found


def steps() -> dict[str, list[dict[str, Any]]]:
    """The steps of all cases by their names."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[dict[str, Any]]] = {f"SHF {name}": shf_steps(name) for name in SHF_CASES}
    found["RLS"] = rls_steps(mlp, numbers(32, 4))
    found["RLS(momentum)"] = rls_steps(mlp, numbers(32, 4), momentum=0.5)
    found["Adam(foreach)"] = gradient_steps(
        lambda m: torch.optim.Adam(m.parameters(), foreach=True), mlp, numbers(32, 4)
    )
    found["RecursiveLinear.update"] = recursive_steps()
    found["RLS of convolutions"] = rls_steps(cnn, numbers(16, 1, 6, 6))
    found |= {f"layer {name}": layer_steps(name) for name in LAYERS}
    found["norms"] = norm_steps()
    found |= {f"GrowingBatchSize by {kind}": growing_steps(kind) for kind in ("layers", "parts")}
    return found
