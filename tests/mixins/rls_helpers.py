"""How the tests train the small regression problem by RLS."""

import torch

from lightning_struct import RLS, RLSOptimization
from tests.mixins.helpers import Network


def squared_error(outputs, targets):
    return 0.5 * (outputs - targets).square().sum() / len(targets)


class AutomaticNetwork(Network):
    """Trained by RLS in automatic optimization, with nothing but ``configure_optimizers``."""

    def __init__(self, dtype=torch.float32, seed=0, scheduler=None, **options):
        super().__init__(dtype, seed)
        self.options, self.scheduler = options, scheduler

    def training_step(self, batch, batch_idx):
        loss = squared_error(self(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=len(batch[0]), sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = RLS(self, **self.options)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class ManualNetwork(RLSOptimization, AutomaticNetwork):
    """The same in manual optimization, with the loss of its base."""


class PaperNetwork(RLSOptimization, Network):
    """Without a training step of its own."""

    def configure_optimizers(self):
        return RLS(self, momentum=0.5)
