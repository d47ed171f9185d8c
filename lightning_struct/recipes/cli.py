"""The command line that all recipes share, and what it prints at the end."""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn
from zipfile import is_zipfile

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]  # a requirement of Lightning
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct import __version__
from lightning_struct.callbacks.pictures import log_directory
from lightning_struct.callbacks.predictions import PredictionWriter
from lightning_struct.functional.torch_tools import denormals_flushed
from lightning_struct.recipes.catalogue import RECIPES, default_config, did_you_mean
from lightning_struct.recipes.checkpoints import LastCheckpoint, compare_optimizers, keep_what_is_there
from lightning_struct.recipes.quiet import noise_filtered
from lightning_struct.utilities.namespaces import MisconfigurationException
from lightning_struct.utilities.optional import require

if TYPE_CHECKING:
    from rich.table import Table

SUBCOMMANDS = ("fit", "validate", "test", "predict")
METRICS_FORMAT = ".5g"  # of the progress bar: Lightning's, .3f, shows an error of 1e-6 as 0.000
CONFIG_IN_CHECKPOINT, RECIPE_IN_CHECKPOINT = "recipe_config", "recipe"
LAST_CHECKPOINT = "last"
# Lightning finds these itself; "best" it knows in the process of the fit alone
WORDS_FOR_CHECKPOINTS = (LAST_CHECKPOINT, "hpc")
PARTS_OF_A_CONFIG = ("seed_everything", "trainer", "model", "data")


@dataclass(frozen=True)
class Results:
    """The results that the recipes of one kind of task show at the end of ``fit``, and what they write.

    Attributes:
        metrics: for each metric of a test run that is shown, its heading and its format.
        predictions: name of what ``predict`` writes.
        log_every_n_steps: few and long steps are all logged.
        gap: the metric whose difference between training and test set is shown, too.
    """

    metrics: Mapping[str, tuple[str, str]]
    predictions: str
    log_every_n_steps: int
    gap: str | None = None


AUTOENCODER_RESULTS = Results(
    {"test_loss": ("½‖x̂ - x‖²", "#.4g"), "test_squared_error": ("‖x̂ - x‖²", "#.4g")}, "reconstructions", 1
)
CLASSIFIER_RESULTS = Results(
    {"test_loss": ("loss", "#.4g"), "test_accuracy": ("accuracy", ".2%")}, "classes", log_every_n_steps=50
)
STRUCTURED_CLASSIFIER_RESULTS = replace(CLASSIFIER_RESULTS, gap="test_accuracy")
LANGUAGE_MODEL_RESULTS = Results(
    {"test_loss": ("nats", "#.4g"), "test_perplexity": ("perplexity", ".2f")}, "words", log_every_n_steps=50
)
PINN_RESULTS = Results(
    {"test_loss": ("Σ ½ mean r²", ".2e"), "relative_l2_error": ("relative L² error", ".2e")},
    "field",
    log_every_n_steps=10,
)


