"""Residuals of a batch as a function of the weights, and their Jacobian.

A residual mostly depends on one row of the inputs alone: on one point of a differential equation. Then the rows of the
Jacobian are gradients of single rows, N times cheaper than by a backward pass for each through the whole batch. The
module is recorded once for a single row, as operations on tensors; derivatives in the inputs that it takes itself, by
``torch.func`` or by autograd, are then operations like all others, and ``torch.func.vmap`` runs the record over all
rows. That a record gives the residuals of the module is checked in every batch, and that it gives their derivative
once; where J is large, at some of the points.

If the residuals alone are wanted, a batch may be recorded as a whole, too: see ``recorded_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx import GraphModule

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.residuals.jacobians import DenseJacobian, FactoredJacobian, Jacobian, OuterProducts
from lightning_struct.functional.residuals.recorded_batch import (
    BatchInputs,
    BatchRecords,
    Context,
    Parameters,
    RecordedBatch,
    Replayed,
    called_blocks,
    is_equal_up_to_rounding,
    largest_number,
    recorded_graph,
    without_writes,
)
from lightning_struct.functional.residuals.weight_products import OuterFactors, WeightProducts
from lightning_struct.functional.torch_tools import joined, tree_leaves

# Numbers and rows of the Jacobian that are computed at once: their intermediate values take several times as much
# memory, and pass the processor's caches sooner if the rows are short. A GPU waits for each operation of the host.
_NUMBERS_AT_ONCE, _ROWS_AT_ONCE, _ROWS_AT_ONCE_OF_GPU = 2**24, 2**10, 2**15
# Backward passes through a whole batch that are done at once.
_PASSES_AT_ONCE = 64
# Shapes of the inputs for which the gradients of a block are recorded at a time.
_KEPT_BATCHES = 4
# Points at which the derivative of a record is compared with the module's at least, if all would be too many
# numbers.
_CHECKED_POINTS = 64


class BatchResiduals:
    """Residuals of one batch, r(w): those of all blocks, one after another, as one flat vector.

    Args:
        records: of the module; new ones are added to it.
        params: name -> w of all trained parameters.
        args: the module's arguments: tensors, in any nested sequences and mappings, whose first dimensions are rows.
        context: makes a context manager around each call of the module, as one that repeats random numbers.

    Attributes:
        blocks: name -> the residuals at ``params`` as the module returned them, (n_b, ...), detached.

    Raises:
        TypeError: the module did not return residuals.
        ValueError: the module changes its inputs in place.
    """

    def __init__(
        self, records: RowRecords, params: Parameters, args: tuple[Any, ...], context: Context = nullcontext
    ) -> None:
        self._records, self._params, self._args, self._context = records, params, args, context
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        versions = [t._version for t in inputs]
        self.blocks = {name: block.detach() for name, block in self._call(params).items()}
        if versions != [t._version for t in inputs]:
            remedy = "let it work on a copy (points.clone())"
            raise ValueError(f"the module changes its inputs in place: its residuals are others in each call; {remedy}")
        self._rows: dict[str, _Rows | None] | None = None
        self._whole: RecordedBatch | None = None

    @property
    def sizes(self) -> list[int]:
        """Number of residuals of each block."""
        return [block.numel() for block in self.blocks.values()]

    def record_whole(self) -> None:
        """Record the whole batch, or take the record of the last one, so that :meth:`values` takes less time.

        Not if the rows of a block cannot be told apart: J takes much longer there than the residuals. Often the
        operations are those of many steps in time. A thousand take a second to record, and longer than in the module.
        """
        if not self._records.refused:
            self._whole = self._records.whole_batches.record_of(self.blocks, self._params, self._args, self._context)

    def values(self, params: Parameters) -> Tensor:
        """r(w), (N,)."""
        if self._whole is not None:
            with self._context():
                parts: Parameters = self._whole.values(params)
        elif None in (by_rows := self._by_rows()).values():
            parts = self._call(params)
        else:
            parts = {name: rows.values(params) for name, rows in by_rows.items() if rows is not None}
        return joined([parts[name].detach().reshape(-1) for name in self.blocks])

    def graph(self, params: Parameters) -> Tensor:
        """r(w), (N,), as a function of ``params`` that autograd differentiates."""
        blocks = self._call(params)
        with torch.enable_grad():
            return torch.cat([blocks[name].reshape(-1) for name in self.blocks])

    def jacobian(self, params: Parameters, kept: Collection[str] = ()) -> Jacobian:
        """J (N, P): the columns are those of all parameters, one after another.

        Args:
            params: w.
            kept: weights whose columns may stay outer products, all of them in each of :meth:`product_counts`.
        """
        sizes = [params[name].numel() for name in params if name not in kept]
        reference = next(iter(params.values()))
        matrix = reference.new_empty(sum(self.sizes), sum(sizes))
        # in one order in all processes, which gather them one after another
        products: dict[str, list[OuterProducts]] = {name: [] for name in params if name in kept}
        for name, part in zip(self.blocks, matrix.split(self.sizes), strict=True):
            of_block = self._write_rows(name, params, part, kept)
            if of_block is None and kept:
                return self.jacobian(params)
            if of_block is None:
                point = {name: p.detach().requires_grad_() for name, p in params.items()}
                residuals = self._flat_block(name, point)
                by_columns = 2 * (part.shape[1] + _PASSES_AT_ONCE) < len(part)  # of second derivatives, and checked
                if not by_columns or not _write_by_columns(residuals, point, part):
                    _write_by_rows(residuals, point, part)
                continue
            for weight, rows in of_block.items():
                products[weight].append(rows)
        if not kept:
            return DenseJacobian(matrix)
        return FactoredJacobian(matrix, products, {name: p.shape for name, p in params.items()})

    def product_counts(self) -> list[Mapping[str, int]] | None:
        """For each block, name of a weight -> the outer products that a row of its columns of J is the sum of.

        None if the rows of a block cannot be told apart.
        """
        rows = [self._known_rows(name) or self._checked_rows(name) for name in self.blocks]
        counts: list[Mapping[str, int]] = [rows_of.record.products.counts for rows_of in rows if rows_of is not None]
        return counts if len(counts) == len(rows) else None

    def _write_rows(
        self, name: str, params: Parameters, out: Tensor, kept: Collection[str]
    ) -> dict[str, OuterProducts] | None:
        """Write the rows of a block to ``out``; return those of the kept weights, None if they cannot be parted."""
        rows = self._known_rows(name)
        if rows is not None:
            values, products = rows.jacobian(params, out, kept)  # the values come with the rows
            if rows.matches(values, self.blocks[name], params):
                return products
        rows = self._checked_rows(name)
        return None if rows is None else rows.jacobian(params, out, kept)[1]

    def _known_rows(self, name: str) -> _Rows | None:
        """A block row by row, by a record of an earlier batch, whose values are not checked."""
        rows = self._records.kept_rows_of(name, self.blocks[name], self._args)
        return rows if rows is not None and rows.record.derivative_is_checked else None

    def _checked_rows(self, name: str) -> _Rows | None:
        """A block row by row, by a record whose derivative is that of the module; None if there is none."""
        rows = self._by_rows()[name]
        if rows is None or rows.record.derivative_is_checked:
            return rows
        point = {name: p.detach().requires_grad_() for name, p in self._params.items()}
        residuals = self._flat_block(name, point)

        def agree(change: Callable[[], None] | None = None) -> bool:
            if change is not None:
                change()
            return rows.has_derivative_of(residuals, point)

        record, reason = rows.record, "the derivative of a single row is not that of the batch"
        try:
            if agree() or agree(lambda: record.remove_detachments(self._params)) or agree(record.products.forget):
                record.derivative_is_checked = True
                return rows
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation writes to a given tensor, for one
            reason = f"a single row cannot be differentiated ({first_line(error)})"
        self._records.refuse(name, reason)
        self._rows = {**self._by_rows(), name: None}
        return None

    def _flat_block(self, name: str, params: Parameters) -> Tensor:
        blocks = self._call(params)
        with torch.enable_grad():
            return blocks[name].reshape(-1)

    def _call(self, params: Parameters) -> dict[str, Tensor]:
        """The blocks as the module returns them, with their graph."""
        with self._context(), torch.enable_grad():
            return called_blocks(self._records.module, params, self._args)

    def _by_rows(self) -> dict[str, _Rows | None]:
        """Blocks row by row; None for those whose rows cannot be told apart."""
        if self._rows is None:
            self._rows = {
                name: self._records.rows_of(name, block, self._params, self._args, self._context)
                for name, block in self.blocks.items()
            }
        return self._rows


class RowRecords:
    """Records of a module for single rows, kept from batch to batch.

    Args:
        module: returns residuals.

    Attributes:
        module: the module.
        refused: name of a block -> why its rows cannot be told apart.
        whole_batches: records of the module for whole batches.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.refused: dict[str, str] = {}
        self.whole_batches = BatchRecords(module)
        self._kept: dict[str, _Record] = {}

    def __getstate__(self) -> dict[str, Any]:  # a copy records anew
        return {**vars(self), "_kept": {}}

    def rows_of(
        self, name: str, block: Tensor, params: Parameters, args: tuple[Any, ...], context: Context
    ) -> _Rows | None:
        """A block row by row, by a record that gives its values at ``params``; None if there is none."""
        rows = self.kept_rows_of(name, block, args)
        if rows is not None and rows.gives(block, params):
            return rows
        if name in self.refused:
            return None
        inputs = BatchInputs(args, block)
        if 0 not in inputs.dims:
            if len(block) == 1:
                return None  # the one backward pass that a single row takes is no reason to warn
            return self.refuse(name, "none of the inputs has a row for each of them")
        buffers = dict(self.module.named_buffers())
        try:
            single_row = partial(_single_row, self.module, name, inputs)
            with context(), torch.enable_grad():
                single = single_row(params, buffers, inputs.row(0))
            if single.numel() != block[0].numel():  # seen before it is recorded, which takes far longer
                return self.refuse(name, _why_not_of_a_row(single, block))
            with context():
                graph = recorded_graph(single_row, params, buffers, inputs.row(0))
            try:
                rows = _Rows(_Record(graph, params, inputs), inputs, buffers)
                fits = rows.gives(block, params)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                if (rewritten := without_writes(graph, params, buffers, inputs.row(0))) is None:
                    raise
                rows = _Rows(_Record(rewritten, params, inputs), inputs, buffers)
                fits = rows.gives(block, params)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # a module may do anything, and a failure to record is no error
            return self.refuse(name, f"a single row cannot be recorded ({first_line(error)})")
        if not fits:
            with context():
                is_rounded = torch.is_autocast_enabled(block.device.type)
            reason = ", or autocast rounds them too coarsely to tell" if is_rounded else ""
            return self.refuse(name, f"they depend on more than one row of the inputs{reason}")
        self._kept[_key(name, inputs, block)] = rows.record
        return rows

    def kept_rows_of(self, name: str, block: Tensor, args: tuple[Any, ...]) -> _Rows | None:
        """The same by a record that is there already, whose values are not checked."""
        inputs = BatchInputs(args, block)
        record = None if name in self.refused else self._kept.get(_key(name, inputs, block))
        if record is None or any(inputs.tensors[index].shape != shape for index, shape in record.wholes.items()):
            return None
        return _Rows(record, inputs, dict(self.module.named_buffers()))

    def refuse(self, name: str, reason: str) -> _Rows | None:
        """From now on tell no rows of the block apart."""
        self.refused[name] = reason
        return None


