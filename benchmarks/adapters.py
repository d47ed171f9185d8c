"""Adapters: accuracy after a shift of the data at equal numbers of trained parameters, beside those of peft.

    pip install peft
    python benchmarks/adapters.py --data-dir data

A perceptron (four hidden layers of 256 units) and a small vision transformer (two blocks of width 64) learn MNIST at 16
x 16 pixels. Then they are frozen, and adapters in the hidden layers or in the four projections of attention learn a
shift: turned digits, digits on pictures, on noise, inverted ones, and USPS, from 2,000 images, in 200 (or 100) steps of
Adam with 32 images each.

Each way takes the largest adapter of its kind that has no more parameters than low rank of 1 (or 2). Its learning rate
is the best for the turned digits, on images that are neither trained nor tested on, for each network and budget; rates
go from 0.01 up, two to a decade, until the largest is not the best.

``--approximation`` has instead how near each class comes to the update of a full fine-tuning, at equal numbers of
parameters.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import MNIST, USPS
from torchvision.transforms.functional import pil_to_tensor

from harness import (
    RESULTS,
    Run,
    load_runs,
    machine_line,
    make_directory,
    make_parser,
    print_header,
    print_machines,
    print_row,
    progress,
    run_name,
    run_once,
    spread,
)
from lightning_struct.data.larochelle import vary_digits
from lightning_struct.nn import (
    Circulant,
    LDRSubdiagonal,
    LowRank,
    RandomizedHadamard,
    ToeplitzLike,
    adapter_parameter_groups,
    add_adapters,
)
from lightning_struct.nn.updates import rudin_shapiro_signs

Sample = tuple[Tensor, Tensor]
SIDE = 16
SHIFTS = ("rotation", "background", "noise", "inverted", "usps")
RATES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
RANKS = (1, 2)
BATCH = 32
TRAINED, CHECKED, TESTED = 2000, 1000, 4000


# --- networks ---------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Four hidden layers of 256 units."""

    adapted = ("hidden.0", "hidden.2", "hidden.4", "hidden.6")
    width = 256
    steps = 200

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.ReLU())]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x.flatten(1)))


class Block(nn.Module):
    """Attention of four heads, and a layer of twice the width, each after a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        heads = (layer(z).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Sixteen patches of 4 x 4 pixels, two blocks of width 64."""

    adapted = tuple(f"blocks.{block}.{layer}" for block in range(2) for layer in "qkvo")
    width = 64
    steps = 100

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, self.width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(16, self.width))
        self.blocks = nn.Sequential(Block(self.width), Block(self.width))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x[:, None]).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


NETWORKS: dict[str, type[Perceptron | VisionTransformer]] = {"perceptron": Perceptron, "transformer": VisionTransformer}


# --- data -------------------------------------------------------------------------------------------------------------


def small(images: Tensor) -> Tensor:
    """(n, 28, 28) as (n, 16, 16)."""
    return F.interpolate(images[:, None], SIDE, mode="bilinear", antialias=True)[:, 0]


def digits(directory: str, train: bool) -> Sample:
    """MNIST's images (n, 28, 28) from 0 to 1, and labels."""
    data = MNIST(directory, train=train)
    return data.data.float() / 255, data.targets


def shifted(directory: str, shift: str) -> tuple[Sample, Sample, Sample]:
    """Images (n, 16, 16) and labels to train, to choose a rate, and to test."""
    if shift == "usps":
        samples = []
        for train in (True, False):
            data = USPS(directory, train=train)
            images = torch.stack([pil_to_tensor(data[i][0])[0] for i in range(len(data))]).float() / 255
            samples.append((images, torch.tensor(data.targets)))
    else:
        samples = []
        for train, count in ((True, TRAINED + CHECKED), (False, TESTED)):
            images, labels = (tensor[-count:] for tensor in digits(directory, train))
            if shift == "inverted":
                images = 1 - images
            else:
                flat = images.flatten(1)
                flat = vary_digits(flat, shift, noise_correlation=0.0, seed=int(train))  # type: ignore[arg-type]
                images = flat.view(-1, 28, 28)
            samples.append((small(images), labels))
    (images, labels), test = samples
    check = slice(TRAINED, TRAINED + CHECKED)
    return (images[:TRAINED], labels[:TRAINED]), (images[check], labels[check]), test


