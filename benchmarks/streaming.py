"""Learning from a stream in one pass: RecursiveLinear against SGD, Adam and river.

    OMP_NUM_THREADS=1 python benchmarks/streaming.py trump segments hyperplane [--seeds 0 1 2]
    OMP_NUM_THREADS=1 python benchmarks/streaming.py speed
    OMP_NUM_THREADS=1 python benchmarks/streaming.py forgetting
    OMP_NUM_THREADS=1 python benchmarks/streaming.py exactness

Every sample is predicted first and learnt afterwards, once (prequential error). The tasks need no files; river brings
the first two, and makes the third:

- ``trump``: approval of a president, 1,001 days in their order, from the date and five polls; absolute error;
- ``segments``: patches of images, 18 features, seven classes; a seed draws 1,000 of the 2,310 in an order; wrong
  answers;
- ``hyperplane``: two classes on the sides of a plane that turns, 1,000 samples of 10 features, 5 % noise; a seed is a
  stream; wrong answers.

Features are standardised by the mean and the variance so far, but for RecursiveLinear and river's Bayesian regression,
which read them less those of the first sample: their scale does not matter there. Targets of a regression are less the
first one, too. RecursiveLinear learns classes by the squared error of one-hot targets, all others by the cross-entropy.
Each way has the best of its settings in hindsight on the first seed: rates 3e-3 to 3e-1 in steps of about three, λ of
1, .99, .95, .9. All tasks take about a minute of one core. ``speed`` takes as many threads as torch is given.
``forgetting`` has features that rest, and the textbook's recursion and one that renews its regularization with each row
beside RecursiveLinear. ``exactness`` compares coefficients with exact rationals, after each row from the one on that
determines them, on regressions that statsmodels brings. The tasks need

    river        pip install river
    statsmodels  pip install statsmodels    exactness alone
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from harness import Run
from lightning_struct import RecursiveLinear

RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FORGETTING = (1.0, 0.99, 0.95, 0.9)
FIXED = (1.0, 0.99)  # λ that are shown whether they are the best or not
TASKS = ("trump", "segments", "hyperplane")


# --- the streams ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Samples in their order.

    Attributes:
        inputs: (n, d), features less those of the first sample.
        standardised: (n, d), by the mean and the variance of all samples up to each.
        targets: (n,) numbers, or (n,) classes.
        classes: their number; 0 for a regression.
    """

    inputs: Tensor
    standardised: Tensor
    targets: Tensor
    classes: int

    @property
    def outputs(self) -> int:
        return self.classes or 1

    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(n,): absolute errors, or 1 for a wrong class."""
        if self.classes:
            return (outputs.argmax(1) != targets).double()
        return (outputs[:, 0] - targets).abs()


def stream(task: str, seed: int) -> Stream:
    from river import datasets
    from river.datasets import synth

    samples: list[Any]
    if task == "trump":
        samples = list(datasets.TrumpApproval())
    elif task == "segments":
        patches = list(datasets.ImageSegments())
        order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))
        samples = [patches[i] for i in order[:1000]]
    else:
        plane = synth.Hyperplane(seed=seed, n_features=10, n_drift_features=5, mag_change=0.01, noise_percentage=0.05)
        samples = list(islice(plane, 1000))
    inputs = torch.tensor([[float(value) for value in x.values()] for x, _ in samples], dtype=torch.float64)
    answers = [y for _, y in samples]
    if task == "trump":
        targets = torch.tensor(answers, dtype=torch.float64)
        return Stream(inputs - inputs[0], standardised(inputs), targets - targets[0], 0)
    names = sorted(set(answers))
    classes = torch.tensor([names.index(y) for y in answers])
    return Stream(inputs - inputs[0], standardised(inputs), classes, len(names))


def standardised(inputs: Tensor) -> Tensor:
    """By the mean and the variance of all rows up to each."""
    numbers = torch.arange(1, len(inputs) + 1, dtype=inputs.dtype)[:, None]
    means = inputs.cumsum(0) / numbers
    variances = (inputs.square().cumsum(0) / numbers - means.square()).clamp(min=0)
    return torch.where(
        variances > 1e-12, (inputs - means) / variances.clamp(min=1e-12).sqrt(), torch.zeros(()).double()
    )


# --- who learns -------------------------------------------------------------------------------------------------------


class Trained:
    """A linear layer, from zeros, and its optimizer."""

    def __init__(self, data: Stream, make: Callable[..., Any], loss: Callable[..., Tensor]) -> None:
        self.module = nn.Linear(data.inputs.shape[1], data.outputs).double()
        for parameter in self.module.parameters():
            nn.init.zeros_(parameter)
        self.optimizer, self.loss = make(self.module.parameters()), loss

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.module(inputs), targets).backward()
        self.optimizer.step()


class Recursive:
    """A RecursiveLinear, which needs no loss and no optimizer."""

    def __init__(self, data: Stream, forgetting: float) -> None:
        size = data.inputs.shape[1]
        self.layer = RecursiveLinear(size, data.outputs, forgetting=forgetting, dtype=torch.float64)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        self.layer.update(inputs, targets)


class OfRiver:
    """A model of river, one sample at a time."""

    def __init__(self, model: Any, classes: int) -> None:
        self.model, self.classes = model, classes

    def predict(self, inputs: Tensor) -> Tensor:
        if not self.classes:
            return torch.tensor([[float(self.model.predict_one(x))] for x in features(inputs)], dtype=torch.float64)
        found = [self.model.predict_one(x) for x in features(inputs)]
        return F.one_hot(torch.tensor([int(y or 0) for y in found]), self.classes)

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        for x, y in zip(features(inputs), targets.tolist(), strict=True):
            self.model.learn_one(x, bool(y) if self.classes == 2 else y)


class LastTarget:
    """The target before, or the class that came most often."""

    def __init__(self, outputs: int, is_class: bool) -> None:
        self.last, self.is_class = torch.zeros(outputs, dtype=torch.float64), is_class

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last.expand(len(inputs), -1)

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        if self.is_class:
            self.last = self.last + torch.bincount(targets, minlength=len(self.last))
        else:
            self.last = targets[-1:].clone()


def features(inputs: Tensor) -> Iterator[dict[int, float]]:
    """As river reads them; the last one is a constant."""
    return (dict(enumerate([*row, 1.0])) for row in inputs.tolist())


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.dtype == torch.int64:
        targets = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return 0.5 * (outputs - targets.view_as(outputs)).square().sum() / len(outputs)


@dataclass(frozen=True)
class Way:
    """Learners of one kind, which predict and learn, by a setting; exact linear ones need no standardised features."""

    settings: Sequence[Any]
    make: Callable[[Stream, Any], Any]
    standardised: bool = True


def of_torch(kind: Callable[..., Any], loss: Callable[..., Tensor]) -> Any:
    return lambda data, rate: Trained(data, partial(kind, lr=rate), loss)


def ways(task: str) -> dict[str, Way]:
    loss = squared_error if task == "trump" else F.cross_entropy
    return {
        "the last target, or the most frequent class": Way(
            [None], lambda data, _: LastTarget(data.outputs, data.classes > 0)
        ),
        "RecursiveLinear": Way(FORGETTING, Recursive, False),
        "SGD": Way(RATES, of_torch(torch.optim.SGD, loss)),
        "Adam": Way(RATES, of_torch(torch.optim.Adam, loss)),
        **ways_of_river(task),
    }


def ways_of_river(task: str) -> dict[str, Way]:
    from river import linear_model, optim

    def way(settings: Sequence[Any], make: Callable[[Any], Any], standardised: bool = True) -> Way:
        return Way(settings, lambda data, setting: OfRiver(make(setting), data.classes), standardised)

    if task == "trump":
        bayesian = linear_model.BayesianLinearRegression
        return {
            "river LinearRegression": way(RATES, lambda rate: linear_model.LinearRegression(optim.SGD(rate))),
            "river BayesianLinearRegression": way((None, *FORGETTING[1:]), lambda λ: bayesian(smoothing=λ), False),
        }
    if task == "segments":
        return {"river SoftmaxRegression": way(RATES, lambda rate: linear_model.SoftmaxRegression(optim.SGD(rate)))}
    return {"river LogisticRegression": way(RATES, lambda rate: linear_model.LogisticRegression(optim.SGD(rate)))}


# --- a run ------------------------------------------------------------------------------------------------------------


def run(task: str, name: str, setting: Any, seed: int, data: Stream) -> Run:
    way = ways(task)[name]
    learner, read = way.make(data, setting), data.standardised if way.standardised else data.inputs
    errors, began = [], time.process_time()
    for inputs, targets in zip(read.split(1), data.targets.split(1), strict=True):
        errors.append(data.errors(learner.predict(inputs), targets))
        learner.learn(inputs, targets)
    seconds = time.process_time() - began
    joined = torch.cat(errors).nan_to_num(nan=1e3).clamp(max=1e3)
    return {
        "task": task,
        "way": name,
        "setting": setting,
        "seed": seed,
        "error": joined.mean().item(),
        "microseconds": 1e6 * seconds / len(joined),
    }


# --- speed ------------------------------------------------------------------------------------------------------------


def seconds_of(ways: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """CPU seconds of a call of each, the least of so many alternating rounds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            began = time.process_time()
            for _ in range(calls):
                call()
            found[name].append((time.process_time() - began) / calls)
    return {name: min(times) for name, times in found.items()}


