"""``python -m lightning_struct``, or ``lightning-struct``: lists the recipes, or runs one."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from itertools import takewhile

from lightning_struct import __version__
from lightning_struct.recipes.catalogue import RECIPES, config_directory, config_names, did_you_mean

PROGRAM = "lightning-struct"
DESCRIPTION = """\
Lists the recipes, tasks that run from the command line, and the commands for them.
With the name of a recipe: lists its configs. With a subcommand too: runs it, as
python -m lightning_struct.recipes.RECIPE does."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command on ``args``, by default on the command line of this process."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] [RECIPE [SUBCOMMAND [OPTION ...]]]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning_struct {__version__}")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="one of the recipes")
    parser.add_argument("subcommand", metavar="SUBCOMMAND", nargs="?", help="fit, validate, test or predict")
    parser.add_argument("options", metavar="OPTION", nargs="*", help="as --help of the subcommand lists them")
    if isinstance(sys.stdout, TextIOWrapper):  # names of authors in any encoding
        sys.stdout.reconfigure(errors="replace")
    given = sys.argv[1:] if args is None else list(args)
    name = parser.parse_args(given[:1]).recipe  # the rest is for the recipe to read
    if name is None:
        print(recipe_list())
    elif name not in RECIPES:
        there = f"The recipes are {', '.join(RECIPES)}."
        parser.error(did_you_mean(name, RECIPES, f"There is no recipe {name}.", there))
    elif len(given) == 1:
        print(config_list(name))
    else:
        from lightning_struct.recipes.cli import run_recipe  # only here: it imports Lightning
        from lightning_struct.recipes.messages import run_command

        run_command(partial(run_recipe, name, given[1:], f"{PROGRAM} {name}"))


def recipe_list() -> str:
    """All recipes, by paper: a line for each with its network and its data, and one with its configs."""
    lines = [f"lightning_struct {__version__}", ""]
    for paper in dict.fromkeys(recipe.paper for recipe in RECIPES.values()):
        lines.append(paper)
        for name, recipe in RECIPES.items():
            if recipe.paper == paper:
                lines.append(f"  {name:<19} {recipe.trains} ({recipe.section}). Data: {recipe.data}")
                lines.append(_indented(f"configs: {', '.join(config_names(name))}", 22))
        lines.append("")
    lines += [
        f"Train:          {PROGRAM} RECIPE fit [--config CONFIG]   (the first config listed is the default)",
        f"A trial:        {PROGRAM} RECIPE fit --quick   (within a minute, without data)",
        f"Without data:   {PROGRAM} RECIPE fit --data.synthetic=true   (an equation needs none)",
        f"About configs:  {PROGRAM} RECIPE",
    ]
    return "\n".join(lines)


def config_list(name: str) -> str:
    """A recipe, and each of its configs with the comment that it begins with."""
    recipe = RECIPES[name]
    lines = [
        f"{name}: {recipe.trains}",
        f"from:  {recipe.paper}, {recipe.section}",
        f"data:  {recipe.data}",
        "",
        f"Configs in {config_directory(name)}:",
    ]
    for config in config_names(name):
        default = " (default)" if config == recipe.default_config else ""
        lines += [f"  {config}{default}", _indented(_comment(name, config), 6)]
    lines += ["", f"Run: {PROGRAM} {name} {{fit,validate,test,predict}} [--config CONFIG] [--KEY=VALUE ...]"]
    return "\n".join(lines)


def _comment(name: str, config: str) -> str:
    """The first lines of a config, which describe it."""
    lines = (config_directory(name) / f"{config}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))


def _indented(text: str, spaces: int) -> str:
    margin = " " * spaces
    return textwrap.fill(text, 110, initial_indent=margin, subsequent_indent=margin)


if __name__ == "__main__":
    main()
