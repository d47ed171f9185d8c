"""Draws which packages of lightning_struct import which, as docs/architecture.svg. ::

    python docs/draw_architecture.py

The arrows are read off the source, so that the picture is true; a test compares it with the file. An import that others
imply is left out: where a imports b and b imports c, there is no arrow from a to c.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("architecture.svg")
CONTENTS = {
    "functional": ["the mathematics:", "linearize, lsmr, gradient norms,", "Kronecker factors, LDR products"],
    "collective": ["reductions over processes"],
    "utilities": ["private fields of Lightning,", "optional requirements"],
    "optim": ["SHF, RLS"],
    "nn": ["LDRSubdiagonal, ToeplitzLike, ...", "replace_linear"],
    "data": ["data modules,", "resizable loaders"],
    "callbacks": ["GrowingBatchSize,", "ValidationMeritStopping, ..."],
    "mixins": ["SHFOptimization,", "RLSOptimization"],
    "models": ["autoencoder, classifiers,", "language model"],
    "recipes": ["the papers' tasks,", "one command each"],
}
WITHOUT_LIGHTNING = {"functional", "collective", "optim", "nn"}
WIDTH, HEIGHT, GAP, MARGIN = 196, 74, 64, 24


def imports() -> set[tuple[str, str]]:
    """Pairs of packages of which the first imports the second when a program runs; annotations do not count."""
    pairs = set()
    for path in (ROOT / "lightning_struct").rglob("*.py"):
        importer = path.relative_to(ROOT / "lightning_struct").parts[0].removesuffix(".py")
        for node in _that_run(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_struct."):
                pairs.add((importer, str(node.module).split(".")[1]))
    return {(importer, imported) for importer, imported in pairs if importer != imported and importer in CONTENTS}


def _that_run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _that_run(child)


def columns(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """The packages from left to right: each stands to the right of all that it imports.

    Raises:
        ValueError: packages import each other in a circle.
    """
    left, placed = list(CONTENTS), []
    while left:
        column = [name for name in left if not any(a == name and b in left for a, b in pairs)]
        if not column:
            raise ValueError(f"{', '.join(left)} import each other in a circle")
        placed.append(column)
        left = [name for name in left if name not in column]
    return placed


def implied(pair: tuple[str, str], pairs: set[tuple[str, str]]) -> bool:
    """Whether the first package reaches the second through others, too."""
    reached = {b for a, b in pairs if a == pair[0] and b != pair[1]}
    while not reached >= (further := {b for a, b in pairs if a in reached}):
        reached |= further
    return pair[1] in reached


def draw() -> str:
    """The picture, as the text of an SVG file."""
    pairs = imports()
    placed = columns(pairs)
    rows = max(map(len, placed))
    width = 2 * MARGIN + len(placed) * WIDTH + (len(placed) - 1) * GAP
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP
    corner = {}
    for x, column in enumerate(placed):
        offset = (height - len(column) * HEIGHT - (len(column) - 1) * GAP) / 2
        for y, name in enumerate(column):
            corner[name] = (MARGIN + x * (WIDTH + GAP), offset + y * (HEIGHT + GAP))
    arrows, boxes = [], []
    for importer, imported in sorted(pair for pair in pairs if not implied(pair, pairs)):
        x0, y0 = corner[importer][0], corner[importer][1] + HEIGHT / 2
        x1, y1 = corner[imported][0] + WIDTH + 2, corner[imported][1] + HEIGHT / 2
        bend = max(GAP, x0 - x1) / 2
        arrows.append(
            f'<path class="arrow" marker-end="url(#head)" d="M{x0:g},{y0:g} C{x0 - bend:g},{y0:g} '
            f'{x1 + bend:g},{y1:g} {x1:g},{y1:g}"/>'
        )
    for name, (x, y) in corner.items():
        kind = "torch" if name in WITHOUT_LIGHTNING else "lightning"
        boxes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        boxes.append(f'<text class="name" x="{x + 10:g}" y="{y + 20:g}">{name}</text>')
        for line, text in enumerate(CONTENTS[name]):
            boxes.append(f'<text x="{x + 10:g}" y="{y + 37 + 14 * line:g}">{escape(text, quote=False)}</text>')
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker>'
    )
    style = (
        "text{font:11px sans-serif;fill:#333} .name{font:bold 14px monospace} "
        ".arrow{fill:none;stroke:#333;stroke-width:1.6} .torch{fill:#fdebd3;stroke:#c77d0a} "
        ".lightning{fill:#e3e7fb;stroke:#4051b5}"
    )
    label = "Packages of lightning_struct and their imports, from right to left"
    described = f'role="img" aria-label="{label}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" {described}>',
            f"<style>{style}</style><defs>{head}</defs>",
            f'<rect width="{width}" height="{height:g}" fill="#fff"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
