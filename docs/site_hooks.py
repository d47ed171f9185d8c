"""Hooks of mkdocs: pages from the root of the repository, the order in the search, equations as MathML, and a check of
the reference."""

import ast
import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
# What the search multiplies its scores by: guides come before the reference, and both before results.
BOOSTS = {"guides": 4, "callbacks": 4, "optimizers": 4, "layers": 4, "api": 0.5, "results": 0.2, "changelog.md": 0.1}
BOOSTS |= {"guides/faq.md": 1}
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[])]</\1>', flags=re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with their links as seen from ``docs/``."""
    for page, source in PAGES.items():
        content = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Give a page the boost of its folder."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri) or BOOSTS.get(page.file.src_uri.partition("/")[0], 1)}
    return markdown


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Typeset the equations of a page, so that the reader's browser needs no script and no other host."""

    def mathml(found: re.Match[str]) -> str:
        return convert(unescape(found[2]), display="block" if found[1] == "div" else "inline")

    if page.file.src_uri == "equations.md":  # long names in narrow columns: they may break between words
        html = re.sub(r"(?<=<code>)[^<]+", lambda name: re.sub(r"::|[./_]", r"\g<0><wbr>", name[0]), html)
    return EQUATION.sub(mathml, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a reference that lacks a public name.

    The function of a module of the same name, such as ``nn.compress``, is found only where its page names it in full.
    """
    for page in (ROOT / "docs/api").glob("*.md"):
        package = ROOT / "lightning_struct" / page.stem / "__init__.py"
        if not package.exists():
            continue
        folder = Path(config.site_dir) / "api"
        html = "".join(path.read_text() for path in (folder / f"{page.stem}.html", *folder.glob(f"{page.stem}/*.html")))
        path = f"lightning_struct.{page.stem}"
        lacking = [
            name
            for name in _public_names(package)
            if not any(f'id="{path}.{end}"' in html for end in (name, f"{name}.{name}"))
        ]
        if lacking:
            raise BuildError(f"docs/api/{page.name} has no entry of {', '.join(lacking)}")


def _public_names(package: Path) -> list[str]:
    """``__all__`` of a package."""
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
