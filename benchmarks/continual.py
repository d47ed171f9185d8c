"""Classes that arrive in five phases of two: a last layer in closed form against Adam, on MNIST and CIFAR-10.

    OMP_NUM_THREADS=1 python benchmarks/continual.py mnist cifar --data-dir DIRECTORY [--width 8192] [--seeds 0]

Each image is read once; the accuracy is that on the test images of all classes so far.

- ``recursive``: a network is trained on the first phase by Adam, one epoch, and frozen; a random ReLU layer and a
  RecursiveLinear stand above it, which learns phase after phase, in batches of 500. Measured is also how far its
  weights are from those that all images in a random order, in batches of 1,000, give.
- ``fine-tuned``: the network and a last layer, trained by Adam with the cross-entropy, phase by phase, in batches of
  100. (With the wide layer between, Adam learns nothing on CIFAR-10.)
- ``joint``: the same on all classes together, in a random order; its accuracy after each phase is that on the classes
  so far.

The network is 784-512-256 for MNIST and a mini VGG for CIFAR-10 with 256 outputs. Adam has its rate of 1e-3. DIRECTORY
has ``MNIST/raw`` as torchvision keeps it, and ``cifar10_jpeg_{train,test}.tar.gz``, of ``<split>/<class>/<index>.jpg``.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import MNIST
from torchvision.transforms.functional import pil_to_tensor

import harness
from harness import Run
from lightning_struct import RecursiveLinear
from lightning_struct.models import fully_connected, mini_vgg

TASKS, WAYS = ("mnist", "cifar"), ("recursive", "fine-tuned", "joint")
PHASES, CLASSES, FEATURES = 5, 10, 256
NOW = CLASSES // PHASES
Part = tuple[Tensor, Tensor]


def read(task: str, directory: str) -> tuple[Part, Part]:
    """Images, float32, and labels of the training and the test part."""
    if task == "mnist":
        parts = [MNIST(directory, train=train) for train in (True, False)]
        train, test = ((part.data.flatten(1) / 255, part.targets) for part in parts)
        return train, test
    train, test = (read_archive(Path(directory) / f"cifar10_jpeg_{part}.tar.gz") for part in ("train", "test"))
    return train, test


def read_archive(path: Path) -> Part:
    images, names = [], []
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                file = archive.extractfile(member)
                assert file is not None
                images.append(pil_to_tensor(Image.open(io.BytesIO(file.read())).convert("RGB")))
                names.append(Path(member.name).parent.name)
    classes = {name: label for label, name in enumerate(sorted({*names}))}
    return torch.stack(images) / 255, torch.tensor([classes[name] for name in names])


def network(task: str) -> nn.Module:
    if task == "mnist":
        return fully_connected([784, 512, FEATURES])
    return mini_vgg(channels=16, hidden=256, num_classes=FEATURES)


def in_phases(labels: Tensor, order: Tensor) -> list[Tensor]:
    """Indices of the samples of each phase, in this order."""
    return [order[labels[order] // NOW == phase] for phase in range(PHASES)]


@torch.no_grad()
def accuracies(predict: Callable[[Tensor], Tensor], test: Part, phase: int) -> float:
    """Share of right answers among the classes up to a phase."""
    known = test[1] < (phase + 1) * NOW
    found = torch.cat([predict(images) for images in test[0][known].split(500)])
    return (found[:, : (phase + 1) * NOW].argmax(1) == test[1][known]).float().mean().item()


def train(module: nn.Module, images: Tensor, labels: Tensor, indices: Tensor) -> None:
    """One epoch of Adam by the cross-entropy."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for batch in indices.split(100):
        optimizer.zero_grad()
        F.cross_entropy(module(images[batch]), labels[batch]).backward()
        optimizer.step()


def recursive(task: str, width: int, data: tuple[Part, Part], order: Tensor) -> Run:
    (images, labels), test = data
    body, phases = network(task), in_phases(labels, order)
    train(nn.Sequential(body, nn.Linear(FEATURES, NOW)), images, labels, phases[0])
    wide = nn.Sequential(body, nn.Linear(FEATURES, width), nn.ReLU()).requires_grad_(False)
    layer, found, began = RecursiveLinear(width, NOW), [], time.process_time()
    for phase, indices in enumerate(phases):
        if phase:
            layer.add_outputs(NOW)
        for batch in indices.split(500):
            layer.update(wide(images[batch]), labels[batch])
        found.append(accuracies(lambda x: layer(wide(x)), test, phase))
    seconds = time.process_time() - began
    together = RecursiveLinear(width, CLASSES)
    for batch in torch.randperm(len(labels)).split(1000):
        together.update(wide(images[batch]), labels[batch])
    one, other = (each.get_extra_state()["weights"] for each in (layer, together))
    return {
        "accuracies": found,
        "seconds": seconds / len(labels),
        "difference": ((one - other).norm() / other.norm()).item(),
        "accuracy_together": accuracies(lambda x: together(wide(x)), test, PHASES - 1),
    }


def by_adam(task: str, _: int, data: tuple[Part, Part], order: Tensor, is_joint: bool) -> Run:
    (images, labels), test = data
    module, found, began = nn.Sequential(network(task), nn.Linear(FEATURES, CLASSES)), [], time.process_time()
    phases = [order] if is_joint else in_phases(labels, order)
    for phase, indices in enumerate(phases):
        train(module, images, labels, indices)
        found += [accuracies(module, test, i) for i in (range(PHASES) if is_joint else [phase])]
    return {"accuracies": found, "seconds": (time.process_time() - began) / len(labels)}


def run(task: str, way: str, width: int, seed: int, data: tuple[Part, Part]) -> Run:
    torch.manual_seed(seed)
    order = torch.randperm(len(data[0][1]))
    make = recursive if way == "recursive" else partial(by_adam, is_joint=way == "joint")
    return {"task": task, "way": way, "width": width, "seed": seed, **make(task, width, data, order)}


def print_table(runs: list[Run]) -> None:
    harness.print_header("task", "way", "accuracy after each phase, %", "ms a sample", "from all at once")
    for each in runs:
        reached = ", ".join(f"{100 * value:.1f}" for value in each["accuracies"])
        beside = ""
        if "difference" in each:
            beside = f"weights {each['difference']:.1e}, accuracy {100 * each['accuracy_together']:.2f} %"
        harness.print_row(each["task"], each["way"], reached, f"{1e3 * each['seconds']:.2f}", beside)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--data-dir", default="data")
    harness.add_run_options(parser, "continual", seeds=[0])
    parser.add_argument("--width", type=int, default=8192, help="units of the random layer")
    options = parser.parse_args()
    output = harness.make_directory(options.output)
    runs: list[Run] = []
    for task in options.tasks:
        (images, labels), test = read(task, options.data_dir)
        if task == "cifar":  # the archives are sorted by classes
            mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
            images, labels = images[mixed], labels[mixed]
        data = (images, labels), test
        jobs = {
            harness.run_name(task, way, options.width, seed): partial(run, task, way, options.width, seed, data)
            for seed in options.seeds
            for way in WAYS
        }
        runs = harness.run_all(output, jobs, options.report)
    harness.print_machines(runs)
    print_table(runs)


if __name__ == "__main__":
    main()
