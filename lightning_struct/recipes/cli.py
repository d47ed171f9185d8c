"""How every recipe's command line is put together, and what it prints."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table

from lightning_struct.callbacks.predictions import PredictionWriter
from lightning_struct.functional.denormals import denormals_flushed

SUBCOMMANDS = ("fit", "validate", "test", "predict")


@dataclass(frozen=True)
class Results:
    """What the recipes of one kind of task end with.

    Attributes:
        metrics: for each metric of a test run that is shown at the end of ``fit``, its heading and its format.
        predictions: what ``predict`` writes.
        config: the file that is run without ``--config``.
        log_every_n_steps: few and long steps are all logged.
        gap: the metric whose difference between training and test set is shown, too.
    """

    metrics: Mapping[str, tuple[str, str]]
    predictions: str
    config: str
    log_every_n_steps: int
    gap: str | None = None


RECONSTRUCTIONS = Results(
    {"test_loss": ("½‖x̂ - x‖²", ".4g"), "test_squared_error": ("‖x̂ - x‖²", ".4g")}, "reconstructions", "shf.yaml", 1
)
CLASSES = Results({"test_loss": ("loss", ".4g"), "test_accuracy": ("accuracy", ".2%")}, "classes", "rls.yaml", 50)
STRUCTURED = replace(CLASSES, config="ldr_sd.yaml", gap="test_accuracy")
WORDS = Results({"test_loss": ("nats", ".4g"), "test_perplexity": ("perplexity", ".2f")}, "words", "ldr_sd.yaml", 50)


def config_directory(name: str) -> Path:
    """Where the YAML files of a recipe are: in the wheel, or in the checkout of an editable install."""
    packaged, checkout = Path(__file__).parent / "configs", Path(__file__).parents[2] / "recipes"
    return (packaged if packaged.is_dir() else checkout) / name


class RecipeCLI(LightningCLI):
    """LightningCLI that says at the end of ``fit`` what was reached and where the results are."""

    def __init__(self, *arguments: Any, results: Results, links: Mapping[str, str], **options: Any) -> None:
        self.results = results
        self.links = links
        super().__init__(*arguments, **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for source, target in self.links.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def before_validate(self) -> None:
        if self.config[self.subcommand].get("ckpt_path") is None:
            rank_zero_warn(f"{self.subcommand} runs on untrained weights: name trained ones by --ckpt_path.")

    before_test = before_predict = before_validate

    def before_fit(self) -> None:
        self._fit_began = time.monotonic()

    def after_fit(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        seconds = time.monotonic() - self._fit_began
        log_dir = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        errors = self._final_errors(best)
        if self.trainer.is_global_zero:
            weights = "the best checkpoint" if best else "the last weights"
            console = Console(soft_wrap=True, highlight=False)
            console.print(_table(f"Averages over samples, {weights}", self.results, errors))
            if self.results.gap is not None:
                heading, form = self.results.metrics[self.results.gap]
                gap = errors["train"][self.results.gap] - errors["test"][self.results.gap]
                console.print(f"generalization gap {gap:{form}} ({heading} on training set less that on test set)")
            console.print(f"time of this fit {seconds:.1f} s, to step {self.trainer.global_step}")
            console.print(f"best checkpoint  {best or 'none was kept'}", markup=False)
            for picture in sorted(log_dir.glob("*.png")):
                console.print(f"picture          {picture}", markup=False)
            console.print(f"log              {log_dir}", markup=False)

    def _final_errors(self, checkpoint: str) -> dict[str, Mapping[str, float]]:
        """Errors over each of the three sets; the last one, of the test set, also goes to the log."""
        errors, loggers, ckpt_path = {}, self.trainer.loggers, checkpoint or None
        for part in ("train", "val", "test"):
            self.trainer.loggers = loggers if part == "test" else []
            loader = self.datamodule.evaluation_dataloader(part)
            (errors[part],) = self.trainer.test(self.model, loader, ckpt_path=ckpt_path, verbose=False)
            ckpt_path = None  # its weights stay in the model
        return errors


def run_recipe(
    name: str,
    model_class: type[L.LightningModule],
    data_class: type[L.LightningDataModule],
    results: Results,
    args: Sequence[str] | None = None,
    *,
    subclass_mode_data: bool = False,
    links: Mapping[str, str] | None = None,
) -> RecipeCLI:
    """Parse arguments and run the subcommand they name.

    Args:
        name: of the recipe: its configs are in ``recipes/NAME``, its results in ``results/NAME``.
        model_class: the configured model is this class or one derived from it.
        data_class: the data module, configured by ``--data.*``; it has ``evaluation_dataloader`` as
            :class:`InMemoryDataModule` has it.
        results: of its kind of task.
        args: command line, of this process if None.
        subclass_mode_data: the configured data module is of a class derived from ``data_class``.
        links: arguments of the model, such as ``model.init_args.vocabulary_size``, by the attributes of the data module
            that they are taken from.

    Returns:
        The command line after its run, with ``trainer``, ``model`` and ``datamodule``.
    """
    given = sys.argv[1:] if args is None else list(args)
    has_config = any(argument in ("-c", "--config") or argument.startswith("--config=") for argument in given)
    defaults = [] if has_config else [str(config_directory(name) / results.config)]
    program = f"python -m lightning_struct.recipes.{name}"
    run = partial(
        RecipeCLI,
        model_class,
        data_class,
        results=results,
        args=None if args is None else given,
        links=links or {},
        subclass_mode_model=True,
        subclass_mode_data=subclass_mode_data,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": program,
            **{
                subcommand: {
                    "default_config_files": defaults,
                    "usage": f"{program} {subcommand} [--config FILE] [--KEY=VALUE ...]",
                }
                for subcommand in SUBCOMMANDS
            },
        },
        trainer_defaults={
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": "results", "name": name},
            },
            "log_every_n_steps": results.log_every_n_steps,
            "callbacks": [PredictionWriter(results.predictions)],
        },
    )
    with denormals_flushed():  # saturated units and long sequences have subnormal derivatives
        return run()


def run_command(main: Callable[[], Any]) -> None:
    """Run ``main`` as a command: what the user can put right is one message and exit status 1, not a traceback."""
    try:
        main()
    except MisconfigurationException as error:
        sys.exit(f"error: {error}")


def _table(title: str, results: Results, values: dict[str, Mapping[str, float]]) -> Table:
    table = Table("", *(heading for heading, _ in results.metrics.values()), title=title, title_justify="left")
    for part, label in (("train", "training"), ("val", "validation"), ("test", "test")):
        table.add_row(label, *(format(values[part][name], form) for name, (_, form) in results.metrics.items()))
    return table
