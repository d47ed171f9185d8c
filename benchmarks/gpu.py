"""All that has not been learned about this package on a GPU, in eight minutes, by one command.

    python benchmarks/gpu.py [--device cpu] [--short] [--parts steps equations ...] [--file results/gpu.jsonl]
    python benchmarks/gpu.py --data-dir DIRECTORY    # with MNIST's files, and lid_driven_a4.dat.gz of PINNacle
    python benchmarks/gpu.py --table FILE

It needs the repository and its packages; without data MNIST's images are synthetic, and the cavity has no error. The
parts are in the order of their value. Each runs in a process of its own with a limit of time, and appends every result
to the file as soon as it has it, so that a run which is cut off is worth something:

    steps       seconds of a step beside Adam's
    equations   SHF on residuals in float64: what corrections, the second Gram matrix, larger blocks of rows and CUDA
                graphs give; Burgers' equation with ν = .01 until 1e-12; Poisson's in 5 dimensions; a driven cavity
    papers      MNIST and CURVES autoencoders by SHF.paper, SHF as it is, and Martens' settings, 120 s each at once
    agreement   ten steps on the device against the CPU, in float64
    layers      forward pass and training step of LDRTridiagonal and RandomizedHadamard against nn.Linear
    language    a transformer of 14 million weights under a cosine, by a fixed batch and by schedule="auto", three seeds
                of each at once

``--short`` tries each part on small sizes in seconds; with ``--device cpu`` nothing needs a GPU. ``--table`` prints the
results of a file in Markdown.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import harness
from autoencoders import data_arguments, train
from least_squares import PROBLEMS, Residuals
from lightning_struct import GrowingBatchSize
from lightning_struct.data import Box, Faces
from lightning_struct.data.equations import DifferentialEquation, Field
from lightning_struct.data.points import PointDraws
from lightning_struct.functional import GramLeastSquares, LeastSquares, curve_fit, partial_derivatives
from lightning_struct.functional.residuals import recorded_batch, residual_rows
from lightning_struct.models.pinn import TanhNetwork
from lightning_struct.nn import STRUCTURED_CLASSES, RecursiveLinear
from lightning_struct.optim import RLS, SHF, LevenbergMarquardt, LowRankP

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"steps": 30, "equations": 200, "papers": 155, "agreement": 25, "layers": 15, "language": 55}  # s
DATA = Path(os.environ.get("DATA_DIR", "data"))  # which the processes inherit
Result = dict[str, Any]
Step = Callable[[], object]


# --- what the parts measure -------------------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.float32, width: int = 64, outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype)


def batch(dtype: torch.dtype, samples: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets of a regression, and classes; the same on every device."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 20, generator=generator, dtype=torch.float64)
    targets = torch.tanh(inputs[:, :10] + 0.5 * inputs[:, 10:])
    return inputs.to(dtype), targets.to(dtype), targets.argmax(1)


class Fit(nn.Module):
    """Residuals of a regression."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.net(inputs) - targets


def by_shf(module: nn.Module, loss: str, inputs: Tensor, targets: Tensor, **options: Any) -> Step:
    optimizer = SHF(module, loss, **options)
    return lambda: optimizer.step(inputs=inputs, targets=targets)


def by_residuals(module: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    optimizer = SHF(Fit(module), "least_squares")
    return lambda: optimizer.step(inputs=(inputs, targets))


def by_gradients(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor], *data: Tensor
) -> Step:
    inputs, targets = data

    def step() -> None:
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()

    return step


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1).mean()


