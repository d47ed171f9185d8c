"""Stopping on the validation merit, with the best weights put back."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_struct.optim.shf import SHF
from lightning_struct.utilities.strategies import refuse_sharded_weights


class ValidationMeritStopping(L.Callback):
    """Ends training when a monitored value has not improved for a while, and puts the best weights back. ::

        Trainer(callbacks=[ValidationMeritStopping(monitor="val_loss", patience=20)])

    At the end of each validation it compares ``monitor`` with the best value so far and keeps a copy of the best weights
    and buffers on the CPU. When ``fit`` ends, for whatever reason but an exception, the module has the best weights. That
    is after the last checkpoint is written, which holds the last weights, so that training can be resumed from it.

    With an SHF optimizer it also supplies the merit that ends LSMR (equation 20): the loss on the validation data, of
    which each process evaluates a share of its own. The data is kept on the device.

    Args:
        monitor: name of a metric that the module logs in validation.
        patience: validations without improvement after which training ends.
        restore_best: put the best weights back at the end.
        mode: ``"min"`` or ``"max"``: what is better.
        min_delta: improvements up to this count as none.
        merit_samples: validation samples that the merit is evaluated on, a fixed random choice; all if None.

    Raises:
        MisconfigurationException: an argument out of range; a strategy that shards the weights; a monitor that was not
            logged, or is NaN; with SHF, no validation data.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 20,
        restore_best: bool = True,
        mode: str = "min",
        min_delta: float = 0.0,
        merit_samples: int | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"mode must be 'min' or 'max', but is {mode!r}")
        if patience < 1 or min_delta < 0 or (merit_samples is not None and merit_samples < 1):
            raise MisconfigurationException(
                f"patience and merit_samples must be at least 1 and min_delta at least 0, but are {patience}, "
                f"{merit_samples} and {min_delta}"
            )
        self.monitor, self.patience, self.restore_best = monitor, patience, restore_best
        self.mode, self.min_delta, self.merit_samples = mode, min_delta, merit_samples
        self.best_value: float | None = None
        self.best_step = 0
        self.wait = 0
        self._best_weights: dict[str, Tensor] | None = None

    @property
    def state_key(self) -> str:
        """One state for each monitor and mode."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.restore_best:
            refuse_sharded_weights(trainer, "ValidationMeritStopping(restore_best=True)")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizers = _shf_optimizers(trainer)
        if optimizers:
            batches = self._merit_batches(trainer, pl_module)
            for optimizer in optimizers:
                optimizer.set_validation(batches)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = self._monitored(trainer)
        sign = 1.0 if self.mode == "min" else -1.0
        if self.best_value is None or sign * value < sign * self.best_value - self.min_delta:
            self.best_value, self.best_step, self.wait = value, trainer.global_step, 0
            if self.restore_best:
                self._best_weights = {k: v.detach().cpu().clone() for k, v in pl_module.state_dict().items()}
            return
        self.wait += 1
        if trainer.strategy.reduce_boolean_decision(self.wait >= self.patience, all=False):
            trainer.should_stop = True
            rank_zero_info(
                f"{self.monitor} has not improved on {self.best_value:.6g} (step {self.best_step}) for {self.wait} "
                "validations: training ends."
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._best_weights is not None:
            pl_module.load_state_dict(self._best_weights)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for optimizer in _shf_optimizers(trainer):
            optimizer.set_validation(None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_value": self.best_value,
            "best_step": self.best_step,
            "wait": self.wait,
            "best_weights": self._best_weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_value = state_dict["best_value"]
        self.best_step = state_dict["best_step"]
        self.wait = state_dict["wait"]
        self._best_weights = state_dict["best_weights"]

    def _monitored(self, trainer: L.Trainer) -> float:
        if self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise MisconfigurationException(
                f"ValidationMeritStopping monitors {self.monitor!r}, which was not logged; logged are: {logged}. "
                f"Log it in validation_step, or set monitor"
            )
        value = float(trainer.callback_metrics[self.monitor])
        if math.isnan(value):
            raise MisconfigurationException(
                f"{self.monitor} is NaN after step {trainer.global_step}: training has diverged"
            )
        return value

    def _merit_batches(self, trainer: L.Trainer, pl_module: L.LightningModule) -> list[tuple[Any, Tensor]]:
        loaders = trainer.val_dataloaders
        loaders = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
        batches = []
        for loader in loaders:
            if not isinstance(loader, DataLoader):
                raise MisconfigurationException(
                    "ValidationMeritStopping with SHF evaluates the loss on the validation data, but there is "
                    f"{'no validation loader' if loader is None else f'a {type(loader).__name__}'}: define "
                    "val_dataloader with a DataLoader (and leave limit_val_batches above 0), or take the callback away"
                )
            for batch in self._share(trainer, loader):
                batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
                batches.append(pl_module.inputs_and_targets(batch))  # type: ignore[operator]
        return batches

    def _share(self, trainer: L.Trainer, loader: DataLoader) -> DataLoader:
        """This process's part of the data set, without the doubles by which Lightning's sampler evens out the parts."""
        if loader.batch_size is None:
            return loader
        samples = len(loader.dataset)  # type: ignore[arg-type]
        chosen = torch.arange(samples)
        if self.merit_samples is not None:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randperm(samples, generator=generator)[: self.merit_samples].sort().values
        mine = chosen.tensor_split(trainer.world_size)[trainer.global_rank].tolist()
        return DataLoader(Subset(loader.dataset, mine), batch_size=loader.batch_size, collate_fn=loader.collate_fn)


def _shf_optimizers(trainer: L.Trainer) -> list[SHF]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SHF)]
