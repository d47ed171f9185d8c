"""Random signs; and the state of the random generators, kept and put back, so that dropout repeats its masks."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_struct.functional.torch_tools import tree_leaves

RandomState: TypeAlias = tuple[Tensor, tuple[list[int], list[Tensor]]]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers, on the CPU and ``device``, by ``seed`` alone; afterwards the generators go on as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def random_state(*args: Any) -> RandomState:
    """The state of the CPU's generator and of those of the devices on which tensors among ``args`` live."""
    return torch.get_rng_state(), get_device_states(*tree_leaves(args))  # some versions refuse named tuples


def set_random_state(state: RandomState) -> None:
    """Let random numbers come as they came after ``state`` was taken."""
    cpu, (devices, states) = state
    torch.set_rng_state(cpu)
    set_device_states(devices, states)


@contextmanager
def restored_random_state(state: RandomState) -> Iterator[None]:
    """Random numbers as they came after ``state`` was taken; afterwards the generators have their earlier states."""
    _, (devices, _) = state
    with torch.random.fork_rng(devices=devices):
        set_random_state(state)
        yield


@contextmanager
def isolated_host_generators() -> Iterator[None]:
    """Afterwards the generators of Python and NumPy have their earlier states: layers may draw from them, too."""
    numpy = sys.modules.get("numpy")  # torch does without it
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def normal_numbers(
    *shape: int, like: Tensor, dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Tensor:
    """Normal numbers of the dtype and device of ``like``, the same on all devices, whatever torch's default device is.

    Args:
        *shape: theirs.
        like: see above.
        dtype: in which they are drawn.
        generator: of the CPU; None: a new one with the seed 0, for vectors that must not be orthogonal to anything in
            particular.

    Example:
        >>> normal_numbers(2, like=torch.empty(0)) == normal_numbers(2, like=torch.empty(0))
        tensor([True, True])
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(like)


def random_signs(*shape: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """±1 with equal probability (Rademacher), of the dtype and device of ``like``; the generator is one of that device.

    Example:
        >>> random_signs(2, 3, like=torch.empty(0)).abs()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    bits = torch.randint(0, 2, shape, generator=generator, device=like.device, dtype=torch.int8)
    return bits.mul_(2).sub_(1).to(like.dtype)
