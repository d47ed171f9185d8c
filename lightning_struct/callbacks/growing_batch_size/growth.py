"""The interface of the ways to change the samples of an optimizer step."""

from typing import Any, Protocol

State = dict[str, Any]


class BatchGrowth(Protocol):
    """A way to set the samples of an optimizer step, over all processes, loaders and accumulated batches together.

    Methods whose names begin with ``on_train_`` are called from the callback hooks of the same names.
    """

    @property
    def batch_size(self) -> float:
        """Samples of the next step, as decided. It gets a whole number near that, the same on all processes."""

    @property
    def dataset_size(self) -> int | None:
        """Samples of an epoch; None for a stream."""

    @property
    def first_length(self) -> float:
        """Batches of an epoch of this process at their first size; infinite for a stream."""

    @property
    def relative_size(self) -> float | None:
        """Size of the batch under way over the first size; None where an epoch is a number of batches."""

    def expected_sizes(self) -> list[int]:
        """Samples that this process reads of each loader for the batch under way; empty if that is not known."""

    def set_batch_size(self, batch_size: float) -> None:
        """Set the samples of the next steps; they change as soon as they can, which may be some batches later."""

    def on_step(self, samples: int) -> None:
        """Take note of an optimizer step on so many samples."""

    def on_train_start(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self) -> None: ...

    def on_train_batch_end(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def state_dict(self) -> State:
        """State that a resumed run needs; a collective call of all processes."""

    def load_state_dict(self, state: State) -> None:
        """Continue the run that saved the state; call it before Lightning prepares the loaders."""

    def restore(self) -> None:
        """Undo what was changed in the Trainer."""
