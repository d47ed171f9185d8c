"""The command line of the recipes that train a classifier: its results are losses and accuracies."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.table import Table

from lightning_struct.data.in_memory import InMemoryDataModule
from lightning_struct.models.classifier import Classifier
from lightning_struct.recipes.cli import SUBCOMMANDS, RecipeCLI, config_directory


class ClassWriter(BasePredictionWriter):
    """Writes what ``predict`` returns to ``classes.pt`` in the log directory.

    The file has a dict: ``classes`` (n,), int64, and ``indices`` (n,), int64, the places of the samples in the data set.
    With several processes each writes its own samples, to ``classes_0.pt`` and so on. Under ``fast_dev_run`` nothing is
    written.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        name = "classes.pt" if trainer.world_size == 1 else f"classes_{trainer.global_rank}.pt"
        indices = torch.tensor([index for batches in batch_indices for batch in batches for index in batch])
        torch.save({"classes": torch.cat(list(predictions)).cpu(), "indices": indices}, directory / name)
        rank_zero_info(f"Classes are in {directory / name}")


class ClassificationCLI(RecipeCLI):
    """LightningCLI that says at the end of ``fit`` what the classifier reached and where the results are."""

    def after_fit(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        seconds = time.monotonic() - self._fit_began
        log_dir = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        results = self._final_errors(best)
        if self.trainer.is_global_zero:
            console = Console(soft_wrap=True, highlight=False)
            console.print(_table("the best checkpoint" if best else "the last weights", results))
            console.print(f"time of this fit {seconds:.1f} s, to step {self.trainer.global_step}")
            console.print(f"best checkpoint  {best or 'none was kept'}", markup=False)
            for picture in sorted(log_dir.glob("*.png")):
                console.print(f"picture          {picture}", markup=False)
            console.print(f"log              {log_dir}", markup=False)


def run_classifier(
    name: str, data_class: type[InMemoryDataModule], args: Sequence[str] | None = None
) -> ClassificationCLI:
    """Parse arguments and run the subcommand they name.

    Args:
        name: of the recipe: its configs are in ``recipes/NAME``, its results in ``results/NAME``. Without ``--config``
            it runs ``adam.yaml``.
        data_class: the data module, configured by ``--data.*``.
        args: command line, of this process if None.

    Returns:
        The command line after its run, with ``trainer``, ``model`` and ``datamodule``.
    """
    given = sys.argv[1:] if args is None else list(args)
    has_config = any(argument in ("-c", "--config") or argument.startswith("--config=") for argument in given)
    defaults = [] if has_config else [str(config_directory(name) / "adam.yaml")]
    program = f"python -m lightning_struct.recipes.{name}"
    options = {
        subcommand: {
            "default_config_files": defaults,
            "usage": f"{program} {subcommand} [--config FILE] [--KEY=VALUE ...]",
        }
        for subcommand in SUBCOMMANDS
    }
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "results", "name": name},
    }
    return ClassificationCLI(
        Classifier,
        data_class,
        args=None if args is None else given,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": program, **options},
        trainer_defaults={"logger": logger, "callbacks": [ClassWriter()]},
    )


def _table(weights: str, results: dict[str, Mapping[str, float]]) -> Table:
    table = Table("", "loss", "accuracy", title=f"Averages over samples, {weights}", title_justify="left")
    for part, label in (("train", "training"), ("val", "validation"), ("test", "test")):
        table.add_row(label, f"{results[part]['test_loss']:.4g}", f"{results[part]['test_accuracy']:.2%}")
    return table