def ways(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, Step]]:
    """The module that each optimizer or layer trains, and its step.

    SHF has the Fisher diagonal or no preconditioner: the random signs of the others differ between devices.
    """
    inputs, targets, classes = (t.to(device) for t in batch(dtype))
    by_loss: dict[str, tuple[str, Tensor, dict[str, Any]]] = {
        "SHF, mse": ("mse", targets, {"preconditioner": None}),
        "SHF, mse, LSMR": ("mse", targets, {"preconditioner": None, "solver": "lsmr"}),
        "SHF, mse, Fisher": ("mse", targets, {"preconditioner": "fisher"}),
        "SHF, cross-entropy": ("cross_entropy", classes, {"preconditioner": None}),
    }
    for name, (loss, answers, options) in by_loss.items():
        module = network(dtype).to(device)
        yield name, module, by_shf(module, loss, inputs, answers, **options)
    module = network(dtype).to(device)
    yield "SHF, least squares", module, by_residuals(module, inputs, targets)
    module = network(dtype).to(device)
    yield "RLS", module, by_gradients(module, RLS(module), half_squares, inputs, targets)
    module = network(dtype).to(device)
    hybrid = RLS(module, exclude=[module[2]], auxiliary=partial(torch.optim.Adam, lr=1e-3))
    yield "HRLS", module, by_gradients(module, hybrid, nn.functional.cross_entropy, inputs, classes)
    forms: dict[str, Any] = {"full": "full", "rank one": "rank1", "low rank": LowRankP(8)}
    for name, form in forms.items():
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 10)
        module = nn.Sequential(*layers).to(dtype).to(device)
        yield (
            f"RLS, convolution, {name}",
            module,
            by_gradients(module, RLS(module, form=form), half_squares, inputs, targets),
        )
    recursive = RecursiveLinear(20, 10, device=device, dtype=dtype)
    yield "RecursiveLinear", recursive, partial(recursive.update, inputs, targets)
    for name, layer in STRUCTURED_CLASSES.items():
        if name == "PrunedLinear":  # a matrix with zeros
            continue
        torch.manual_seed(0)
        module = nn.Sequential(layer(20, 20), nn.Tanh(), nn.Linear(20, 10)).to(dtype).to(device)
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        yield name, module, by_gradients(module, optimizer, half_squares, inputs, targets)


