"""Adapters: accuracy after a shift of the data at equal numbers of trained parameters, beside those of peft.

    pip install peft
    python benchmarks/adapters.py --data-dir data
    python benchmarks/adapters.py --data-dir data --networks characters --seeds 0 1

A perceptron (four hidden layers of 256 units) and a small vision transformer (two blocks of width 64) learn MNIST at 16
x 16 pixels. Then they are frozen, and adapters in the hidden layers or in the four projections of attention learn a
shift: turned digits, digits on pictures, on noise, inverted ones, and USPS, from 2,000 images, in 200 (or 100) steps of
Adam with 32 images each. A transformer of characters (one block of width 64) learns Shakespeare's plays
(data/tinyshakespeare.txt), and then, by adapters in its projections, the reference of Python's language that Python
ships as ``pydoc_data.topics``, in 2,000 steps of 8 texts of 32 characters; rates are compared after 400.

Each way takes the largest adapter of its kind that has no more parameters than low rank of 1 or 2. Its learning rate
is the best for the turned digits or for the text, on samples that are neither trained nor tested on, for each network
and budget. Rates are two to a decade; the search goes on from the best one until both of its neighbours are worse.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import MNIST, USPS
from torchvision.transforms.functional import pil_to_tensor

import harness
from harness import Run
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

Sample = tuple[Tensor, Tensor]
SIDE = 16
SHIFTS = ("rotation", "background", "noise", "inverted", "usps")
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
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

    def __init__(self, width: int, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        heads = (layer(z).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.is_causal)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
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


class CharacterModel(nn.Module):
    """Texts of 32 characters, one block of width 64."""

    adapted = tuple(f"block.{layer}" for layer in "qkvo")
    width = 64
    steps = 2000
    rate_steps = 400
    batch = 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, self.width)
        self.places = nn.Parameter(0.02 * torch.randn(32, self.width))
        self.block = Block(self.width, is_causal=True)
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embedding(x) + self.places))).mT


NETWORKS: dict[str, type[Perceptron | VisionTransformer | CharacterModel]] = {
    "perceptron": Perceptron,
    "transformer": VisionTransformer,
    "characters": CharacterModel,
}


def shifts_of(name: str) -> Sequence[str]:
    """The shifts that a network learns."""
    return ("text",) if name == "characters" else SHIFTS


# --- data -------------------------------------------------------------------------------------------------------------


def small(images: Tensor) -> Tensor:
    """(n, 28, 28) as (n, 16, 16)."""
    return F.interpolate(images[:, None], SIDE, mode="bilinear", antialias=True)[:, 0]


def digits(directory: str, train: bool) -> Sample:
    """MNIST's images (n, 28, 28) from 0 to 1, and labels."""
    data = MNIST(directory, train=train)
    return data.data.float() / 255, data.targets


