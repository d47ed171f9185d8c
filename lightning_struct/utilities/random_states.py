"""The states of the random generators in the form of checkpoints, so that an order of samples comes again."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

# Plain values and tensors only, so that a checkpoint that holds it can be loaded with weights_only=True.
RandomStates: TypeAlias = dict[str, Any]


def random_states(generators: Sequence[torch.Generator]) -> RandomStates:
    """States of the global generators of torch (on the CPU), Python and NumPy, and of ``generators``."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_states(states: RandomStates, generators: Sequence[torch.Generator]) -> None:
    """Restore the states of the global generators and, in order, of ``generators``."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    for generator, state in zip(generators, states["generators"], strict=True):
        generator.set_state(state)


@contextmanager
def isolated_random_states() -> Iterator[None]:
    """Afterwards the global generators of torch (on the CPU), Python and NumPy continue from their earlier states."""
    states = random_states(())
    try:
        yield
    finally:
        set_random_states(states, ())
