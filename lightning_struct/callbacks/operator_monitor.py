"""The displacement operators that structured layers learn, logged and drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_struct.callbacks import pictures
from lightning_struct.functional.structured.subdiagonal import SUBDIAGONAL_METHODS
from lightning_struct.nn import LDRSubdiagonal, StructuredLinear
from lightning_struct.nn.ldr import LearnedOperatorLinear
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.distributed import refuse_sharded_weights
from lightning_struct.utilities.namespaces import MisconfigurationException

# A picture of more entries than this shows no more, and takes the memory of the dense layer.
_LARGEST_PICTURE = 4096 * 4096


class OperatorMonitor(pictures.PictureWriter):
    """Logs the range of learned displacement operators, and draws structured layers (Thomas et al., figure 4).

    For example::

        monitor = OperatorMonitor()
        Trainer(callbacks=[monitor]).fit(module)
        figure, axes = monitor.plot("hidden")

    Every ``every_n_steps`` training steps it logs for each layer with learned operators, here one called ``hidden``:

    - ``operators/hidden/a_min``, ``a_max``, ``b_min``, ``b_max``: extremes of the entries that A and B learn;
    - ``operators/hidden/a_log_range``, ``b_log_range`` (LDR-SD): max - min of log|P| less its trend, P the cumulative
      products of the subdiagonal. The method follows from the larger of both; see ``LDRSubdiagonal``;
    - ``operators/hidden/method`` (LDR-SD): ``method_in_use`` as a number, 0 ``"scaled"``, 1 ``"scaled_float64"``,
      2 ``"tree"``.

    When ``fit`` ends, or is interrupted by Ctrl-C or SIGTERM, ``operators_hidden.png`` is written to the log directory
    for every structured layer of at most 4096 x 4096 entries (by the first process, and not under ``fast_dev_run``).
    Put it after a callback that changes the weights at the end of ``fit``. matplotlib is needed, from the start:
    ``pip install matplotlib``.

    Args:
        every_n_steps: training steps between two records. The Trainer writes to the logger every
            ``log_every_n_steps`` steps alone: let this number divide that one.
        image_size: (height, width) of the input images, to draw the subdiagonal of B as an image in the layers that
            read them. None, and for layers with another number of inputs: a square image if that number is a square,
            else a line.

    Attributes:
        layers: name -> structured layer of the module, once there is one.
        paths: files written, empty before.

    Raises:
        MisconfigurationException: if an argument is out of range; at the start of fit, if the module has no
            structured layer, the strategy shards the weights, matplotlib is missing, or the log directory cannot be
            written to.

    Example:
        >>> from lightning import Trainer
        >>> monitor = OperatorMonitor(every_n_steps=100)
        >>> trainer = Trainer(callbacks=[monitor], logger=False, accelerator="cpu")
        >>> figure, axes = monitor.plot(LDRSubdiagonal(16, 12))  # of any layer, without a fit too
        >>> len(axes)
        2
    """

    def __init__(self, every_n_steps: int = 50, image_size: tuple[int, int] | None = None) -> None:
        check_counts(every_n_steps=every_n_steps)
        pictures.check_image_size(image_size)
        super().__init__()
        self.every_n_steps, self.image_size = every_n_steps, image_size
        self.layers: dict[str, StructuredLinear] = {}
        self._last_step = -1

    def plot(self, layer: str | StructuredLinear) -> tuple[pictures.Figure, list[pictures.Axes]]:
        """Draw the matrix of a layer as a heat map and, if it learns operators, the subdiagonal of B (figure 4).

        Args:
            layer: a layer, or the name of one in the module that was trained.

        Returns:
            The figure, and its one or two axes.

        Raises:
            MisconfigurationException: there is no layer of that name, ``image_size`` does not fit its inputs, or
                matplotlib is missing.
        """
        if isinstance(layer, str):
            if layer not in self.layers:
                there_are = ", ".join(self.layers) or "none, before training"
                raise MisconfigurationException(f"there is no structured layer {layer!r}; there are: {there_are}")
            layer = self.layers[layer]
        return plot_layer(layer, self.image_size)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._find_layers(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_sharded_weights(trainer, "OperatorMonitor")
        self._find_layers(pl_module)  # configure_model may have made layers since
        if not self.layers:
            raise MisconfigurationException(
                f"OperatorMonitor watches structured layers, but {type(pl_module).__name__} has none: put some into "
                "it, for example by replace_linear, or leave out this callback."
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step != self._last_step and step % self.every_n_steps == 0:
            self._last_step = step
            for name, layer in self.layers.items():
                records = operator_records(layer)
                pl_module.log_dict({f"operators/{name}/{key}": value for key, value in records.items()})

    def figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterable[tuple[str, pictures.Figure]]:
        for name, layer in self.layers.items():
            if layer.in_features * layer.out_features <= _LARGEST_PICTURE:
                reads_images = self.image_size is not None and math.prod(self.image_size) == layer.in_features
                yield f"operators_{name}.png", plot_layer(layer, self.image_size if reads_images else None)[0]

    def _find_layers(self, pl_module: L.LightningModule) -> None:
        named = pl_module.named_modules()
        self.layers = {name: module for name, module in named if isinstance(module, StructuredLinear)}


def operator_records(layer: nn.Module) -> dict[str, Tensor]:
    """Extremes, log-ranges and method of a layer's learned operators, by the last part of the logged name.

    Empty for a layer without learned operators.
    """
    if not isinstance(layer, LearnedOperatorLinear):
        return {}
    records = {}
    for name, entries in zip("ab", layer.operator_entries(), strict=True):
        if entries.numel():  # an operator of size 1 without a corner has none
            records[f"{name}_min"], records[f"{name}_max"] = entries.min(), entries.max()
    if isinstance(layer, LDRSubdiagonal):
        records["a_log_range"], records["b_log_range"] = layer.log_ranges()
        records["method"] = torch.tensor(float(SUBDIAGONAL_METHODS.index(layer.method_in_use)))
    return {name: record.detach() for name, record in records.items()}


def plot_layer(
    layer: StructuredLinear, image_size: tuple[int, int] | None = None
) -> tuple[pictures.Figure, list[pictures.Axes]]:
    """Draw the matrix of a layer as a heat map and, if it learns operators, the subdiagonal of B beside it.

    B[j + 1, j] is drawn at pixel j + 1 of the image that the layer reads: the first pixel stays blank.

    Args:
        layer: any structured layer.
        image_size: (height, width) of its inputs; None: square if their number is a square, else B is drawn as a line.

    Returns:
        The figure, and its one or two axes.

    Raises:
        MisconfigurationException: the inputs do not make an image of ``image_size``, or matplotlib is missing.

    Example:
        >>> figure, (matrix, subdiagonal) = plot_layer(LDRSubdiagonal(16, 12, rank=1))
        >>> subdiagonal.images[0].get_array().shape
        (4, 4)
    """
    learns = isinstance(layer, LearnedOperatorLinear)
    figure, axes = pictures.new_figure(1 + learns, 5.5, 4.5, "A plot of structured layers")
    with torch.no_grad():
        matrix = layer.to_dense().float().cpu().numpy()
    _draw_heat_map(axes[0], matrix)
    axes[0].set(title=f"matrix of {type(layer).__name__}", xlabel="input", ylabel="output")
    if isinstance(layer, LearnedOperatorLinear):
        _draw_subdiagonal(axes[1], layer.subdiagonal_b.detach().float().cpu().numpy(), image_size)
    return figure, axes


def _draw_subdiagonal(axes: pictures.Axes, subdiagonal: np.ndarray, image_size: tuple[int, int] | None) -> None:
    pixels = np.concatenate([[np.nan], subdiagonal])
    axes.set_title("subdiagonal of B")
    if image_size is None and math.isqrt(pixels.size) ** 2 != pixels.size:
        axes.plot(pixels, linewidth=0.8)
        axes.set(xlabel="input", ylabel="entry")
        axes.grid(alpha=0.25)
        return
    _draw_heat_map(axes, pixels.reshape(pictures.height_and_width(pixels.size, image_size, "inputs")))
    axes.set(xlabel="column of the input image", ylabel="row of the input image")


def _draw_heat_map(axes: pictures.Axes, values: np.ndarray) -> None:
    """Draw values with zero in white, red above and blue below, or from dark to light if all have one sign.

    The most extreme thousandth of values of both signs shares the last colour, so that a few entries do not pale the
    others.
    """
    if np.nanmin(values) < 0 < np.nanmax(values):
        largest = float(np.nanquantile(np.abs(values), 0.999, method="higher"))
        scale: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        extend = "both" if np.nanmax(np.abs(values)) > largest else "neither"
    else:
        scale, extend = {"cmap": "viridis"}, "neither"
    # more entries than pixels are averaged, not picked: picking makes stripes that are not there
    picture = axes.imshow(values, interpolation="antialiased", **scale)
    axes.figure.colorbar(picture, ax=axes, extend=extend, label="entry")
