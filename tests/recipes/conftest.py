import sys
from pathlib import Path

import pytest

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture(autouse=True)
def command_line(tmp_path, monkeypatch):
    """Results are written below the working directory; the arguments of pytest are not those of a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipe"])


@pytest.fixture
def conf():
    return lambda name: str(CONF / f"{name}.yaml")
