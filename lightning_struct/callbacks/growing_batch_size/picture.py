"""The picture of GrowingBatchSize: batch size, variance ratio and validation value over the samples seen."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_struct.utilities.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "batch_size": "samples in a batch",
    "variance_ratio": "‖Var‖₁ / (n ‖ḡ‖²)",
    "validation_value": "validation value",
}


def plot_growth(records: Sequence[Mapping[str, float]], bound: float | None) -> "tuple[Figure, list[Axes]]":
    """Draw the checks of a GrowingBatchSize, one panel for each quantity that was recorded.

    Args:
        records: of the callback, at least one.
        bound: of the variance ratio in the norm test, drawn beside it if it is known and finite.

    Raises:
        MisconfigurationException: matplotlib is missing.
    """
    require("matplotlib", "GrowingBatchSize.plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    names = [name for name in PANELS if any(name in record for record in records)]
    figure = Figure(figsize=(3.3 * len(names), 3), layout="constrained")
    axes = list(figure.subplots(1, len(names), squeeze=False)[0])
    for panel, name in zip(axes, names, strict=True):
        style: dict[str, Any] = (
            {"drawstyle": "steps-pre", "label": "batch"} if name == "batch_size" else {"linewidth": 1}
        )
        _draw(panel, records, name, **style)
        panel.set(xlabel="samples seen", ylabel=PANELS[name])
        panel.grid(alpha=0.25)
        panel.locator_params(axis="x", nbins=4)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
        if name == "batch_size":
            _draw(panel, records, "batch_size_predicted", alpha=0.4, linewidth=0.8, zorder=1, label="predicted")
            panel.legend()
        elif name == "variance_ratio":
            panel.set_yscale("log")
            if bound is not None and bound < math.inf:
                panel.axhline(bound, color="black", linestyle="--", linewidth=1, label="norm test")
                panel.legend(handles=[panel.lines[-1]])
    return figure, axes


def _draw(panel: "Axes", records: Sequence[Mapping[str, float]], name: str, **style: Any) -> None:
    points = [(record["samples"], record[name]) for record in records if name in record]
    panel.plot(*zip(*points, strict=True), **style)
