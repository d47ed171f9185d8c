"""The picture that shows the accuracies of all classes of structured matrices beside those of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import style

NETWORKS = {"shl": ("o", "one hidden layer"), "lenet": ("^", "LeNet")}


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies in per cent of a class of matrices, as the hidden layer of a network.

    Attributes:
        data: title of the data set.
        network: ``"shl"`` or ``"lenet"``.
        unstructured: whether the layer has no structure.
        ours: the mean over seeds.
        paper: of Thomas et al.
    """

    data: str
    network: str
    unstructured: bool
    ours: float
    paper: float


@style.readable
def draw_accuracies(accuracies: Sequence[Accuracy]) -> Figure:
    """Ours against the paper's, a mark for each class and rank."""
    figure = Figure(figsize=(style.WIDTH, 6.0), layout="constrained")
    axes = figure.subplots()
    colors = {data: style.DATA[number] for number, data in enumerate(dict.fromkeys(each.data for each in accuracies))}
    for each in accuracies:
        color = colors[each.data]
        face = "none" if each.unstructured else color
        axes.plot(each.paper, each.ours, NETWORKS[each.network][0], color=color, markerfacecolor=face, markersize=6)
    ends = [20.0, 100.0]
    axes.plot(ends, ends, color=style.INK, linewidth=1, zorder=0)
    axes.set(
        title="Test accuracy of a class of matrices",
        xlabel="the paper, %",
        ylabel="here, %",
        xlim=ends,
        ylim=ends,
        aspect="equal",
    )
    axes.grid()
    handles = [Line2D([], [], marker="s", linestyle="", color=color, label=data) for data, color in colors.items()]
    shown = dict.fromkeys(each.network for each in accuracies)
    marks = [(NETWORKS[network], style.INK) for network in NETWORKS if network in shown]
    handles += [
        Line2D([], [], marker=marker, linestyle="", color=style.INK, markerfacecolor=face, label=label)
        for (marker, label), face in [*marks, (("o", "unstructured layer"), "none")]
    ]
    axes.legend(handles=handles, loc="upper left")
    return figure
