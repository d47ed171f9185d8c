"""The report of one step of SHF."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

_TOLERANCE = 1e-10


@dataclass(frozen=True)
class StepReport:
    """Report of one iteration of Algorithm 1. Losses are means over the batch of all processes.

    Attributes:
        loss_before: f at the old weights, without weights of conditions that have risen.
        loss_after: the same at the new weights, on the same batch.
        reduction_ratio: ρ of section 4.2; 0 if no step was taken.
        step_length: s of the line search; 0 if no step was taken.
        damping: λ that the accepted direction was computed with.
        solver_iterations: iterations of the solver, all tries together.
        stop_reason: why the solver stopped, or ``"line_search"``, ``"zero_gradient"`` or ``"noise"`` if no step was
            taken.
        merits: (solver iteration, validation value) as evaluated during the solve.
        merit: the validation value at the new weights; None without validation data.
        gradient_norm: ‖∇f‖ at the old weights.
        gradient_variance: ‖Var‖₁ of the per-sample gradients, or an estimate (:attr:`SHF.exact_variance`); None where
            samples are coupled by batch normalisation, and for a batch of one.
        batch_size: samples over all processes.
        predicted_batch_size: n̂ of the norm test; None if the variance is, or if the gradient is zero.
        block_losses: name -> ½ mean_i r²_{b,i} before the step, without its weight, if the module returns residuals
            (``loss="least_squares"``).
        block_weights: name -> w_b of the conditions whose weights have risen (:class:`LeastSquares`).
        step_scale: σ, the share of the solver's direction that was tried (damping by :class:`NextBatch`; else 1).
        next_batch_ratio: fall of the loss of the next batch over that of a step's own, averaged over the steps until
            the last; None if it is not measured yet.
        convergence: of the exact solver and of residuals, the relative gain that remained: ``"gtol"``, ‖Jᵀr‖ over
            ‖J‖ ‖r‖ before the step; ``"ftol"``, the larger of the fall of the loss and its prediction; ``"xtol"``, the
            length of the step over that of the weights. 0 under ``"precision"`` if no step lowers the loss, under
            ``"underflow"`` if the gradient is too small for its dtype, or under ``"noise"`` if steps would fit noise.
        seconds: wall time by phase (``"linearize"``, with the gradient; ``"precondition"``; ``"solve"``, with the merit
            evaluated in it; ``"line_search"``; ``"merit"``, after the step).

    Example:
        >>> import torch
        >>> from lightning_struct.optim import SHF
        >>> report = SHF(torch.nn.Linear(3, 1), "mse").step(inputs=torch.randn(8, 3), targets=torch.randn(8, 1))
        >>> report.batch_size, report.loss_after < report.loss_before
        (8, True)
    """

    loss_before: float
    loss_after: float
    reduction_ratio: float
    step_length: float
    damping: float
    solver_iterations: int
    stop_reason: str
    merits: tuple[tuple[int, float], ...]
    merit: float | None
    gradient_norm: float
    gradient_variance: float | None
    batch_size: int
    predicted_batch_size: int | None
    seconds: dict[str, float]
    block_losses: Mapping[str, float] = field(default_factory=dict)
    block_weights: Mapping[str, float] = field(default_factory=dict)
    step_scale: float = 1.0
    next_batch_ratio: float | None = None
    convergence: Mapping[str, float] = field(default_factory=dict)

    def reason_within(self, tolerance: float) -> str | None:
        """The first name in ``convergence`` whose number is within a tolerance, or None."""
        return next((name for name, size in self.convergence.items() if size <= tolerance), None)

    @property
    def reason(self) -> str | None:
        """Why a fit of this batch would end, within 1e-10: a name in ``convergence``, or None."""
        return self.reason_within(_TOLERANCE)

    @property
    def converged(self) -> bool:
        """Whether this batch is fitted to within 1e-10, or to the limit of the precision. Other batches may differ."""
        return self.reason not in (None, "underflow")


class PhaseTimer:
    """Wall time of one step by phase.

    Attributes:
        seconds: by name of the phase, in the order of their first entry.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent within to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
