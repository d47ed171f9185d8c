"""The solution of a differential equation as a network has it, its error, and how that fell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_struct.callbacks.pictures import PictureWriter, draw_curve, new_figure
from lightning_struct.functional.torch_tools import in_eval_mode
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.namespaces import MisconfigurationException

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_struct.data.equations import DifferentialEquation

# Points of the pictures along a coordinate.
_RESOLUTION = 201
_MEASURES = {"relative_l2_error": "relative L² error", "val_loss": "validation loss"}


def plot_solution(
    equation: DifferentialEquation, network: Callable[[Tensor], Tensor], records: Sequence[dict[str, float]] = ()
) -> tuple[Figure, list[Axes]]:
    """Draw a network over the domain of an equation, its error, and the errors measured in training.

    In more than two dimensions it is the plane through the middle of the domain along the first two coordinates, as the
    titles say. Points that the interior does not contain, as holes, are left blank.

    Args:
        equation: gives the domain, and the solution if that is known.
        network: maps points (n, d), float64, to values (n,), or (n, k) for k unknown functions.
        records: with ``step``, and ``relative_l2_error`` or ``val_loss``.

    Returns:
        The figure, and its axes: the solution, each function of several; its error, if it is known; the errors over
        steps, if there are records.

    Raises:
        MisconfigurationException: matplotlib is missing.

    Example:
        >>> from lightning_struct.data import Poisson
        >>> equation = Poisson(dimension=2)
        >>> figure, axes = plot_solution(equation, lambda points: 0.9 * equation.solution(points))
        >>> [panel.get_title() for panel in axes]
        ['u', 'u - solution']
    """
    low, high = equation.domain.low, equation.domain.high
    axes_of_points = [
        torch.linspace(*ends, _RESOLUTION, dtype=torch.float64) for ends in zip(low[:2], high[:2], strict=True)
    ]
    points = torch.cartesian_prod(*axes_of_points, *((low + high) / 2)[2:, None]).reshape(-1, len(low))
    values = network(points).detach().cpu().clone()
    with suppress(NotImplementedError):  # of regions that do not say what they contain
        values[~equation.regions["interior"].contains(points)] = torch.nan
    pictures = _by_function("u", values)
    if equation.is_solved:
        pictures |= _by_function("u - solution", values - equation.solution(points))
    figure, axes = new_figure(len(pictures) + bool(records), 4.4, 3.6, "A plot of a solution")
    for panel, (title, numbers) in zip(axes, pictures.items(), strict=False):
        panel.set_title(title + _place_of(equation))
        _draw_field(panel, equation, points.numpy(), numbers.double().numpy())
    if records:
        measure = next((name for name in _MEASURES if name in records[-1]), "val_loss")
        draw_curve(axes[-1], records, "step", measure)
        axes[-1].set(yscale="log", xlabel="step", title=_MEASURES[measure])
        axes[-1].grid(alpha=0.25, which="both")
    return figure, axes


class SolutionPlot(PictureWriter):
    """Draws the solution of a physics-informed network, its error, and how that fell, at the end of ``fit``.

    ``solution.png`` is written to the log directory, by the first process, and not under ``fast_dev_run``. Its third
    panel has ``relative_l2_error``, or ``val_loss`` if the solution is not known, of all validations; a resumed run
    continues those of its checkpoint. With another Trainer or module the callback starts anew. Put it after a
    callback that changes the weights at the end of ``fit``.

    The module has its ``equation`` and its ``network``, as
    :class:`~lightning_struct.models.PhysicsInformedNetwork`. matplotlib is needed, from the start:
    ``pip install matplotlib``.

    Attributes:
        records: one dict for each validation, with ``step`` and the logged values.
        paths: files written, empty before.

    Raises:
        MisconfigurationException: at the start of fit, if the module has no ``equation`` or no ``network``, or
            matplotlib is missing, or the log directory cannot be written to.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[SolutionPlot()], logger=False, accelerator="cpu")
    """

    draws_together = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        missing = [name for name in ("equation", "network") if not hasattr(pl_module, name)]
        if missing and stage == "fit":
            raise MisconfigurationException(
                f"SolutionPlot draws module.network over the domain of module.equation, but {type(pl_module).__name__} "
                f"has no {' and no '.join(missing)}: set them, or leave out this callback."
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            values = {name: metrics[name].item() for name in _MEASURES if name in metrics}
            if values:
                self.records.append({"step": trainer.global_step, **values})

    def plot(self, pl_module: L.LightningModule) -> tuple[Figure, list[Axes]]:
        """Figure and axes of the module as it is, in eval mode."""
        module: Any = pl_module

        def network(points: Tensor) -> Tensor:
            with torch.no_grad(), in_eval_mode(module):
                return module.network(points.to(module.device, module.dtype))

        return plot_solution(module.equation, network, self.records)

    def figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterable[tuple[str, Figure]]:
        yield "solution.png", self.plot(pl_module)[0]


def _by_function(title: str, values: Tensor) -> dict[str, Tensor]:
    """Values (n,) under the title, or the columns of (n, k) under numbered ones."""
    if values.ndim == 1:
        return {title: values}
    return {title.replace("u", f"u[{i}]", 1): column for i, column in enumerate(values.unbind(1))}


def _place_of(equation: DifferentialEquation) -> str:
    """The place of the plane that is drawn, for a title."""
    others = equation.coordinates[2:]
    if len(others) < 2:
        middle = (equation.domain.low + equation.domain.high) / 2
        return "".join(f" at {name} = {middle[2]:g}" for name in others)
    return f" in the middle of {others[0]} to {others[-1]}"


def _draw_field(panel: Axes, equation: DifferentialEquation, points: np.ndarray, values: np.ndarray) -> None:
    panel.set_xlabel(equation.coordinates[0])
    if points.shape[1] == 1:
        panel.plot(points[:, 0], values)
        panel.grid(alpha=0.25)
        return
    panel.set_ylabel(equation.coordinates[1])
    x, y, z = (numbers.reshape(_RESOLUTION, _RESOLUTION) for numbers in (points[:, 0], points[:, 1], values))
    largest = float(np.nanmax(np.abs(values))) or 1.0
    mesh = panel.pcolormesh(x, y, z, cmap="RdBu_r", vmin=-largest, vmax=largest, rasterized=True)
    panel.figure.colorbar(mesh, ax=panel)
