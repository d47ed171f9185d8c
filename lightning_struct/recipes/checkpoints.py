"""Checkpoints of recipes: the one at the end of a fit, and the best one of a run that is resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.utilities.namespaces import MisconfigurationException


class LastCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` where a fit ends between the times at which the ModelCheckpoints before it write.

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
        writing = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_top_k and not callback.save_weights_only
        ]
        if writing and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            home = next((callback for callback in writing if callback.filename == "last"), writing[0])
            trainer.save_checkpoint(f"{home.dirpath}/last.ckpt")


def compare_optimizers(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare the optimizers of two configs, of a checkpoint and of the run that goes on from it.

    Settings of an optimizer are a part of its state, so those of the checkpoint stay: a warning names the others.

    Raises:
        MisconfigurationException: if they are of different classes.
    """
    (before, settings_before), (now, settings) = _optimizer(saved), _optimizer(present)
    if before != now:
        raise MisconfigurationException(
            f"The checkpoint has the state of {before}, from which {now} cannot go on: leave out what names another "
            "optimizer (--config, --model), or train anew, without --ckpt_path"
        )
    changed = [f"{name}={value}" for name, value in settings.items() if settings_before.get(name, value) != value]
    if changed:
        rank_zero_warn(
            f"The settings of {now} are a part of the state that the checkpoint has, and stay as they were: "
            f"{', '.join(changed)} may have no effect"
        )


def _optimizer(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of what makes the optimizer, a class or a function."""
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
