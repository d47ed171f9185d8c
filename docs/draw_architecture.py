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
    "functional": ["solvers, jacobian, residuals,", "curvature, layers, structured"],
    "collective": ["sums over processes"],
    "utilities": ["private fields of Lightning"],
    "optim": ["SHF, RLS"],
    "nn": ["structured layers, adapters"],
    "data": ["data modules, samplers"],
    "callbacks": ["GrowingBatchSize, ..."],
    "mixins": ["SHFOptimization, ..."],
    "models": ["networks of the papers, PINNs"],
    "recipes": ["one command for each task"],
}
WITHOUT_LIGHTNING = {"functional", "collective", "optim", "nn"}
# As wide as the column of the page, which shows the picture in its own size.
PAGE, WIDTH, HEIGHT, GAP, MARGIN = 800, 236, 62, 36, 12


def imports() -> set[tuple[str, str]]:
    """Pairs (importer, imported) of packages, when a program runs; annotations do not count."""
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


def rows_of_boxes(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """The packages from the bottom row to the top one: each stands above all that it imports.

    Raises:
        ValueError: packages import each other in a circle.
    """
    left, placed = list(CONTENTS), []
    while left:
        row = [name for name in left if not any(a == name and b in left for a, b in pairs)]
        if not row:
            raise ValueError(f"{', '.join(left)} import each other in a circle")
        placed.append(row)
        left = [name for name in left if name not in row]
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
    placed = rows_of_boxes(pairs)
    height = 2 * MARGIN + len(placed) * HEIGHT + (len(placed) - 1) * GAP
    corner = {}
    for level, row in enumerate(reversed(placed)):
        between = (PAGE - len(row) * WIDTH) / (len(row) + 1)
        for place, name in enumerate(row):
            corner[name] = (between + place * (WIDTH + between), MARGIN + level * (HEIGHT + GAP))
    arrows, boxes = [], []
    for importer, imported in sorted(pair for pair in pairs if not implied(pair, pairs)):
        x0, y0 = corner[importer][0] + WIDTH / 2, corner[importer][1] + HEIGHT
        x1, y1 = corner[imported][0] + WIDTH / 2, corner[imported][1] - 2
        bend = (y1 - y0) / 2
        arrows.append(
            f'<path class="arrow" marker-end="url(#head)" d="M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} '
            f'{x1:g},{y1 - bend:g} {x1:g},{y1:g}"/>'
        )
    for name, (x, y) in corner.items():
        kind = "torch" if name in WITHOUT_LIGHTNING else "lightning"
        boxes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        boxes.append(f'<text class="name" x="{x + 12:g}" y="{y + 22:g}">{name}</text>')
        for line, text in enumerate(CONTENTS[name]):
            boxes.append(f'<text x="{x + 12:g}" y="{y + 39 + 16 * line:g}">{escape(text, quote=False)}</text>')
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker>'
    )
    style = (
        "text{font:14px sans-serif;fill:#333} .name{font:bold 16px monospace} "
        ".arrow{fill:none;stroke:#333;stroke-width:1.6} .torch{fill:#fdebd3;stroke:#c77d0a} "
        ".lightning{fill:#e3e7fb;stroke:#4051b5}"
    )
    label = "Packages of lightning_struct and their imports, from top to bottom"
    described = f'role="img" aria-label="{label}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE}" viewBox="0 0 {PAGE} {height:g}" {described}>',
            f"<style>{style}</style><defs>{head}</defs>",
            f'<rect width="{PAGE}" height="{height:g}" fill="#fff"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