def trainer(device: torch.device, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return harness.bare_trainer(*callbacks, accelerator="gpu" if device.type == "cuda" else device.type, **options)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Step, device: torch.device, limit: float) -> float:
    """The median time of a step, from as many as fit into ``limit`` seconds; the first three do not count."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 6 or (time.perf_counter() - begin < limit and len(times) < 100):
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[(len(times) - 3) // 2]


# --- the parts --------------------------------------------------------------------------------------------------------


def agreement(device: torch.device, short: bool) -> Iterator[Result]:
    """The largest difference between device and CPU after ten steps, over the largest weight."""
    steps = 2 if short else 10
    here, there = ways(torch.device("cpu"), torch.float64), ways(device, torch.float64)
    for (name, module, step), (_, other, other_step) in zip(here, there, strict=True):
        for _ in range(steps):
            step()
            other_step()
        pairs = list(zip(module.parameters(), other.parameters(), strict=True))
        largest = max(float((p - q.cpu()).abs().max()) for p, q in pairs)
        yield {"case": name, "difference": largest / max(float(p.abs().max()) for p, _ in pairs)}
    x = torch.linspace(0, 2, 50, dtype=torch.float64)
    y = torch.linspace(1, 2, 1000, dtype=torch.float64)[:, None] * torch.exp(-1.5 * x) + 0.1
    start = torch.ones(1000, 3, dtype=torch.float64)
    fits = [
        curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x.to(at), y.to(at), start.to(at)).parameters.cpu()
        for at in ("cpu", device)
    ]
    yield {"case": "curve_fit, 1,000 fits", "difference": float((fits[0] - fits[1]).abs().max())}


def steps(device: torch.device, short: bool) -> Iterator[Result]:
    """Time of a step on 4,096 samples, for networks of 64 and 1,024 units."""
    samples, limit = (64, 0.1) if short else (4096, 1.0)
    for width in (64,) if short else (64, 1024):
        inputs, targets, classes = (t.to(device) for t in batch(torch.float32, samples))

        adam, rls, with_momentum, *others = (network(width=width).to(device) for _ in range(6))
        for name, step in {
            "Adam": by_gradients(adam, torch.optim.Adam(adam.parameters(), 1e-3), half_squares, inputs, targets),
            "RLS": by_gradients(rls, RLS(rls), half_squares, inputs, targets),
            "RLS, momentum": by_gradients(
                with_momentum, RLS(with_momentum, momentum=0.5), half_squares, inputs, targets
            ),
            "SHF, mse": by_shf(others[0], "mse", inputs, targets),
            "SHF, mse, LSMR": by_shf(others[1], "mse", inputs, targets, solver="lsmr"),
            "SHF, cross-entropy": by_shf(others[2], "cross_entropy", inputs, classes),
        }.items():
            seconds = seconds_of(step, device, limit)
            yield {"case": f"{name}, {width} units", "milliseconds": 1e3 * seconds}


def layers(device: torch.device, short: bool) -> Iterator[Result]:
    """Milliseconds of forward pass and training step on 256 rows."""
    sizes, rows, limit = ((64,), 8, 0.05) if short else ((1024, 4096, 16384), 256, 0.5)
    for size, name in product(sizes, ("nn.Linear", "LDRTridiagonal", "RandomizedHadamard")):
        layer = nn.Linear(size, size) if name == "nn.Linear" else STRUCTURED_CLASSES[name](size, size)
        yield {"case": f"{name}, {size}", **layer_times(layer, rows, device, limit)}


def layer_times(layer: nn.Module, rows: int, device: torch.device, limit: float) -> Result:
    layer = layer.to(device)
    inputs = torch.randn(rows, layer.in_features, device=device)

    def train() -> None:
        layer(inputs).square().sum().backward()
        layer.zero_grad()

    with torch.no_grad():
        forward_seconds = seconds_of(partial(layer, inputs), device, limit)
    return {"forward": 1e3 * forward_seconds, "training": 1e3 * seconds_of(train, device, limit)}


class Cavity(DifferentialEquation):
    """Stationary flow in a square whose lid moves, ν = .01; unknowns u, v and p (PINNacle, arXiv 2306.08827)."""

    coordinates, unknowns, domain = ("x", "y"), 3, Box([0.0, 0.0], [1.0, 1.0])

    def __init__(self) -> None:
        self.regions = {"interior": self.domain, "boundary": Faces(self.domain), "corner": Box([0.0, 0.0], [0.0, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "corner":
            return u(points)[:, 2]
        if block == "boundary":
            lid = torch.where(points[:, 1] == 1, 4 * points[:, 0] * (1 - points[:, 0]), 0.0)
            return torch.stack([u(points)[:, 0] - lid, u(points)[:, 1]], dim=1)
        values, first, second = partial_derivatives(u, points, twice=[0, 1])
        flow, gradient_of_p = values[:, :2], torch.stack([first[0][:, 2], first[1][:, 2]], dim=1)
        along = flow[:, :1] * first[0][:, :2] + flow[:, 1:] * first[1][:, :2]
        momentum = along + gradient_of_p - 0.01 * (second[0] + second[1])[:, :2]
        return torch.cat([momentum, (first[0][:, 0] + first[1][:, 1])[:, None]], dim=1)


def reference_of(name: str) -> tuple[Tensor, Tensor]:
    """Points and values of the solution; none if the file of the cavity is not there."""
    if name != "cavity":
        equation = PROBLEMS[name].equation()
        where = equation.domain.sample(5000, torch.Generator().manual_seed(1))
        return where, equation.solution(where)
    file = DATA / "lid_driven_a4.dat.gz"
    rows = torch.from_numpy(np.loadtxt(file, comments="%")) if file.exists() else torch.empty(0, 5).double()
    return rows[:, :2], rows[:, 2:]


def equations(device: torch.device, short: bool) -> Iterator[Result]:
    """The error of the solution over seconds; the points double as ``PointsDataModule`` lets them."""
    wide, flow = [38, 38, 38], {"interior": 2000, "boundary": 400, "corner": 1}
    change: dict[str, Any] = {
        "": nullcontext(),
        "one Gram matrix": patch.object(GramLeastSquares, "is_refined", True),
        "rows by 1,024": patch.object(residual_rows, "_ROWS_AT_ONCE_OF_GPU", residual_rows._ROWS_AT_ONCE),
        "no CUDA graphs": patch.object(recorded_batch, "captured", lambda *_: None),
        "no corrections": nullcontext(),
    }
    runs = [("burgers_smooth", wide, variant, 6) for variant in change]
    runs += [("burgers_smooth", wide, "", 120), ("poisson5d", [128], "", 12), ("cavity", [50, 50, 50], "", 25)]
    for name, sizes, variant, seconds in runs:
        equation = Cavity() if name == "cavity" else PROBLEMS[name].equation()
        counts = flow if name == "cavity" else {block: 3 * count for block, count in PROBLEMS[name].counts.items()}
        limit = 1 if short else seconds
        if short:
            counts = {block: min(count, 40) for block, count in counts.items()}
        torch.manual_seed(0)
        net = TanhNetwork(equation.domain.dimension, sizes, outputs=equation.unknowns).double().to(device)
        module = Residuals(equation, net)
        rule = LevenbergMarquardt(acceleration=False) if variant == "no corrections" else None
        optimizer = SHF(module, LeastSquares(), damping=rule)

        def residuals(points: dict[str, Tensor], module: nn.Module = module) -> dict[str, Tensor]:
            with torch.no_grad():
                return module({block: p.to(device) for block, p in points.items()})

        draws = PointDraws(
            equation.regions, counts, draws_per_epoch=1, redraw_every_n_steps=5, residual_share=0.2,
            residuals=residuals, max_points=30_000,
        )  # fmt: skip
        where, right = reference_of(name)
        begin, step, shown, uncounted, error = time.perf_counter(), 0, limit / 16, 0.0, math.inf
        with change[variant]:
            while ((spent := time.perf_counter() - begin - uncounted) < limit and not error < 1e-12) or step < 2:
                points = draws.draw(step)
                report = optimizer.step(inputs={block: p.to(device) for block, p in points.items()})
                step += 1
                if (spent := time.perf_counter() - begin - uncounted) > shown:
                    since = time.perf_counter()
                    with torch.no_grad():
                        error = float((net(where.to(device)).cpu() - right).norm() / right.norm())
                    at = {"seconds": spent, "points": draws.batch_size, "error": error, "loss": report.loss_after}
                    yield {"case": f"{name}, {sizes}{variant and f', {variant}'}", "steps": step, **at}
                    shown, uncounted = 2 * shown, uncounted + time.perf_counter() - since


def at_once(device: torch.device, function: Callable[..., Result], calls: Iterable[Sequence[Any]]) -> Iterator[Result]:
    """Results of calls in processes of their own, which share the GPU; on the CPU one after another."""
    workers = 6 if device.type == "cuda" else 1
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as processes:
        for done in as_completed([processes.submit(function, *call) for call in calls]):
            yield done.result()


def autoencoder(device: str, short: bool, task: str, config: str) -> Result:
    """A recipe's lowest validation error within 120 CPU seconds; what waits for the GPU computes, too."""
    synthetic = short or not (DATA / "MNIST").exists()
    options = argparse.Namespace(data_dir=DATA, synthetic=synthetic)
    given = [f"--config={harness.CONFIGS / f'{task}_autoencoder' / f'{config}.yaml'}"]
    given += [*data_arguments(task, options), f"--trainer.accelerator={'gpu' if device == 'cuda' else device}"]
    given += ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2"] if short else []
    run = train(task, None if short else 120, config, 0, given)
    best = min(run["validations"], key=lambda validation: validation["error"], default={"error": math.nan, "step": 0})
    of = ", synthetic" if synthetic and task == "mnist" else ""
    return {"case": f"{task}{of}, {config}", "steps": best["step"], "error": best["error"], "test": run["test_at_best"]}


