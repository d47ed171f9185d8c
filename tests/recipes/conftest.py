import io
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_struct.recipes.cli import RecipeCLI

CONF = Path(__file__).parents[1] / "conf"


def empty_file(_, path, **__):
    """In place of a picture: to draw it takes a third of a short run."""
    Path(path).touch()


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: its command line, what that printed and warned of, and the directory its paths begin at."""

    cli: RecipeCLI
    printed: str
    warned: list[str]
    directory: Path


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Runs ``main(arguments)`` in a directory of its own, for tests that only look at what a run left."""

    def run(main, arguments, directory=None):
        directory, printed = directory or tmp_path_factory.mktemp("run"), io.StringIO()
        recorded = warnings.catch_warnings(record=True)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), recorded as warned:
            warnings.simplefilter("always")
            patch.chdir(directory)
            patch.setattr("matplotlib.figure.Figure.savefig", empty_file)
            patch.setattr(sys, "argv", ["recipe"])
            cli = main(arguments)
            return FinishedRun(cli, printed.getvalue(), [str(warning.message) for warning in warned], directory)

    return run


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", empty_file)


@pytest.fixture(autouse=True)
def command_line(tmp_path, monkeypatch):
    """Results are written below the working directory; the arguments of pytest are not those of a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipe"])


@pytest.fixture(scope="module")
def conf():
    return lambda name: str(CONF / f"{name}.yaml")
