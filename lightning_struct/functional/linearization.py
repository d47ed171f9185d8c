"""A network at one point: its outputs, and the products with their Jacobian in the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

Parameters: TypeAlias = Mapping[str, Tensor]


class Linearization(ABC):
    """A network at one point: its outputs and the products with its Jacobian J there.

    Attributes:
        outputs: (n, ...), what the network returned; detached.
        backend: which one of ``linearize`` gives the products; with chunks, the one that is used inside each of them.
    """

    outputs: Tensor
    backend: str

    @abstractmethod
    def jvp(self, v: Parameters) -> Tensor:
        """J v: ``v`` has a tensor for each parameter; the result is shaped like ``outputs``."""

    @abstractmethod
    def vjp(self, u: Tensor, out: Parameters | None = None) -> dict[str, Tensor]:
        """Jᵀ u, a tensor for each parameter, written to ``out`` if given; ``u`` is shaped like ``outputs``."""

    @abstractmethod
    def squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        """Σᵢ (Jᵢᵀ uᵢ)², squared elementwise before the sum over the n samples."""

    @abstractmethod
    def squared_norms(self, u: Tensor) -> Tensor:
        """(n,): ‖Jᵢᵀ uᵢ‖² of each sample."""