def blocks(features: int, rows: int = 256, outputs: int = 10) -> dict[str, Callable[[], object]]:
    """One block of rows: RecursiveLinear, and the update of P = (δI + XᵀX)⁻¹ by Woodbury's formula."""
    x, y = torch.randn(rows, features).double(), torch.randn(rows, outputs).double()
    layer = RecursiveLinear(features, outputs, bias=False, dtype=torch.float64)
    P, W = torch.eye(features).double(), torch.zeros(features, outputs).double()

    def woodbury() -> None:
        nonlocal P, W
        K = P @ x.T
        G = torch.linalg.solve(torch.eye(rows).double() + x @ K, K.T).T
        W = W + G @ (y - x @ W)
        P = P - G @ K.T
        P = (P + P.T) / 2

    return {"Woodbury": woodbury, "RecursiveLinear": lambda: layer.update(x, y)}


def single_rows(features: int = 10) -> dict[str, Callable[[], object]]:
    """One row after the other, predicted and learnt: numpy's recursion of P, river's, and RecursiveLinear."""
    from river.linear_model import BayesianLinearRegression

    x, y = torch.randn(100, 1, features).double(), torch.randn(100, 1, 1).double()
    rows, batches = cycle(zip(x[:, 0].numpy(), y[:, 0, 0].numpy(), strict=True)), cycle(zip(x, y, strict=True))
    layer = RecursiveLinear(features, 1, bias=False, dtype=torch.float64)
    P, w, model = np.eye(features), np.zeros(features), BayesianLinearRegression(alpha=1.0, beta=1.0)
    samples = cycle(zip(map(dict, map(enumerate, x[:, 0].tolist())), y.flatten().tolist(), strict=True))

    def by_numpy() -> None:
        nonlocal P, w
        row, answer = next(rows)
        u = P @ row
        k = u / (1 + row @ u)
        w = w + k * (answer - row @ w)
        P = P - np.outer(k, u)

    def by_layer() -> None:
        inputs, targets = next(batches)
        layer(inputs)
        layer.update(inputs, targets)

    def by_river() -> None:
        sample, answer = next(samples)
        model.predict_one(sample)
        model.learn_one(sample, answer)

    return {"numpy": by_numpy, "river": by_river, "RecursiveLinear": by_layer}


