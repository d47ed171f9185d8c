"""Inputs of an autoencoder beside their reconstructions, drawn at the end of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_struct.callbacks import pictures
from lightning_struct.functional.torch_tools import in_eval_mode
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check_counts, require
from lightning_struct.utilities.lightning_internals import prepare_batch, validation_loaders
from lightning_struct.utilities.namespaces import MisconfigurationException


def plot_reconstructions(
    images: Tensor, reconstructions: Tensor, image_size: tuple[int, int] | None = None
) -> tuple[pictures.Figure, np.ndarray]:
    """Draw images (upper row) above their reconstructions (lower row).

    Args:
        images: (n, pixels) or (n, 1, height, width), values in [0, 1].
        reconstructions: either shape, likewise.
        image_size: (height, width); None for square images.

    Returns:
        The figure, and its axes as an array (2, n).

    Raises:
        MisconfigurationException: if the images have several channels, or their pixels do not make one of
            ``image_size``, or those of images and reconstructions are not as many, or matplotlib is missing.

    Example:
        >>> images = torch.rand(3, 16)
        >>> figure, axes = plot_reconstructions(images, images / 2)
        >>> axes.shape
        (2, 3)
    """
    require("matplotlib", "A plot of reconstructions")
    from matplotlib.figure import Figure

    if images.dim() == 4 and images.shape[1] != 1:
        raise MisconfigurationException(
            f"Images of {images.shape[1]} channels cannot be drawn: give (n, pixels) or (n, 1, height, width)"
        )
    images, reconstructions = images.flatten(1), reconstructions.flatten(1)
    if images.shape != reconstructions.shape:
        raise MisconfigurationException(
            f"Images have {images.shape[1]} pixels, and their reconstructions {reconstructions.shape[1]}, not as many"
        )
    height, width = pictures.height_and_width(images.shape[1], image_size, "pixels")
    columns = len(images)
    figure = Figure(figsize=(columns, 2.3), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    for row, (name, values) in zip(axes, (("input", images), ("output", reconstructions)), strict=True):
        for cell, image in zip(row, values.float().cpu().view(-1, height, width).numpy(), strict=True):
            cell.imshow(image, cmap="gray", vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    return figure, axes


class ReconstructionPlot(pictures.PictureWriter):
    """Draws validation images above the reconstructions that the trained module makes of them, at the end of ``fit``.

    ``reconstructions.png`` is written to the log directory, by the first process, and not under ``fast_dev_run``. Put
    it after a callback that changes the weights at the end of ``fit``.

    The module must return reconstructions when it is called on images, both (n, pixels) or (n, 1, height, width); a
    module with ``inputs_and_targets(batch)`` says itself where the images are, else they are the batch or its first
    element. The first validation batch is drawn on trial: images that cannot be drawn end the fit in the sanity check.
    matplotlib is needed, from the start: ``pip install matplotlib``.

    Args:
        count: how many images, the first ones that the validation loader gives.
        image_size: (height, width); None for square images.

    Attributes:
        paths: files written, empty before.

    Raises:
        MisconfigurationException: if an argument is out of range; at the start of fit, if matplotlib or the validation
            loader is missing, or the log directory cannot be written to; in the first validation, if the batch has no
            images at the place where they are looked for, the module does not return a tensor, or either cannot be
            drawn (see :func:`plot_reconstructions`).

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[ReconstructionPlot(count=10)], logger=False, accelerator="cpu")
    """

    draws_together = True

    def __init__(self, count: int = 10, image_size: tuple[int, int] | None = None) -> None:
        check_counts(count=count)
        pictures.check_image_size(image_size)
        super().__init__()
        self.count, self.image_size = count, image_size
        self._tried = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._tried = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not trainer.enable_validation:
            raise MisconfigurationException(
                "ReconstructionPlot draws validation images: give a validation loader, or leave out this callback."
            )

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        if trainer.state.fn == "fit" and not self._tried:
            self._tried = True
            self._draw(trainer, pl_module, batch)

    def plot(self, trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[pictures.Figure, np.ndarray]:
        """Figure and axes (2, n) of the first validation images and their reconstructions."""
        batch = prepare_batch(trainer, next(iter(validation_loaders(trainer)[0])), 0)
        return self._draw(trainer, pl_module, batch)

    def _draw(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> tuple[pictures.Figure, np.ndarray]:
        images = _images(pl_module, batch)[: self.count]
        with torch.no_grad(), in_eval_mode(pl_module), trainer.precision_plugin.forward_context():
            reconstructions = pl_module(images)
        if not isinstance(reconstructions, Tensor):
            raise MisconfigurationException(
                f"ReconstructionPlot needs reconstructions of images from the module, but {type(pl_module).__name__} "
                f"returns a {type(reconstructions).__name__}: return them alone, or leave out this callback."
            )
        return plot_reconstructions(images, reconstructions, self.image_size)

    def figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterable[tuple[str, pictures.Figure]]:
        yield "reconstructions.png", self.plot(trainer, pl_module)[0]


def _images(module: L.LightningModule, batch: Any) -> Tensor:
    """The images of a batch: the batch itself or its first element, or as the module says."""
    select = getattr(module, "inputs_and_targets", None)
    if select is not None:
        batch = select(batch)
    images = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(images, Tensor):
        raise MisconfigurationException(
            "ReconstructionPlot takes the images from a batch that is a tensor or begins with one, but got a "
            f"{type(images).__name__}: have {type(module).__name__}.inputs_and_targets(batch) return them twice."
        )
    return images
