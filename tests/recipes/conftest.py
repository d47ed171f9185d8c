import io
import logging
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
    """What a run left: its command line, what that printed, logged and warned of, and the directory of its paths."""

    cli: RecipeCLI
    printed: str
    said: list[str]
    directory: Path


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Runs ``main(arguments)`` in a directory of its own, for tests that only look at what a run left."""

    def run(main, arguments, directory=None):
        directory, printed = directory or tmp_path_factory.mktemp("run"), io.StringIO()
        said, logged = [], logging.Handler()
        logged.emit = lambda record: said.append(record.getMessage())
        recorded = warnings.catch_warnings(record=True)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), recorded as warned:
            warnings.simplefilter("always")
            patch.chdir(directory)
            patch.setattr("matplotlib.figure.Figure.savefig", empty_file)
            patch.setattr(sys, "argv", ["recipe"])
            patch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [logged])
            cli = main(arguments)
            said += [str(warning.message) for warning in warned]
            return FinishedRun(cli, printed.getvalue(), said, directory)

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
