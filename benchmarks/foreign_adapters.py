"""Adapters on networks and classes that nothing was chosen on: accuracy beside LoRA at equal numbers of parameters.

    pip install peft scikit-learn
    OMP_NUM_THREADS=1 python benchmarks/foreign_adapters.py

A vision transformer (two blocks of width 64) and a ResNet-18 learn the digits 0 to 4 of scikit-learn, 8 x 8 pixels;
then they are adapted to the digits 5 to 9 by 20 images of each, with a new head, and tested on all others. All layers
have adapters. A row has the rate with the best mean over seeds, of the four of its way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torchvision.models import resnet18

import adapters
import harness
from adapters import Sample
from harness import Run
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


# The network, the name of its head, steps to learn the old digits, and steps to adapt.
NETWORKS = {
    "transformer": (Transformer, "head", 300, 100),
    "resnet": (residual, "1.fc", 100, 30),
}


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


def hadamard(terms: int) -> Way:
    def make(network: nn.Module, head: str, rate: float) -> tuple[nn.Module, list[dict]]:
        add_adapters(network, partial(RandomizedHadamard, terms=terms), learned_diagonals="outputs", train=head)
        return network, adapter_parameter_groups(network, rate)

    return make


def lora(rank: int) -> Way:
    def make(network: nn.Module, head: str, rate: float) -> tuple[nn.Module, list[dict]]:
        import peft

        layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        layers.remove(head)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, modules_to_save=[head])
        return trained(peft.get_peft_model(network, config), rate)  # type: ignore[arg-type]

    return make


OF_OURS, OF_LORA = (1e-2, 3e-2, 1e-1, 3e-1), (3e-3, 1e-2, 3e-2, 1e-1)
WAYS: dict[str, tuple[Way, tuple[float, ...]]] = {
    "head alone": (head_alone, OF_LORA),
    "all weights": (lambda network, head, rate: trained(network, rate), (3e-4, 1e-3, 3e-3, 1e-2)),
    "LoRA, rank 1": (lora(1), OF_LORA),
    "RandomizedHadamard": (hadamard(1), OF_OURS),
    "LoRA, rank 2": (lora(2), OF_LORA),
    "RandomizedHadamard, 2 terms": (hadamard(2), OF_OURS),
}


def base(name: str, sample: Sample, results: Path) -> nn.Module:
    """The network after it has learned the old digits, kept in a file; with a new head."""
    make, _, steps, _ = NETWORKS[name]
    torch.manual_seed(0)
    network, file = make(), results / f"{name}.pt"
    if not file.exists():
        adapters.fit(network, trained(network, 1e-3)[1], sample, steps, 0)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


def adapt(name: str, way: str, rate: float, seed: int, samples: list[Sample], results: Path) -> Run:
    network, (_, head, _, steps) = base(name, samples[0], results), NETWORKS[name]
    torch.manual_seed(1000 + seed)
    network.set_submodule(head, nn.Linear(network.get_submodule(head).in_features, 10 - OLD))  # type: ignore
    network, groups = WAYS[way][0](network, head, rate)
    start = time.process_time()
    adapters.fit(network, groups, samples[1], steps, seed, BATCH)
    seconds = time.process_time() - start
    parameters = sum(p.numel() for group in groups for p in group["params"])
    found = {"network": name, "way": way, "rate": rate, "seed": seed, "parameters": parameters, "seconds": seconds}
    return found | {"accuracy": adapters.accuracy(network, samples[2])}


def accuracies(runs: list[Run]) -> list[float]:
    return [run["accuracy"] for run in runs]


def report(runs: list[Run]) -> None:
    """A table for each network: the best rate by the mean over seeds, that mean, and all seeds."""
    for name in NETWORKS:
        of_network = [run for run in runs if run["network"] == name]
        print()
        harness.print_header(name, "parameters", "rate", "mean accuracy", "of each seed", "seconds")
        for way, (_, rates) in WAYS.items():
            tried = [[run for run in of_network if (run["way"], run["rate"]) == (way, rate)] for rate in rates]
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
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=int, nargs="+", default=list(range(4)), help="which of the four of a way")
    harness.add_run_options(parser, "foreign_adapters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, jobs = harness.make_directory(options.output), {}
    for name in () if options.report else options.networks:
        for seed in options.seeds:
            samples = digits(seed)
            for way, index in ((way, index) for way in options.ways for index in options.rates):
                cell = (name, way, WAYS[way][1][index], seed)
                jobs[harness.run_name(*cell)] = partial(adapt, *cell, samples, results)
    report(harness.run_all(results, jobs, options.report))


if __name__ == "__main__":
    main()
