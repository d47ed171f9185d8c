"""Matrices of layers whose weights do not change, prepared between calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.structured.prepared import PreparedMatrix

Form = Tensor | PreparedMatrix
"""A matrix by its entries, or in another form."""


class PreparedForms:
    """A matrix prepared for products, by the number of rows that it multiplies: in few numbers, dense, or both.

    Args:
        reference: has the dtype and the device of the inputs.
        sources: the tensors that it is made from, by name. Aliases hold their memory, so that no other tensor can come
            to lie at their address.
    """

    def __init__(self, reference: Tensor, sources: dict[str, Tensor]) -> None:
        self.dtype, self.device, self.device_type = reference.dtype, reference.device, reference.device.type
        self._sources = [(name, source, source._version, source.data_ptr()) for name, source in sources.items()]
        self._aliases = [source.detach() for source in sources.values()]
        self._by_form: dict[bool, Form] = {}
        self._by_magnitude: dict[int, Form] = {}

    def are_current(self, parameters: dict[str, Any], buffers: dict[str, Any]) -> bool:
        """Whether the tensors of those names are the same, unchanged; and no gradient to one of them is asked for."""
        with_gradients = torch.is_grad_enabled()
        for name, source, version, address in self._sources:
            now = parameters[name] if name in parameters else buffers.get(name)
            if now is not source or source._version != version or source.data_ptr() != address:
                return False
            if with_gradients and source.requires_grad:
                return False
        return True

    def found(self, rows: int) -> Form | None:
        """The form for so many rows, if it has been made. Numbers of as many binary digits share a form."""
        return self._by_magnitude.get(rows.bit_length())

    def matrix(self, rows: int, is_dense: Callable[[int], bool], prepare: Callable[[bool], Form]) -> Form:
        """The form for so many rows, made at the first time.

        Args:
            rows: rows of the input.
            is_dense: whether the form for so many rows is dense.
            prepare: makes the dense form, or the other one.
        """
        if (matrix := self.found(rows)) is not None:
            return matrix
        # What is made within inference mode could not take part in a backward pass to the inputs later.
        with torch.inference_mode(False), torch.no_grad():
            form = is_dense(rows)
            if form not in self._by_form:
                self._by_form[form] = prepare(form)
        matrix = self._by_magnitude[rows.bit_length()] = self._by_form[form]
        return matrix


def changes_unseen(tensor: Tensor) -> bool:
    """Whether changes may leave no trace: in inference mode, or by another process, which counts them by itself."""
    return tensor.is_inference() or (tensor.device.type == "cpu" and tensor.is_shared())  # on a GPU all count as shared
