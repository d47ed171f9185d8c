"""All that can be learned about this package on a GPU in eleven minutes, by one command.

    python benchmarks/gpu.py [--device cpu] [--short] [--parts agreement steps ...] [--file results/gpu.jsonl]
    python benchmarks/gpu.py --table FILE

It needs the repository and its packages, and no data. Each part runs in a process of its own with a limit of time, and
appends every result to the file as soon as it has it, so that a run which is cut off is worth something:

    agreement   ten steps on the device against the CPU, in float64 and float32; bf16-mixed; a resumed run; DDP
    memory      batches that do not fit: out of memory, and max_device_batch_size="auto" goes on
    steps       seconds of a step beside Adam's
    layers      forward pass and training step of structured layers against nn.Linear
    equations   Poisson's and Burgers' equations by SHF on residuals in float64
    language    a transformer of 14 million weights: seconds of a step over the batch; and what the same samples give
                under a cosine by a fixed batch and by schedule="auto"

``--short`` tries each part on small sizes in seconds; with ``--device cpu`` nothing needs a GPU. ``--table`` prints the
results of a file in Markdown.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import harness
from least_squares import PROBLEMS, Residuals
from lightning_struct import GrowingBatchSize, RLSOptimization, SHFOptimization
from lightning_struct.data.points import PointDraws
from lightning_struct.functional import LeastSquares, curve_fit
from lightning_struct.models.pinn import TanhNetwork
from lightning_struct.nn import STRUCTURED_CLASSES, RecursiveLinear
from lightning_struct.optim import RLS, SHF, LowRankP

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"agreement": 80, "memory": 60, "steps": 50, "layers": 70, "equations": 165, "language": 175}  # s
TIMED = ("LDRSubdiagonal", "ToeplitzLike", "Monarch", "RandomizedHadamard")
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


class Task(L.LightningModule):
    """A regression in a Trainer; mixins come before it."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make = network(), make

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, data: list[Tensor], index: int) -> Tensor:
        return half_squares(self(data[0]), data[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.net)


class SHFTask(SHFOptimization, Task):
    """The same by SHF."""


class RLSTask(RLSOptimization, Task):
    """The same by RLS."""


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
    for dtype in (torch.float64, torch.float32):
        here, there = ways(torch.device("cpu"), dtype), ways(device, dtype)
        for (name, module, step), (_, other, other_step) in zip(here, there, strict=True):
            for _ in range(steps):
                step()
                other_step()
            pairs = list(zip(module.parameters(), other.parameters(), strict=True))
            largest = max(float((p - q.cpu()).abs().max()) for p, q in pairs)
            yield {"case": f"{name}, {dtype}", "difference": largest / max(float(p.abs().max()) for p, _ in pairs)}
    x = torch.linspace(0, 2, 50, dtype=torch.float64)
    y = torch.linspace(1, 2, 1000, dtype=torch.float64)[:, None] * torch.exp(-1.5 * x) + 0.1
    start = torch.ones(1000, 3, dtype=torch.float64)
    fits = [
        curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x.to(at), y.to(at), start.to(at)).parameters.cpu()
        for at in ("cpu", device)
    ]
    yield {"case": "curve_fit, 1,000 fits", "difference": float((fits[0] - fits[1]).abs().max())}
    inputs, targets, _ = batch(torch.float32)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)
    tasks: dict[str, Callable[[], Task]] = {
        "SHF": lambda: SHFTask(lambda net: SHF(net, "mse")),
        "RLS": lambda: RLSTask(RLS),
        "GrowingBatchSize": lambda: Task(lambda net: torch.optim.Adam(net.parameters(), 1e-2)),
    }
    for name, make in tasks.items():
        callbacks = [GrowingBatchSize(schedule="256:128")] if name == "GrowingBatchSize" else []
        for how, options in {"bf16-mixed": {"precision": "bf16-mixed"}, "DDP": {"strategy": "ddp"}}.items():
            task = make()
            before = float(half_squares(task(inputs), targets))
            trainer(device, *copy.deepcopy(callbacks), max_epochs=2, **options).fit(task, loader)
            task.to("cpu")
            yield {"case": f"{name}, {how}", "loss": [before, float(half_squares(task(inputs), targets))]}
        yield {"case": f"{name}, resumed", "equal": resumed_equals_whole(device, make, callbacks, loader)}


