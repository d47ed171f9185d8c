"""Steps of SHF for the squared error (``loss="mse"``): with few outputs on a batch that stays by the exact solver."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import rank
from lightning_struct.functional.jacobian.losses import SquaredError
from lightning_struct.functional.randomness import random_state
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.optim.shf.outputs.objective import Objective
from lightning_struct.optim.shf.outputs.steps import OutputSteps
from lightning_struct.optim.shf.residuals.model import ResidualModel
from lightning_struct.optim.shf.residuals.steps import ResidualSteps
from lightning_struct.optim.shf.samples import BatchShare, FlatWeights
from lightning_struct.optim.shf.settings import LevenbergMarquardt, NextBatch, Settings, WarmStart
from lightning_struct.optim.shf.step_state import StepState
from lightning_struct.optim.shf.steps import Steps

_log = logging.getLogger(__name__)
# A batch is that of the last step if its loss is the one after that step, but for a share and for rounding: the root of
# the loss by so many units of the largest one in the last place.
_SAME, _ROUNDING = 1e-5, 100


class RegressionSteps(OutputSteps):
    """Steps for the squared error: those of residuals, outputs - targets, if the batch stays and the sizes allow it.

    Fresh batches need steps that do not fit each of them as well as possible. So the first two steps are those of
    outputs. If the second one begins at the loss at which the first has ended, the batch stays, and the exact solver
    with corrections takes over. The first batch that differs ends that for good.

    Args:
        module, given, named: as for :class:`OutputSteps`.
        asked: whether ``solver="exact"`` asks for the exact solver, whatever the batches are.

    Raises:
        ValueError: a setting that has no meaning beside ``solver="exact"``.
    """

    def __init__(self, module: nn.Module, given: Settings, named: Mapping[str, nn.Parameter], *, asked: bool) -> None:
        outputs = replace(given, damping=NextBatch(), solver=None, preconditioner=None) if asked else given
        super().__init__(module, SquaredError(), outputs, named)
        chosen = replace(given, damping=LevenbergMarquardt(), warm_start=WarmStart(growth=1.0))
        self._asked, given = asked, given if asked else chosen
        self._exact = ResidualSteps(_Errors(module), LeastSquares(), given, stops_at_noise=not asked)
        if asked:
            self.settings = self._exact.settings

    def linearize(self, now: StepState, inputs: Any, targets: Tensor | None) -> Any:
        self._check_batch(inputs, targets)
        if type(self.loss) is not SquaredError:  # set since; with solver="exact" an error
            self.settings = self.settings.for_outputs()
        elif self._asked or now.memory.decisions.exact:
            exact = self._exact_model(now, inputs, targets)
            if exact is not None:
                return exact
        model = super().linearize(now, inputs, targets)
        if now.memory.decisions.exact is None and self._is_last_batch(now, model.value):
            now.memory = replace(now.memory, decisions=replace(now.memory.decisions, exact=True))
        return model

    def of(self, model: Any) -> Steps:
        return self._exact if isinstance(model, ResidualModel) else self

    def _exact_model(self, now: StepState, inputs: Any, targets: Any) -> ResidualModel | None:
        """The model of the exact solver; None, and a decision for good, if the batch is another or has no rows of J."""
        share = BatchShare.of_batch(inputs, targets, now.group["params"][0].device)
        weights = {f"module.{name}": weight for name, weight in now.weights.items()}
        batch = self._exact.residuals(now, (share.args, targets), weights)
        stays = self._asked or (self._is_last_batch(now, batch.value) and self._exact.is_exact_cheap(batch))
        if stays:
            if now.memory.blocks is None and not self._asked:
                now.group["damping"] = None
            model = self._exact.linearized(now, batch, self._exact.method(batch) if self._asked else "exact")
            own, state = FlatWeights(now.weights), random_state(*share.args)
            model.objective = Objective(self.module, self.loss, own, share, state, self.settings)
            return model
        if rank() == 0:
            _log.info("SHF goes on by solver='cg': the batch has changed, or J takes too much time or memory")
        decisions = replace(now.memory.decisions, exact=False)
        now.memory = replace(now.memory, direction=None, decisions=decisions)
        if now.memory.first_damping is not None:
            now.damping = now.memory.first_damping
        return None

    def _is_last_batch(self, now: StepState, value: float) -> bool:
        """Whether a loss is the one after the last step, so that the batch is that of the last step."""
        like, last = now.group["params"][0], now.memory.last_loss
        is_else = type(self.loss) is not SquaredError or now.group["drop"] is None
        if last is None or is_else or torch.is_autocast_enabled(like.device.type):
            return False
        rounding = _ROUNDING * torch.finfo(like.dtype).eps * math.sqrt(now.memory.first_loss or last)
        return abs(math.sqrt(value) - math.sqrt(last)) <= _SAME * math.sqrt(last) + rounding


class _Errors(nn.Module):
    """The residuals of a module under the squared error: its outputs less the targets."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Any, ...], targets: Tensor) -> Tensor:
        return SquaredError().residual(self.module(*args), targets)
