"""The rules of imports that docs/architecture.md draws, read from the source: nothing is imported here."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_struct"

# What each part may import besides itself. Parts of one line are peers.
ON_TORCH = {"functional": set(), "collective": set()}
STATEFUL = {part: {"functional", "collective"} for part in ("optim", "nn")}
PEERS = ("mixins", "callbacks", "models", "data", "utilities")
ON_LIGHTNING = {part: {*ON_TORCH, *STATEFUL, *PEERS} for part in PEERS}
MAY_IMPORT = ON_TORCH | STATEFUL | ON_LIGHTNING | {"strategies": {"mixins"}, "recipes": {*ON_TORCH, *STATEFUL, *PEERS}}

# Private names that may be used beside Lightning: of Python's named tuples and its argparse, of torch's DataLoader and
# compiled modules, and the one that Lightning's documentation gives to callbacks for their ``state_key``.
PRIVATE_NAMES_TO_USE = {
    *("_asdict", "_fields", "_replace", "_actions", "_iterator", "_compiled_call_impl", "_generate_state_key")
}


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module of the package, by its name."""
    trees = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, which several tests read."""
    return list(ast.walk(tree))


@cache
def imports(tree: ast.Module) -> list[str]:
    """The modules that are imported anywhere in a module, in functions and for type checkers too."""
    return list(iterate_imports(tree))


def iterate_imports(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "relative imports are not used"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph, as the names along it; [] if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if found := visit(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def part_of(name: str) -> str:
    """``"nn"`` for ``"lightning_struct.nn.ldr"``."""
    return (name.split(".") + [""])[1]


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_import_closes_a_circle():
    graph = {name: {other for other in imports(tree) if other in modules()} for name, tree in modules().items()}
    assert graph[f"{PACKAGE}.nn.replace"], "the graph has edges"
    assert cycle(graph) == []


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_those_below_it_only(part):
    allowed = {part, *MAY_IMPORT[part]}
    upwards = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if part_of(name) == part
        for other in imports(tree)
        if other.startswith(f"{PACKAGE}.") and part_of(other) not in allowed
    ]
    assert upwards == []


def test_every_part_has_a_rule():
    parts = {part_of(name) for name in modules()} - {"", "__main__"}
    assert parts == set(MAY_IMPORT)


@pytest.mark.parametrize("part", [*ON_TORCH, *STATEFUL])
def test_the_mathematics_optimizers_and_layers_need_torch_alone(part):
    allowed = {"torch", "typing_extensions", PACKAGE, *sys.stdlib_module_names}
    others = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if part_of(name) == part
        for other in imports(tree)
        if other.split(".")[0] not in allowed
    ]
    assert others == []


def private_imports(tree: ast.Module) -> list[str]:
    """The private names, and names from private modules, that are imported from modules of the package."""
    return [
        f"{node.module}.{alias.name}"
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE
        for alias in node.names
        if any(
            part.startswith("_") and not part.startswith("__") for part in [*str(node.module).split("."), alias.name]
        )
    ]


def test_no_module_imports_a_private_name_of_another():
    assert private_imports(ast.parse(f"def f():\n    from {PACKAGE}.nn.ldr import _x, y")) == [f"{PACKAGE}.nn.ldr._x"]
    assert {name: found for name, tree in modules().items() if (found := private_imports(tree))} == {}


def names_of_lightning(tree: ast.Module) -> list[str]:
    """The modules of Lightning, of either namespace, that are imported in a module."""
    return [
        name for name in imports(tree) if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")
    ]


def test_what_works_with_both_namespaces_imports_neither():
    neutral = {name for name in modules() if part_of(name) in ("mixins", "callbacks", "data", "utilities")}
    one = f"{PACKAGE}.utilities.namespaces"
    assert [name for name in sorted(neutral - {one}) if names_of_lightning(modules()[name])] == []
    assert names_of_lightning(modules()[one]), "the one place, for type checkers"


def private_names_of_others(tree: ast.Module, ours: set[str]) -> set[str]:
    """The private attributes and imports in a module that nobody in the package has defined."""
    used = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            used |= {str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
    return {name for name in used if name.startswith("_") and not name.startswith("__")} - ours - PRIVATE_NAMES_TO_USE


def private_names_defined(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_private_names_of_lightning_are_used_in_one_file():
    internals = f"{PACKAGE}.utilities.lightning_internals"
    others = {name: tree for name, tree in modules().items() if name != internals}
    ours = {private for tree in others.values() for private in private_names_defined(tree)}
    found = {
        name: private_names_of_others(tree, ours)
        for name, tree in others.items()
        if names_of_lightning(tree) or f"{PACKAGE}.utilities.namespaces" in imports(tree)
    }
    assert {name: names for name, names in found.items() if names} == {}
    assert private_names_of_others(modules()[internals], ours), "the one file that uses them is read as such"


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """Names with a leading underscore that are imported from torch or read off it, such as ``torch._C``."""
    found = {
        f"{node.module}.{alias.name}"
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch"
        for alias in node.names
    }
    found |= {alias.name for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {ast.unparse(node) for node in nodes(tree) if isinstance(node, ast.Attribute)}
    return {name for name in found if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name)}


def test_private_names_of_torch_are_used_in_one_file():
    internals = f"{PACKAGE}.functional.torch_tools"
    found = {name: private_names_of_torch(tree) for name, tree in modules().items()}
    assert found.pop(internals), "the one file that uses them is read as such"
    assert {name: names for name, names in found.items() if names} == {}


def test_first_lines_of_docstrings_do_not_begin_with_a_word_that_stands_for_a_noun():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = ((name, node) for name, tree in modules().items() for node in nodes(tree) if isinstance(node, kinds))
    first_lines = ((name, (ast.get_docstring(node) or "").partition("\n")[0]) for name, node in documented)
    assert [(name, line) for name, line in first_lines if re.match(r"(Of|What|That|Those|Where)\b", line)] == []
