"""What layers with weights that do not change keep between calls: their matrix, prepared for products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.structured.prepared import DenseMatrix, PreparedMatrix


class KeptMatrix:
    """A matrix in the forms in which it is kept, by the number of rows that it multiplies: compressed, dense, or both.

    Args:
        reference: has the dtype and the device of the inputs.
        sources: the tensors that it is made from, by name. Aliases hold their memory, so that no other tensor can come
            to lie at their address.

    Attributes:
        latest: the form of the last product.
    """

    def __init__(self, reference: Tensor, sources: dict[str, Tensor]) -> None:
        self.dtype, self.device, self.device_type = reference.dtype, reference.device, reference.device.type
        self.latest: PreparedMatrix | None = None
        self._sources = [(name, source, source._version, source.data_ptr()) for name, source in sources.items()]
        self._aliases = [source.detach() for source in sources.values()]
        self._by_form: dict[bool, PreparedMatrix] = {}
        self._by_magnitude: dict[int, PreparedMatrix] = {}

    def is_current(self, parameters: dict[str, Any], buffers: dict[str, Any]) -> bool:
        """Whether the tensors of those names are the same, unchanged; and no gradient to one of them is asked for."""
        with_gradients = torch.is_grad_enabled()
        for name, source, version, address in self._sources:
            now = parameters[name] if name in parameters else buffers.get(name)
            if now is not source or source._version != version or source.data_ptr() != address:
                return False
            if with_gradients and source.requires_grad:
                return False
        return True

    def is_of(self, tensors: dict[str, Tensor]) -> bool:
        """Whether tensors of those names hold the same numbers, as copies do that ``functional_call`` puts there."""
        for name, source, version, address in self._sources:
            now = tensors[name]
            if source._version != version or source.data_ptr() != address:
                return False
            if now.dtype != source.dtype or now.device != source.device or not torch.equal(now, source):
                return False
        return True

    def matrix(self, rows: int) -> PreparedMatrix | None:
        """The form for so many rows, if it has been made."""
        self.latest = self._by_magnitude.get(rows.bit_length())
        return self.latest

    def prepared(self, rows: int, is_dense: bool, prepare: Callable[[bool], PreparedMatrix]) -> PreparedMatrix:
        """The form for so many rows, made where that is the first time.

        Args:
            rows: rows of the input; numbers of as many binary digits share a form.
            is_dense: which form that is. There are two at most.
            prepare: makes it.
        """
        if is_dense not in self._by_form:
            self._by_form[is_dense] = prepare(is_dense)
            if not is_dense and isinstance(self._by_form[is_dense], DenseMatrix):  # one copy is enough
                self._by_form[True] = self._by_form[is_dense]
                self._by_magnitude.clear()
        self.latest = self._by_magnitude[rows.bit_length()] = self._by_form[is_dense]
        return self.latest


def changes_unseen(tensor: Tensor) -> bool:
    """Whether changes may leave no trace: in inference mode, or by another process, which counts them by itself."""
    return tensor.is_inference() or (tensor.device.type == "cpu" and tensor.is_shared())  # on a GPU all count as shared
