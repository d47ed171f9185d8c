"""Options of SHF: the values that tune it, what is in force, and what is refused."""

import inspect
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_struct.optim import CG, LSMR, SHF, Exact, Kronecker, LevenbergMarquardt, NextBatch, WarmStart
from lightning_struct.optim.shf import Settings


class Identity:
    def solve(self, y: Any) -> Any:
        return y

    solve_transpose = solve

    def __repr__(self) -> str:
        return "Identity()"


def settings(loss: str = "mse", **options: Any) -> Settings:
    return SHF(nn.Sequential(nn.Linear(2, 2)), loss, **options).settings


# Arguments of SHF and fields of its values, out of range (of other types: tests/test_bad_calls.py), and the message.
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: settings("hinge"), "'hinge'"),
    (lambda: settings(damping=0.0), r"initial must be a finite number > 0, got 0\.0"),
    (lambda: settings(damping="1"), "damping must be one of: a number, 'levenberg_marquardt', LevenbergMarquardt"),
    (lambda: LevenbergMarquardt(initial=math.inf), "LevenbergMarquardt: initial must be a finite number > 0, got inf"),
    (lambda: LevenbergMarquardt(drop=0.0), r"drop must be a number in \(0, 1\], None or 'auto', got 0.0"),
    (lambda: NextBatch(drop=1.5), "NextBatch: drop must be"),
    (lambda: LevenbergMarquardt(lower=0.9), "upper must be a number >= lower, got 0.75"),
    (lambda: LevenbergMarquardt(minimum=-1.0), "minimum must be a finite number >= 0"),
    (lambda: LevenbergMarquardt(minimum=2.0, maximum=1.0), "maximum must be a number > 0 and >= minimum, got 1.0"),
    (lambda: settings(solver="x"), r"solver must be one of: 'lsmr', LSMR\(...\), .*None; got 'x'"),
    (lambda: LSMR(maxiter=0), "LSMR: maxiter must be an integer >= 1, got 0"),
    (lambda: LSMR(miniter=-1), "miniter must be an integer >= 0"),
    (lambda: LSMR(atol=-1.0), "LSMR: atol must be a finite number >= 0"),
    (lambda: CG(progress_tolerance=-1.0), "progress_tolerance must be a finite number >= 0"),
    (lambda: CG(curvature_share=0.0), r"curvature_share must be a number in \(0, 1\], got 0.0"),
    (lambda: settings(preconditioner="x"), "preconditioner must be one of 'auto', .*'kronecker', .* got 'x'"),
    (lambda: settings(preconditioner=object()), "an object with solve and solve_transpose"),
    (lambda: Kronecker(decay=1.0), r"Kronecker: decay must be a number in \[0, 1\), got 1.0"),
    (lambda: Kronecker(interval=0), "interval must be an integer >= 1, got 0"),
    (lambda: Kronecker(max_size=0), "max_size must be an integer >= 1, None or 'auto', got 0"),
    (lambda: settings(warm_start=1.0), r"WarmStart: initial must be a number in \[0, 1\), got 1.0"),
    (lambda: settings(warm_start="x"), "warm_start must be one of: a number, a WarmStart, None; got 'x'"),
    (lambda: WarmStart(growth=0.5), "growth must be a finite number >= 1, got 0.5"),
    (lambda: settings(l2=-1.0), "l2 must be a finite number >= 0, got -1.0"),
    (lambda: settings(theta=0.0), "theta must be a number > 0, got 0.0"),
    (lambda: settings(chunk_size=0), "chunk_size must be an integer >= 1, or None, got 0"),
    (lambda: settings(backend="jax"), "backend must be one of .* got 'jax'"),
    (lambda: replace(settings(), l2=-1.0), "l2 must be a finite number >= 0"),
    (lambda: settings(solver=LSMR(damping_space="y"), l2=0.1), "damping_space='y'"),
    (lambda: settings(solver=LSMR(damping_space="y"), preconditioner="kronecker"), "damping_space='y'"),
    (
        lambda: settings(
            solver=LSMR(damping_space="y"), damping=NextBatch(center="origin"), preconditioner=Identity()
        ),
        "damping_space='y'.*leave it out",
    ),
    (lambda: settings("cross_entropy", solver="exact"), "solver='exact' is for loss='mse'.*; choose 'lsmr' or 'cg'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_what_an_option_does_not_take_is_named_with_what_it_takes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preconditioner": None}, "preconditioner=None"),
        ({"preconditioner": "fisher"}, "preconditioner='fisher'"),
        ({"l2": 0.1}, "l2=0.1"),
        ({"backend": "layer_rules"}, "backend='layer_rules'"),
        ({"chunk_size": 5}, "chunk_size=5"),
        ({"damping": NextBatch()}, "damping=NextBatch"),
        ({"damping": LevenbergMarquardt(lower=0.1)}, "LevenbergMarquardt.lower=0.1"),
        ({"damping": LevenbergMarquardt(upper=0.9)}, "LevenbergMarquardt.upper=0.9"),
        ({"damping": LevenbergMarquardt(center="origin")}, "LevenbergMarquardt.center='origin'"),
        ({"solver": LSMR(atol=1e-3)}, "LSMR.atol=0.001"),
        ({"solver": LSMR(scale_maxiter=False)}, "LSMR.scale_maxiter=False"),
        ({"solver": CG(maxiter=5)}, "solver='cg'"),
    ],
    ids=str,
)
def test_an_option_without_meaning_beside_residuals_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings("least_squares", **options)
    remedies = {
        "l2=0.1": "return √l2 times the weights as a block of one row, torch.cat([...])[None]",
        "solver='cg'": "choose 'lsmr' or 'exact', or leave it out",
    }
    remedy = remedies.get(named, "leave it out")
    assert str(caught.value).startswith(named)
    assert str(caught.value).endswith(f" has no meaning beside loss='least_squares' or solver='exact'; {remedy}")


