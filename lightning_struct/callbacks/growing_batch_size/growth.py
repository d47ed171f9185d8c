"""What GrowingBatchSize asks of a way to change the samples of an optimizer step."""

from typing import Any, Protocol

State = dict[str, Any]


class BatchGrowth(Protocol):
    """What sets the samples of an optimizer step, over all processes, loaders and accumulated batches together.

    The methods whose names begin with ``on_`` are called from the hooks of a callback that they are named after.
    """

    @property
    def batch_size(self) -> int:
        """Samples of the next step, as decided; those it has may be a few more, to be shared out evenly."""

    @property
    def dataset_size(self) -> int | None:
        """Samples of an epoch; None for a stream."""

    def expected_sizes(self) -> list[int]:
        """Samples that this process was to read of each loader for the batch under way; empty if that is not known."""

    def set_batch_size(self, batch_size: int) -> None:
        """Decide the samples of the next steps; what cannot be had at once comes as soon as it can."""

    def on_step(self, samples: int) -> None:
        """An optimizer step was taken on so many samples."""

    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self) -> None: ...

    def on_train_batch_end(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def state_dict(self) -> State:
        """What a resumed run needs; to be asked for in all processes."""

    def load_state_dict(self, state: State) -> None:
        """Go on as in the run that left the state; before Lightning prepares the loaders."""

    def restore(self) -> None:
        """Undo what was changed in the Trainer."""
