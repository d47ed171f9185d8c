"""The picture of GrowingBatchSize: batch size, variance ratio and validation value over the samples seen."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_struct.callbacks.pictures import draw_curve, new_figure

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
    names = [name for name in PANELS if any(name in record for record in records)]
    figure, axes = new_figure(len(names), 3.3, 3, "GrowingBatchSize.plot")
    from matplotlib.ticker import EngFormatter

    for panel, name in zip(axes, names, strict=True):
        style: dict[str, Any] = (
            {"drawstyle": "steps-pre", "label": "batch"} if name == "batch_size" else {"linewidth": 1}
        )
        draw_curve(panel, records, "samples", name, **style)
        panel.set(xlabel="samples seen", ylabel=PANELS[name])
        panel.grid(alpha=0.25)
        panel.locator_params(axis="x", nbins=4)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
        if name == "batch_size":
            faint = {"alpha": 0.4, "linewidth": 0.8, "zorder": 1}
            draw_curve(panel, records, "samples", "batch_size_predicted", label="predicted", **faint)
            panel.legend()
        elif name == "variance_ratio":
            panel.set_yscale("log")
            if bound is not None and bound < math.inf:
                panel.axhline(bound, color="black", linestyle="--", linewidth=1, label="norm test")
                panel.legend(handles=[panel.lines[-1]])
    return figure, axes
