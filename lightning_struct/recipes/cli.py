"""The command line that all recipes share, and the results that it prints at the end."""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import isabstract
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import lightning as L
import yaml  # type: ignore[import-untyped]  # a requirement of Lightning
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from lightning_struct import __version__
from lightning_struct.callbacks.pictures import log_directory
from lightning_struct.callbacks.predictions import PredictionWriter
from lightning_struct.callbacks.training_curves import TrainingCurves
from lightning_struct.functional.torch_tools import denormals_flushed
from lightning_struct.recipes import checkpoints
from lightning_struct.recipes.catalogue import RECIPES, Results, default_config
from lightning_struct.recipes.checkpoints import LAST_CHECKPOINT, newest_checkpoint
from lightning_struct.recipes.messages import EpochLines, noise_filtered, raise_message_of_a_class
from lightning_struct.utilities.checks import require
from lightning_struct.utilities.namespaces import MisconfigurationException

QUICK, FULL_HELP, SYNTHETIC = "--quick", "--help.full", "--data.synthetic=true"
TRIAL_BEGINS = "Trial (--quick): a small network, few samples and few steps, to see that everything runs."
TRIAL_ENDS = "This was a trial (--quick): its figures say nothing about the method. Leave --quick out to train."
SUBCOMMANDS = ("fit", "validate", "test", "predict")
METRICS_FORMAT = ".5g"  # of the progress bar: Lightning's, .3f, shows an error of 1e-6 as 0.000