def papers(device: torch.device, short: bool) -> Iterator[Result]:
    """The papers' autoencoders by the recipes: SHF.paper, SHF as it is, Martens' settings."""
    ways = product([device.type], [short], ("curves", "mnist"), ("kronecker", "shf", "hf"))
    yield from at_once(device, autoencoder, list(ways)[: 1 if short else None])


def characters(length: int, part: slice) -> TensorDataset:
    """Windows of a part of this repository's own text, and of the same one byte later."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("lightning_struct/**/*.py")])
    text = b"".join(file.read_bytes() for file in files)
    every_tenth = [text[i : i + 10_000] for i in range(0, len(text), 10_000)][part]
    windows = torch.tensor(list(b"".join(every_tenth))).unfold(0, length + 1, length)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


class Transformer(L.LightningModule):
    """A decoder of bytes."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        return self.head(self.blocks(self.embedding(inputs) + self.positions(positions), self.mask, is_causal=True))

    def loss(self, data: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(data[0]).flatten(0, 1), data[1].flatten())

    def training_step(self, data: list[Tensor], index: int) -> Tensor:
        return self.loss(data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 5e-4)


class Scheduled(Transformer):
    """The same with a rate that falls to 0 by a cosine."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(device: str, short: bool, name: str, schedule: str | None, seed: int) -> Result:
    """The loss of a transformer after the same samples."""
    width, depth, length, size = (24, 1, 32, 2) if short else (384, 8, 256, 16)
    at = torch.device(device)
    train, held_out = characters(length, slice(1, None)), characters(length, slice(0, 8))
    L.seed_everything(seed, verbose=False)
    model = Scheduled(width, depth, length)
    callbacks = [GrowingBatchSize(schedule=schedule)] if schedule else []
    run = trainer(at, *callbacks, precision="bf16-mixed", max_epochs=1)
    begin = time.perf_counter()
    run.fit(model, DataLoader(held_out if short else train, batch_size=size, shuffle=True, drop_last=True))
    wait(at)
    seconds = time.perf_counter() - begin
    model.to(at).eval()
    with torch.no_grad():
        losses = [model.loss([t.to(at) for t in data]) for data in DataLoader(held_out, batch_size=32)]
    loss, last = float(torch.stack(losses).mean()), run.callback_metrics.get("batch_size", torch.tensor(float(size)))
    found = {"steps": run.global_step, "seconds": seconds, "validation_loss": loss, "batch_size": last.item()}
    return {"case": f"{name}, seed {seed}", **found}


def language(device: torch.device, short: bool) -> Iterator[Result]:
    """A fixed batch and one that grows."""
    ways = {"fixed batch": None, 'schedule="auto"': "auto"}
    calls = [(device.type, short, *way, seed) for seed in ((0,) if short else (0, 1, 2)) for way in ways.items()]
    yield from at_once(device, trained, calls)


PARTS: dict[str, Callable[[torch.device, bool], Iterator[Result]]] = {
    part.__name__: part for part in (steps, equations, papers, agreement, layers, language)
}


# --- the command ------------------------------------------------------------------------------------------------------


def run_part(part: str, device: torch.device, short: bool, file: Path) -> None:
    """Run a part in this process, and append its results to the file."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_struct"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with file.open("a") as results:
        for result in PARTS[part](device, short):
            results.write(json.dumps({"part": part, **result, "machine": harness.machine()}) + "\n")
            results.flush()