@pytest.mark.parametrize("loss", ["mse", "least_squares"])
def test_defaults_that_are_written_out_change_nothing(loss: str) -> None:
    """As in the configuration that a command line saves."""
    defaults = {name: p.default for name, p in inspect.signature(SHF).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert settings(loss, **defaults) == settings(loss)
    written = {"damping": LevenbergMarquardt(), "solver": LSMR(), "warm_start": WarmStart()}
    names = {"damping": "levenberg_marquardt", "solver": "lsmr"}
    assert settings(loss, **defaults | written) == settings(loss, **names)


def test_each_option_is_an_argument_and_described() -> None:
    arguments = [name for name, p in inspect.signature(SHF).parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert arguments == [field.name for field in fields(Settings)]
    for described, names in (
        (SHF, arguments),
        *((kind, [field.name for field in fields(kind)]) for kind in (LevenbergMarquardt, LSMR, Kronecker, WarmStart)),
        (CG, ["progress_tolerance", "progress_window", "curvature_share"]),
    ):
        assert [name for name in names if f"    {name}: " not in (inspect.getdoc(described) or "")] == []


# Given options -> the fields that are in force.
IN_FORCE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"damping": 10.0},
        {
            "damping": LevenbergMarquardt(10.0, drop=0.99, minimum=0.0, maximum=1e9),
            "solver": LSMR(maxiter=150, scale_maxiter=True),
            "preconditioner": "diagonal",
            "warm_start": WarmStart(0.7, growth=1.002),
        },
    ),
    (
        {"damping": LevenbergMarquardt(2.0, drop=None), "solver": "cg", "warm_start": WarmStart(growth=1.0)},
        {
            "damping": LevenbergMarquardt(2.0, drop=None, minimum=0.0, maximum=1e9),
            "solver": CG(maxiter=150, scale_maxiter=True, progress_tolerance=5e-4, progress_window=10),
            "warm_start": WarmStart(0.7, growth=1.0),
        },
    ),
    (
        {"damping": NextBatch(2.0), "preconditioner": "kronecker"},
        {
            "damping": NextBatch(2.0, drop=0.99, minimum=0.0, maximum=1e9),
            "solver": LSMR(maxiter=150, scale_maxiter=True),
            "preconditioner": Kronecker(interval=1, max_size=None),
        },
    ),
    (
        {},
        {
            "damping": NextBatch(drop=0.85),
            "solver": CG(maxiter=20, scale_maxiter=False, progress_tolerance=0.05, progress_window=1),
            "preconditioner": Kronecker(interval=1, max_size=4096),
            "warm_start": WarmStart(0.9, growth=1.0),
        },
    ),
    ({"damping": "levenberg_marquardt"}, {"damping": LevenbergMarquardt(drop=0.85)}),
    ({"preconditioner": Kronecker(max_size=None)}, {"preconditioner": Kronecker(interval=1, max_size=None)}),
    ({"preconditioner": None, "warm_start": 0.0}, {"preconditioner": None, "warm_start": WarmStart(0.0, growth=1.0)}),
    ({"preconditioner": "fisher", "solver": LSMR()}, {"solver": LSMR(maxiter=50, scale_maxiter=False)}),
    ({"solver": LSMR(damping_space="y")}, {"preconditioner": "diagonal"}),
    (
        {"loss": "least_squares"},
        {
            "damping": LevenbergMarquardt(drop=0.99, minimum=0.0, maximum=1e9),
            "solver": None,
            "preconditioner": None,
            "warm_start": WarmStart(0.0, growth=1.002),
            "maxiter": 150,
        },
    ),
    (
        {"loss": "least_squares", "solver": LSMR(maxiter=5), "warm_start": 0.5},
        {"solver": LSMR(maxiter=5, scale_maxiter=True), "warm_start": WarmStart(0.5, growth=1.002)},
    ),
    ({"loss": "least_squares", "solver": "exact"}, {"solver": Exact(), "maxiter": 150}),
    ({"l2": 0.1, "theta": 0.3, "dataset_size": 50, "chunk_size": 5, "seed": 5}, {"theta": 0.3}),
]


