"""Training of one example three times: without the callback, with batches that grow, and with batches that do not."""

import importlib
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from zlib import crc32

import torch

from lightning_struct.callbacks import GrowingBatchSize, NoiseEstimator, ValidationRule
from lightning_struct.functional.layers.calls import tensors_in

# Trains with these callbacks, and always the same way.
Train = Callable[[list[Any]], Any]
# Something hashable of each sample in a batch.
SamplesOf = Callable[[Any], Iterable[Any]]

FIRST_STEPS = 3  # are not timed


@dataclass
class Run:
    """What one training did.

    Attributes:
        sizes: samples in each batch.
        samples: of each epoch, how often each sample was seen.
        validations: how many there were.
        steps: of the optimizer.
        largest: samples in the largest of them.
        seconds: CPU time of a step.
        messages: warnings of the callback.
    """

    sizes: list[int] = field(default_factory=list)
    samples: list[Counter[Any]] = field(default_factory=list)
    validations: int = 0
    steps: int = 0
    largest: int = 0
    seconds: float = float("nan")
    messages: list[str] = field(default_factory=list)
    callback: Any = None


@dataclass
class Row:
    """A line of the table that the command prints."""

    example: str
    package: str
    fixed: Run
    grown: Run
    measured: Run

    def __str__(self) -> str:
        overhead = 100 * (self.measured.seconds / self.fixed.seconds - 1)
        return (
            f"| {self.example} | {version(self.package)} | {self.fixed.steps} | {self.grown.steps} | "
            f"{self.fixed.largest} → {self.grown.largest} | {1000 * self.fixed.seconds:.1f} | {overhead:+.0f} % |"
        )


TABLE: list[Row] = []
HEAD = (
    "| example | version | steps without | steps with | batch | ms a step without | measuring takes |\n"
    "|---|---|---|---|---|---|---|"
)


def fingerprints(batch: Any) -> list[int]:
    """A number for each sample: of all numbers that a batch has of it, in the first dimension of its tensors."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim]
    size = Counter(len(tensor) for tensor in tensors).most_common(1)[0][0]
    of_samples = [tensor.detach().contiguous() for tensor in tensors if len(tensor) == size]
    return [crc32(b"".join(tensor[i].numpy().tobytes() for tensor in of_samples)) for i in range(size)]


def train_thrice(
    example: str,
    package: str,
    train: Train,
    *,
    namespace: str = "lightning.pytorch",
    samples_of: SamplesOf = fingerprints,
    largest: int = 32,
    **settings: Any,
) -> Row:
    """Train an example three times, and note the row of the table.

    Args:
        example: its name in the table.
        package: whose version is printed.
        train: trains with given callbacks.
        namespace: of the Lightning that the example uses.
        samples_of: names the samples of a batch.
        largest: ``max_batch_size``.
        settings: further arguments of the callback that grows.
    """
    fixed = {"max_batch_size": largest, "mode": settings.get("mode", "auto")}
    growing = {"theta": 0.02, "max_batch_size": largest, "validation": ValidationRule(window=2)} | settings
    growing["estimator"] = NoiseEstimator(growing.get("estimator", "auto"), every_n_steps=4)
    row = Row(
        example,
        package,
        fixed=_run(train, None, namespace, samples_of),
        grown=_run(train, GrowingBatchSize(**growing), namespace, samples_of),
        measured=_run(train, GrowingBatchSize(theta=1e3, **fixed), namespace, samples_of),
    )
    TABLE.append(row)
    return row


def assert_batches_grow(row: Row, *, steps_are_fixed: bool = False, announced: Collection[str] = ()) -> None:
    """The same samples in each epoch and the same validations in fewer steps, and no warning.

    Args:
        row: of :func:`train_thrice`.
        steps_are_fixed: the run ends after so many steps: larger ones go through more epochs, and the last is cut
            short.
        announced: parts of the warnings that are due, as names of parameters that cannot be measured.
    """
    if steps_are_fixed:
        assert row.grown.samples[0] == row.fixed.samples[0]
        assert row.grown.steps == row.fixed.steps
    else:
        assert row.grown.samples == row.fixed.samples
        assert row.grown.steps < row.fixed.steps
    assert row.grown.largest > row.fixed.largest
    assert row.grown.validations == row.fixed.validations
    assert [message for message in row.grown.messages if not any(part in message for part in announced)] == []
    assert row.measured.sizes == row.fixed.sizes


def _run(train: Train, callback: GrowingBatchSize | None, namespace: str, samples_of: SamplesOf) -> Run:
    run = Run(callback=callback)
    watch = _watch(namespace, run, samples_of)
    random.seed(0)  # by which PINA orders the parts of a boundary
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train([watch] if callback is None else [watch, callback])
    run.messages = [str(w.message) for w in caught if "GrowingBatchSize" in str(w.message)]
    return run


def _watch(namespace: str, run: Run, samples_of: SamplesOf) -> Any:
    """A callback, the first of all, that fills a :class:`Run`."""

    class Watch(importlib.import_module(namespace).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began: float | None = None
            self.seconds, self.timed = 0.0, 0

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            run.samples.append(Counter())
            self.began = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            now = time.process_time()
            if self.began is not None and len(run.sizes) > FIRST_STEPS:
                self.seconds, self.timed = self.seconds + now - self.began, self.timed + 1
            samples = list(samples_of(batch))
            run.samples[-1].update(samples)
            run.sizes.append(len(samples))
            run.largest = max(run.largest, len(samples) * trainer.accumulate_grad_batches)
            self.began = time.process_time()

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            run.validations += not trainer.sanity_checking
            self.began = None

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            run.seconds = self.seconds / max(1, self.timed)
            run.steps = trainer.global_step

    return Watch()
