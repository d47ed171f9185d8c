"""Small fits: NIST's nonlinear regressions, and ten thousand fits at once, beside scipy.optimize.curve_fit.

    python benchmarks/curve_fits.py --nist nist --picture docs/images/curve_fit.png

``--nist`` names a folder with the 27 files of https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml.
SciPy gets the same formulas, in NumPy, and takes derivatives by differences; both start at NIST's values. One thread.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import curve_fit as scipy_curve_fit
from torch import Tensor

from harness import machine_line, print_header, print_row
from lightning_struct.functional import curve_fit

_DIGITS = 1e-4


def formulas(m: ModuleType) -> dict[str, Callable[..., Any]]:
    """The formulas of the problems, on tensors (``m`` is torch) or arrays (``m`` is numpy)."""
    exp, cos, sin, pi = m.exp, m.cos, m.sin, math.pi

    def gauss(x, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
        return a * exp(-b * x) + c * exp(-((x - d) ** 2) / e**2) + f * exp(-((x - g) ** 2) / h**2)

    def lanczos(x, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
        return a * exp(-b * x) + c * exp(-d * x) + e * exp(-f * x)

    def cubic(x, a, b, c, d, e, f, g):  # type: ignore[no-untyped-def]
        return (a + b * x + c * x**2 + d * x**3) / (1 + e * x + f * x**2 + g * x**3)

    def waves(x, a, b, c, d, e, f, g, h, i):  # type: ignore[no-untyped-def]
        year = b * cos(2 * pi * x / 12) + c * sin(2 * pi * x / 12)
        first = e * cos(2 * pi * x / d) + f * sin(2 * pi * x / d)
        return a + year + first + h * cos(2 * pi * x / g) + i * sin(2 * pi * x / g)

    return {
        "Bennett5": lambda x, a, b, c: a * (b + x) ** (-1 / c),
        "BoxBOD": lambda x, a, b: a * (1 - exp(-b * x)),
        **{f"Chwirut{number}": lambda x, a, b, c: exp(-a * x) / (b + c * x) for number in (1, 2)},
        "DanWood": lambda x, a, b: a * x**b,
        "ENSO": waves,
        "Eckerle4": lambda x, a, b, c: (a / b) * exp(-0.5 * ((x - c) / b) ** 2),
        **{f"Gauss{number}": gauss for number in (1, 2, 3)},
        "Hahn1": cubic,
        "Kirby2": lambda x, a, b, c, d, e: (a + b * x + c * x**2) / (1 + d * x + e * x**2),
        **{f"Lanczos{number}": lanczos for number in (1, 2, 3)},
        "MGH09": lambda x, a, b, c, d: a * (x**2 + x * b) / (x**2 + x * c + d),
        "MGH10": lambda x, a, b, c: a * exp(b / (x + c)),
        "MGH17": lambda x, a, b, c, d, e: a + b * exp(-x * d) + c * exp(-x * e),
        "Misra1a": lambda x, a, b: a * (1 - exp(-b * x)),
        "Misra1b": lambda x, a, b: a * (1 - (1 + b * x / 2) ** (-2)),
        "Misra1c": lambda x, a, b: a * (1 - (1 + 2 * b * x) ** (-0.5)),
        "Misra1d": lambda x, a, b: a * b * x / (1 + b * x),
        "Nelson": lambda x, a, b, c: a - b * x[..., 0] * exp(-c * x[..., 1]),
        "Rat42": lambda x, a, b, c: a / (1 + exp(b - c * x)),
        "Rat43": lambda x, a, b, c, d: a / (1 + exp(b - c * x)) ** (1 / d),
        "Roszman1": lambda x, a, b, c, d: a - b * x - m.arctan(c / (x - d)) / pi,
        "Thurber": cubic,
    }


def problem(file: Path) -> tuple[Tensor, Tensor, Tensor]:
    """x (N,) or (N, 2), y (N,), and the columns start 1, start 2, certified value and deviation, (P, 4)."""
    lines = file.read_text().splitlines()
    rows = [line.split("=")[1].split() for line in lines if re.match(r"\s*b\d+\s*=", line) and len(line.split()) > 4]
    first = max(number for number, line in enumerate(lines) if line.startswith("Data:")) + 1
    data = torch.tensor([[*map(float, line.split())] for line in lines[first:] if line.strip()], dtype=torch.float64)
    x, y = data[:, 1:].squeeze(1), data[:, 0]
    values = torch.tensor([[*map(float, row[:4])] for row in rows], dtype=torch.float64)
    return x, y.log() if file.stem == "Nelson" else y, values


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the second call, and its result; None if it raises."""
    for _ in range(2):
        start = time.process_time()
        try:
            result = call()
        except (RuntimeError, ValueError):
            result = None
    return time.process_time() - start, result


