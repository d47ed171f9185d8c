"""Matrices of weights that do not change: prepared between calls, and frozen in a module of their own."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from lightning_struct.functional.structured.arguments import has_values
from lightning_struct.functional.structured.prepared import (
    DenseMatrix,
    LeadingSubmatrix,
    PreparedMatrix,
    ReversedColumns,
    affine,
    kept_dense,
)
from lightning_struct.nn.torch_modules import (
    HALF_PRECISION,
    is_traced,
    recorded,
    refuse_to_be_scripted,
    restore_precision,
    whole_call,
)


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


class FrozenLinear(nn.Module):
    """The map y = M x + b of a structured layer with nothing left to train: made by :meth:`StructuredLinear.freeze`.

    All its tensors are buffers, the complex ones as pairs of reals. ``torch.export.export`` takes it. For ONNX, Fourier
    transforms are products with small real matrices; LDR-TD and Vandermonde-like matrices must be dense there, and
    LDR-SD with operators for which spectra are not exact.

    Converted to half precision, spectra and nodes stay float32: such products are computed in it.

    Between calls it keeps in memory what multiplies faster, also the matrix, or both for batches of different sizes;
    when a buffer has changed, that is made anew. It is no part of ``state_dict``, of copies or of what is exported.

    Args:
        in_features, out_features: sizes.
        matrix: M, prepared for products.
        bias: (out_features,) or None.
        class_name: the class of the layer that it was, for ``repr``.
        dtype: of the layer that it was; M may be prepared in a higher precision. None: that of M.

    Attributes:
        dtype: of ``weight``; conversions of the module change it.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> frozen = Circulant(8, 8).freeze()
        >>> frozen
        FrozenLinear(in_features=8, out_features=8, was=Circulant)
        >>> len(list(frozen.parameters())), frozen(torch.randn(3, 8)).shape
        (0, torch.Size([3, 8]))
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        matrix: PreparedMatrix,
        bias: Tensor | None,
        class_name: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.class_name = class_name
        self._matrix = matrix
        self._kept: KeptMatrix | None = None
        for name, tensor in _tensors_of(matrix):
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self.register_buffer(name, tensor.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.dtype = dtype or self._reference.dtype

    def forward(self, input: Tensor) -> Tensor:
        """(..., out_features) for an input (..., in_features), of any floating-point dtype.

        Raises:
            TypeError: the input does not hold real floating-point numbers.
            ValueError: the last dimension of the input is not ``in_features``.
        """
        if is_traced(input):
            return whole_call(self, input)
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"FrozenLinear takes inputs (..., {self.in_features}), but the input has shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            raise TypeError(f"the input of FrozenLinear has dtype {input.dtype}: use real floating-point numbers")
        if torch.jit.is_tracing():
            return recorded(self, lambda: affine(self._multiplying(input), input, self.bias))
        return affine(self._multiplying(input), input, self._buffers["bias"])  # found faster than self.bias

    def to_dense(self) -> Tensor:
        """M, (out_features, in_features)."""
        return self._entries().to(self.dtype)

    def _entries(self) -> Tensor:
        """M in the precision in which it was prepared."""
        matrix = _with_buffers_of(self, self._matrix)
        if isinstance(matrix, DenseMatrix):
            return matrix.entries
        identity = torch.eye(self.in_features, dtype=self._reference.dtype, device=self._reference.device)
        return matrix.matmul(identity).mT.contiguous()

    @property
    def _reference(self) -> Tensor:
        """A tensor with the device and the precision in which M was prepared."""
        return next(buffer for buffer in self.buffers() if buffer.is_floating_point())

    @property
    def weight(self) -> Tensor:
        """M, (out_features, in_features), for code that reads the weight of a layer."""
        return self.to_dense()

    def _multiplying(self, x: Tensor) -> PreparedMatrix:
        """The matrix in the form that multiplies x."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return _with_buffers_of(self, self._matrix)
        kept = self._kept  # another thread may drop it meanwhile
        if kept is None or not kept.is_current({}, self._buffers):
            sources = {name: getattr(self, name) for name, _ in _tensors_of(self._matrix)}
            if get_proxy_mode() is not None or not all(map(_is_constant, sources.values())):  # recorded by make_fx
                return _with_buffers_of(self, self._matrix)
            if kept is None or not kept.is_of(sources):
                seen = {name: source for name, source in sources.items() if not changes_unseen(source)}
                kept = self._kept = KeptMatrix(self._reference, seen)
        rows = x.numel() // self.in_features
        matrix = kept.matrix(rows)
        if matrix is not None:
            return matrix
        with torch.inference_mode(False), torch.no_grad():
            return kept.prepared(rows, self._dense_is_faster(rows), self._prepare)

    def _dense_is_faster(self, rows: int) -> bool:
        """Whether the dense matrix multiplies so many rows faster than the form that was frozen."""
        rule = getattr(_innermost(self._matrix), "dense_is_faster", None)
        return rule is not None and rule(self.out_features, self.in_features, rows)

    def _prepare(self, dense: bool) -> PreparedMatrix:
        """The matrix as kept between calls, dense or as it was frozen."""
        if not dense:
            return _completed(_with_buffers_of(self, self._matrix))
        return kept_dense(self._entries() if self.dtype in HALF_PRECISION else self.to_dense())

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenLinear:
        self._kept = None
        keeps_precision = getattr(_innermost(self._matrix), "keeps_precision", False)
        names = [name for name, _ in _tensors_of(self._matrix)] if keeps_precision else []
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(1, dtype=self.dtype)).dtype
        restore_precision(self, before)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_to_be_scripted(self)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, was={self.class_name}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Version 0.1.0 had other names for the same tensors in the same order, or the matrix alone.
        old_names = [name for name in state_dict if name.startswith(f"{prefix}form_")]
        own = [name for name, _ in _tensors_of(self._matrix)]
        if len(old_names) == 1 and state_dict[old_names[0]].shape != getattr(self, own[0]).shape:
            own = ["matrix_entries"]
        for old, new in zip(old_names, own, strict=False):
            state_dict[prefix + new] = state_dict.pop(old)
        self._take_form_of_older_versions(state_dict, prefix)
        self._kept = None
        saved = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)} - {"bias"}
        if saved and not any(name.startswith("matrix_") for name in saved):
            warnings.warn(
                f"a frozen {self.class_name} keeps the matrix it has, because it was not frozen when it was saved: "
                "load what was saved into the model, and freeze that",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _take_form_of_older_versions(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Up to version 0.2 small matrices were kept dense, and spectra together with what is made of them."""
        for name in [name for name in state_dict if name.startswith(f"{prefix}matrix_") and "_few_rows_" in name]:
            del state_dict[name]
        dense = [name for name in state_dict if name.startswith(f"{prefix}matrix_") and name.endswith("_entries")]
        if len(dense) != 1 or isinstance(self._matrix, DenseMatrix):
            return
        entries = state_dict.pop(dense[0])[: self.out_features, : self.in_features]
        for name, _ in list(_tensors_of(self._matrix)):
            del self._buffers[name]
        self._matrix = DenseMatrix(entries)
        reference = self.bias if self.bias is not None else entries
        self.register_buffer("matrix_entries", torch.empty_like(entries, device=reference.device))
        state_dict[f"{prefix}matrix_entries"] = entries


def _is_constant(tensor: Tensor) -> bool:
    """Whether nothing maps over a tensor, as torch.func does, and no gradient to it is asked for."""
    return has_values(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _innermost(matrix: Any) -> Any:
    """The matrix without the parts and orders in which it is."""
    while isinstance(matrix, LeadingSubmatrix | ReversedColumns):
        matrix = matrix.matrix
    return matrix


def _completed(matrix: Any) -> Any:
    """The matrix with what was left out where it was compressed."""
    if isinstance(matrix, LeadingSubmatrix | ReversedColumns):
        return dataclasses.replace(matrix, matrix=_completed(matrix.matrix))
    return matrix.completed() if hasattr(matrix, "completed") else matrix


def _parts_of(matrix: Any) -> dict[str, Any]:
    """The fields of a prepared matrix or of a dataclass in it, or the items of a tuple in it."""
    if isinstance(matrix, tuple):
        return {str(index): item for index, item in enumerate(matrix)}
    return {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}


def _has_parts(value: Any) -> bool:
    return isinstance(value, tuple) or dataclasses.is_dataclass(value)


def _tensors_of(matrix: Any, prefix: str = "matrix") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a prepared matrix, and of what is in it, with a name for each."""
    for part, value in _parts_of(matrix).items():
        if isinstance(value, Tensor):
            yield f"{prefix}_{part}", value
        elif _has_parts(value):
            yield from _tensors_of(value, f"{prefix}_{part}")


def _with_buffers_of(module: nn.Module, matrix: Any, prefix: str = "matrix") -> Any:
    """``matrix`` with the buffers of ``module`` in place of its tensors."""
    parts = {}
    for part, value in _parts_of(matrix).items():
        name = f"{prefix}_{part}"
        if isinstance(value, Tensor):
            buffer = getattr(module, name)
            parts[part] = torch.view_as_complex(buffer) if value.is_complex() else buffer
        else:
            parts[part] = _with_buffers_of(module, value, name) if _has_parts(value) else value
    return tuple(parts.values()) if isinstance(matrix, tuple) else type(matrix)(**parts)
