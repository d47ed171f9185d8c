"""The table of equations in the documentation leads to functions and tests that are there."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (?P<number>[^|]+) \| .+ \| `(?P<function>[\w.]+)` \| `(?P<file>[\w/.]+)::(?P<test>\w+)` \|$",
    (ROOT / "docs/equations.md").read_text(),
    flags=re.MULTILINE,
)


def test_every_row_of_the_page_is_read() -> None:
    lines = (ROOT / "docs/equations.md").read_text().splitlines()
    assert len(ROWS) == sum(line.startswith("| ") and not line.startswith("| number") for line in lines) > 45


@pytest.mark.parametrize(("number", "function"), [row[:2] for row in ROWS], ids=lambda part: part)
def test_the_function_of_an_equation_can_be_imported(number: str, function: str) -> None:
    assert pkgutil.resolve_name(f"lightning_struct.{function}") is not None


@pytest.mark.parametrize(("file", "test"), sorted({row[2:] for row in ROWS}), ids=lambda part: part)
def test_the_test_of_an_equation_is_there(file: str, test: str) -> None:
    assert re.search(rf"^ *def {test}\(", (ROOT / "tests" / file).read_text(), flags=re.MULTILINE)