# --- training ---------------------------------------------------------------------------------------------------------


def fit(network: nn.Module, groups: list[dict], sample: Sample, steps: int, seed: int, batch_size: int = BATCH) -> None:
    """Adam with a rate that rises over a tenth of the steps and falls to zero."""
    images, labels = sample
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    network.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (batch_size,), generator=generator)
        loss = F.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(network: nn.Module, sample: Sample) -> float:
    """Per cent of the images whose class is found."""
    network.eval()
    return 100 * (network(sample[0]).argmax(1) == sample[1]).float().mean().item()


def trained_on_mnist(name: str, directory: str, results: Path) -> nn.Module:
    """The network after 3,000 steps on MNIST, kept in a file."""
    file = results / f"{name}.pt"
    torch.manual_seed(0)
    network = NETWORKS[name]()
    if not file.exists():
        images, labels = digits(directory, train=True)
        fit(network, [{"params": list(network.parameters()), "lr": 2e-3}], (small(images), labels), 3000, 0)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


# --- ways -------------------------------------------------------------------------------------------------------------


def of_ours(
    factory: Callable[[int], Callable[..., nn.Module]], diagonals: Sequence[str] = ("none", "none")
) -> Callable:
    """The model with our adapters, and its parameter groups; ``diagonals`` says for each rank which are learned."""

    def make(network: nn.Module, rank: int, rate: float) -> tuple[nn.Module, list[dict]]:
        layers = list(network.adapted)  # type: ignore[arg-type]
        learned = diagonals[rank - 1]
        add_adapters(network, factory(rank), include=layers, learned_diagonals=learned)  # type: ignore[arg-type]
        return network, adapter_parameter_groups(network, rate)

    return make


def of_peft(name: str, options: Callable[[int, int], dict]) -> Callable:
    """The model with the adapters of peft's class ``name``, given its options for a width and a rank."""

    def make(network: nn.Module, rank: int, rate: float) -> tuple[nn.Module, list[dict]]:
        import peft

        config = getattr(peft, name)(target_modules=list(network.adapted), **options(network.width, rank))  # type: ignore
        network = peft.get_peft_model(network, config)
        return network, [{"params": [p for p in network.parameters() if p.requires_grad], "lr": rate}]

    return make


