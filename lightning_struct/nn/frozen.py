"""Matrices of weights that do not change: prepared between calls, and frozen in a module of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import check_dense, warn
from lightning_struct.functional.structured.arguments import has_values
from lightning_struct.functional.structured.prepared import (
    DenseMatrix,
    LeadingSubmatrix,
    PreparedMatrix,
    ReversedColumns,
    affine,
    prepare_dense,
)
from lightning_struct.functional.torch_tools import is_recorded
from lightning_struct.nn.torch_modules import (
    HALF_PRECISION,
    INSTEAD_OF_SCRIPTS,
    is_traced,
    recorded,
    restore_precision,
    whole_call,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class PreparedForms:
    """A matrix prepared for products, by the number of rows that it multiplies: in few numbers, dense, or both.

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

    def are_of(self, tensors: dict[str, Tensor]) -> bool:
        """Whether tensors of those names hold the same numbers, as copies do that ``functional_call`` puts there."""
        for name, source, version, address in self._sources:
            now = tensors[name]
            if source._version != version or source.data_ptr() != address:
                return False
            if now.dtype != source.dtype or now.device != source.device or not torch.equal(now, source):
                return False
        return True

    def found(self, rows: int) -> PreparedMatrix | None:
        """The form for so many rows, if it has been made. Numbers of as many binary digits share a form."""
        self.latest = self._by_magnitude.get(rows.bit_length())
        return self.latest

    def matrix(
        self, rows: int, is_dense: Callable[[int], bool], prepare: Callable[[bool], PreparedMatrix]
    ) -> PreparedMatrix:
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
                self._by_form[form] = _completed(prepare(form))
                if not form and isinstance(self._by_form[form], DenseMatrix):  # one copy is enough
                    self._by_form[True] = self._by_form[form]
                    self._by_magnitude.clear()
            self.latest = self._by_magnitude[rows.bit_length()] = self._by_form[form]
        return self.latest


def changes_unseen(tensor: Tensor) -> bool:
    """Whether changes may leave no trace: in inference mode, or by another process, which counts them by itself."""
    return tensor.is_inference() or (tensor.device.type == "cpu" and tensor.is_shared())  # on a GPU all count as shared


class PreparingLinear(nn.Module):
    """A linear layer that prepares its matrix once for many calls; ``torch.jit.script`` cannot compile it."""

    in_features: int
    out_features: int

    _prepared: PreparedForms | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._prepared = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(f"torch.jit.script cannot compile {self}: {INSTEAD_OF_SCRIPTS}")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class FrozenLinear(PreparingLinear):
    """The map y = M x + b of a structured layer with nothing left to train: made by :meth:`StructuredLinear.freeze`.

    All its tensors are buffers, the complex ones as pairs of reals. ``torch.export.export`` takes it. For ONNX, Fourier
    transforms are products with small real matrices; LDR-TD and Vandermonde-like matrices must be dense there, and
    LDR-SD with operators for which spectra are not exact.

    Converted to half precision, spectra and nodes stay float32: such products are computed in it.

    What multiplies faster is prepared once for many calls: this form, the dense matrix, or both for batches of
    different sizes. It is made anew when a buffer has changed, and no part of ``state_dict``, copies or exports.

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
        check_dense("the input of FrozenLinear", input)
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            taken, got = f"(..., {self.in_features})", tuple(input.shape)
            raise ValueError(f"FrozenLinear takes inputs {taken}, but the input has shape {got}")
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
        prepared = self._prepared  # another thread may drop it meanwhile
        if prepared is None or not prepared.are_current({}, self._buffers):
            sources = {name: getattr(self, name) for name, _ in _tensors_of(self._matrix)}
            if is_recorded() or not all(map(_is_constant, sources.values())):
                return _with_buffers_of(self, self._matrix)
            if prepared is None or not prepared.are_of(sources):
                seen = {name: source for name, source in sources.items() if not changes_unseen(source)}
                prepared = self._prepared = PreparedForms(self._reference, seen)
        return prepared.matrix(x.numel() // self.in_features, self._prepares_dense, self._prepare)

    def _prepares_dense(self, rows: int) -> bool:
        """Whether the dense matrix multiplies so many rows faster than the form that was frozen."""
        return dense_is_faster(self._matrix, self.out_features, self.in_features, rows, otherwise=False)

    def _prepare(self, dense: bool) -> PreparedMatrix:
        """The matrix for products, dense or as it was frozen."""
        if not dense:
            return _with_buffers_of(self, self._matrix)
        return prepare_dense(self._entries() if self.dtype in HALF_PRECISION else self.to_dense())

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        keeps_precision = getattr(_innermost(self._matrix), "keeps_precision", False)
        names = [name for name, _ in _tensors_of(self._matrix)] if keeps_precision else []
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(1, dtype=self.dtype)).dtype
        restore_precision(self, before)
        self._matrix = _with_buffers_of(self, self._matrix)  # else the tensors of the old dtype and device stay
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, was={self.class_name}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        self._prepared = None
        saved = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)} - {"bias"}
        if saved and not any(name.startswith("matrix_") for name in saved):
            warn(
                f"a frozen {self.class_name} stays with the matrix it has, because it was not frozen when it was "
                "saved: load the state into the model, and freeze that"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def dense_is_faster(matrix: PreparedMatrix, m: int, n: int, rows: int, otherwise: bool) -> bool:
    """Whether the dense matrix (m, n) multiplies so many rows faster; ``otherwise`` if ``matrix`` has no rule."""
    rule = getattr(_innermost(matrix), "dense_is_faster", None)
    return otherwise if rule is None else rule(m, n, rows)


def _is_constant(tensor: Tensor) -> bool:
    """Whether nothing maps over a tensor, as torch.func does, and no gradient to it is asked for."""
    return has_values(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _innermost(matrix: Any) -> Any:
    """The matrix without the parts and orders in which it is."""
    while isinstance(matrix, LeadingSubmatrix | ReversedColumns):
        matrix = matrix.matrix
    return matrix


def _completed(matrix: Any) -> Any:
    """The matrix with the entries that were left out when it was frozen."""
    if isinstance(matrix, LeadingSubmatrix | ReversedColumns):
        return dataclasses.replace(matrix, matrix=_completed(matrix.matrix))
    return matrix.completed() if hasattr(matrix, "completed") else matrix


def _parts_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, such as a prepared matrix, or the items of a tuple; none of other values."""
    if isinstance(value, tuple):
        return {str(index): item for index, item in enumerate(value)}
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: getattr(value, field.name) for field in fields}


def _tensors_of(value: Any, name: str = "matrix") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a prepared matrix, and of its parts, with a name for each."""
    if isinstance(value, Tensor):
        yield name, value
    for part, within in _parts_of(value).items():
        yield from _tensors_of(within, f"{name}_{part}")


def _with_buffers_of(module: nn.Module, value: Any, name: str = "matrix") -> Any:
    """A prepared matrix, or a part of one, with the buffers of ``module`` in place of its tensors."""
    if isinstance(value, Tensor):
        buffer = getattr(module, name)
        return torch.view_as_complex(buffer) if value.is_complex() else buffer
    parts = {part: _with_buffers_of(module, within, f"{name}_{part}") for part, within in _parts_of(value).items()}
    if isinstance(value, tuple):
        return tuple(parts.values())
    return type(value)(**parts) if parts else value