class RunConfigCallback(SaveConfigCallback):
    """Saves the config of a run beside its results and in its checkpoints: each says itself how to resume it."""

    def __init__(self, *arguments: Any, recipe: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recipe = recipe

    @cached_property
    def text(self) -> str:
        """The config as YAML."""
        return self.parser.dump(self.config, skip_none=False)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {CONFIG_IN_CHECKPOINT: self.text, RECIPE_IN_CHECKPOINT: self.recipe}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the best scores for a resumed run: Lightning drops them where the folder of checkpoints is another.

        Raises:
            MisconfigurationException: for a fit with another optimizer than that of the checkpoint.
        """
        if trainer.state.fn != "fit":
            return
        if (text := checkpoint.get(CONFIG_IN_CHECKPOINT)) is not None:
            compare_optimizers(yaml.safe_load(text), yaml.safe_load(self.text))
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state:
                keep_what_is_there(state, callback)


class RecipeCLI(LightningCLI):
    """LightningCLI that says at the end of ``fit`` what was reached and where the results are.

    A checkpoint brings the config of its run, unless ``--config`` names another one; options of the command line win
    over both. LightningCLI instead puts the hyperparameters of the checkpoint, which lack what makes optimizers and
    schedulers, over the config: a resumed run would have others.

    Args:
        arguments: of LightningCLI.
        recipe: whose configs can be named.
        results: of its kind of task.
        links: arguments of the model by the attributes of the data module that they are taken from.
        parsed: subcommands that get a parser. Each parser takes a good part of the time until a run begins.
        options: of LightningCLI.
    """

    def __init__(
        self,
        *arguments: Any,
        recipe: str,
        results: Results,
        links: Mapping[str, str],
        parsed: Sequence[str] = SUBCOMMANDS,
        **options: Any,
    ) -> None:
        self.recipe = recipe
        self.results = results
        self.links = links
        self._parsed = parsed
        self._fit_began: float | None = None
        try:
            super().__init__(*arguments, **options)
        except (KeyboardInterrupt, SystemExit, OSError):
            if self._fit_began is not None:
                self._say_how_to_resume()
            raise
        except ValueError as error:
            _raise_what_a_class_has_said(error)
            raise
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise MisconfigurationException(
                f"The weights of {self._checkpoint} do not fit the model that was configured. Leave out --config and "
                f"the options of the model, if there are any: the checkpoint brings its own.\n{error}"
            ) from error

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static there, called of the object
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in self._parsed}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        from lightning_struct.recipes.parser import ConfigByName, RecipeParser  # they need jsonargparse

        versions = [f"lightning_struct=={__version__}", f"lightning.pytorch=={L.__version__}"]
        parser = RecipeParser(recipe=self.recipe, model_class=self.model_class, dump_header=versions, **kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=ConfigByName,
            help="Path of a YAML file, or name of a config of this recipe (lightning-struct RECIPE lists them), or "
            "RECIPE/NAME for one of another recipe.",
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for source, target in self.links.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        options = self.config[self.config.subcommand]
        # LightningCLI now would put the hyperparameters of the checkpoint over the config: it sees none.
        self._checkpoint, options.ckpt_path = options.ckpt_path, None

    def before_instantiate_classes(self) -> None:
        self.config[self.subcommand].ckpt_path = self._checkpoint
        self._check_checkpoint()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.subcommand in ("validate", "test"):  # they print what they measure and need no folder
            self.save_config_callback = None
            if self._logger_is_the_default():
                kwargs.setdefault("logger", False)
        elif self.config[self.subcommand].trainer.logger is False:
            kwargs.setdefault("default_root_dir", self._folder_without_logger())
        trainer = super().instantiate_trainer(**kwargs)
        # Lightning looks into the folders of this run, which has none yet, and goes on with untrained weights
        named = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
        if self._checkpoint == LAST_CHECKPOINT and not named:
            self._refuse_missing(LAST_CHECKPOINT)
        if self.subcommand == "fit" and trainer.checkpoint_callbacks:
            trainer.callbacks.append(LastCheckpoint())  # type: ignore[attr-defined]
        bar = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and bar.theme.metrics_format == RichProgressBarTheme.metrics_format:
            bar.theme = replace(bar.theme, metrics_format=METRICS_FORMAT)
        return trainer

    def _folder_without_logger(self) -> str:
        """A folder that is not there yet, as a logger makes one: ``version_0``, ``version_1`` and so on.

        It is in the folder that was named for what is written without a logger, else where the recipe logs.
        """
        named = self.config[self.subcommand].trainer.default_root_dir
        if "://" in str(named):  # where folders cannot be listed in this way
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
        console.print(f"time of this fit {seconds:.1f} s, to step {self.trainer.global_step}")
        console.print(f"best checkpoint  {best or 'none was kept'}", markup=False)
        if not best and (last := self._newest_checkpoint()):
            console.print(f"last checkpoint  {last}", markup=False)
        for picture in sorted(self._log_dir.glob("*.png")):
            console.print(f"picture          {picture}", markup=False)
        console.print(f"log              {self._log_dir}", markup=False)

    def _final_errors(self, checkpoint: str) -> dict[str, Mapping[str, float]]:
        """Errors over each of the three sets; the last one, of the test set, also goes to the log."""
        self.datamodule.setup("test")  # where processes were spawned for the fit, this one has no data yet
        errors, loggers, ckpt_path = {}, self.trainer.loggers, checkpoint or None
        for part in ("train", "val", "test"):
            self.trainer.loggers = loggers if part == "test" else []
            loader = self.datamodule.evaluation_dataloader(part)
            (errors[part],) = self.trainer.test(self.model, loader, ckpt_path=ckpt_path, verbose=False)
            ckpt_path = None  # its weights stay in the model
        return errors

    def _check_checkpoint(self) -> None:
        """Refuse a checkpoint that is not there, before any data are read."""
        path = self._checkpoint
        if path is None or path in WORDS_FOR_CHECKPOINTS or "://" in path or path.startswith("registry"):
            return
        if not Path(path).exists():
            self._refuse_missing(path)
        if Path(path).is_file() and not is_zipfile(path):
            raise MisconfigurationException(f"{path} is no complete checkpoint: name another one.")

    def _refuse_missing(self, path: str) -> NoReturn:
        there = sorted(Path("results", self.recipe).glob("version_*/checkpoints/*.ckpt"), key=os.path.getmtime)
        sentences = [
            f"There is no checkpoint {path}.",
            did_you_mean(path, map(str, there)),
            f"The newest here is {there[-1]}." if there else "",
        ]
        raise MisconfigurationException(" ".join(filter(None, sentences)))

    def _newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint in the folders of this run."""
        folders = {str(getattr(callback, "dirpath", None)) for callback in self.trainer.checkpoint_callbacks}
        written = [path for folder in folders for path in Path(folder).glob("*.ckpt") if is_zipfile(path)]
        return max(written, key=lambda path: path.stat().st_mtime, default=None)

    def _say_how_to_resume(self) -> None:
        """Tell where the results of an unfinished fit are, and the command that goes on with it."""
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        newest = self._newest_checkpoint() or self._checkpoint
        print(f"\nresults so far   {self._log_dir}", file=sys.stderr)
        if newest is None:
            print("No checkpoint was written yet: start again to train.", file=sys.stderr)
        else:
            command = f"python -m lightning_struct.recipes.{self.recipe} fit --ckpt_path {shlex.quote(str(newest))}"
            print(f"to resume        {command}", file=sys.stderr)


def _raise_what_a_class_has_said(error: ValueError) -> None:
    """Raise what a model, a data module or a callback has said of its arguments, or what a package lacks.

    Where an argument may be of several types, as ``Optional[Classifier]``, jsonargparse makes a long error of all of
    them: what the class has raised is a cause of it.
    """
    of_arguments = _raised_by(error, "jsonargparse.")
    cause: BaseException | None = error
    while cause is not None:
        said = isinstance(cause, MisconfigurationException | ImportError)
        if said or (of_arguments and _raised_by(cause, "lightning_struct.")):
            raise MisconfigurationException(str(cause)) from cause
        cause = cause.__cause__


def _raised_by(error: BaseException, package: str) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals["__name__"].startswith(package)


def _configure_optimizers(model: L.LightningModule) -> Any:
    """What the model's own method returns; what an optimizer or a scheduler says of its arguments is no defect.

    It stands in for the method in a fit, and goes with the model into other processes.
    """
    try:
        return type(model).configure_optimizers(model)
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


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
        name: of the recipe, one of ``RECIPES``: its configs are in ``recipes/NAME``, its results in ``results/NAME``.
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

    Raises:
        MisconfigurationException: if the extra ``recipes`` is not installed, or there is no such checkpoint.
    """
    for package in ("jsonargparse", "rich"):
        require(package, "The command line of a recipe")
    given = _config_first(_with_home(sys.argv[1:] if args is None else args))
    program = f"python -m lightning_struct.recipes.{name}"
    parsed = given[:1] if given and given[0] in SUBCOMMANDS else SUBCOMMANDS
    with ExitStack() as stack:
        stack.enter_context(noise_filtered())
        stack.enter_context(denormals_flushed())  # saturated units and long sequences have subnormal derivatives
        defaults = _default_configs(name, given, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        parsers = {
            subcommand: {
                "default_config_files": defaults,
                "usage": f"{program} {subcommand} [--config CONFIG] [--KEY=VALUE ...]",
                "allow_abbrev": False,
            }
            for subcommand in parsed
        }
        return RecipeCLI(
            model_class,
            data_class,
            recipe=name,
            results=results,
            links=links or {},
            parsed=parsed,
            args=given,
            subclass_mode_model=True,
            subclass_mode_data=subclass_mode_data,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=RunConfigCallback,
            save_config_kwargs={"overwrite": True, "recipe": name},
            parser_kwargs={
                "prog": program,
                "description": f"{RECIPES[name].trains}. Its configs are listed by: lightning-struct {name}",
                "allow_abbrev": False,
                **parsers,
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


def config_of_checkpoint(path: str | Path, recipe: str) -> dict[str, Any] | None:
    """The config of the run of a recipe that wrote a checkpoint, None if there is none in it.

    Raises:
        MisconfigurationException: if it is an archive of something else, or a checkpoint of another recipe.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:  # not written by a recipe: it has objects of others
        return None
    except RuntimeError as error:
        raise MisconfigurationException(f"{path} is no checkpoint: name another file. ({error})") from error
    written_by = checkpoint.get(RECIPE_IN_CHECKPOINT, recipe)  # version 0.2 does not say
    if written_by != recipe:
        raise MisconfigurationException(
            f"{path} is a checkpoint of the recipe {written_by}, not of {recipe}: run lightning-struct {written_by}, "
            "or say by --config which model its weights are to go into"
        )
    text = checkpoint.get(CONFIG_IN_CHECKPOINT)
    if text is None:
        return None
    return {key: value for key, value in yaml.safe_load(text).items() if key in PARTS_OF_A_CONFIG}


def _with_home(arguments: Sequence[str]) -> list[str]:
    """The arguments with the home directory in ``--KEY=~/PATH``, where a shell leaves the ``~`` as it is."""
    home = os.path.expanduser("~/")
    return [argument.replace("=~/", f"={home}", 1) for argument in arguments]


def _config_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--config`` directly behind the subcommand: options win over it wherever they stand."""
    if not arguments or arguments[0] not in SUBCOMMANDS:
        return list(arguments)
    configs: list[str] = []
    options: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in ("-c", "--config"):
            configs += [argument, *islice(rest, 1)]
        else:
            (configs if argument.startswith(("-c", "--config=")) else options).append(argument)
    return [arguments[0], *configs, *options]


def _default_configs(name: str, arguments: Sequence[str], folder: Path) -> list[str]:
    """The config to be read if none is named: that of the checkpoint if there is one, else that of the recipe."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("-c", "--config")
    options.add_argument("--ckpt_path")
    named, _ = options.parse_known_args(arguments)
    if named.config is not None:
        return []
    config = config_of_checkpoint(named.ckpt_path, name) if named.ckpt_path and is_zipfile(named.ckpt_path) else None
    if config is None:
        return [str(default_config(name))]
    file = folder / "config_of_checkpoint.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [str(file)]


def _table(title: str, results: Results, values: dict[str, Mapping[str, float]]) -> "Table":
    from rich.table import Table

    # an equation whose solution is not known has no error
    columns = {name: column for name, column in results.metrics.items() if name in values["test"]}
    table = Table("", *(heading for heading, _ in columns.values()), title=title, title_justify="left")
    for part, label in (("train", "training"), ("val", "validation"), ("test", "test")):
        table.add_row(label, *(format(values[part][name], form) for name, (_, form) in columns.items()))
    return table
