"""The interface of the estimators."""

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators.faults import LocalFaults
from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics


class GradientEstimator(Protocol):
    """A way to measure, while a Trainer runs, the noise of the gradients by which each optimizer steps.

    The methods are called in the order of a training batch: :meth:`begin_batch`, :meth:`before_backward` and
    :meth:`after_backward` for each backward pass that Lightning makes, :meth:`before_step` for each optimizer that
    steps, and :meth:`statistics` at the end of a batch in which one did.
    """

    name: str
    faults: LocalFaults

    @property
    def every_n_steps(self) -> int:
        """Optimizer steps from one measurement to the next."""

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        """Prepare for the batch that is about to be trained on.

        Args:
            batch: what ``training_step`` gets.
            expected_sizes: samples that were to be read of each loader.
            step: number of the optimizer step to be, the first one is 1.
        """

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None:
        """Take what is needed of the gradients by which ``optimizer`` is about to step, before they are clipped.

        Raises:
            GradientNotFinite: a gradient is NaN or infinite; the next step that is checked may be measured again.
            Unmeasurable: neither these gradients nor those of any other optimizer can be measured.
        """

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        """Statistics of the steps in the batch that ends, by the place of their optimizers in ``Trainer.optimizers``.

        Args:
            samples: number of samples of the steps, over all processes.
        """

    def pause(self) -> None:
        """Remove all hooks, and forget what is not saved, until the next :meth:`begin_batch`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