def kronecker(width: int, rank: int) -> dict:
    """Kronecker factors of the same size; or a small one, and a large one of a low rank, within the budget."""
    root = int(width**0.5)
    if rank == 1:
        return {"r": width, "alpha": width, "decompose_factor": root}
    large = 2 * root
    own = (2 * rank * width - (width // large) ** 2) // (2 * large)
    return {"r": own, "alpha": own, "decompose_factor": width // large}


WAYS: dict[str, Callable] = {
    "LDR-SD": of_ours(lambda rank: partial(LDRSubdiagonal, rank=rank - 1)),
    "LDR-SD by diagonals": of_ours(lambda rank: partial(ToeplitzLike, rank=rank - 1), diagonals=("both", "both")),
    "Toeplitz-like": of_ours(lambda rank: partial(ToeplitzLike, rank=rank)),
    "circulant, learned diagonals": of_ours(lambda rank: Circulant, diagonals=("outputs", "both")),
    "Hadamard, learned outputs' diagonal": of_ours(
        lambda rank: partial(RandomizedHadamard, terms=2 * rank - 1), diagonals=("outputs", "outputs")
    ),
    "LoRA": of_peft("LoraConfig", lambda width, rank: {"r": rank, "lora_alpha": 2 * rank}),
    "C3A": of_peft("C3AConfig", lambda width, rank: {"block_size": width // (2 * rank)}),
    "OFT": of_peft("OFTConfig", lambda width, rank: {"r": 0, "oft_block_size": 4 * rank}),
    "VeRA": of_peft("VeraConfig", lambda width, rank: {"r": (2 * rank - 1) * width}),
    "LoKr": of_peft("LoKrConfig", kronecker),
}


LEFT_OUT = (("LDR-SD", 1), ("LDR-SD by diagonals", 1))


def run_way(way: str, network: nn.Module, rank: int, rate: float, sample: Sample, tested: Sample, seed: int) -> Run:
    """Adapt a copy of the network, and test it."""
    torch.manual_seed(seed)
    adapted, groups = WAYS[way](copy.deepcopy(network), rank, rate)
    parameters = sum(parameter.numel() for group in groups for parameter in group["params"])
    start = time.process_time()
    fit(adapted, groups, sample, network.steps, seed)  # type: ignore[arg-type]
    seconds = time.process_time() - start
    return {"accuracy": accuracy(adapted, tested), "parameters": parameters, "seconds": seconds}


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """All missing runs: rates first, then each shift with each seed."""
    data = {shift: shifted(arguments.data_dir, shift) for shift in SHIFTS}
    networks = {name: trained_on_mnist(name, arguments.data_dir, results) for name in arguments.networks}
    cells = [(name, way, rank) for name in arguments.networks for rank in arguments.ranks for way in arguments.ways]
    # Learned operators double the parameters: in all layers they need the budget of rank 2.
    cells = [cell for cell in cells if cell[1:] not in LEFT_OUT]
    for name, way, rank in progress(cells, len(cells), "rates"):
        train, check, _ = data["rotation"]
        for tried, rate in enumerate(RATES):
            if tried >= 3 and best_rates(load_runs(results))[name, way, rank] != RATES[tried - 1]:
                break  # larger ones are tried while the largest so far is the best
            key = {"kind": "rate", "network": name, "way": way, "rank": rank, "rate": rate}
            run = partial(run_way, way, networks[name], rank, rate, train, check, 100)
            run_once(results, run_name(*key.values()), lambda key=key, run=run: key | run())
    best = best_rates(load_runs(results))
    jobs = [(*cell, shift, seed) for seed in arguments.seeds for shift in arguments.shifts for cell in cells]
    for name, way, rank, shift, seed in progress(jobs, len(jobs), "shifts"):
        train, _, test = data[shift]
        key = {"kind": "shift", "network": name, "way": way, "rank": rank, "shift": shift, "seed": seed}
        rate = best[name, way, rank]
        if arguments.lower_rates:
            key["kind"] = "lower"
            rate = RATES[max(RATES.index(rate) - 1, 0)]
        run = partial(run_way, way, networks[name], rank, rate, train, test, seed)
        run_once(results, run_name(*key.values()), lambda key=key, run=run, rate=rate: key | {"rate": rate} | run())
    for name, network in networks.items():
        for shift in arguments.shifts:
            key = {"kind": "before", "network": name, "shift": shift}
            test = data[shift][2]
            run_once(
                results,
                run_name(*key.values()),
                lambda key=key, n=network, test=test: key | {"accuracy": accuracy(n, test)},
            )


def best_rates(runs: Sequence[Run]) -> dict[tuple[str, str, int], float]:
    """The rate with the highest accuracy for each network, way and budget."""
    best: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        cell = (run["network"], run.get("way", ""), run.get("rank", 0))
        if run["kind"] == "rate" and (cell not in best or run["accuracy"] > best[cell]["accuracy"]):
            best[cell] = run
    return {cell: run["rate"] for cell, run in best.items()}


def report(runs: Sequence[Run], networks: Sequence[str], shifts: Sequence[str], kind: str) -> None:
    """A table for each network and budget: the median of the seeds for each shift, and the mean over shifts.

    The mean is that of the seeds that have all shifts.
    """
    for name in networks:
        before = {run["shift"]: run["accuracy"] for run in runs if run["kind"] == "before" and run["network"] == name}
        for rank in RANKS:
            chosen = [r for r in runs if r["kind"] == kind and r["network"] == name and r["rank"] == rank]
            chosen = [r for r in chosen if r["shift"] in shifts]
            if not chosen:
                continue
            print(f"\n{name}, budget of low rank {rank}")
            print_header("way", "parameters", "rate", *shifts, "mean", "seconds")
            if before:
                print_row("before", 0, "", *(f"{before[s]:.1f}" if s in before else "" for s in shifts), "", "")
            for way in WAYS:
                of_way = [run for run in chosen if run["way"] == way]
                if of_way:
                    print_row(*summary(way, of_way, shifts))
    print()
    print_machines(runs)


def summary(way: str, runs: Sequence[Run], shifts: Sequence[str]) -> list[str]:
    """A row of a table."""
    of_shift = {s: {r["seed"]: r["accuracy"] for r in runs if r["shift"] == s} for s in shifts}
    cells = [spread(list(found.values()), "{:.1f}") if found else "" for found in of_shift.values()]
    complete = set.intersection(*(set(found) for found in of_shift.values()))
    means = [statistics.mean(found[seed] for found in of_shift.values()) for seed in sorted(complete)]
    seconds = statistics.median(run["seconds"] for run in runs)
    first = runs[0]
    mean = spread(means, "{:.1f}") if means else ""
    return [way, f"{first['parameters']:,}", f"{first['rate']:g}", *cells, mean, f"{seconds:.1f}"]


# --- approximation ----------------------------------------------------------------------------------------------------


def approximate(arguments: argparse.Namespace, results: Path) -> None:
    """Print the relative errors of the nearest members of each class to the updates of a full fine-tuning."""
    network = trained_on_mnist("perceptron", arguments.data_dir, results)
    assert isinstance(network, Perceptron)
    print_header("class", "parameters of a layer", *arguments.shifts)
    updates: dict[str, list[Tensor]] = {}
    for shift in arguments.shifts:
        tuned = copy.deepcopy(network)
        groups = [{"params": [tuned.get_submodule(layer).weight for layer in tuned.adapted], "lr": 1e-3}]
        fit(tuned, groups, shifted(arguments.data_dir, shift)[0], network.steps, 0)
        before, after = (dict(model.named_parameters()) for model in (network, tuned))
        updates[shift] = [(after[f"{n}.weight"] - before[f"{n}.weight"]).detach() for n in network.adapted]
    signs = rudin_shapiro_signs(256).float()
    for rank in RANKS:
        nearest: dict[str, Callable[[Tensor], float]] = {
            "low rank": lambda update, rank=rank: error(LowRank, update, rank),
            "Toeplitz-like": lambda update, rank=rank: error(ToeplitzLike, signs[:, None] * update * signs, rank),
            "C3A": lambda update, rank=rank: circulant_blocks_error(update, 128 // rank),
            "LoKr": lambda update, rank=rank: kronecker_error(update, 16),
        }
        if rank > 1:
            nearest["LDR-SD"] = lambda update, rank=rank: error(
                LDRSubdiagonal, signs[:, None] * update * signs, rank - 1
            )
            del nearest["LoKr"]
        for name, measured in nearest.items():
            errors = [statistics.mean(measured(update) for update in updates[shift]) for shift in arguments.shifts]
            print_row(name, 512 * rank, *(f"{value:.3f}" for value in errors))
    print(f"\n{machine_line()}")


def error(layer_class: type, update: Tensor, rank: int) -> float:
    """‖M - Δ‖ / ‖Δ‖ of the nearest M that is found."""
    linear = nn.Linear(*update.shape, bias=False)
    linear.weight = nn.Parameter(update)
    return layer_class.from_linear(linear, rank=rank, refine=40).approximation_error


def circulant_blocks_error(update: Tensor, size: int) -> float:
    """The nearest matrix of circulant blocks: means over the wrapped diagonals of each block."""
    blocks = update.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).double()
    place = (torch.arange(size)[:, None] - torch.arange(size)) % size
    wrapped = torch.stack([blocks[..., place == k].mean(-1) for k in range(size)], -1)
    return float((wrapped[..., place] - blocks).norm() / blocks.norm())


def kronecker_error(update: Tensor, size: int) -> float:
    """The nearest Kronecker product of two matrices of that size (Van Loan and Pitsianis)."""
    rearranged = update.unflatten(0, (size, size)).unflatten(2, (size, size)).permute(0, 2, 1, 3).reshape(size**2, -1)
    values = torch.linalg.svdvals(rearranged.double())
    return float(values[1:].norm() / values.norm())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the files of MNIST and USPS are")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=list(RANKS), help="budgets, of low rank")
    parser.add_argument("--lower-rates", action="store_true", help="all by the rate below the best one")
    parser.add_argument("--shifts", nargs="+", choices=SHIFTS, default=list(SHIFTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--approximation", action="store_true", help="errors of the nearest members of the classes")
    parser.add_argument("--report", action="store_true", help="print what is there, without new runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = make_directory(RESULTS / "adapters")
    if arguments.approximation:
        approximate(arguments, results)
        return
    if not arguments.report:
        measure(arguments, results)
    kind = "lower" if arguments.lower_rates else "shift"
    report(load_runs(results), arguments.networks, arguments.shifts, kind)


if __name__ == "__main__":
    main()
