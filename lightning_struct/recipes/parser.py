"""The parser of a recipe's command line: configs have names, and wrong options are answered with the nearest right one.

Needs the extra ``recipes``: only the command line of a recipe imports it.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile
from lightning.pytorch.cli import LightningArgumentParser

from lightning_struct.recipes.catalogue import did_you_mean, find_config

# Messages of jsonargparse about a wrong option: 4.40 and 4.53 have other words, hence several.
UNKNOWN_OPTION = re.compile(
    r"[Uu]nrecognized arguments: --(?P<argument>[\w.]+)"
    r"|Option '(?P<option>[\w.]+)' is not accepted"
    r"|does not accept (?:option|nested key) '(?P<key>[\w.]+)'"
    r"|[Kk]ey [\"'](?P<unexpected>[\w.]+)[\"'] is not expected"
    r"|No action for key [\"'](?P<unhandled>[\w.]+)[\"']"
)
SHORT_HELP = {
    "print_config": "Print the configuration with all of its values, and end.",
    "seed_everything": "Seed of the initial weights; that of batches and points is --data.seed.",
    "trainer.max_epochs": "Epochs of training at most.",
    "ckpt_path": "The checkpoint to go on from; it brings the configuration of its run.",
}
LEFT_OUT = re.compile(r"trainer|weights_only|(model|data)$")
MORE_HELP = """\
a trial, and more options:
  --quick               Run the whole command within a minute: a small network,
                        few samples, of --data.data_dir or else made by the
                        recipe, and few steps.
  --help.full           Describe the options of the Trainer, too.
  --model.help CLASS    Describe the options of a class of models; likewise
                        --data.help if --data names a class.
"""
UNKNOWN_CHOICE = re.compile(r"invalid choice: '?(?P<choice>\w+)'?")
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\w+)")
HOMES_OF_CLASSES = (
    *(f"lightning_struct.{part}" for part in ("models", "data", "callbacks", "optim", "nn")),
    *(f"lightning.pytorch.{part}" for part in ("callbacks", "loggers")),
)


class ConfigByName(ActionConfigFile):
    """Reads the config that is named by its path, or as :func:`find_config` says."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            values = find_config(values, parser.recipe)
        except LookupError as error:
            raise TypeError(error.args[0]) from error  # the parser makes its own error of it
        super().__call__(parser, namespace, values, option_string)


class RecipeParser(LightningArgumentParser):
    """LightningCLI's parser for a recipe.

    Args:
        recipe: whose configs can be named.
        model_class: of the recipe, for the names of its arguments.
        full_help: whether ``--help`` lists all options, those of the Trainer among them.
        options: of the parser of LightningCLI.
    """

    def __init__(
        self,
        *arguments: Any,
        recipe: str = "",
        model_class: Callable[..., Any] | None = None,
        full_help: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.recipe, self.model_class, self.full_help = recipe, model_class, full_help

    def format_help(self, *arguments: Any, **options: Any) -> str:
        """Describe the options of the recipe; or, if it is asked for, all options."""
        if self.full_help:
            return super().format_help(*arguments, **options)
        for action in self._actions:
            if action.dest in SHORT_HELP:
                action.help = SHORT_HELP[action.dest]
            elif LEFT_OUT.match(action.dest):
                action.help = argparse.SUPPRESS
        return f"{super().format_help(*arguments, **options)}\n{MORE_HELP}"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with the message, and the nearest right name below it."""
        # a parser within this one may have asked
        question = "" if "Did you mean" in message else suggestion(message, self)
        super().error(f"{message}\n{question}" if question else message, ex)


def suggestion(message: str, parser: argparse.ArgumentParser) -> str:
    """The question that follows an error message of the parser, empty if there is nothing to suggest."""
    options, subcommands = _accepted(parser)
    if choice := UNKNOWN_CHOICE.search(message):
        return did_you_mean(choice["choice"], subcommands)
    if unknown := UNKNOWN_CLASS.search(message):
        classes = (name for home in HOMES_OF_CLASSES for name in import_module(home).__all__)
        return did_you_mean(unknown["name"], classes)
    if wrong := UNKNOWN_OPTION.search(message):
        name = next(name for name in wrong.groups() if name is not None)
        if subcommands and options & {f"--{name}", f"--{name.partition('.')[0]}"}:  # an option, or a field of one
            command = f"{parser.prog} {min(subcommands)}"
            return f"Options come after the subcommand, --config too: begin with {command}"
        if homes := _homes(name, options, parser):
            return f"Did you mean {homes[0]}?"
        part, _, rest = name.partition(".")
        names = sorted(option.partition(".")[2] for option in options if option.startswith(f"--{part}."))
        if rest and names:
            near = get_close_matches(rest, names, n=1)
            return f"Did you mean --{part}.{near[0]}?" if near else f"--{part} has the options {', '.join(names)}."
        return did_you_mean(f"--{name}", {*options, "--quick"}) or did_you_mean(f"--{part}", options)
    return ""


def _homes(name: str, options: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """The options of the model, the data and so on for an option that was given without them, as ``optimizer.lr``."""
    first, dot, rest = name.partition(".")
    model_class = getattr(parser, "model_class", None)
    of_model = [f"--model.{argument}" for argument in signature(model_class).parameters] if model_class else []
    homes = sorted(option for option in {*options, *of_model} if option.partition(".")[2] == first)
    return [f"{home}{dot}{rest}" for home in homes]


def _accepted(parser: argparse.ArgumentParser) -> tuple[set[str], set[str]]:
    """Options of a parser and of its subcommands, and these subcommands."""
    options: set[str] = set()
    subcommands: set[str] = set()
    for action in parser._actions:  # argparse has no public way to list them
        options.update(option for option in action.option_strings if not option.endswith(".help"))
        if isinstance(action.choices, Mapping):
            subcommands.update(action.choices)
            options.update(*(_accepted(subparser)[0] for subparser in action.choices.values()))
    return options, subcommands