def resumed_equals_whole(
    device: torch.device, make: Callable[[], Task], callbacks: list[L.Callback], loader: DataLoader[Any]
) -> bool:
    """Whether a run that is stopped after two of four epochs and resumed ends with the same bits."""
    whole, first, second = make(), make(), make()
    trainer(device, *copy.deepcopy(callbacks), max_epochs=4).fit(whole, loader)
    with tempfile.TemporaryDirectory() as folder:
        half = trainer(device, *copy.deepcopy(callbacks), max_epochs=2)
        half.fit(first, loader)
        half.save_checkpoint(f"{folder}/half.ckpt")
        rest = trainer(device, *copy.deepcopy(callbacks), max_epochs=4)
        rest.fit(second, loader, ckpt_path=f"{folder}/half.ckpt")
    pairs = zip(whole.parameters(), second.parameters(), strict=True)
    return all(torch.equal(p.cpu(), q.cpu()) for p, q in pairs)


class Wide(L.LightningModule):
    """A network whose activations of a batch are much larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 256), *[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
        )
        self.passes = 0

    def training_step(self, data: list[Tensor], index: int) -> Tensor:
        self.passes += 1
        return self.layers(data[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def memory(device: torch.device, short: bool) -> Iterator[Result]:
    """The weights after a batch grew beyond the memory, against those after the same run in memory that is enough."""
    growth, samples = (64, 2**10) if short else (2**10, 2**18)
    inputs = torch.randn(2 * samples, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for is_bounded in (False, True):
        module = Wide()
        growing = GrowingBatchSize(schedule=f"0:{growth} 4:{samples}", max_device_batch_size="auto")
        if device.type == "cuda" and is_bounded:
            in_all = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.5 * 2**30 / in_all)
        run = trainer(device, growing, max_steps=8, max_epochs=-1)
        run.fit(module, DataLoader(TensorDataset(inputs), batch_size=growth))
        found.append(torch.cat([p.detach().cpu().flatten() for p in module.parameters()]))
        counted = {"forward passes": module.passes, "peak_GiB": None}
        if device.type == "cuda":
            counted["peak_GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        yield {"case": f"a batch of {samples}{', 1.5 GiB' if is_bounded else ''}", "steps": run.global_step, **counted}
    yield {"case": "both", "difference": float((found[0] - found[1]).abs().max() / found[0].abs().max())}


def steps(device: torch.device, short: bool) -> Iterator[Result]:
    """Time of a step on 4,096 samples, for networks of 64 and 1,024 units."""
    samples, limit = (64, 0.1) if short else (4096, 1.0)
    for width in (64,) if short else (64, 1024):
        inputs, targets, classes = (t.to(device) for t in batch(torch.float32, samples))

        adam, rls, *others = (network(width=width).to(device) for _ in range(5))
        for name, step in {
            "Adam": by_gradients(adam, torch.optim.Adam(adam.parameters(), 1e-3), half_squares, inputs, targets),
            "RLS": by_gradients(rls, RLS(rls), half_squares, inputs, targets),
            "SHF, mse": by_shf(others[0], "mse", inputs, targets),
            "SHF, mse, LSMR": by_shf(others[1], "mse", inputs, targets, solver="lsmr"),
            "SHF, cross-entropy": by_shf(others[2], "cross_entropy", inputs, classes),
        }.items():
            seconds = seconds_of(step, device, limit)
            yield {"case": f"{name}, {width} units", "milliseconds": 1e3 * seconds}


def layers(device: torch.device, short: bool) -> Iterator[Result]:
    """Milliseconds of forward pass and training step on 256 rows."""
    sizes, rows, limit = ((64,), 8, 0.05) if short else ((1024, 2048, 4096, 8192, 16384), 256, 0.15)
    kinds = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "bf16": (torch.bfloat16, True)}
    made: dict[str, Callable[..., nn.Module]] = {"nn.Linear": nn.Linear, **{n: STRUCTURED_CLASSES[n] for n in TIMED}}
    for size, kind, name in product(sizes, kinds, made):
        dtype, torch.backends.cuda.matmul.allow_tf32 = kinds[kind]
        yield {"case": f"{name}, {size}, {kind}", **layer_times(made[name](size, size), rows, dtype, device, limit)}


def layer_times(layer: nn.Module, rows: int, dtype: torch.dtype, device: torch.device, limit: float) -> Result:
    layer = layer.to(device)
    inputs = torch.randn(rows, layer.in_features, device=device)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return layer(inputs)

    def train() -> None:
        forward().float().square().sum().backward()
        layer.zero_grad()

    with torch.no_grad():
        forward_seconds = seconds_of(forward, device, limit)
    return {"forward": 1e3 * forward_seconds, "training": 1e3 * seconds_of(train, device, limit)}


def equations(device: torch.device, short: bool) -> Iterator[Result]:
    """The error of the solution over seconds; the points double as ``PointsDataModule`` lets them."""
    limits = {"poisson5d": 15, "burgers_smooth": 65, "burgers": 55}
    sizes = {"poisson5d": [128], "burgers_smooth": [38, 38, 38], "burgers": [38, 38, 38]}
    for name, seconds in limits.items():
        problem, limit = PROBLEMS[name], 2 if short else seconds
        equation = problem.equation()
        torch.manual_seed(0)
        net = TanhNetwork(equation.domain.dimension, sizes[name]).double().to(device)
        module = Residuals(equation, net)
        optimizer = SHF(module, LeastSquares())

        def residuals(points: dict[str, Tensor], module: nn.Module = module) -> dict[str, Tensor]:
            with torch.no_grad():
                return module({block: p.to(device) for block, p in points.items()})

        counts = {block: 3 * count for block, count in problem.counts.items()}
        draws = PointDraws(
            equation.regions, counts, draws_per_epoch=1, redraw_every_n_steps=5, residual_share=0.2,
            residuals=residuals, max_points=30_000,
        )  # fmt: skip
        where = equation.domain.sample(5000, torch.Generator().manual_seed(1))
        right = equation.solution(where)
        begin, step, shown, uncounted = time.perf_counter(), 0, limit / 16, 0.0
        while (spent := time.perf_counter() - begin - uncounted) < limit or step < 2:
            points = draws.draw(step)
            optimizer.step(inputs={block: p.to(device) for block, p in points.items()})
            step += 1
            if (spent := time.perf_counter() - begin - uncounted) > shown:
                since = time.perf_counter()
                with torch.no_grad():
                    error = float((net(where.to(device)).cpu() - right).norm() / right.norm())
                at = {"seconds": spent, "points": draws.batch_size, "error": error}
                yield {"case": f"{problem.title.partition(',')[0]}, {sizes[name]}", "steps": step, **at}
                shown, uncounted = 2 * shown, uncounted + time.perf_counter() - since


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


def language(device: torch.device, short: bool) -> Iterator[Result]:
    """Milliseconds of a step over the batch, then the loss after the same samples under a cosine."""
    width, depth, length, limit = (24, 1, 32, 0.05) if short else (384, 8, 256, 1.0)
    train, held_out = characters(length, slice(1, None)), characters(length, slice(0, 8))
    for size in (2, 4) if short else (8, 16, 32, 64, 128, 256, 512):
        model = Transformer(width, depth, length).to(device)
        data = [t.to(device) for t in next(iter(DataLoader(train, batch_size=size)))]
        optimizer = model.configure_optimizers()

        def step(model: Transformer = model, data: Any = data, optimizer: Any = optimizer) -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model.loss(data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        yield {"case": f"a step on {size} windows", "milliseconds": 1e3 * seconds_of(step, device, limit)}
    size, epochs = (2, 1) if short else (16, 2)
    ways = {f"batches of {size}": [], 'schedule="auto"': [GrowingBatchSize(schedule="auto")]}
    for seed, (name, callbacks) in product((0,) if short else (0, 1), ways.items()):
        L.seed_everything(seed, verbose=False)
        model = Scheduled(width, depth, length)
        run = trainer(device, *copy.deepcopy(callbacks), precision="bf16-mixed", max_epochs=epochs)
        loader = DataLoader(held_out if short else train, batch_size=size, shuffle=True, drop_last=True)
        begin = time.perf_counter()
        run.fit(model, loader)
        wait(device)
        seconds = time.perf_counter() - begin
        model.to(device).eval()
        with torch.no_grad():
            losses = [model.loss([t.to(device) for t in data]) for data in DataLoader(held_out, batch_size=32)]
        yield {
            "case": f"{name}, seed {seed}",
            "steps": run.global_step,
            "seconds": seconds,
            "validation_loss": float(torch.stack(losses).mean()),
            "batch_size": run.callback_metrics.get("batch_size", torch.tensor(float(size))).item(),
        }


PARTS: dict[str, Callable[[torch.device, bool], Iterator[Result]]] = {
    "agreement": agreement,
    "memory": memory,
    "steps": steps,
    "layers": layers,
    "equations": equations,
    "language": language,
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