def _key(name: str, inputs: BatchInputs, block: Tensor) -> str:
    """All that a record of single rows depends on."""
    return f"{name} {inputs.key} {tuple(block.shape[1:])} {block.dtype} {block.device}"


class _Record:
    """One block for a single row, as a graph of operations on weights, buffers and tensors of the inputs.

    Attributes:
        graph: the graph; it returns the residuals of the row, (k,).
        products: that give its gradients.
        derivative_is_checked: whether its Jacobian was compared with the module's.
        wholes: index -> shape of the tensors of the inputs that the row needs as a whole.
    """

    def __init__(self, graph: GraphModule, params: Parameters, inputs: BatchInputs) -> None:
        self.graph, self.products = graph, WeightProducts(graph, params)
        places = [node for node in graph.graph.nodes if node.op == "placeholder"][-len(inputs.tensors) :]
        self.wholes = {
            index: tensor.shape
            for index, (place, tensor, dim) in enumerate(zip(places, inputs.tensors, inputs.dims, strict=True))
            if dim is None and place.users
        }
        self.derivative_is_checked = False
        self._batches: dict[str, Replayed | None] = {}  # of the gradients, by the shapes of their inputs

    def gradients(
        self, params: Parameters, buffers: Parameters, tensors: list[Tensor], dims: list[int | None]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, OuterFactors]]:
        """Gradients of several rows, as :meth:`WeightProducts.gradients` returns them for one.

        Shapes that come a second time are recorded: the rules of ``vmap`` and autograd take longer than the operations.
        """

        def over_rows(params: Parameters, buffers: Parameters, tensors: list[Tensor]) -> Any:
            return vmap(partial(self.products.gradients, params, buffers), in_dims=(dims,))(tensors)

        key = str([t.shape for t in tensors])
        if key not in self._batches:
            if len(self._batches) == _KEPT_BATCHES:
                self._batches.clear()
            self._batches[key] = None
        elif not torch.is_autocast_enabled(tensors[0].device.type):
            self._batches[key] = record = self._batches[key] or Replayed(
                recorded_graph(over_rows, params, buffers, tensors)
            )
            with torch.no_grad():
                return record(*tree_leaves((params, buffers, tensors)))
        return over_rows(params, buffers, tensors)

    def remove_detachments(self, params: Parameters) -> None:
        """Let derivatives pass where the graph detaches tensors that autograd kept for a backward pass (torch 2.6)."""
        for node in self.graph.graph.nodes:
            if node.target is torch.ops.aten.detach.default:
                node.replace_all_uses_with(node.args[0])
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        self.products = WeightProducts(self.graph, params)


