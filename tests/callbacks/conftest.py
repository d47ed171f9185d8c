"""What tests of callbacks share."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture
def pl(request):
    """Lightning by the name that the rest of the tests does not use, unless a test is parametrised by names."""
    return import_module(getattr(request, "param", "pytorch_lightning"))


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Pictures are empty files: to draw them takes longer than the rest of a short run."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())


@pytest.fixture
def pictures(monkeypatch, without_pictures):
    """Pictures are drawn after all."""
    monkeypatch.undo()
