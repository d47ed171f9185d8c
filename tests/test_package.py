import subprocess
import sys
from doctest import DocTestParser
from importlib import import_module

import pytest

import lightning_struct
import lightning_struct.callbacks


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_loads_no_library():
    loaded = run(
        "import sys, lightning_struct;"
        "print([name for name in ('torch', 'lightning', 'torchvision', 'matplotlib') if name in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.slow
def test_lower_layers_do_not_load_lightning():
    packages = ", ".join(f"lightning_struct.{name}" for name in ("functional", "optim", "nn"))
    assert run(f"import sys, {packages}; print('lightning' in sys.modules)") == "False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("set_up", "shown"),
    [("pass", False), ("logging.basicConfig(level='INFO')", True)],
)
def test_choices_of_an_optimizer_are_shown_if_logging_is_set_up_to_show_them(set_up, shown):
    code = f"import logging, torch; {set_up}; from lightning_struct.optim import RLS; RLS(torch.nn.Linear(2, 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("RLS takes" in done.stderr) == shown


LIST_IMPORTS_OF_THE_PACKAGE = """
import builtins

original, imported = builtins.__import__, set()

def spy(name, globals=None, *arguments):
    if globals and globals.get("__name__", "").startswith("lightning_struct"):
        imported.add(name.split(".")[0])
    return original(name, globals, *arguments)

builtins.__import__ = spy
import lightning_struct
for name in lightning_struct.__all__:
    getattr(lightning_struct, name)
print(*imported)
"""


@pytest.mark.slow
def test_plug_ins_do_not_need_what_the_recipes_need():
    imported = set(run(LIST_IMPORTS_OF_THE_PACKAGE).split())
    assert "torch" in imported and not imported & {"jsonargparse", "matplotlib", "rich", "torchvision"}


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
        *("DampedSolver", "GaussNewtonLoss", "RightPreconditioner"),  # protocols
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
