"""Settings of SHF as a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from lightning_struct.optim.shf import SHF, OutputSettings, ResidualSettings, Settings

# Another value than the default of each setting, and where it needs one, another setting beside it.
OTHERS: dict[str, dict[str, Any]] = {
    "damping": {"damping": 3.0},
    "drop": {"drop": None},
    "lower": {"lower": 0.1},
    "upper": {"upper": 0.9},
    "min_damping": {"min_damping": 0.01},
    "max_damping": {"max_damping": 100.0},
    "damping_rule": {"damping_rule": "next_batch"},
    "solver": {"solver": "lsqr"},
    "preconditioner": {"preconditioner": "fisher"},
    "damping_center": {"damping_center": "origin"},
    "damping_space": {"damping_space": "x"},
    "warm_start": {"warm_start": 0.5},
    "warm_start_growth": {"warm_start_growth": 1.5},
    "max_warm_start": {"max_warm_start": 0.8},
    "maxiter": {"maxiter": 7},
    "scale_maxiter": {"scale_maxiter": False},
    "miniter": {"miniter": 3},
    "recover": {"recover": 4},
    "atol": {"atol": 1e-3},
    "ftol": {"ftol": 1e-3},
    "progress_tolerance": {"progress_tolerance": 0.1},
    "progress_window": {"progress_window": 3},
    "return_best": {"return_best": True},
    "armijo": {"armijo": 0.1},
    "l2": {"l2": 0.1},
    "theta": {"theta": 0.3},
    "dataset_size": {"dataset_size": 50},
    "backend": {"backend": "linearize"},
    "chunk_size": {"chunk_size": 5},
    "factor_decay": {"factor_decay": 0.5},
    "factor_interval": {"factor_interval": 2},
    "max_factor_size": {"max_factor_size": 100},
    "exclude_factors": {"exclude_factors": ["0"]},
    "held_out": {"held_out": 0.2},
    "curvature_share": {"curvature_share": 0.5, "solver": "cg"},
    "single_samples": {"single_samples": False},
    "seed": {"seed": 5},
    "geodesic_acceleration": {"geodesic_acceleration": False},
}
OF_OUTPUTS, OF_RESIDUALS = ({field.name for field in fields(kind)} for kind in (OutputSettings, ResidualSettings))


def stepped(optimizer: SHF) -> SHF:
    optimizer.step(inputs=torch.linspace(-1, 1, 8)[:, None].expand(8, 2), targets=torch.ones(8, 2))
    return optimizer


def test_settings_have_the_names_and_defaults_of_the_arguments() -> None:
    arguments = [p for p in inspect.signature(SHF).parameters.values() if p.kind is p.KEYWORD_ONLY]
    settings = inspect.signature(Settings).parameters.values()
    assert [(p.name, p.default) for p in arguments] == [(p.name, p.default) for p in settings]


def test_each_setting_is_among_those_that_are_tried_here() -> None:
    assert list(OTHERS) == [field.name for field in fields(Settings)]
    assert all(given[name] != getattr(Settings, name) for name, given in OTHERS.items())


@pytest.mark.parametrize("name", [name for name in OTHERS if name in OF_OUTPUTS])
def test_an_optimizer_has_the_setting_that_it_was_given(name: str) -> None:
    settings = SHF(nn.Sequential(nn.Linear(2, 2)), "mse", **{"damping": 1.0, **OTHERS[name]}).settings
    assert getattr(settings, name) == OTHERS[name][name]


@pytest.mark.parametrize("name", [name for name in OTHERS if name in OF_RESIDUALS])
def test_an_optimizer_of_residuals_has_the_setting_that_it_was_given(name: str) -> None:
    settings = SHF(nn.Linear(2, 2), "least_squares", **OTHERS[name]).settings
    assert getattr(settings, name) == OTHERS[name][name]


def test_the_settings_of_residuals_are_those_that_mean_something_there() -> None:
    assert {field.name for field in fields(SHF(nn.Linear(2, 2), "least_squares").settings)} == {
        *("damping", "drop", "min_damping", "max_damping", "solver", "maxiter", "geodesic_acceleration"),
        *("warm_start", "warm_start_growth", "max_warm_start", "theta", "dataset_size", "seed"),
    }


def test_only_residuals_have_a_geodesic_acceleration() -> None:
    assert {field.name for field in fields(Settings)} - OF_OUTPUTS == {"geodesic_acceleration"}


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in OF_RESIDUALS])
def test_a_setting_without_meaning_beside_residuals_is_refused_with_its_value_and_the_remedy(name: str) -> None:
    given = OTHERS[name][name]
    value = tuple(given) if isinstance(given, list) else given
    with pytest.raises(ValueError) as caught:
        SHF(nn.Linear(2, 2), "least_squares", **OTHERS[name])
    of_decay = "return √l2 times the weights as a block of one row, torch.cat([...])[None]"
    remedy = of_decay if name == "l2" else "leave it out"
    assert str(caught.value) == f"{name}={value!r} has no meaning beside loss='least_squares'; {remedy}"


def test_default_values_that_are_written_out_are_not_refused_beside_residuals() -> None:
    """As in the configuration that a command line saves."""
    defaults = {field.name: field.default for field in fields(Settings)} | {"exclude_factors": []}
    assert SHF(nn.Linear(2, 2), "least_squares", **defaults).settings == SHF(nn.Linear(2, 2), "least_squares").settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"solver": "exact"}, "solver='exact' is for loss='least_squares'.*; choose 'lsmr', 'lsqr' or 'cg'"),
        ({"geodesic_acceleration": True}, "geodesic_acceleration=True is for loss='least_squares'.*; leave it out"),
    ],
    ids=["solver", "acceleration"],
)
def test_a_setting_that_is_for_residuals_is_refused_with_its_value_and_the_remedy(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SHF(nn.Linear(2, 2), "mse", **given)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Settings(),
        lambda: SHF(nn.Linear(2, 2), "mse").settings,
        lambda: stepped(SHF(nn.Linear(2, 2), "mse")).settings,
        lambda: SHF(nn.Linear(2, 2), "mse", solver="lsmr", preconditioner="diagonal").settings,
        lambda: SHF(nn.Linear(2, 2), "mse", damping=1.0).settings,
        lambda: SHF(nn.Linear(2, 2), "least_squares").settings,
        lambda: SHF(nn.Linear(2, 2), "least_squares", damping=1.0, solver="lsmr").settings,
    ],
    ids=["given", "two arguments", "after a step", "lsmr", "paper", "residuals", "residuals, damping"],
)
def test_a_setting_that_may_be_none_says_so_in_its_type(build: Callable[[], Any]) -> None:
    settings = build()
    hints = get_type_hints(type(settings))
    none = [field.name for field in fields(settings) if getattr(settings, field.name) is None]
    assert [name for name in none if type(None) not in get_args(hints[name])] == []


def test_no_setting_of_an_optimizer_may_be_auto_by_its_type() -> None:
    for kind in (OutputSettings, ResidualSettings):
        assert "Literal" not in " ".join(map(str, get_type_hints(kind).values()))


def test_the_damping_is_none_until_the_first_batch_and_says_so_in_its_type() -> None:
    optimizer = SHF(nn.Linear(2, 2), "mse")
    assert optimizer.damping is None
    assert isinstance(stepped(optimizer).damping, float)
    assert get_type_hints(SHF.damping.fget)["return"] == float | None  # type: ignore[attr-defined]


def test_settings_of_a_step_do_not_change_with_the_damping() -> None:
    optimizer = SHF(nn.Linear(2, 2), "mse", damping=3.0)
    optimizer.damping = 1.0
    assert optimizer.settings.damping == 3.0


def test_settings_are_frozen() -> None:
    settings = Settings(damping=1.0)
    with pytest.raises(FrozenInstanceError):
        settings.damping = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("seed", "a", "an integer"),
        ("seed", 1.5, "an integer"),
        ("seed", None, "an integer"),
        ("maxiter", 1.5, "an integer or None"),
        ("maxiter", "20", "an integer or None"),
        ("factor_interval", 1.5, "an integer or None"),
        ("progress_window", True, "an integer or None"),
        ("dataset_size", 1.5, "an integer or None"),
        ("max_factor_size", 8.5, "an integer or 'auto' or None"),
        ("max_factor_size", "x", "an integer or 'auto' or None"),
        ("damping", "1", "a number or None"),
        ("drop", "x", "a number or 'auto' or None"),
        ("l2", None, "a number"),
        ("single_samples", "no", "True or False or None"),
        ("return_best", "x", "True or False"),
        ("return_best", None, "True or False"),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_refused_with_what_it_takes(name: str, value: Any, takes: str) -> None:
    with pytest.raises(ValueError) as caught:
        Settings(**{name: value})
    assert str(caught.value) == f"{name} must be {takes}, got {value!r}"


@pytest.mark.parametrize(
    "given",
    [{"l2": 1}, {"damping": torch.tensor(2.0)}, {"damping": np.float32(2.0)}, {"maxiter": np.int64(7)}],
    ids=["integer for a number", "tensor", "NumPy", "NumPy's integer"],
)
def test_numbers_of_other_libraries_are_settings_too(given: dict[str, Any]) -> None:
    assert vars(Settings(**given)).items() >= given.items()


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "exclude_factors"])
def test_each_setting_refuses_bytes_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^(a )?{name} "):
        Settings(**{name: b"x"})


def test_settings_made_of_others_are_checked_too() -> None:
    with pytest.raises(ValueError, match="maxiter must be >= 1, got 0"):
        replace(Settings(damping=1.0), maxiter=0)


@pytest.mark.parametrize("loss", ["mse", "least_squares"])
def test_settings_made_of_those_of_an_optimizer_are_checked_too(loss: str) -> None:
    with pytest.raises(ValueError, match="maxiter must be >= 1, got 0"):
        replace(SHF(nn.Linear(2, 2), loss).settings, maxiter=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "y"),
        ({"solver": "lsqr"}, "y"),
        ({"damping_space": "x"}, "x"),
        ({"solver": "cg"}, "x"),
        ({"l2": 0.1}, "x"),
        ({"preconditioner": "kronecker"}, "x"),
        ({"damping_center": "origin"}, "y"),
    ],
    ids=str,
)
def test_the_damping_is_on_y_unless_only_x_is_possible(options: dict[str, Any], expected: str) -> None:
    assert SHF(nn.Linear(2, 2), "mse", damping=1.0, **options).settings.damped_space == expected  # type: ignore[union-attr]


def test_each_setting_is_described_where_the_optimizer_is() -> None:
    described = inspect.getdoc(SHF) or ""
    missing = [field.name for field in fields(Settings) if f"    {field.name}: " not in described]
    assert missing == []


def test_the_space_of_the_damping_is_known_without_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SHF.paper(nn.Linear(2, 2), "mse")
    monkeypatch.setattr(Settings, "__post_init__", lambda self: pytest.fail("settings were made"))
    assert optimizer.settings.damped_space == "y"  # type: ignore[union-attr]
