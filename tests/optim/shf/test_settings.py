"""Settings of SHF as a value."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from torch import nn

from lightning_struct.optim.shf import SHF, Settings
from lightning_struct.optim.shf.settings import PAPER


def test_settings_have_the_names_and_defaults_of_the_arguments() -> None:
    arguments = [p for p in inspect.signature(SHF).parameters.values() if p.kind is p.KEYWORD_ONLY]
    settings = inspect.signature(Settings).parameters.values()
    assert [(p.name, p.default) for p in arguments] == [(p.name, p.default) for p in settings]


def test_an_optimizer_has_the_settings_that_it_was_given() -> None:
    given: dict[str, Any] = {"damping": 3.0, "solver": "cg", "l2": 0.1, "maxiter": 7, "seed": 5}
    assert SHF(nn.Linear(2, 2), "mse", **given).settings == Settings(**given).filled(PAPER)


def test_settings_of_a_step_do_not_change_with_the_damping() -> None:
    optimizer = SHF(nn.Linear(2, 2), "mse", damping=3.0)
    optimizer.damping = 1.0
    assert optimizer.settings.damping == 3.0


def test_settings_are_frozen() -> None:
    settings = Settings(damping=1.0)
    with pytest.raises(FrozenInstanceError):
        settings.damping = 2.0  # type: ignore[misc]


def test_settings_made_of_others_are_checked_too() -> None:
    with pytest.raises(ValueError, match="maxiter must be >= 1, got 0"):
        replace(Settings(damping=1.0), maxiter=0)


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
    assert Settings(damping=1.0, **options).damped_space == expected


def test_each_setting_is_described_where_the_optimizer_is() -> None:
    described = inspect.getdoc(SHF) or ""
    missing = [field.name for field in fields(Settings) if f"    {field.name}: " not in described]
    assert missing == []