@pytest.mark.parametrize(("options", "expected"), IN_FORCE, ids=[str(options) for options, _ in IN_FORCE])
def test_what_is_not_given_is_the_papers_with_a_damping_and_else_chosen(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    in_force = settings(**options)
    assert {name: getattr(in_force, name) for name in expected} == expected


def test_the_papers_settings_can_be_overridden_field_by_field() -> None:
    module = nn.Linear(2, 2)
    assert SHF.paper(module, "mse").settings == settings(damping=10.0)
    overridden = SHF.paper(module, "mse", damping=NextBatch(drop=0.9), solver=LSMR(atol=1e-3)).settings
    assert overridden.damping == NextBatch(10.0, drop=0.9, minimum=0.0, maximum=1e9)
    assert overridden.solver == LSMR(maxiter=150, scale_maxiter=True, atol=1e-3)
    assert SHF.paper(module, "mse", damping=5.0).settings.damping.initial == 5.0


@pytest.mark.parametrize(
    "options",
    [{"l2": 1}, {"damping": torch.tensor(2.0)}, {"damping": np.float32(2.0)}, {"solver": CG(maxiter=np.int64(7))}],  # type: ignore[arg-type]
    ids=["integer for a number", "tensor", "NumPy", "NumPy's integer"],
)
def test_numbers_of_other_libraries_are_taken_too(options: dict[str, Any]) -> None:
    assert settings(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "y"),
        ({"solver": LSMR(damping_space="x")}, "x"),
        ({"l2": 0.1}, "x"),
        ({"preconditioner": "kronecker"}, "x"),
        ({"damping": LevenbergMarquardt(1.0, center="origin")}, "y"),
        ({"damping": LevenbergMarquardt(1.0, center="origin"), "preconditioner": Identity()}, "x"),
        ({"preconditioner": Identity()}, "y"),
    ],
    ids=str,
)
def test_the_damping_is_on_y_unless_only_x_is_possible(options: dict[str, Any], expected: str) -> None:
    assert settings(**{"damping": 1.0} | options).damping_space == expected


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_damping_set_out_of_range_is_named(value: float) -> None:
    optimizer = SHF(nn.Linear(2, 2), "mse", damping=1.0)
    with pytest.raises(ValueError, match=f"damping must be finite and > 0, got {value}"):
        optimizer.damping = value
    assert optimizer.damping == 1.0


@pytest.mark.parametrize("value", [0.0, 1.5, math.nan])
def test_a_drop_set_out_of_range_is_named(value: float) -> None:
    optimizer = SHF(nn.Linear(2, 2), "mse", damping=LevenbergMarquardt(1.0, drop=0.9))
    with pytest.raises(ValueError, match=rf"drop must be a number in \(0, 1\], None or 'auto', got {value}"):
        optimizer.drop = value
    assert optimizer.drop == 0.9
