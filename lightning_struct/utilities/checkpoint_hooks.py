"""Additions of callbacks to the ``on_save_checkpoint`` and ``on_load_checkpoint`` of a module.

Lightning asks callbacks neither if weights alone are saved nor before weights are loaded, but always the module.
"""

from collections.abc import Callable
from typing import Any

from lightning_struct.utilities import namespaces as L

CheckpointHook = Callable[[Any, dict[str, Any]], None]
"""Called as ``hook(module, checkpoint)``."""


def add_checkpoint_hooks(module: L.LightningModule, owner: str, *, save: CheckpointHook, load: CheckpointHook) -> None:
    """Have hooks called after those that a module has, be they methods of its class or attributes of its own.

    Args:
        module: the module.
        owner: who adds them, such as the name of a callback. Earlier hooks of the same owner are replaced.
        save: called after ``on_save_checkpoint``.
        load: called after ``on_load_checkpoint``.
    """
    for name, hook in (("on_save_checkpoint", save), ("on_load_checkpoint", load)):
        present = vars(module).get(name)
        if not isinstance(present, _Chain):
            present = vars(module)[name] = _Chain(module, name)
        present.added[owner] = hook


def remove_checkpoint_hooks(pl_module: L.LightningModule, owner: str) -> None:
    """Take the hooks of an owner away, if there are any; with the last ones gone, the module has its own again."""
    for name in ("on_save_checkpoint", "on_load_checkpoint"):
        chain = vars(pl_module).get(name)
        if isinstance(chain, _Chain):
            chain.added.pop(owner, None)
            if not chain.added:
                del vars(pl_module)[name]
                vars(pl_module).update(chain.before)


class _Chain:
    """Stands in for a hook of a module. It goes with copies of the module, also into other processes.

    Attributes:
        before: the attribute that it stands in for, by its name; empty if that is the method of the class.
        added: the hooks to be called after it, by their owners.
    """

    def __init__(self, pl_module: L.LightningModule, name: str) -> None:
        self.pl_module, self.name = pl_module, name
        self.before = {name: vars(pl_module)[name]} if name in vars(pl_module) else {}
        self.added: dict[str, CheckpointHook] = {}

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        if self.before:
            self.before[self.name](checkpoint)
        else:
            getattr(type(self.pl_module), self.name)(self.pl_module, checkpoint)
        for hook in self.added.values():
            hook(self.pl_module, checkpoint)