class RecipeCLI(LightningCLI):
    """LightningCLI that prints the results and their folder at the end of ``fit``.

    A checkpoint brings the config of its run, unless ``--config`` names another one; options of the command line win
    over both. LightningCLI instead puts the hyperparameters of the checkpoint, which lack what makes optimizers and
    schedulers, over the config: a resumed run would have others.

    Args:
        arguments: of LightningCLI.
        recipe: its name in the catalogue.
        parsed: subcommands that get a parser. Each parser takes a good part of the time until a run begins.
        quick: whether the run is a trial, and says so in its first and its last line.
        options: of LightningCLI.
    """

    def __init__(
        self, *arguments: Any, recipe: str, parsed: Sequence[str] = SUBCOMMANDS, quick: bool = False, **options: Any
    ) -> None:
        self.recipe, self.quick, self._parsed = recipe, quick, parsed
        self.results = RECIPES[recipe].results
        self._fit_began: float | None = None
        try:
            super().__init__(*arguments, **options)
        except (KeyboardInterrupt, SystemExit, OSError):
            if self._fit_began is not None:
                self._say_how_to_resume()
            raise
        except ValueError as error:
            raise_message_of_a_class(error)
            raise
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise MisconfigurationException(
                f"The weights of {self._checkpoint} do not fit the model that was configured. Leave out --config and "
                f"the options of the model, if there are any: the checkpoint brings its own.\n{error}"
            ) from error
        if quick:
            rank_zero_only(print)(TRIAL_ENDS)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static there, called of the object
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in self._parsed}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        from lightning_struct.recipes.parser import ConfigByName, RecipeParser  # they need jsonargparse

        versions = [f"lightning_struct=={__version__}", f"lightning.pytorch=={L.__version__}"]
        parser = RecipeParser(recipe=self.recipe, model_class=self.model_class, dump_header=versions, **kwargs)
        names = "a config of this recipe (lightning-struct RECIPE lists them), or RECIPE/NAME for one of another recipe"
        parser.add_argument("-c", "--config", action=ConfigByName, help=f"Path of a YAML file, or name of {names}.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for source, target in RECIPES[self.recipe].links.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        if self.quick:
            rank_zero_only(print)(" ".join(filter(None, (TRIAL_BEGINS, RECIPES[self.recipe].about_quick))))
        options = self.config[self.config.subcommand]
        # LightningCLI now would put the hyperparameters of the checkpoint over the config: it sees none.
        self._checkpoint, options.ckpt_path = options.ckpt_path, None

    def before_instantiate_classes(self) -> None:
        self.config[self.subcommand].ckpt_path = self._checkpoint
        checkpoints.check_checkpoint(self._checkpoint, self.recipe)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.subcommand in ("validate", "test"):  # they print their measurements and need no folder
            self.save_config_callback = None
            if self._logger_is_the_default():
                kwargs.setdefault("logger", False)
        elif self.config[self.subcommand].trainer.logger is False:
            kwargs.setdefault("default_root_dir", self._folder_without_logger())
        from rich import get_console

        trainer = super().instantiate_trainer(**kwargs)
        # Lightning looks into the folders of this run, which has none yet, and goes on with untrained weights
        named = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
        if self._checkpoint == LAST_CHECKPOINT and not named:
            checkpoints.refuse_missing(LAST_CHECKPOINT, self.recipe)
        if self.subcommand == "fit" and trainer.checkpoint_callbacks:
            trainer.callbacks.append(checkpoints.LastCheckpoint())  # type: ignore[attr-defined]
        bar = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and not get_console().is_terminal:  # it would draw nothing
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            callbacks[callbacks.index(bar)] = EpochLines()
        elif isinstance(bar, RichProgressBar) and bar.theme.metrics_format == RichProgressBarTheme.metrics_format:
            bar.theme = replace(bar.theme, metrics_format=METRICS_FORMAT)
        return trainer

    def _folder_without_logger(self) -> str:
        """A folder that is not there yet, as a logger makes one: ``version_0``, ``version_1`` and so on.

        It is in the folder that was named for files without a logger, else in that of the logs of the recipe.
        """
        named = self.config[self.subcommand].trainer.default_root_dir
        if "://" in str(named):  # such folders cannot be listed in this way
            return str(named)
        root = Path("results", self.recipe) if named is None else Path(named)
        versions = (path.name.removeprefix("version_") for path in root.glob("version_*"))
        return str(root / f"version_{max((int(number) + 1 for number in versions if number.isdecimal()), default=0)}")

    def _logger_is_the_default(self) -> bool:
        default, chosen = self.trainer_defaults["logger"], self.config[self.subcommand].trainer.logger
        same_class = getattr(chosen, "class_path", None) == default["class_path"]
        return same_class and default["init_args"].items() <= chosen.init_args.as_dict().items()

    def before_validate(self) -> None:
        if self._checkpoint is None:
            rank_zero_warn(f"{self.subcommand} runs on untrained weights: name trained ones by --ckpt_path.")

    before_test = before_predict = before_validate

    def before_fit(self) -> None:
        vars(self.model)["configure_optimizers"] = partial(_configure_optimizers, self.model)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # it has no logger
            # before there are other processes: Lightning asks all of them, and after an error not all may be left
            self._log_dir = log_directory(self.trainer)
        self._fit_began = time.monotonic()

    def after_fit(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        from rich.console import Console

        assert self._fit_began is not None
        seconds = time.monotonic() - self._fit_began
        console = Console(soft_wrap=True, highlight=False, quiet=not self.trainer.is_global_zero)
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        weights = "the best checkpoint" if best else "the last weights"
        limit = self.trainer.limit_test_batches
        if limit:
            console.print(f"Testing {weights} on the training, the validation and the test set.")
            errors = self._final_errors(best)
            part = "" if isinstance(limit, float) and limit == 1 else f", limit_test_batches={limit}"
            console.print(_table(f"Averages over samples, {weights}{part}", self.results, errors))
            if self.results.gap is not None:
                heading, form = self.results.metrics[self.results.gap]
                gap = errors["train"][self.results.gap] - errors["test"][self.results.gap]
                console.print(f"generalization gap {gap:{form}} ({heading} on training set less that on test set)")
        curves = (call for call in self.trainer.callbacks if isinstance(call, TrainingCurves))  # type: ignore[attr-defined]
        losses = [record["val_loss"] for curve in curves for record in curve.records if "val_loss" in record]
        if losses:
            console.print(f"validation loss  {losses[0]:.4g} at first, {min(losses):.4g} at best")
        console.print(f"time of this fit {seconds:.1f} s, to step {self.trainer.global_step}")
        console.print(f"best checkpoint  {best or 'none was kept'}", markup=False)
        if not best and (last := newest_checkpoint(self.trainer)):
            console.print(f"last checkpoint  {last}", markup=False)
        for picture in sorted(self._log_dir.glob("*.png")):
            console.print(f"picture          {picture}", markup=False)
        console.print(f"log              {self._log_dir}", markup=False)

    def _final_errors(self, checkpoint: str) -> dict[str, Mapping[str, float]]:
        """Errors over each of the three sets; the last one, of the test set, also goes to the log."""
        self.datamodule.setup("test")  # if processes were spawned for the fit, this one has no data yet
        errors, loggers, ckpt_path = {}, self.trainer.loggers, checkpoint or None
        for part in ("train", "val", "test"):
            self.trainer.loggers = loggers if part == "test" else []
            loader = self.datamodule.evaluation_dataloader(part)
            (errors[part],) = self.trainer.test(self.model, loader, ckpt_path=ckpt_path, verbose=False)
            ckpt_path = None  # its weights stay in the model
        return errors

    def _say_how_to_resume(self) -> None:
        """Tell where the results of an unfinished fit are, and the command that goes on with it."""
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        newest = newest_checkpoint(self.trainer) or self._checkpoint
        if self._log_dir.exists():
            print(f"\nresults so far   {self._log_dir}", file=sys.stderr)
        if newest is None:
            print("No checkpoint was written yet: start again to train.", file=sys.stderr)
        else:
            command = f"python -m lightning_struct.recipes.{self.recipe} fit --ckpt_path {shlex.quote(str(newest))}"
            print(f"to resume        {command}", file=sys.stderr)


def _configure_optimizers(model: L.LightningModule) -> Any:
    """The return value of the model's own method; an error of an optimizer about its arguments is no defect.

    It stands in for the method in a fit, and goes with the model into other processes.
    """
    try:
        return type(model).configure_optimizers(model)
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def run_recipe(name: str, args: Sequence[str] | None = None, program: str | None = None) -> RecipeCLI:
    """Parse arguments and run the subcommand they name.

    Args:
        name: name of the recipe in ``RECIPES``: its configs are in ``recipes/NAME``, its results in ``results/NAME``.
        args: command line, of this process if None.
        program: name of the command in its help, by default that of the module of the recipe.

    Returns:
        The command line after its run, with ``trainer``, ``model`` and ``datamodule``.

    Raises:
        MisconfigurationException: if the extra ``recipes`` is not installed, or there is no such checkpoint.
    """
    for package in ("jsonargparse", "rich"):
        require(package, "The command line of a recipe")
    recipe = RECIPES[name]
    model_class = getattr(import_module("lightning_struct.models"), recipe.model_class)
    data_class = getattr(import_module("lightning_struct.data"), recipe.data_class)
    home = os.path.expanduser("~/")  # a shell leaves the ~ of --KEY=~/PATH as it is
    given = [arg.replace("=~/", f"={home}", 1) for arg in (sys.argv[1:] if args is None else args)]
    quick, full_help = QUICK in given, FULL_HELP in given
    given = ["--help" if arg == FULL_HELP else arg for arg in given if arg != QUICK]
    has_data = any(arg.startswith(("--data.data_dir", "--data.text_file")) for arg in given)  # then a part of those
    trial = [option for option in recipe.quick if not (has_data and option == SYNTHETIC)]
    given = _config_first(given, trial if quick else ())
    program = program or f"python -m lightning_struct.recipes.{name}"
    parsed = given[:1] if given and given[0] in SUBCOMMANDS else SUBCOMMANDS
    with ExitStack() as stack:
        stack.enter_context(noise_filtered())
        stack.enter_context(denormals_flushed())  # saturated units and long sequences have subnormal derivatives
        defaults = _default_configs(name, given, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        usage = "[--config CONFIG] [--quick] [--KEY=VALUE ...]"
        common = {"allow_abbrev": False, "full_help": full_help}
        parsers = {
            sub: {"default_config_files": defaults, "usage": f"{program} {sub} {usage}", **common} for sub in parsed
        }
        csv_logger = {
            "class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "results", "name": name}
        }  # fmt: skip
        return RecipeCLI(
            model_class,
            data_class,
            recipe=name,
            parsed=parsed,
            quick=quick,
            args=given,
            subclass_mode_model=True,
            subclass_mode_data=isabstract(data_class),
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=checkpoints.RunConfigCallback,
            save_config_kwargs={"overwrite": True, "recipe": name},
            parser_kwargs={
                "prog": program,
                "usage": f"{program} {{{','.join(SUBCOMMANDS)}}} {usage}",
                "description": f"{recipe.trains}. Its configs are listed by: lightning-struct {name}",
                **common,
                **parsers,
            },
            trainer_defaults={
                "logger": csv_logger,
                "log_every_n_steps": recipe.results.log_every_n_steps,
                "callbacks": [PredictionWriter(recipe.results.predictions)],
            },
        )


def _config_first(arguments: Sequence[str], quick: Sequence[str]) -> list[str]:
    """The arguments with configs and classes directly behind the subcommand, and the options of a trial behind those.

    Options win over all of them wherever they stand.
    """
    if not arguments or arguments[0] not in SUBCOMMANDS:
        return list(arguments)
    first: list[str] = []
    options: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        names_first = argument.startswith(("-c", "--config=", "--model=", "--data=")) or argument == "--config"
        chosen = first if names_first else options
        chosen += [argument, *islice(rest, argument in ("-c", "--config"))]
    return [arguments[0], *first, *quick, *options]


def _default_configs(name: str, arguments: Sequence[str], folder: Path) -> list[str]:
    """The config to be read if none is named: that of the checkpoint if there is one, else that of the recipe."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("-c", "--config")
    options.add_argument("--ckpt_path")
    named, _ = options.parse_known_args(arguments)
    if named.config is not None:
        return []
    has_config = named.ckpt_path and is_zipfile(named.ckpt_path)
    config = checkpoints.config_of_checkpoint(named.ckpt_path, name) if has_config else None
    if config is None:
        return [str(default_config(name))]
    file = folder / "config_of_checkpoint.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [str(file)]


def _table(title: str, results: Results, values: dict[str, Mapping[str, float]]) -> Any:
    from rich.table import Table

    # an equation whose solution is not known has no error
    columns = {name: column for name, column in results.metrics.items() if name in values["test"]}
    table = Table("", *(heading for heading, _ in columns.values()), title=title, title_justify="left")
    for part, label in (("train", "training"), ("val", "validation"), ("test", "test")):
        table.add_row(label, *(format(values[part][name], form) for name, (_, form) in columns.items()))
    return table