class _Rows:
    """One block of a batch, row by row."""

    def __init__(self, record: _Record, inputs: BatchInputs, buffers: Parameters) -> None:
        self.record, self._inputs, self._buffers = record, inputs, buffers

    def values(self, params: Parameters) -> Tensor:
        """The residuals, (n_b, k)."""
        with torch.no_grad():
            dims = [None] * (len(params) + len(self._buffers)) + self._inputs.dims
            over_rows = vmap(self.record.graph, in_dims=tuple(dims))
            return over_rows(*tree_leaves((params, self._buffers, self._inputs.tensors)))

    def gives(self, block: Tensor, params: Parameters) -> bool:
        """Whether these are the values of a block."""
        return self.matches(self.values(params), block, params)

    def matches(self, values: Tensor, block: Tensor, params: Parameters) -> bool:
        """Whether values (n_b, k) are those of a block. A single row is rounded otherwise than the whole batch."""

        def largest() -> float:
            """The difference of the row that differs most."""
            difference = (values - block.view_as(values)).abs().flatten(1).amax(1)
            row = self._inputs.row(int(difference.argmax()))
            return largest_number(self.record.graph, params, self._buffers, row)

        return is_equal_up_to_rounding(values, block, largest)

    def jacobian(
        self, params: Parameters, out: Tensor, kept: Collection[str] = (), at: Tensor | None = None
    ) -> tuple[Tensor, dict[str, OuterProducts]]:
        """Write the rows to ``out``, (n_b k, P) but for the columns of the weights in ``kept``.

        Args:
            params: w.
            out: the rows.
            kept: weights whose columns are returned.
            at: indices of the points (n_b,) to take; all if not given.

        Returns:
            The residuals, (n_b, k), and the rows of the weights in ``kept``.
        """
        dims = self._inputs.dims
        points = [t if dim is None or at is None else t[at] for t, dim in zip(self._inputs.tensors, dims, strict=True)]
        count = self._inputs.rows if at is None else len(at)
        per_row = len(out) // count
        most_rows = _ROWS_AT_ONCE if out.device.type == "cpu" else _ROWS_AT_ONCE_OF_GPU
        at_once = max(1, min(most_rows, _NUMBERS_AT_ONCE // max(out.shape[1], 1)) // per_row)
        values, products = [], {name: list[OuterProducts]() for name in params if name in kept}
        for first in range(0, count, at_once):
            tensors = [t if dim is None else t[first : first + at_once] for t, dim in zip(points, dims, strict=True)]
            residuals, gradients, outer = self.record.gradients(params, self._buffers, tensors, dims)
            values.append(residuals.detach())
            rows = out[first * per_row : (first + at_once) * per_row]
            columns = iter(rows.split([p.numel() for name, p in params.items() if name not in kept], dim=1))
            for name in params:
                if name in gradients:
                    next(columns).copy_(gradients[name].reshape(len(rows), -1))
                    continue
                left, right = (factor.detach().flatten(0, 1).transpose(0, 1) for factor in outer[name])
                if name in kept:
                    products[name].append(OuterProducts(left, right))
                else:
                    next(columns).copy_(OuterProducts(left, right).dense().flatten(1))
        return joined(values), {name: _joined(parts) for name, parts in products.items()}

    def has_derivative_of(self, residuals: Tensor, point: Parameters) -> bool:
        """Whether uᵀJ is that of autograd, for one random u that is zero but at points where J is large."""
        params = {name: p.detach() for name, p in point.items()}
        count, columns = self._inputs.rows, sum(p.numel() for p in point.values())
        shape = (count, len(residuals) // count)
        checked = min(count, max(_CHECKED_POINTS, _NUMBERS_AT_ONCE // (shape[1] * columns)))
        at = torch.linspace(0, count - 1, checked, dtype=torch.float64, device="cpu").round().long()
        at = at.to(residuals.device)
        out = residuals.new_empty(len(at) * shape[1], columns)
        self.jacobian(params, out, at=at)
        u = normal_numbers(len(out), like=residuals)
        full = torch.zeros(shape, dtype=u.dtype, device=u.device)
        full[at] = u.view(len(at), -1)
        expected = _backward(residuals, point, full.view(-1), batched=False)
        return bool((out.mT @ u - expected).norm() <= torch.finfo(out.dtype).eps ** 0.5 * out.norm())


def _single_row(
    module: nn.Module, name: str, inputs: BatchInputs, params: Parameters, buffers: Parameters, tensors: list[Tensor]
) -> Tensor:
    """The residuals of one row of the module's inputs, (k,)."""
    rows = [t[None] if dim == 0 else t for t, dim in zip(tensors, inputs.dims, strict=True)]
    values = {**{key: b.clone() for key, b in buffers.items()}, **params}
    return called_blocks(module, values, inputs.args(rows))[name].reshape(-1)


def _why_not_of_a_row(single: Tensor, block: Tensor) -> str:
    """Why a block is not made of single rows, which have another number of residuals."""
    reason = f"one row of the inputs gives {single.numel()} of them, and a row of the batch has {block[0].numel()}"
    n = len(block)
    if single.numel() == 1 and block.shape == (n, n):
        reason += f" (a tensor ({n}, 1) minus one of ({n},) is a table ({n}, {n}) of all differences: is that meant?)"
    return reason


def _joined(parts: Sequence[OuterProducts]) -> OuterProducts:
    """Rows one after another."""
    left, right = ([getattr(part, side) for part in parts] for side in ("left", "right"))
    return OuterProducts(torch.cat(left, dim=1).contiguous(), torch.cat(right, dim=1).contiguous())


def _write_by_columns(residuals: Tensor, point: Parameters, out: Tensor) -> bool:
    """Write J to ``out``, a pass through the whole batch for each column, ∂(Jᵀu)/∂u; or return False if it fails.

    It fails if an operation has no second derivative; some of these say nothing, so that Jᵀu is compared.
    """
    rows, columns = out.shape
    u = out.new_zeros(rows, requires_grad=True)
    at_once = max(1, min(_PASSES_AT_ONCE, _NUMBERS_AT_ONCE // rows))
    try:
        with torch.enable_grad():
            product = _backward(residuals, point, u, batched=False, create_graph=True)
        if not product.requires_grad:
            return False
        for first in range(0, columns, at_once):
            part = out[:, first : first + at_once]
            units = torch.zeros(part.shape[1], columns, dtype=product.dtype, device=product.device)
            units[:, first:].fill_diagonal_(1.0)
            part.copy_(torch.autograd.grad(product, u, units, retain_graph=True, is_grads_batched=True)[0].mT)
    except RuntimeError:
        return False
    probe = normal_numbers(rows, like=out)
    expected = _backward(residuals, point, probe, batched=False)
    return bool((out.mT @ probe - expected).norm() <= torch.finfo(out.dtype).eps ** 0.5 * out.norm())


def _write_by_rows(residuals: Tensor, point: Parameters, out: Tensor) -> None:
    """Write J to ``out``, a backward pass through the whole batch for each row."""
    at_once = max(1, min(_PASSES_AT_ONCE, _NUMBERS_AT_ONCE // out.shape[1]))
    for first in range(0, len(out), at_once):
        rows = out[first : first + at_once]
        u = torch.zeros(len(rows), len(out), dtype=out.dtype, device=out.device)
        u[:, first:].fill_diagonal_(1.0)
        try:
            rows.copy_(_backward(residuals, point, u, batched=True))
        except RuntimeError:  # an operation whose derivative has no batching rule
            for row, cotangent in zip(rows, u, strict=True):
                row.copy_(_backward(residuals, point, cotangent, batched=False))


def _backward(residuals: Tensor, point: Parameters, u: Tensor, batched: bool, create_graph: bool = False) -> Tensor:
    """Jᵀu, flat, for one u or for a batch of them."""
    if not residuals.requires_grad:
        return u.new_zeros(*u.shape[:-1], sum(p.numel() for p in point.values()))
    options: dict[str, bool] = {"retain_graph": True, "create_graph": create_graph, "is_grads_batched": batched}
    gradients = torch.autograd.grad(
        residuals, list(point.values()), u.to(residuals.dtype), materialize_grads=True, **options
    )
    return torch.cat([g.reshape(*u.shape[:-1], -1) for g in gradients], dim=-1)
