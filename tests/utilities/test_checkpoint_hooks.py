import copy
import pickle
from functools import partial

import pytest
from lightning.pytorch import LightningModule

from lightning_struct.utilities.checkpoint_hooks import add_checkpoint_hooks, remove_checkpoint_hooks

NAMES = ("on_save_checkpoint", "on_load_checkpoint")


class Module(LightningModule):
    def on_save_checkpoint(self, checkpoint):
        note("class", self, checkpoint)


def note(who, module, checkpoint):
    checkpoint.setdefault("called", []).append((who, module))


def add(module, owner):
    add_checkpoint_hooks(module, owner, save=partial(note, owner), load=partial(note, owner))


def called(module, name="on_save_checkpoint"):
    """Who is called, in this order, and that all are called with the module."""
    checkpoint = {}
    getattr(module, name)(checkpoint)
    assert all(with_module is module for _, with_module in checkpoint.get("called", []))
    return [who for who, _ in checkpoint.get("called", [])]


@pytest.mark.parametrize(("name", "own"), [("on_save_checkpoint", ["class"]), ("on_load_checkpoint", [])])
def test_hooks_are_called_once_after_the_method_of_the_class(name, own):
    module = Module()
    for owner in "aba":
        add(module, owner)
    assert called(module, name) == [*own, "a", "b"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_hooks_are_removed_in_any_order(order):
    module = Module()
    add(module, "a")
    add(module, "b")
    for number, owner in enumerate(order):
        remove_checkpoint_hooks(module, owner)
        assert called(module) == ["class", *order[number + 1 :]]
    assert not set(NAMES) & vars(module).keys()


def test_attribute_of_the_module_is_called_and_comes_back():
    module = Module()
    own = vars(module)["on_load_checkpoint"] = partial(note, "own", module)
    add(module, "a")
    assert called(module, "on_load_checkpoint") == ["own", "a"]
    remove_checkpoint_hooks(module, "a")
    assert vars(module)["on_load_checkpoint"] is own and "on_save_checkpoint" not in vars(module)


def test_removal_of_what_was_not_added_changes_nothing():
    module = Module()
    own = vars(module)["on_load_checkpoint"] = partial(note, "own", module)
    remove_checkpoint_hooks(module, "a")
    assert vars(module)["on_load_checkpoint"] is own
    add(module, "b")
    remove_checkpoint_hooks(module, "a")
    assert called(module) == ["class", "b"]


def test_what_another_has_put_in_place_of_the_hooks_stays():
    module = Module()
    add(module, "a")
    other = vars(module)["on_save_checkpoint"] = partial(note, "other", module)
    remove_checkpoint_hooks(module, "a")
    assert vars(module)["on_save_checkpoint"] is other and "on_load_checkpoint" not in vars(module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_calls_its_own_hooks(copied):
    module = Module()
    vars(module)["on_load_checkpoint"] = partial(note, "own", module)
    add(module, "a")
    other = copied(module)
    remove_checkpoint_hooks(module, "a")
    assert called(other) == ["class", "a"] and called(other, "on_load_checkpoint") == ["own", "a"]
    remove_checkpoint_hooks(other, "a")
    assert called(other) == ["class"] and called(other, "on_load_checkpoint") == ["own"]
