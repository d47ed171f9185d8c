"""The list of recipes, and configs by their names."""

import importlib
import io
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import lightning_struct.data
import lightning_struct.models
from lightning_struct import __version__
from lightning_struct.__main__ import main
from lightning_struct.recipes.catalogue import RECIPES, config_directory, config_names, default_config, find_config


def test_every_recipe_is_a_module_that_can_be_run():
    for name, recipe in RECIPES.items():
        module = importlib.import_module(f"lightning_struct.recipes.{name}")
        assert recipe.trains in module.__doc__ and module.main.__module__ == module.__name__
        assert hasattr(lightning_struct.models, recipe.model_class)
        assert hasattr(lightning_struct.data, recipe.data_class)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lightning_struct.recipes.another")


def test_tracebacks_show_the_lines_of_a_recipe(capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module("lightning_struct.recipes.mnist_fnn").main(["fitt"])
    assert "return run_recipe(NAME, args)" in "".join(traceback.format_exception(end.value))


@pytest.mark.parametrize("recipe", RECIPES)
def test_listing_names_each_recipe_and_its_configs(recipe, capsys):
    main([])
    printed = " ".join(capsys.readouterr().out.split())
    assert f" {recipe} {RECIPES[recipe].trains}" in printed and ", ".join(config_names(recipe)) in printed


def test_listing_is_printed_in_any_encoding(monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    main([])
    printed.flush()
    assert b"M?ller" in printed.buffer.getvalue()


def test_listing_imports_no_torch_and_needs_no_extra():
    program = "import sys; from lightning_struct.__main__ import main; main([]); main(['mnist_fnn'])\n"
    program += "assert not {'torch', 'lightning', 'jsonargparse', 'rich', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=Path(__file__).parents[2])


def test_recipe_alone_lists_its_configs_with_their_comments(capsys):
    main(["curves_autoencoder"])
    printed = capsys.readouterr().out
    assert "shf (default)" in printed and "CURVES with Adam: what SHF is measured against." in printed


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"lightning_struct {__version__}\n"


def test_unknown_recipe_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        main(["mnist_fn"])
    assert end.value.code == 2 and "Did you mean mnist_fnn?" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_default_config_exists_and_is_listed_first(recipe):
    assert default_config(recipe).is_file() and config_names(recipe)[0] == default_config(recipe).stem


@pytest.mark.parametrize("name", ["hrls", "hrls.yaml", "mnist_fnn/hrls", "mnist_fnn/hrls.yaml"])
def test_config_has_a_name(name):
    assert find_config(name, "mnist_fnn") == str(config_directory("mnist_fnn") / "hrls.yaml")


def test_config_of_another_recipe_has_a_name():
    assert find_config("imdb_lstm/plain_rnn", "mnist_fnn") == str(config_directory("imdb_lstm") / "plain_rnn.yaml")


def test_file_is_taken_before_a_name():
    Path("hrls").write_text("trainer: {max_epochs: 1}")
    assert find_config("hrls", "mnist_fnn") == "hrls"


@pytest.mark.parametrize("text", ["{trainer: {max_epochs: 1}}", "s3://bucket/some.yaml"])
def test_neither_yaml_nor_a_url_is_a_name(text):
    assert find_config(text, "mnist_fnn") == text


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("hrsl", "hrls"), ("hrsl.yaml", "hrls"), ("imdb_lstm/plain_rn", "imdb_lstm/plain_rnn")]
)
def test_unknown_config_is_answered_with_the_nearest_and_the_list(wrong, nearest):
    with pytest.raises(LookupError) as error:
        find_config(wrong, "mnist_fnn")
    assert f"Did you mean {nearest}?" in error.value.args[0] and "rls, adam, hrls" in error.value.args[0]
