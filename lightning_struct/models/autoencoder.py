"""Deep autoencoders of flat images, trained by any optimizer or by SHF."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_struct.functional.checks import check_types
from lightning_struct.mixins.shf import SHFOptimization
from lightning_struct.models.training import Task, check_train_loss
from lightning_struct.nn.baselines import sparse_normal_
from lightning_struct.optim.shf import SHF
from lightning_struct.utilities.namespaces import MisconfigurationException


def logistic_layers(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers between consecutive sizes, each followed by a logistic activation.

    Example:
        >>> logistic_layers([4, 3, 2])
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): Sigmoid()
          (2): Linear(in_features=3, out_features=2, bias=True)
          (3): Sigmoid()
        )
    """
    return nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Sigmoid())))


class Autoencoder(Task):
    """A symmetric autoencoder with logistic activations in every layer, code and output included (section 6).

    The loss of a sample is f = ½‖x̂ - x‖², summed over pixels; batches and epochs are averages over samples. It logs
    ``train_loss``, ``val_loss`` and ``test_loss`` in this unit, the one of the paper's Table 2, and
    ``val_squared_error`` and ``test_squared_error``, ‖x̂ - x‖², twice as large.

    For example::

        Trainer().fit(Autoencoder([784, 400, 200, 100, 50, 25, 6]), datamodule=CurvesDataModule(draws="epoch"))

    Args:
        layer_sizes: of the encoder, from the pixels to the code; the decoder is its mirror image.
        sparse_connections: nonzero incoming weights of each unit at the start, m_0 of equation (9), all biases 0; None
            keeps torch's own initialisation.
        sparse_std: standard deviation of these weights, sigma of equation (9).
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``.

    Raises:
        MisconfigurationException: if ``layer_sizes`` has fewer than two sizes, or one that is not positive; in a
            step, if the images are not flat, or it begins with another number of pixels than they have.

    Example:
        >>> Autoencoder([784, 30, 6])(torch.zeros(5, 784)).shape
        torch.Size([5, 784])
    """

    def __init__(
        self,
        layer_sizes: Sequence[int],
        sparse_connections: int | None = None,
        sparse_std: float = 1.5,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        check_types(Autoencoder.__init__, locals())
        if len(layer_sizes) < 2 or min(layer_sizes) < 1:
            raise MisconfigurationException(
                f"layer_sizes must name the pixels, the code and the layers between, all positive, but is {layer_sizes}"
            )
        # makers of optimizers need not be picklable; a checkpoint has the optimizer's state anyway
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.encoder = logistic_layers(layer_sizes)
        self.decoder = logistic_layers(layer_sizes[::-1])
        if sparse_connections is not None:
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    sparse_normal_(layer.weight, sparse_connections, sparse_std)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Reconstructions of ``images``: both (n, pixels), values in [0, 1]."""
        return self.decoder(self.encoder(images))

    def inputs_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The images of a batch, twice. ``batch`` is a tensor (n, pixels) or a sequence that begins with it."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        pixels = self.hparams["layer_sizes"][0]
        if images.dim() != 2:
            raise MisconfigurationException(
                f"The batch is {tuple(images.shape)}, but images must be flat, (n, pixels), as by images.flatten(1)"
            )
        if images.shape[-1] != pixels:
            raise MisconfigurationException(
                f"The images have {images.shape[-1]} pixels, but layer_sizes begins with {pixels}: "
                f"begin it with {images.shape[-1]}"
            )
        return images, images

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, samples = self._loss_and_samples(batch)
        check_train_loss(self, loss, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=samples, sync_dist=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Reconstructions, (n, pixels)."""
        return self(self.inputs_and_targets(batch)[0])

    def _loss_and_samples(self, batch: Any) -> tuple[Tensor, int]:
        images, targets = self.inputs_and_targets(batch)
        return 0.5 * nn.functional.mse_loss(self(images), targets, reduction="sum") / len(images), len(images)

    def evaluate(self, batch: Any, batch_idx: int, stage: str) -> None:
        loss, samples = self._loss_and_samples(batch)
        values = {f"{stage}_loss": loss, f"{stage}_squared_error": 2 * loss}
        self.log_dict(values, prog_bar=True, batch_size=samples, sync_dist=True)


def shf_with_usual_damping(module: nn.Module) -> SHF:
    """SHF for the squared error, with the damping that section 4.2 of the paper names as the usual start."""
    return SHF(module, "mse", damping=10.0)


class SHFAutoencoder(SHFOptimization, Autoencoder):
    """The autoencoder trained by SHF (Emirahmetoglu & Stewart).

    For example::

        model = SHFAutoencoder([784, 400, 200, 100, 50, 25, 6], sparse_connections=20)
        Trainer().fit(model, datamodule=CurvesDataModule())

    Args:
        layer_sizes: of the encoder, from the pixels to the code; the decoder is its mirror image.
        sparse_connections: nonzero incoming weights of each unit at the start, m_0 of equation (9), all biases 0; None
            keeps torch's own initialisation.
        sparse_std: standard deviation of these weights, sigma of equation (9).
        optimizer: makes the SHF from the module; by default with the paper's settings and λ₁ = 10.
            ``lambda module: SHF(module, "mse")`` chooses its settings instead.

    Raises:
        MisconfigurationException: if ``layer_sizes`` has fewer than two sizes, or one that is not positive; in a
            step, if the images are not flat, or it begins with another number of pixels than they have.

    Example:
        >>> model = SHFAutoencoder([784, 30, 6], sparse_connections=20)
        >>> model.encoder[0].weight.count_nonzero(dim=1).unique()  # inputs of each unit
        tensor([20])
    """

    def __init__(
        self,
        layer_sizes: Sequence[int],
        sparse_connections: int | None = None,
        sparse_std: float = 1.5,
        optimizer: Callable[[nn.Module], SHF] = shf_with_usual_damping,
    ) -> None:
        super().__init__(layer_sizes, sparse_connections, sparse_std)
        check_types(SHFAutoencoder.__init__, locals())
        self.make_shf = optimizer

    def configure_optimizers(self) -> SHF:
        return self.make_shf(self)
