"""A network at one point: its outputs, and the products with their Jacobian in the weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from lightning_struct.functional.vectors import matching_tensors

Parameters: TypeAlias = Mapping[str, Tensor]


class Linearization(ABC):
    """A network at one point: its outputs and the products with its Jacobian J there.

    Attributes:
        outputs: (n, ...), of the network; detached.
        backend: which one of ``linearize`` gives the products; with chunks, the one that is used inside each of them.
    """

    outputs: Tensor
    backend: str
    _point: Parameters  # where it is taken

    def jvp(self, v: Parameters) -> Tensor:
        """J v: ``v`` has a tensor for each parameter; the result is shaped like ``outputs``.

        Raises:
            ValueError: other names or shapes than those of the parameters.
        """
        matching_tensors(v, self._point, "v")
        return self._jvp(v)

    def vjp(self, u: Tensor, out: Parameters | None = None) -> dict[str, Tensor]:
        """Jᵀ u, a tensor for each parameter, written to ``out`` if given; ``u`` is shaped like ``outputs``.

        Raises:
            ValueError: ``u`` has another shape, or ``out`` other names or shapes than those of the parameters.
        """
        matching_tensors(u, self.outputs, "u")
        if out is not None:
            matching_tensors(out, self._point, "out")
        return self._vjp(u, out)

    def squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        """Σᵢ (Jᵢᵀ uᵢ)², squared elementwise before the sum over the n samples.

        Raises:
            ValueError: ``u`` is not shaped like ``outputs``, or a batch normalisation couples the samples.
        """
        matching_tensors(u, self.outputs, "u")
        return self._squared_vjp(u)

    def squared_norms(self, u: Tensor) -> Tensor:
        """(n,): ‖Jᵢᵀ uᵢ‖² of each sample.

        Raises:
            ValueError: as for :meth:`squared_vjp`.
        """
        matching_tensors(u, self.outputs, "u")
        return self._squared_norms(u)

    @abstractmethod
    def _jvp(self, v: Parameters) -> Tensor: ...

    @abstractmethod
    def _vjp(self, u: Tensor, out: Parameters | None) -> dict[str, Tensor]: ...

    @abstractmethod
    def _squared_vjp(self, u: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _squared_norms(self, u: Tensor) -> Tensor: ...