def nist(folder: Path) -> None:
    """How many of the 54 fits have four digits, and their times beside SciPy's."""
    ours, scipys = formulas(torch), formulas(np)
    ratios, right, rights = [], 0, 0
    print_header("problem", "start", "largest error", "steps", "milliseconds", "SciPy's error", "SciPy's milliseconds")
    for name in ours:
        x, y, values = problem(folder / f"{name}.dat")
        certified = values[:, 2]
        for start in (0, 1):
            p0 = values[:, start]
            seconds, fit = seconds_of(partial(curve_fit, ours[name], x, y, p0))
            arrays = (x.numpy(), y.numpy(), p0.numpy())
            others, found = seconds_of(partial(scipy_curve_fit, scipys[name], *arrays, maxfev=20_000))
            error = float(((fit.parameters - certified) / certified).abs().max())
            theirs = math.inf if found is None else float(np.abs(found[0] / certified.numpy() - 1).max())
            right, rights = right + (error < _DIGITS), rights + (theirs < _DIGITS)
            ratios.append(seconds / others)
            row = (f"{error:.1e}", int(fit.steps), f"{seconds * 1e3:.1f}", f"{theirs:.1e}", f"{others * 1e3:.1f}")
            print_row(name, start + 1, *row)
    print(
        f"\n{right} of 54 to four digits, SciPy {rights}; time over SciPy's, median: {statistics.median(ratios):.1f}\n"
    )


def many(count: int, compared: int) -> None:
    """Fits of three parameters at 50 places, at once, beside a loop of SciPy's over some of them."""
    torch.manual_seed(0)
    x = torch.linspace(0, 4, 50, dtype=torch.float64)
    true = torch.rand(count, 3, dtype=torch.float64) + 0.5
    y = true[:, :1] * torch.exp(-true[:, 1:2] * x) + true[:, 2:] + 0.01 * torch.randn(count, 50, dtype=torch.float64)
    start = torch.ones(count, 3, dtype=torch.float64)
    seconds, fits = seconds_of(lambda: curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x, y, start))

    def loop() -> list[np.ndarray]:
        places, measured = x.numpy(), y[:compared].numpy()
        return [scipy_curve_fit(lambda x, a, b, c: a * np.exp(-b * x) + c, places, of)[0] for of in measured]

    others, found = seconds_of(loop)
    apart = float((fits.parameters[:compared] / torch.tensor(np.array(found)) - 1).abs().max())
    print_header("fits", "seconds", "a loop of SciPy's", "ratio", "largest difference", "converged")
    others *= count / compared
    row = (f"{seconds:.2f}", f"{others:.1f}", f"{others / seconds:.1f}", f"{apart:.0e}", f"{fits.converged.sum():,}")
    print_row(f"{count:,}", *row)


def draw(file: Path) -> None:
    """The picture of the guide: a fit and its band."""

    def decay(x: Tensor, height: Any, rate: Any, floor: Any) -> Tensor:
        return height * torch.exp(-rate * x) + floor

    torch.manual_seed(0)
    x = torch.linspace(0, 5, 40, dtype=torch.float64)
    y = decay(x, 2.0, 1.3, 0.5) + 0.05 * torch.randn(40, dtype=torch.float64)
    fit = curve_fit(decay, x, y, [1.0, 1.0, 0.0])
    J = torch.func.jacrev(lambda p: decay(x, *p))(fit.parameters)
    curve, band = decay(x, *fit.parameters), (J @ fit.covariance * J).sum(1).sqrt()
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, y, ".", label="measurements")
    axes.plot(x, curve, label="fit")
    axes.fill_between(x, curve - 2 * band, curve + 2 * band, alpha=0.3, label="fit ± 2 standard deviations")
    axes.set(xlabel="x", ylabel="y")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nist", type=Path, help="the folder of NIST's files; without it this part is left out")
    parser.add_argument("--fits", type=int, default=10_000, help="fits at once")
    parser.add_argument("--compared", type=int, default=1000, help="of them, in a loop of SciPy's")
    parser.add_argument("--picture", type=Path, help="draw the picture of the guide to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.nist is not None:
        nist(arguments.nist)
    many(arguments.fits, min(arguments.compared, arguments.fits))
    print(f"\n{machine_line()}")
    if arguments.picture is not None:
        draw(arguments.picture)


if __name__ == "__main__":
    main()
