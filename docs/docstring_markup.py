"""Extension of griffe: the markup of our docstrings, which is Sphinx's, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([\w.]+)`")
LITERAL_BLOCK = re.compile(r"(?m)^( *)(.*?) ?::\n\n((?:\1 {2,}.*\n?|\n)+)")
DIRECTIVE = re.compile(r"(?m)^( *)\.\. code-block:: (\w+)\n\n((?:\1 {2,}.*\n?|\n)+)")
GROUPED = re.compile(r"(?m)^( +)((?:\*{0,2}\w+, )+\*{0,2}\w+):( .*(?:\n\1 +.*)*)")
EXAMPLE = re.compile(r"(?m)^( *)Example:$")
ARGUMENTS = re.compile(r"(?m)^( *)Args:$")


def _link(match: re.Match[str]) -> str:
    """A role as a link, where the site has the name; else as code."""
    shortened, target = match.groups()
    shown = target.rsplit(".", 1)[-1] if shortened else target
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'


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


def to_markdown(text: str) -> str:
    """``text`` with roles as links, literal blocks as fenced ones, and one line for each argument."""
    text = GROUPED.sub(_one_each, ROLE.sub(_link, EXAMPLE.sub(r"\1Examples:", text)))
    text = DIRECTIVE.sub(lambda m: _fenced(m[1], m[2], m[3]), text)
    return LITERAL_BLOCK.sub(_literal_block, text)


class DocstringMarkup(griffe.Extension):
    """Rewrites each docstring once, when it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = to_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Class) and any(str(base).endswith("NamedTuple") for base in obj.bases):
            text = ARGUMENTS.sub(r"\1Attributes:", text)  # griffe knows no signature of them
        obj.docstring.value = text
