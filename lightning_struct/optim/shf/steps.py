"""Parts of a step that SHF takes alike on outputs and on residuals."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_struct.collective import rank
from lightning_struct.functional.randomness import seeded
from lightning_struct.optim.shf.diagnostics import Diagnostics
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.settings import Settings
from lightning_struct.optim.shf.step_state import BufferUpdates, StepState


@dataclass(frozen=True)
class Update:
    """The update w <- w + s d of one step.

    Attributes:
        change: s d, flat; None if the weights stay.
        direction: d of the solver, from which the next solve starts; None if the weights stay.
        step_length: s; 0 if the weights stay.
        loss: f at the new weights.
        reduction_ratio: ρ; 0 if the weights stay.
        damping: λ that d was computed with; if the weights stay, λ from which the next step goes on.
        iterations: iterations of all solves together.
        stop_reason: why the last solver stopped, or ``"line_search"`` or ``"zero_gradient"`` if the weights stay.
        merits: (iteration, φ) as evaluated during the solve.
        last_merit: φ(s d), if the solve has evaluated it.
        convergence: see :class:`StepReport`.
        damping_factor: see :class:`Decisions`.
    """

    loss: float
    damping: float
    stop_reason: str
    iterations: int = 0
    change: Tensor | None = None
    direction: Tensor | None = None
    step_length: float = 0.0
    reduction_ratio: float = 0.0
    merits: tuple[tuple[int, float], ...] = ()
    last_merit: float | None = None
    convergence: Mapping[str, float] = field(default_factory=dict)
    damping_factor: float = 2.0


class Steps(ABC):
    """The lines of Algorithm 1 (see :meth:`SHF.step`) for one kind of loss.

    Args:
        module: the network.
        loss: as given.
        settings: with values for all omitted ones.
        exact_variance: see SHF.

    Attributes:
        module, loss, settings, exact_variance: these.
        buffers: the forward that updates the module's buffers.
        diagnostics: the warnings.
    """

    def __init__(self, module: nn.Module, loss: Any, settings: Settings, exact_variance: bool) -> None:
        self.module, self.loss, self.settings, self.exact_variance = module, loss, settings, exact_variance
        self.buffers, self.diagnostics = BufferUpdates(module), Diagnostics(module)

    @abstractmethod
    def linearize(self, now: StepState, inputs: Any, targets: Tensor | None) -> Any:
        """The model of a batch at the current weights.

        Raises:
            TypeError: inputs or targets are missing, or not those that the module takes.
        """

    def of(self, model: Any) -> Steps:
        """The steps that a model is for: these, or others that they have made it by."""
        return self

    @abstractmethod
    def choose_damping(self, now: StepState, model: Any) -> None:
        """Choose λ₁ and its bounds by the first batch."""

    def adapt_to_next_batch(self, now: StepState, model: Any) -> bool:
        """Adapt σ and λ to how much of the last step's gain this batch shows; return whether that step did harm."""
        return False

    def take_back(self, now: StepState, model: Any) -> None:
        """Move the weights back to those of before the last step, from which no solve starts then."""
        change = now.memory.change
        assert change is not None
        model.weights.add_(-change.to(model.gradient))
        now.memory = replace(now.memory, change=None, direction=None)

    @abstractmethod
    def solver(self, now: StepState, model: Any) -> Any:
        """The solver of the model: its preconditioner, or its factors."""

    @abstractmethod
    def search(self, now: StepState, model: Any, solver: Any) -> Update:
        """The direction, its step length and its reduction ratio."""

    @abstractmethod
    def adapt(self, now: StepState, model: Any, solver: Any, update: Update) -> None:
        """Set λ, γ and the memory for the next step."""

    def move(self, model: Any, update: Update) -> None:
        """Change the weights, after the one forward that updates buffers."""
        if self.buffers.are_needed():
            model.write_buffers(self.buffers)
        if update.change is not None:
            model.weights.add_(update.change)

    def report(self, now: StepState, model: Any, update: Update) -> StepReport:
        """The report of a step, with n̂ of the norm test."""
        return StepReport(
            loss_before=model.value,
            loss_after=update.loss,
            reduction_ratio=update.reduction_ratio,
            step_length=update.step_length,
            damping=update.damping,
            solver_iterations=update.iterations,
            stop_reason=update.stop_reason,
            merits=update.merits,
            merit=None,
            gradient_norm=math.sqrt(model.gradient_squared),
            gradient_variance=model.variance,
            batch_size=model.samples,
            predicted_batch_size=self.settings.predicted_batch_size(model.variance, model.gradient_squared),
            seconds=now.timed.seconds,
            block_losses=model.block_losses,
            step_scale=now.memory.step_scale,
            next_batch_ratio=now.memory.ratio,
            convergence=update.convergence,
        )

    @contextmanager
    def _network_draws(self, now: StepState) -> Iterator[None]:
        """Within, the network draws (as for dropout) by the seed of this step."""
        with seeded(now.seed(f"network on rank {rank()}"), now.group["params"][0].device):
            yield
