"""What a step of SHF reads and leaves: the values of its parameter group, and what the next step must know."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_struct.optim.requirements import WEIGHTS_ALONE
from lightning_struct.optim.shf.report import PhaseTimer
from lightning_struct.optim.shf.settings import is_damping

# Where the state has the memory: torch casts the state of a parameter to that parameter's dtype when it is loaded.
_KEY = "shf"


class StepState:
    """The state of an optimizer during one step; what is set here is set there.

    Args:
        optimizer_state: its ``state``.
        group: its parameter group.
        names: of the group's parameters.
        seed: of all steps.

    Attributes:
        group: the group, with λ, ``drop``, γ and ``maxiter``.
        timed: the phases of the step.
    """

    def __init__(self, optimizer_state: Any, group: dict[str, Any], names: Sequence[str], seed: int) -> None:
        self._state, self._names, self._seed_of_all = optimizer_state, names, seed
        self.group = group
        self.timed = PhaseTimer()

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name -> the trained weights, detached."""
        return {name: p.detach() for name, p in zip(self._names, self.group["params"], strict=True)}

    @property
    def memory(self) -> dict[str, Any]:
        """State that a resumed run needs beside the values of the group. It is replaced, not changed: a
        ``state_dict()`` taken before, and an optimizer loaded from one, hold the old one."""
        return self._state.setdefault(_KEY, {"steps": 0, "largest_batch": 0, "direction": None})

    @memory.setter
    def memory(self, value: dict[str, Any]) -> None:
        self._state[_KEY] = value

    @property
    def damping(self) -> float:
        """λ, from where it is known: the group has None until the first step has chosen it."""
        damping = self.group["damping"]
        assert damping is not None, "the first step chooses it first"
        return damping

    @damping.setter
    def damping(self, value: float) -> None:
        if not is_damping(value):
            raise ValueError(f"damping must be finite and > 0, got {value}")
        self.group["damping"] = float(value)

    @property
    def step_scale(self) -> float:
        """σ of the rule of the next batch."""
        return self.memory.get("step_scale", 1.0)

    def start(self, like: Tensor) -> Tensor | None:
        """d0 = γ d of the last step (section 4.5); None for zero."""
        decay, direction = self.group["warm_start"], self.memory["direction"]
        if direction is None or decay == 0.0:
            return None
        return direction.to(like) * decay  # a loaded direction may come from another device or dtype

    def seed(self, purpose: str) -> int:
        """Seed for ``purpose`` in this step. 32 bits: the CPU generator ignores the rest."""
        return random.Random(f"{self._seed_of_all} {self.memory['steps']} {purpose}").getrandbits(32)


def check_state(state_dict: Mapping[str, Any], options: Mapping[str, Any], weights: int) -> None:
    """Raise unless a state can be that of an SHF with these options in its group that trains so many weights.

    Raises:
        ValueError: see above.
    """
    groups = state_dict["param_groups"]
    if len(groups) != 1 or not groups[0].keys() >= options.keys():
        raise ValueError(f"the state is of another optimizer than SHF. {WEIGHTS_ALONE}")
    direction = state_dict["state"].get(_KEY, {}).get("direction")
    if direction is not None and len(direction) != weights:
        raise ValueError(
            f"the state is of an SHF that trains {len(direction):,} weights, and this one trains {weights:,}: load it "
            "into one whose module is that of the one that was saved, with the same parameters frozen"
        )
