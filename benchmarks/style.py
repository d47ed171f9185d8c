"""The look of all pictures of the documentation: sizes, one colour for each method, and words for settings.

Pictures have no background, and an ink that can be read on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

WIDTH = 8.0  # inches of a picture, which is 880 pixels wide on a page: letters of 11 points are 17 pixels high there
INK = "#76808c"
# A decorator of what draws, since a text takes its size when it is made.
readable = rc_context(
    {
        "font.size": 11,
        "axes.titlesize": 11,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "figure.dpi": 150,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.3,
        **{name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    }
)
DATA = ("#3a86d8", "#e08e0b", "#4f9d4f", "#d6455d", "#a06cc8", "#9c6b4e", "#2aa198", "#8d8d8d")  # for data and settings
ADAM, SHF, PAPER, RLS, SGD = "#e08e0b", "#3a86d8", "#2aa198", "#d6455d", "#4f9d4f"
COLORS = {
    "Adam": ADAM,
    "Adam, cross-entropy": ADAM,
    "Adam, then L-BFGS": "#a86a08",
    "SHF": SHF,
    "SHF, Kronecker factors": SHF,
    "SHF of the paper": PAPER,
    "Martens' method": "#8d8d8d",
    "L-BFGS": "#9c6b4e",
    "torch-levenberg-marquardt": "#7f8c1f",
    "SSBroyden": "#c44bab",
    "Adam, then SSBroyden": "#87307a",
    "fine-tuned by Adam,": ADAM,
    "trained by Adam": "#a86a08",
    "SOAP": "#a06cc8",
    "SGD": SGD,
    "SGD with momentum": SGD,
    "RLS": RLS,
    "HRLS": RLS,
    "RLS+M": "#e58aa0",
    "HRLS+M": "#e58aa0",
    "RecursiveLinear": RLS,
    "RecursiveLinear, δ = 1": "#8e2b3c",
    "RecursiveLinear above a random ReLU layer": "#e58aa0",
    "nearest mean of a class": "#8d8d8d",
    "GrowingBatchSize()": "#5a55d2",
    'scale_lr="sqrt"': "#9d9af0",
    "fixed ×1": SHF,
    "fixed ×2": ADAM,
    "fixed ×4": "#9c6b4e",
    "doubling, rate ×√2": SGD,
    "unstructured": "#8d8d8d",
    "LDR-SD": SHF,
    "Toeplitz-like": SGD,
    "low rank": ADAM,
    "compress": SHF,
    "SVD": "#a06cc8",
    "pruning": SGD,
}


def color_of(method: str) -> str:
    """The colour of a method, which is the same in all pictures; those of settings follow the method's name."""
    found = [name for name in COLORS if method == name or method.startswith(f"{name} ")]
    return COLORS[max(found, key=len)]


def seed_style(number: int) -> dict[str, Any]:
    """The look of the curve of one seed: those after the first are paler."""
    return {"linewidth": 1.5, "alpha": 1.0 if number == 0 else 0.45}


def explain_seeds(seeds: Collection[int]) -> str:
    """The words beside a legend that explain several curves of one colour."""
    listed = ", ".join(map(str, sorted(seeds)))
    return f"seed {listed}" if len(seeds) == 1 else f"one curve for each seed ({listed}), the first in full colour"


def legend_below(figure: Figure, axes: Axes, title: str, columns: int) -> None:
    """The legend of all panels, from the curves of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title)


def plain_ticks(*axes: Axis, unit: str = "") -> None:
    """Ticks of logarithmic axes as numbers (20, 5k, 1M), not powers of ten; three a decade if there is room."""

    def short(value: float, _: int) -> str:
        for size, letter in ((1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:g}{letter}{unit}"
        return f"{value:g}{unit}"

    for axis in axes:
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        axis.set_major_formatter(FuncFormatter(short))
        axis.set_minor_locator(NullLocator())
