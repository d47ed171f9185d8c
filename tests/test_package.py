import json
import subprocess
import sys
from doctest import DocTestParser
from importlib import import_module

import pytest

import lightning_struct
import lightning_struct.callbacks

# One process answers all questions about imports, in this order.
STEPS = """
import builtins, json, logging, sys

original, imported = builtins.__import__, set()

def spy(name, globals=None, *arguments):
    if globals and globals.get("__name__", "").startswith("lightning_struct"):
        imported.add(name.split(".")[0])
    return original(name, globals, *arguments)

def loaded():
    return [name for name in ("torch", "lightning", "torchvision", "matplotlib") if name in sys.modules]

builtins.__import__ = spy
import lightning_struct
answers = {"package": loaded()}
import lightning_struct.functional, lightning_struct.nn, torch
from lightning_struct.optim import RLS
answers["lower layers"] = loaded()
RLS(torch.nn.Linear(2, 2))
print("logging is set up", file=sys.stderr)
logging.basicConfig(level="INFO")
RLS(torch.nn.Linear(2, 2))
for name in lightning_struct.__all__:
    getattr(lightning_struct, name)
other = "pytorch_lightning" in sys.modules
print(json.dumps(answers | {"imported": sorted(imported), "other namespace": other}))
"""


@pytest.fixture(scope="module")
def process():
    return subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_importing_the_package_loads_no_library(process):
    assert json.loads(process.stdout)["package"] == []


@pytest.mark.slow
def test_lower_layers_do_not_load_lightning(process):
    assert json.loads(process.stdout)["lower layers"] == ["torch"]


@pytest.mark.slow
def test_choices_of_an_optimizer_are_shown_if_logging_is_set_up_to_show_them(process):
    before, after = process.stderr.split("logging is set up")
    assert "RLS takes" not in before and "RLS takes" in after


@pytest.mark.slow
def test_plug_ins_do_not_need_what_the_recipes_need(process):
    imported = set(json.loads(process.stdout)["imported"])
    assert "torch" in imported and not imported & {"jsonargparse", "matplotlib", "rich", "torchvision"}


@pytest.mark.slow
def test_a_project_of_lightning_does_not_load_the_other_namespace(process):
    assert not json.loads(process.stdout)["other namespace"]


@pytest.mark.parametrize("name", sorted(set(lightning_struct.__all__) - {"__version__"}))
def test_public_names_are_there(name):
    assert getattr(lightning_struct, name).__name__ == name


def test_callbacks_are_at_the_top_level():
    assert set(lightning_struct.callbacks.__all__) <= set(lightning_struct.__all__)


def test_public_names_are_listed():
    assert set(lightning_struct.__all__) <= set(dir(lightning_struct))


# Public names for which an example of their own says nothing.
WITHOUT_EXAMPLE = {
    "functional": {
        *("GaussNewtonLoss", "RightPreconditioner"),  # protocols
        *("DisplacementOperator", "Jacobian", "Linearization"),  # abstract bases
        # records, which the example of the function that returns or takes them shows
        *("Derivatives", "LineSearchResult", "ParameterNorms", "ScaledDamping"),
    },
    "models": {"pruned"},  # reads the checkpoint of a run from the command line
}


@pytest.mark.parametrize("part", ["callbacks", "data", "functional", "models", "nn", "optim", "mixins"])
def test_public_functions_and_classes_have_an_example(part):
    package = import_module(f"lightning_struct.{part}")
    docstrings = {name: getattr(package, name).__doc__ or "" for name in package.__all__}
    without = {name for name, docstring in docstrings.items() if not DocTestParser().get_examples(docstring)}
    assert without == WITHOUT_EXAMPLE.get(part, set())


@pytest.mark.parametrize("part", ["callbacks", "data", "functional", "models", "nn", "optim", "mixins"])
def test_the_first_paragraph_of_a_docstring_leads_to_no_code(part):
    # the command line makes titles of it
    package = import_module(f"lightning_struct.{part}")
    first = {name: (getattr(package, name).__doc__ or "").split("\n\n")[0] for name in package.__all__}
    assert [name for name, text in first.items() if text.rstrip().endswith("::")] == []


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lightning_struct' has no attribute 'SHG'"):
        lightning_struct.SHG  # noqa: B018
