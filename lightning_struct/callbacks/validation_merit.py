"""Stopping on the validation merit, with the best weights put back."""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_struct.callbacks.runs import Run
from lightning_struct.callbacks.validation import DueValidation, MonitoredValue, validation_batches
from lightning_struct.functional.checks import is_real
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.optim.shf import SHF
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check, check_counts, check_positive
from lightning_struct.utilities.distributed import compare_batches, refuse_sharded_weights
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException

BEST_WEIGHTS = "best_weights"  # key in the state of the callback


class ValidationMeritStopping(Callback):
    """Ends training when a monitored value has stopped improving, and puts the best weights back.

    After each validation it compares ``monitor`` (the mean over the processes) with the best value so far, and keeps a
    copy of the best weights and buffers on the CPU. These are the weights that were validated, even if another callback
    had put averaged ones in place for the validation. When training ends, by patience or for any other reason except an
    exception, the module gets the best ones back; if it has changed meanwhile, those that fit, with a warning. A
    value that is NaN or infinite ends training, too.

    Checkpoints written before hold the weights of their own step, so a run resumed from them continues as if it had not
    been stopped. ``Trainer.save_checkpoint`` after ``fit`` writes the best weights, and so does a
    ``ModelCheckpoint(save_last=True)`` that has not saved anything until then. The copy is part of the callback's
    state: a resumed run knows the earlier best weights. With another Trainer or module, as for the next fold of a
    cross-validation, the callback starts anew.

    With an :class:`~lightning_struct.optim.SHF` optimizer it also supplies the merit that ends LSMR (equation 20), the
    loss on the validation data. The data are read once when training starts, by the module's
    ``inputs_and_targets(batch)``, and kept on the device until the end of ``fit``. Each process keeps its own share, no
    sample twice; with ``Trainer(use_distributed_sampler=False)``, all of its own loader.

    Args:
        monitor: name of a metric that the module logs in validation. Validations that do not log it do not count, but
            the first one must.
        patience: number of validations without improvement after which training ends, at least 1.
        restore_best: put the best weights back at the end of training.
        mode: ``"min"`` or ``"max"``: which is better.
        min_delta: an improvement must be larger than this.
        merit_samples: number of validation samples for the merit, a fixed random choice; None: all.

    Attributes:
        best_value: best value of the monitored metric; None before the first validation.
        best_step: ``global_step`` of that value.
        wait: number of validations since then.

    Raises:
        MisconfigurationException: an argument is out of range; at the start of fit there is no validation, or no data
            for it, or the Trainer does not keep logged values, or the strategy shards the weights; with SHF the module
            has no ``inputs_and_targets``; after a validation the monitor is not logged, or in the
            first one not finite.

    Example:
        >>> from lightning import Trainer
        >>> callback = ValidationMeritStopping(monitor="val_loss", patience=20)
        >>> trainer = Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 20,
        restore_best: bool = True,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        merit_samples: int | None = None,
    ) -> None:
        check("monitor", monitor, isinstance(monitor, str) and monitor != "", "the name of a metric")
        check_counts(patience=patience)
        check("restore_best", restore_best, isinstance(restore_best, bool), "True or False")
        check("mode", mode, mode in ("min", "max"), "'min' or 'max'")
        check("min_delta", min_delta, is_real(min_delta) and min_delta >= 0, "a finite number >= 0")
        check_positive(merit_samples=merit_samples)
        self.monitor, self.patience, self.restore_best = monitor, patience, restore_best
        self.mode, self.min_delta, self.merit_samples = mode, min_delta, merit_samples
        self._begin()

    def _begin(self) -> None:
        self.best_value: float | None = None
        self.best_step = self.wait = 0
        self._best_weights: dict[str, Any] | None = None
        self._validated_weights: dict[str, Any] | None = None
        self._validation = DueValidation()
        self._monitored = MonitoredValue(self.monitor, "ValidationMeritStopping")
        self._run = Run()
        self._has_announced = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: one for each monitor and mode."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def improves(self, value: float) -> bool:
        """Whether a value is better than the best so far; override it for another rule."""
        if self.best_value is None:
            return True
        gain = self.best_value - value if self.mode == "min" else value - self.best_value
        return gain > self.min_delta

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            compare_batches(trainer)
            if self._run.begins_anew(trainer, pl_module):
                self._begin()
            self._has_announced = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_sharded_weights(trainer, "ValidationMeritStopping")
        if trainer.barebones:
            raise MisconfigurationException(
                f"ValidationMeritStopping compares {self.monitor!r}, and Trainer(barebones=True) keeps nothing that is "
                "logged: leave barebones or the callback out"
            )
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"ValidationMeritStopping compares {self.monitor!r} after each validation, but there is none: give a "
                "validation loader and a validation_step, with limit_val_batches above 0, or leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.num_val_batches and not any(trainer.num_val_batches):
            raise MisconfigurationException(
                "ValidationMeritStopping: the validation data has no samples, or with drop_last=True fewer than a "
                f"batch, so {self.monitor!r} is never logged: give it some, or leave the callback out"
            )
        self._give_merit(trainer, pl_module)
        self._run.on_train_start(pl_module)
        self._validation.on_train_start(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._validation.on_train_batch_end(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated_weights = None

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # the first batch and not the end: averaged weights are put in before the one and taken out before the other
        if self.restore_best and self._validated_weights is None and self._validation.counts(trainer):
            self._validated_weights = _copy_on_cpu(pl_module.state_dict())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        validated, self._validated_weights = self._validated_weights, None
        if not self._validation.on_validation_end(trainer):
            return
        value = self._monitored.logged(trainer, required=self.best_value is None)
        if value is None:  # only some validations log it
            return
        if not math.isfinite(value):
            problem = self._monitored.not_finite(trainer, value)
            rank_zero_warn(f"{problem}. Training ends; the best was {self.best_value:.6g} at step {self.best_step}")
            trainer.should_stop = True
            return
        if self.improves(value):
            self.best_value, self.best_step, self.wait = value, trainer.global_step, 0
            self._best_weights = validated
            return
        self.wait += 1
        if self.wait >= self.patience and not trainer.should_stop:  # min_epochs may let a stopped fit go on
            trainer.should_stop = True
            rank_zero_info(
                f"{self.monitor} has not improved on {self.best_value:.6g} (step {self.best_step}) in {self.wait} "
                "validations: training ends"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_back(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # once more: callbacks after this one may have put averaged weights in, or made a pruning permanent, and a
        # resumed run that has nothing left to train has no on_train_end
        missing = self._put_back(trainer, pl_module)
        if missing is not None:
            rank_zero_warn(
                f"ValidationMeritStopping puts back what fits of the best weights (step {self.best_step}). {missing}"
            )
        if self.best_value is None:
            rank_zero_warn(
                "ValidationMeritStopping has compared nothing, as the fit has ended before a validation that logs "
                f"{self.monitor!r}. Validate more often (check_val_every_n_epoch, val_check_interval)"
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for optimizer in _shf_optimizers(trainer):
            optimizer.set_validation(None)

    def state_dict(self) -> dict[str, Any]:
        best = {"best_value": self.best_value, "best_step": self.best_step, BEST_WEIGHTS: self._best_weights}
        return best | {"wait": self.wait, "validation": self._validation.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_value, self.best_step = state_dict["best_value"], state_dict["best_step"]
        self.wait, self._best_weights = state_dict["wait"], state_dict[BEST_WEIGHTS]
        self._validation.load_state_dict(state_dict["validation"])

    def _give_merit(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the optimizers that a merit ends the solves of the validation data."""
        if not (optimizers := _shf_optimizers(trainer)):
            return
        read = getattr(pl_module, "inputs_and_targets", None)
        if read is None:
            raise MisconfigurationException(
                f"ValidationMeritStopping gives SHF the validation loss, but {type(pl_module).__name__} has no method "
                "inputs_and_targets(self, batch), which SHFOptimization has: define it"
            )
        batches = [read(batch) for batch in validation_batches(trainer, self.merit_samples)]
        for optimizer in optimizers:
            try:
                optimizer.set_validation(batches)
            except ValueError as error:
                raise MisconfigurationException(f"ValidationMeritStopping: {error}") from error

    def _put_back(self, trainer: L.Trainer, pl_module: L.LightningModule) -> RuntimeError | None:
        """Put back the best weights that fit; returns the names of the others."""
        if not self.restore_best or self._best_weights is None:
            return None
        weights = _with_permanent_masks(self._best_weights, pl_module.state_dict())
        try:
            pl_module.load_state_dict(weights, strict=pl_module.strict_loading)
        except RuntimeError as error:
            return error
        if self.best_step != trainer.global_step and not self._has_announced:
            rank_zero_info(f"The weights of step {self.best_step} are put back: {self.monitor} = {self.best_value:.6g}")
        self._has_announced = True
        return None


def _with_permanent_masks(weights: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Weights from before the masks of ``torch.nn.utils.prune`` became permanent, as the module has them now."""
    masked = [name for name in present if name not in weights and {f"{name}_orig", f"{name}_mask"} <= weights.keys()]
    multiplied = {name: weights[f"{name}_orig"] * weights[f"{name}_mask"] for name in masked}
    replaced = {f"{name}_{part}" for name in masked for part in ("orig", "mask")}
    return {name: value for name, value in weights.items() if name not in replaced} | multiplied


def _copy_on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a module's ``state_dict``, tensors on the CPU; values that are no tensors are extra states."""
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _shf_optimizers(trainer: L.Trainer) -> list[SHF]:
    """The optimizers that a merit ends the solves of; those of residuals need none."""
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SHF)]
    return [optimizer for optimizer in found if not isinstance(optimizer.loss, LeastSquares)]