def windows(text: str) -> Sample:
    """Texts (n, 32), and the character after each of theirs, of a long one."""
    codes = torch.tensor(list(text.encode())).clamp(max=127)
    texts = codes[: len(codes) // 33 * 33].view(-1, 33)
    return texts[:, :-1], texts[:, 1:]


def shifted(directory: str, shift: str) -> tuple[Sample, Sample, Sample]:
    """Images (n, 16, 16) and labels to train, to choose a rate, and to test; or texts and their next characters."""
    if shift == "text":
        x, y = windows("\n".join(topics.values()))
        parts = slice(None, -1500), slice(-1500, -1000), slice(-1000, None)
        train, check, test = ((x[part], y[part]) for part in parts)
        return train, check, test
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
    """Per cent of the labels that are found."""
    network.eval()
    found = [network(x).argmax(1) == y for x, y in zip(sample[0].split(250), sample[1].split(250), strict=True)]
    return 100 * torch.cat(found).float().mean().item()


@torch.no_grad()
def scores(network: nn.Module, sample: Sample) -> Run:
    """The accuracy and the mean cross-entropy."""
    network.eval()
    return {"accuracy": accuracy(network, sample), "loss": F.cross_entropy(network(sample[0]), sample[1]).item()}


def trained_before(name: str, directory: str, results: Path) -> nn.Module:
    """The network after 3,000 steps on MNIST or on Shakespeare's plays, kept in a file."""
    file = results / f"{name}.pt"
    torch.manual_seed(0)
    network = NETWORKS[name]()
    if not file.exists():
        groups = [{"params": list(network.parameters()), "lr": 2e-3}]
        if name == "characters":
            fit(network, groups, windows((Path(directory) / "tinyshakespeare.txt").read_text()), 3000, 0)
        else:
            images, labels = digits(directory, train=True)
            fit(network, groups, (small(images), labels), 3000, 0)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


# --- ways -------------------------------------------------------------------------------------------------------------


def of_ours(
    factory: Callable[[int], Callable[..., nn.Module]], diagonals: Sequence[str] = ("none", "none")
) -> Callable:
    """The model with our adapters, and its parameter groups; ``diagonals`` says for each budget which are learned."""

    def make(network: nn.Module, rank: int, rate: float) -> tuple[nn.Module, list[dict]]:
        layers = list(network.adapted)  # type: ignore[arg-type]
        learned = diagonals[min(rank, 2) - 1]
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
    "low rank between signs": of_ours(lambda rank: partial(LowRank, rank=rank)),
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


# Learned operators double the parameters: in all layers they need the budget of rank 2.
LEFT_OUT = (("LDR-SD", 1), ("LDR-SD by diagonals", 1))
FIRST_RATE = {"C3A": 3.0, "LoRA": 1e-2}


def run_way(
    way: str, network: nn.Module, steps: int, rank: int, rate: float, sample: Sample, tested: Sample, seed: int
) -> Run:
    """Adapt a copy of the network, and test it."""
    torch.manual_seed(seed)
    adapted, groups = WAYS[way](copy.deepcopy(network), rank, rate)
    parameters = sum(parameter.numel() for group in groups for parameter in group["params"])
    start = time.process_time()
    fit(adapted, groups, sample, steps, seed, getattr(network, "batch", BATCH))  # type: ignore[arg-type]
    seconds = time.process_time() - start
    return scores(adapted, tested) | {"parameters": parameters, "seconds": seconds}


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """All missing runs: rates first, then each shift with each seed."""
    shifts = dict.fromkeys(s for name in arguments.networks for s in ("rotation", *shifts_of(name)))
    data = {shift: shifted(arguments.data_dir, shift) for shift in shifts}
    networks = {name: trained_before(name, arguments.data_dir, results) for name in arguments.networks}
    cells = [(name, way, rank) for name in arguments.networks for rank in RANKS for way in WAYS]
    cells = [cell for cell in cells if cell[1:] not in LEFT_OUT]
    for name, way, rank in harness.progress(cells, len(cells), "rates"):
        train, check, _ = data["text" if name == "characters" else "rotation"]
        rate_steps = getattr(networks[name], "rate_steps", networks[name].steps)
        around = [RATES.index(FIRST_RATE.get(way, 3e-2))]
        while around:  # the best one and its neighbours
            for rate in (RATES[index] for index in around):
                key = {"kind": "rate", "network": name, "way": way, "rank": rank, "rate": rate}
                adapt = partial(run_way, way, networks[name], rate_steps, rank, rate, train, check, 100)
                harness.run_once(results, harness.run_name(*key.values()), partial(with_key, key, adapt))
            runs = harness.load_runs(results)
            tried = {run["rate"] for run in runs if run["kind"] == "rate" and cell_of(run) == (name, way, rank)}
            best_one = RATES.index(best_rates(runs)[name, way, rank])
            around = [i for i in (best_one - 1, best_one + 1) if 0 <= i < len(RATES) and RATES[i] not in tried]
    best = best_rates(harness.load_runs(results))
    jobs = {}
    for name, way, rank in cells:
        for shift, seed in product(shifts_of(name), arguments.seeds):
            train, _, test = data[shift]
            key = {"kind": "shift", "network": name, "way": way, "rank": rank, "shift": shift, "seed": seed}
            rate, steps = best[name, way, rank], NETWORKS[name].steps
            adapt = partial(run_way, way, networks[name], steps, rank, rate, train, test, seed)
            jobs[harness.run_name(*key.values())] = partial(with_key, key | {"rate": rate}, adapt)
    for name, network in networks.items():
        for shift in shifts_of(name):
            key = {"kind": "before", "network": name, "shift": shift}
            jobs[harness.run_name(*key.values())] = partial(with_key, key, partial(scores, network, data[shift][2]))
    harness.run_all(results, jobs)


def with_key(key: Run, run: Callable[[], Run]) -> Run:
    return key | run()


def cell_of(run: Run) -> tuple[str, str, int]:
    """Network, way and budget of a run."""
    return run["network"], run.get("way", ""), run.get("rank", 0)


def quality(run: Run) -> float:
    """The score by which a rate is chosen: the accuracy, and of texts the loss."""
    value = -run["loss"] if run["network"] == "characters" else run["accuracy"]
    return value if math.isfinite(value) else -math.inf


def best_rates(runs: Sequence[Run]) -> dict[tuple[str, str, int], float]:
    """The best rate for each network, way and budget."""
    best: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        if run["kind"] == "rate" and (cell_of(run) not in best or quality(run) > quality(best[cell_of(run)])):
            best[cell_of(run)] = run
    return {cell: run["rate"] for cell, run in best.items()}


def report(runs: Sequence[Run], networks: Sequence[str]) -> None:
    """A table for each network and budget: the median of the seeds for each shift, and the mean over shifts.

    The mean is that of the seeds that have all shifts. Of texts the table has the loss.
    """
    for name in networks:
        shifts = shifts_of(name)
        of_network = [run for run in runs if run["kind"] == "before" and run["network"] == name]
        before = {run["shift"]: abs(quality(run)) for run in of_network}
        for rank in RANKS:
            chosen = [r for r in runs if r["kind"] == "shift" and r["network"] == name and r["rank"] == rank]
            if not chosen:
                continue
            print(f"\n{name}, budget of low rank {rank}")
            harness.print_header("way", "parameters", "rate", *shifts, "mean", "seconds")
            if before:
                harness.print_row("before", 0, "", *(f"{before[s]:.4g}" if s in before else "" for s in shifts), "", "")
            for way in WAYS:
                of_way = [run for run in chosen if run["way"] == way]
                if of_way:
                    harness.print_row(*summary(way, of_way, shifts))
    print()
    harness.print_machines(runs)


def summary(way: str, runs: Sequence[Run], shifts: Sequence[str]) -> list[str]:
    """A row of a table."""
    layout = "{:.3f}" if "text" in shifts else "{:.1f}"
    of_shift = {s: {r["seed"]: abs(quality(r)) for r in runs if r["shift"] == s} for s in shifts}
    cells = [harness.spread(list(found.values()), layout) if found else "" for found in of_shift.values()]
    complete = set.intersection(*(set(found) for found in of_shift.values()))
    means = [statistics.mean(found[seed] for found in of_shift.values()) for seed in sorted(complete)]
    seconds = statistics.median(run["seconds"] for run in runs)
    first = runs[0]
    mean = harness.spread(means, layout) if means else ""
    return [way, f"{first['parameters']:,}", f"{first['rate']:g}", *cells, mean, f"{seconds:.1f}"]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the files of MNIST and USPS are")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["perceptron", "transformer"])
    harness.add_run_options(parser, "adapters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = harness.make_directory(arguments.output)
    if not arguments.report:
        measure(arguments, results)
    report(harness.load_runs(results), arguments.networks)


if __name__ == "__main__":
    main()
