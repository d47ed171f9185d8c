"""The only place that touches private fields of Lightning. Checked with Lightning 2.6.0 and 2.6.6."""

from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader


def validation_loaders(trainer: L.Trainer) -> list[Any]:
    """The validation loaders of a fit, as Lightning prepared them; none where it will not validate.

    ``Trainer.val_dataloaders`` is None until the first validation is due. The loop sets its loaders up here as it would
    then, once.
    """
    if not trainer.enable_validation:
        return []
    if trainer.val_dataloaders is None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def prepare_batch(trainer: L.Trainer, batch: Any) -> Any:
    """A batch of a loader as the steps get it: through the transfer hooks, on the device, in the precision of inputs."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def unwrapped_sampler(loader: DataLoader) -> Any:
    """The sampler of a loader, without the distributed one that Lightning may have put around it."""
    sampler = loader.sampler
    return sampler.dataset._sampler if isinstance(sampler, DistributedSamplerWrapper) else sampler  # type: ignore[attr-defined]


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation is due after the training batch that has just ended."""
    fit_loop = trainer.fit_loop
    assert fit_loop._data_fetcher is not None
    return fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)


def validate_now(trainer: L.Trainer) -> None:
    """Run the validation of a fit, from ``on_train_start``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True
