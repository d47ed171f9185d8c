"""Counting the validations of a fit, each once, across a resume."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_struct.utilities.lightning_internals import validate_now, validation_follows


class DueValidation:
    """What a callback that counts validations remembers of them.

    A checkpoint can be written between a training batch and the validation that is due after it (by
    ``ModelCheckpoint(every_n_train_steps=...)``). Lightning passes over that validation when the run is resumed; here it
    is made up for, so that the resumed run is the uninterrupted one. Call the methods from the hooks they are named after.
    """

    def __init__(self) -> None:
        self._due = False
        self._last_batch: int | None = None

    def on_train_start(self, trainer: L.Trainer) -> None:
        """Run the validation that was due when the run was stopped."""
        if self._due:
            self._due = False
            validate_now(trainer)

    def on_train_batch_end(self, trainer: L.Trainer) -> None:
        self._due = validation_follows(trainer)

    def on_validation_end(self, trainer: L.Trainer) -> bool:
        """Whether this validation counts: see :meth:`counts`. From here on it has been counted."""
        if not self.counts(trainer):
            return False
        self._due, self._last_batch = False, trainer.fit_loop.total_batch_idx
        return True

    def counts(self, trainer: L.Trainer) -> bool:
        """Whether the validation that is running is one of a fit: not a sanity check, nor a second one after the same batch.

        Batches tell them apart, not steps: those of an optimizer that Lightning does not wrap are not counted.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        return fitting and trainer.fit_loop.total_batch_idx != self._last_batch

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "last_batch": self._last_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due, self._last_batch = state_dict["due"], state_dict["last_batch"]
