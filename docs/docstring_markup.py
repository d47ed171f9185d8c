"""Extension of griffe: the markup of our docstrings, which is Sphinx's, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

LINK = re.compile(r"`([^`<]+?) <(https?://[^>]+)>`__")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([\w.]+)`")
LITERAL_BLOCK = re.compile(r"(?m)^( *)(.*?) ?::\n\n((?:\1 {2,}.*\n?|\n)+)")
DIRECTIVE = re.compile(r"(?m)^( *)\.\. code-block:: (\w+)\n\n((?:\1 {2,}.*\n?|\n)+)")
GROUPED = re.compile(r"(?m)^( +)((?:\*{0,2}\w+, )+\*{0,2}\w+):( .*(?:\n\1 +.*)*)")
EXAMPLE = re.compile(r"(?m)^( *)Example:$")
RETURNS = re.compile(r"(?m)^( *)Returns:\n\1( +).*\n(?:\1 +.*\n?)+")
ARGUMENTS = re.compile(r"(?m)^( *)Args:$")


def _path(name: str, scope: griffe.Object) -> str:
    """The full path of a name as it is seen from an object; of a module and a function of one name, the function."""
    first, _, rest = name.partition(".")
    package = scope.package
    try:
        path = name if first == package.name else ".".join(filter(None, (scope.resolve(first), rest)))
    except griffe.NameResolutionError:
        return name
    root, *parts = path.split(".")
    found = package
    for part in parts if root == package.name else ():
        if part not in found.members or found.members[part].is_alias:
            return path
        found = found.members[part]
    return f"{path}.{parts[-1]}" if found.is_module and parts and parts[-1] in found.members else path


def _link(match: re.Match[str], scope: griffe.Object) -> str:
    """A role as a link if the site has the name, else as code."""
    shortened, target = match.groups()
    shown = target.rsplit(".", 1)[-1] if shortened else target
    return f'<autoref optional identifier="{_path(target, scope)}"><code>{shown}</code></autoref>'


def _fenced(indent: str, language: str, block: str) -> str:
    lines = block.rstrip().splitlines()
    depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(indent + line[depth:] for line in lines)
    return f"{indent}```{language}\n{code}\n{indent}```\n\n"


def _literal_block(match: re.Match[str]) -> str:
    """The sentence before a literal block, and the block."""
    indent, sentence, block = match.groups()
    colon = "" if sentence[-1:] in (".", "") else ":"
    return f"{indent}{sentence}{colon}\n\n{_fenced(indent, 'python', block)}"


def _one_each(match: re.Match[str]) -> str:
    """An argument line for each of several names that are described together."""
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}:{description}" for name in names.split(", "))


def _one_value(match: re.Match[str]) -> str:
    """What is returned as one value: griffe would take each line for another."""
    first, second, *others = match[0].splitlines(keepends=True)
    return first + second + "".join(match[2] + line for line in others)


def to_markdown(text: str, scope: griffe.Object) -> str:
    """``text`` with roles as links, literal blocks as fenced ones, and one line for each argument."""
    text = ROLE.sub(lambda match: _link(match, scope), EXAMPLE.sub(r"\1Examples:", text))
    text = RETURNS.sub(_one_value, text)
    text = GROUPED.sub(_one_each, LINK.sub(r"[\1](\2)", text))
    text = DIRECTIVE.sub(lambda m: _fenced(m[1], m[2], m[3]), text)
    return LITERAL_BLOCK.sub(_literal_block, text)


def _documented(obj: griffe.Object) -> Iterator[griffe.Object]:
    """An object and everything that is defined below it."""
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _documented(member)


class DocstringMarkup(griffe.Extension):
    """Rewrites each docstring once, when the package has been read, so that names of all its modules are known."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for obj in _documented(pkg):
            if obj.docstring is None:
                continue
            text = to_markdown(obj.docstring.value, obj)
            if isinstance(obj, griffe.Class) and any(str(base).endswith("NamedTuple") for base in obj.bases):
                text = ARGUMENTS.sub(r"\1Attributes:", text)  # griffe knows no signature of them
            obj.docstring.value = text