def print_speed() -> None:
    torch.manual_seed(0)
    print(harness.machine_line(), end="\n\n")
    harness.print_header("a row", "reference, µs", "RecursiveLinear, µs", "ratio")
    found = {f"of {n:,} features, in blocks of 256": (seconds_of(blocks(n), 5, 1), 256) for n in (512, 1024, 2048)}
    found["of 10 features, alone, predicted and learnt"] = seconds_of(single_rows(), 40, 50), 1
    for name, (seconds, rows) in found.items():
        of_layer = seconds.pop("RecursiveLinear")
        for other, time_of_it in seconds.items():
            shown = f"{1e6 * time_of_it / rows:.1f}", f"{1e6 * of_layer / rows:.1f}", f"{of_layer / time_of_it:.2f}"
            harness.print_row(f"{name}; {other}", *shown)


# --- forgetting -------------------------------------------------------------------------------------------------------

LENGTH, REST = 3000, slice(600, 2800)


def resting_streams(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs, the last one a constant, and targets without noise, by name; some inputs rest from row 600 to 2,800."""
    random, one, rows = np.random.default_rng(seed), np.ones(LENGTH), np.arange(LENGTH)
    moving, sensor = 5 + random.standard_normal((2, LENGTH))
    first, second, large = random.standard_normal((3, LENGTH))
    hours, years = rows % 12, rows / 365
    sensor[REST], second[REST], hours[REST] = 5, 1, hours[REST] % 6
    found = {
        "a sensor rests": ([sensor], 2 * sensor + 1),
        "a feature is there twice": ([moving, moving], 2 * moving + 1),
        "six of twelve hours, one-hot": (np.eye(12)[hours].T, np.sin(hours) + 1),
        "a slope jumps, another feature rests": ([first, second], np.where(rows < 1500, 1, 3) * first + 2 * second),
        "a year, and a feature of scale 1e6": ([1950 + years, 1e6 * large], 0.3 * years + large),
    }
    return {name: (np.stack([*inputs, one], 1), targets) for name, (inputs, targets) in found.items()}


def by_inverse(inputs: np.ndarray, targets: np.ndarray, forgetting: float) -> Iterator[float]:
    """Predictions of the textbook's recursion of P."""
    P, w = np.eye(inputs.shape[1]), np.zeros(inputs.shape[1])
    for x, y in zip(inputs, targets, strict=True):
        yield x @ w
        u = P @ x
        k = u / (forgetting + x @ u)
        w, P = w + k * (y - x @ w), (P - np.outer(k, u)) / forgetting


def by_constant_prior(inputs: np.ndarray, targets: np.ndarray, forgetting: float) -> Iterator[float]:
    """Predictions if each row renews the regularization, δ = 1, around the weights of that time."""
    unit, w = np.eye(inputs.shape[1]), np.zeros(inputs.shape[1])
    A = unit
    for x, y in zip(inputs, targets, strict=True):
        yield x @ w
        A = forgetting * A + np.outer(x, x) + (1 - forgetting) * unit
        w = w + np.linalg.solve(A, x) * (y - x @ w)


def by_layer(inputs: np.ndarray, targets: np.ndarray, forgetting: float) -> Iterator[float]:
    layer = RecursiveLinear(inputs.shape[1], 1, bias=False, forgetting=forgetting, dtype=torch.float64)
    for x, y in zip(torch.from_numpy(inputs).split(1), torch.from_numpy(targets)[:, None].split(1), strict=True):
        yield layer(x).item()
        layer.update(x, y)


def print_forgetting(seeds: Sequence[int]) -> None:
    """Root mean square error of predictions in the second half, and the largest when what rested moves again."""
    ways = {"textbook": by_inverse, "renewed with each row": by_constant_prior, "RecursiveLinear": by_layer}
    for forgetting in (0.99, 0.9):
        harness.print_header(f"λ = {forgetting}", *ways)
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for seed in seeds:
            for name, (inputs, truth) in resting_streams(seed).items():
                targets = truth + 0.1 * np.random.default_rng(100 + seed).standard_normal(LENGTH)
                for way, predict in ways.items():
                    errors = np.fromiter(predict(inputs, targets, forgetting), float) - truth
                    pair = np.sqrt(np.mean(errors[LENGTH // 2 :] ** 2)), np.abs(errors[REST.stop :]).max()
                    found.setdefault(name, {}).setdefault(way, []).append(pair)
        for name, cells in found.items():
            medians = (np.median(pairs, 0) for pairs in cells.values())
            harness.print_row(name, *("; ".join(f"{value:.2g}" for value in pair) for pair in medians))


# --- exactness --------------------------------------------------------------------------------------------------------

DELTAS = (Fraction(1), Fraction(1, 10**20))
REGRESSIONS = ("longley", "copper", "stackloss")


def exact_coefficients(rows: Sequence[Sequence[float]], answers: Sequence[float], delta: Fraction) -> np.ndarray:
    """Ridge regression in rationals, by Gauss-Jordan elimination of the normal equations."""
    X, y = [list(map(Fraction, row)) for row in rows], list(map(Fraction, answers))
    size = range(len(X[0]))
    left = [[sum(row[i] * row[j] for row in X) + delta * (i == j) for j in size] for i in size]
    system = [[*left[i], sum(row[i] * answer for row, answer in zip(X, y, strict=True))] for i in size]
    for i in size:  # the matrix is positive definite: no pivots need be looked for
        system[i] = [value / system[i][i] for value in system[i]]
        for j in size:
            if j != i:
                factor = system[j][i]
                system[j] = [a - factor * b for a, b in zip(system[j], system[i], strict=True)]
    return np.array([float(row[-1]) for row in system])


def of_layer(rows: np.ndarray, answers: np.ndarray, delta: float) -> np.ndarray:
    """Coefficients of RecursiveLinear after each row, (n, d)."""
    layer = RecursiveLinear(rows.shape[1], 1, bias=False, regularization=delta, dtype=torch.float64)
    found = []
    for x, y in zip(rows, answers, strict=True):
        layer.update(torch.tensor(x)[None], torch.tensor([[y]]))
        found.append(layer.weight[0].numpy().copy())
    return np.array(found)


def of_river(rows: np.ndarray, answers: np.ndarray, delta: float) -> np.ndarray:
    """The same of river's model, as its predictions for unit vectors."""
    from river.linear_model import BayesianLinearRegression

    model, found = BayesianLinearRegression(alpha=delta, beta=1.0), []
    for x, y in zip(rows, answers, strict=True):
        model.learn_one(dict(enumerate(x)), y)
        found.append([model.predict_one({j: float(i == j) for j in range(len(x))}) for i in range(len(x))])
    return np.array(found)


def of_statsmodels(rows: np.ndarray, answers: np.ndarray, delta: float) -> np.ndarray:
    """The same of statsmodels' model, which has no regularization."""
    from statsmodels.api import RecursiveLS

    return np.asarray(RecursiveLS(answers, rows).fit().recursive_coefficients.filtered.T)


def print_exactness() -> None:
    """Largest relative error of a coefficient, from the row on that determines them all."""
    import statsmodels.api

    print(harness.machine_line(), end="\n\n")
    harness.print_header("data", "rows, coefficients", "δ", "way", "after any row", "after the last row")
    ways: dict[str, Callable[..., np.ndarray]] = {
        "`RecursiveLinear`": of_layer,
        "river `BayesianLinearRegression`": of_river,
        "statsmodels `RecursiveLS`": of_statsmodels,
    }
    cases = [
        (delta, way) for way in ways for delta in (DELTAS if way != "statsmodels `RecursiveLS`" else (Fraction(0),))
    ]
    for name in REGRESSIONS:
        data = getattr(statsmodels.api.datasets, name).load_pandas()
        rows = np.asarray(statsmodels.api.add_constant(data.exog), float)
        answers = np.asarray(data.endog, float)
        n, size = rows.shape
        for delta, way in cases:
            found = ways[way](rows, answers, float(delta))
            errors = []
            for m in range(size, n + 1):
                expected = exact_coefficients(rows[:m].tolist(), answers[:m].tolist(), delta)
                errors.append(np.abs(found[m - 1] / expected - 1).max())
            shown = f"{np.max(errors):.1e}", f"{errors[-1]:.1e}"
            harness.print_row(name, f"{n}, {size}", f"{float(delta):g}", way, *shown)


# --- what comes out ---------------------------------------------------------------------------------------------------


def chosen_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By way, its best setting on the first seed; for RecursiveLinear also those that are shown in any case."""
    first = min(each["seed"] for each in runs)
    best: dict[str, Run] = {}
    for each in runs:
        if each["seed"] == first and each["error"] < best.get(each["way"], {"error": math.inf})["error"]:
            best[each["way"]] = each
    return {way: [each["setting"], *(FIXED if way == "RecursiveLinear" else ())] for way, each in best.items()}


def chosen_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """By way, the runs of its best setting, one for each seed; and those of RecursiveLinear that nobody chose."""
    found = {}
    for way, settings in chosen_settings(runs).items():
        for number, setting in enumerate(settings):
            name = f"{way}, λ = {setting}" if number else way
            found[name] = [each for each in runs if each["way"] == way and each["setting"] == setting]
    return found


def print_table(task: str, runs: Sequence[Run]) -> None:
    form = "{:.3f}" if task == "trump" else "{:.1%}"
    harness.print_header(f"{task}: way", "setting", "error", "µs a sample")
    chosen = chosen_runs(runs)
    for way, best in sorted(chosen.items(), key=lambda item: statistics.median(r["error"] for r in item[1])):
        errors = [r["error"] for r in best]
        cost = f"{statistics.median(r['microseconds'] for r in best):.0f}"
        setting = "" if best[0]["setting"] is None else best[0]["setting"]
        harness.print_row(way, setting, harness.spread(errors, form), cost)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument(
        "tasks",
        nargs="+",
        choices=(*TASKS, "speed", "forgetting", "exactness"),
        help="speed: blocks and rows beside numpy and Woodbury's formula; forgetting: features that rest; "
        "exactness: coefficients after each row",
    )
    harness.add_run_options(parser, "streaming")
    options = parser.parse_args()
    if "speed" in options.tasks:
        return print_speed()
    if "forgetting" in options.tasks:
        return print_forgetting(options.seeds)
    if "exactness" in options.tasks:
        return print_exactness()
    runs: list[Run] = []
    for task in options.tasks:
        for seed in options.seeds if task != "trump" else options.seeds[:1]:  # it has one order, and nothing is random
            runs = harness.load_runs(options.output)
            data = stream(task, seed)
            settings = {name: way.settings for name, way in ways(task).items()}
            if seed != options.seeds[0]:
                settings = chosen_settings([r for r in runs if r["task"] == task])
            cells = [(name, setting) for name, values in settings.items() for setting in values]
            jobs = {harness.run_name(task, *cell, seed, 1): partial(run, task, *cell, seed, data) for cell in cells}
            runs = harness.run_all(options.output, jobs, options.report)
    harness.print_machines(runs)
    for task in options.tasks:
        print_table(task, [r for r in runs if r["task"] == task])


if __name__ == "__main__":
    main()