def print_table(file: Path) -> None:
    """The results of a file in Markdown."""
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    harness.print_machines(runs)
    for part in dict.fromkeys(run["part"] for run in runs):
        harness.print_header(part, "result")
        for run in runs:
            if run["part"] == part:
                shown = ", ".join(
                    f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in run.items()
                    if key not in ("part", "case", "machine") and value not in (None, [])
                )
                harness.print_row(run["case"], shown)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", help="where files of MNIST and PINNacle are")
    parser.add_argument("--short", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--file", type=Path, default=Path("results/gpu.jsonl"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the results of a file, and run nothing")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.table is not None:
        print_table(given.table)
        return
    if given.part is not None:
        run_part(given.part, torch.device(given.device), given.short, given.file)
        return
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --short tries the script without one")
    if given.data_dir is not None:
        os.environ["DATA_DIR"] = str(Path(given.data_dir).resolve())
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.unlink(missing_ok=True)
    problems = 0
    for part in given.parts:
        command = [sys.executable, __file__, "--part", part, "--device", given.device, "--file", str(given.file)]
        command += ["--short"] if given.short else []
        begin, problem = time.perf_counter(), None
        limit = 300 if given.short else LIMITS[part]
        try:
            done = subprocess.run(command, check=False, timeout=limit, capture_output=True, text=True)
            if done.returncode:
                problem = done.stderr.strip().splitlines()[-1]
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit} s"
        print(f"{part}: {time.perf_counter() - begin:.0f} s{f', {problem}' if problem else ''}", file=sys.stderr)
        if problem:
            problems += 1
            with given.file.open("a") as results:
                results.write(json.dumps({"part": part, "case": "the part itself", "problem": problem}) + "\n")
    print_table(given.file)
    sys.exit(min(problems, 1))


if __name__ == "__main__":
    main()
