"""Checkpoints of recipes: which there are, the config that each has, and the run that goes on from one."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn
from zipfile import is_zipfile

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]  # a requirement of Lightning
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.functional.torch_tools import damaged_part
from lightning_struct.recipes.catalogue import did_you_mean
from lightning_struct.utilities.namespaces import MisconfigurationException

CONFIG_IN_CHECKPOINT, RECIPE_IN_CHECKPOINT = "recipe_config", "recipe"
PARTS_OF_A_CONFIG = ("seed_everything", "trainer", "model", "data")
LAST_CHECKPOINT = "last"
# Lightning finds these itself; "best" it knows in the process of the fit alone
WORDS_FOR_CHECKPOINTS = (LAST_CHECKPOINT, "hpc")


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and then moves it there: a full disk leaves the one before, and no part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = f"{path}.part"
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)


class LastCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` if a fit ends between the times at which the ModelCheckpoints before it write.

    They write after validations. At the end of the last epoch, not later: there Lightning can go on from a checkpoint
    exactly, and no best weights have been put back yet.
    """

    def __init__(self) -> None:
        self._saved_step: int | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved_step = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ends = trainer.should_stop or trainer.global_step == trainer.max_steps
        if not (ends or trainer.current_epoch + 1 == trainer.max_epochs) or self._saved_step == trainer.global_step:
            return
        writing = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        writing = [each for each in writing if each.save_top_k and not each.save_weights_only]
        if writing and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            home = next((callback for callback in writing if callback.filename == LAST_CHECKPOINT), writing[0])
            trainer.save_checkpoint(f"{home.dirpath}/{LAST_CHECKPOINT}.ckpt")


class RunConfigCallback(SaveConfigCallback):
    """Saves the config of a run beside its results and in its checkpoints: each says itself how to resume it."""

    def __init__(self, *arguments: Any, recipe: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recipe = recipe

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpointIO()

    @cached_property
    def text(self) -> str:
        """The config as YAML."""
        return self.parser.dump(self.config, skip_none=False)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {CONFIG_IN_CHECKPOINT: self.text, RECIPE_IN_CHECKPOINT: self.recipe}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the best scores for a resumed run: Lightning drops them if the folder of checkpoints is another.

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


def compare_optimizers(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare the optimizers of two configs, of a checkpoint and of the run that goes on from it.

    Settings of an optimizer are a part of its state, so those of the checkpoint stay: a warning names the others.

    Raises:
        MisconfigurationException: if they are of different classes.
    """
    (before, settings_before), (now, settings) = _optimizer(saved), _optimizer(present)
    if before != now:
        raise MisconfigurationException(
            f"The checkpoint has the state of {before}, from which {now} cannot go on: leave out options of another "
            "optimizer (--config, --model), or train anew, without --ckpt_path"
        )
    changed = [f"{name}={value}" for name, value in settings.items() if settings_before.get(name, value) != value]
    if changed:
        rank_zero_warn(f"The checkpoint has the settings of {now}, which stay: {', '.join(changed)} may have no effect")


def _optimizer(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the class or function that makes the optimizer."""
    made_by = config["model"].get("init_args", {}).get("optimizer")
    if not isinstance(made_by, Mapping):
        made_by = {"class_path": made_by}
    return str(made_by["class_path"]).rpartition(".")[-1], made_by.get("init_args", {})


def keep_what_is_there(state: dict[str, Any], callback: ModelCheckpoint) -> None:
    """Make the saved state of a ModelCheckpoint one of its present folder, with the files that have not been removed.

    Nor are they removed for better ones: Lightning removes files of the present folder only.
    """
    best, scores = state["best_model_path"], state.get("best_k_models", {})
    if best and not _exists(best):
        state["best_model_path"] = ""
        if callback.monitor is not None:
            rank_zero_warn(f"The best checkpoint so far, {best}, is not there any more: the best of the others counts.")
    there = sorted(filter(_exists, scores), key=scores.__getitem__, reverse=callback.mode == "max")
    kept = there[: callback.save_top_k] if callback.save_top_k >= 0 else there  # -1 keeps all
    if kept:
        state |= {
            "dirpath": callback.dirpath,
            "best_k_models": {path: scores[path] for path in kept},
            "best_model_path": kept[0],
            "best_model_score": scores[kept[0]],
            "kth_best_model_path": kept[-1],
            "kth_value": scores[kept[-1]],
        }


def _exists(path: str) -> bool:
    """Whether there is such a file; those of remote file systems are taken to be there."""
    return "://" in path or Path(path).exists()


def newest_checkpoint(trainer: L.Trainer) -> Path | None:
    """The newest complete checkpoint in the folders of a run."""
    folders = {str(getattr(callback, "dirpath", None)) for callback in trainer.checkpoint_callbacks}
    written = [path for folder in folders for path in Path(folder).glob("*.ckpt") if is_zipfile(path)]
    return max(written, key=lambda path: path.stat().st_mtime, default=None)


def check_checkpoint(path: str | None, recipe: str) -> None:
    """Refuse a checkpoint that is not there, before any data are read.

    Raises:
        MisconfigurationException: there is no such file, it is not complete or damaged, or it is no checkpoint.
    """
    if path is None or path in WORDS_FOR_CHECKPOINTS or "://" in path or path.startswith("registry"):
        return
    if not Path(path).exists():
        refuse_missing(path, recipe)
    if not Path(path).is_file():
        return
    if not is_zipfile(path):
        raise MisconfigurationException(f"{path} is no complete checkpoint: name another one.")
    if (damaged := damaged_part(path)) is not None:
        raise MisconfigurationException(f"{path} is damaged ({damaged}): name another checkpoint, or a copy of it.")
    checkpoint = _content(path)
    if checkpoint is not None and not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys():
        raise MisconfigurationException(
            f"{path} is no checkpoint of Lightning, as it has no state_dict and version: name a file that fit wrote."
        )


def refuse_missing(path: str, recipe: str) -> NoReturn:
    """Raise MisconfigurationException for a checkpoint that is not there; it names the newest one of the recipe."""
    there = sorted(Path("results", recipe).glob("version_*/checkpoints/*.ckpt"), key=os.path.getmtime)
    newest = f"The newest here is {there[-1]}." if there else ""
    raise MisconfigurationException(did_you_mean(path, map(str, there), f"There is no checkpoint {path}.", newest))


def config_of_checkpoint(path: str | Path, recipe: str) -> dict[str, Any] | None:
    """The config of the run of a recipe that wrote a checkpoint, None if there is none in it.

    Raises:
        MisconfigurationException: if it is an archive of something else, or a checkpoint of another recipe.
    """
    checkpoint = _content(path)
    if checkpoint is None:
        return None
    written_by = checkpoint.get(RECIPE_IN_CHECKPOINT, recipe)  # version 0.2 does not say
    if written_by != recipe:
        raise MisconfigurationException(
            f"{path} is of the recipe {written_by}, not of {recipe}: run lightning-struct {written_by}, or give "
            "--config"
        )
    text = checkpoint.get(CONFIG_IN_CHECKPOINT)
    return text and {key: value for key, value in yaml.safe_load(text).items() if key in PARTS_OF_A_CONFIG}


def _content(path: str | Path) -> dict[str, Any] | None:
    """The content of a checkpoint; None if it has objects of others, which no recipe writes.

    Raises:
        MisconfigurationException: if it is an archive of something else.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        return None
    except RuntimeError as error:
        raise MisconfigurationException(f"{path} is no checkpoint: name another file. ({error})") from error
    return checkpoint if isinstance(checkpoint, dict) else {}
