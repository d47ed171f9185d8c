"""Residuals of a batch as a function of the weights, and their Jacobian as a dense matrix.

A residual mostly depends on one row of the inputs alone: on one point of a differential equation. Then the rows of the
Jacobian are gradients of single rows, N times cheaper than by a backward pass for each through the whole batch. The
module is recorded once for a single row, as operations on tensors; derivatives in the inputs that it takes itself, by
``torch.func`` or by autograd, are then operations like all others, and ``torch.func.vmap`` runs the record over all rows.
That a record gives the residuals of the module is checked in every batch, and that it gives their derivative once.

The residuals alone are wanted several times in a step. A batch that is as large as the last one is recorded as a whole, too:
what the module does in Python, and its own derivatives above all, are then done once, and not in each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_struct.functional.residuals import residual_blocks
from lightning_struct.functional.stateless import call_with

Parameters: TypeAlias = Mapping[str, Tensor]
# Numbers and rows of the Jacobian that are computed at once: their intermediate values take several times as much memory,
# and pass the processor's caches sooner where the rows are short.
_NUMBERS_AT_ONCE, _ROWS_AT_ONCE = 2**24, 2**10


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
        self,
        records: RowRecords,
        params: Parameters,
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._records, self._params, self._args, self._context = records, params, args, context
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        versions = [t._version for t in inputs]
        self.blocks = {name: block.detach() for name, block in self._call(params).items()}
        if versions != [t._version for t in inputs]:
            raise ValueError(
                "the module changes its inputs in place, so that its residuals are others in each call: let it work on a "
                "copy (points.clone())"
            )
        self._rows: dict[str, _Rows | None] | None = None
        self._whole: _Whole | None = None

    @property
    def sizes(self) -> list[int]:
        """Number of residuals of each block."""
        return [block.numel() for block in self.blocks.values()]

    def record_whole(self) -> None:
        """Record the whole batch, or take the record of the last one, so that :meth:`values` takes less time."""
        self._whole = self._records.whole_of(self.blocks, self._params, self._args, self._context)

    def values(self, params: Parameters) -> Tensor:
        """r(w), (N,)."""
        if self._whole is not None:
            with self._context():
                parts: Parameters = self._whole.values(params)
        elif None in (by_rows := self._by_rows()).values():
            parts = self._call(params)
        else:
            parts = {name: rows.values(params) for name, rows in by_rows.items() if rows is not None}
        return torch.cat([parts[name].detach().reshape(-1) for name in self.blocks])

    def graph(self, params: Parameters) -> Tensor:
        """r(w), (N,), as a function of ``params`` that autograd differentiates."""
        blocks = self._call(params)
        with torch.enable_grad():
            return torch.cat([blocks[name].reshape(-1) for name in self.blocks])

    def jacobian(self, params: Parameters, out: Tensor) -> None:
        """Write J (N, P) to ``out``: the columns are those of all parameters, one after another."""
        point = {name: p.detach().requires_grad_() for name, p in params.items()}
        blocks: dict[str, Tensor] | None = None
        for (name, block), part in zip(self.blocks.items(), out.split(self.sizes), strict=True):
            kept = self._records.kept_rows_of(name, block, self._args)
            if kept is not None and kept.record.derivative_is_checked:
                values = kept.jacobian(params, part)  # they come with the rows
                if _is_equal(values, block, kept.record.scale):
                    continue
            if (rows := self._by_rows()[name]) is not None:
                rows.jacobian(params, part)
                if rows.record.derivative_is_checked:
                    continue
            blocks = blocks or self._call(point)
            with torch.enable_grad():
                residuals = blocks[name].reshape(-1)
            if rows is not None:
                rows.record.derivative_is_checked = _is_jacobian(part, residuals, point)
                if not rows.record.derivative_is_checked:
                    rows.record.remove_detachments()
                    rows.jacobian(params, part)
                    rows.record.derivative_is_checked = _is_jacobian(part, residuals, point)
                if rows.record.derivative_is_checked:
                    continue
                self._records.refuse(name, "the derivative of a single row is not that of the batch")
                self._rows = {**self._by_rows(), name: None}
            _jacobian_by_backward_passes(residuals, point, part)

    def _call(self, params: Parameters) -> dict[str, Tensor]:
        """The blocks as the module returns them, with their graph."""
        module = self._records.module
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        with self._context(), torch.enable_grad():
            return residual_blocks(call_with(module, {**buffers, **params}, self._args))

    def _by_rows(self) -> dict[str, _Rows | None]:
        """Blocks row by row; None for those whose rows cannot be told apart."""
        if self._rows is None:
            self._rows = {
                name: self._records.rows_of(name, block, self._params, self._args)
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
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.refused: dict[str, str] = {}
        self._kept: dict[str, _Record] = {}
        self._kept_whole: dict[str, GraphModule] = {}  # the last one
        self._refused_whole = False

    def __getstate__(self) -> dict[str, Any]:  # a copy records anew
        return {**vars(self), "_kept": {}, "_kept_whole": {}}

    def rows_of(self, name: str, block: Tensor, params: Parameters, args: tuple[Any, ...]) -> _Rows | None:
        """A block row by row, by a record that gives its values at ``params``; None where there is none."""
        rows = self.kept_rows_of(name, block, args)
        if rows is not None and rows.give(block, params):
            return rows
        if name in self.refused:
            return None
        inputs = _Inputs(args, block)
        if 0 not in inputs.dims:
            return self.refuse(name, "none of the inputs has a row for each of them")
        buffers = dict(self.module.named_buffers())
        try:
            graph = _graph_of_single_row(self.module, name, params, buffers, inputs)
            rows = _Rows(_Record(graph, block.abs().max().item()), inputs, buffers)
            fits = rows.give(block, params)
        except Exception as error:  # noqa: BLE001  # a module may do anything, and what cannot be recorded is no error
            return self.refuse(name, f"a single row cannot be recorded ({str(error).splitlines()[0]})")
        if not fits:
            return self.refuse(name, "they depend on more than one row of the inputs")
        self._kept[_key(name, inputs, block)] = rows.record
        return rows

    def kept_rows_of(self, name: str, block: Tensor, args: tuple[Any, ...]) -> _Rows | None:
        """The same by a record that is there already, of which it is not checked that it gives the values."""
        inputs = _Inputs(args, block)
        record = None if name in self.refused else self._kept.get(_key(name, inputs, block))
        return None if record is None else _Rows(record, inputs, dict(self.module.named_buffers()))

    def whole_of(
        self,
        blocks: Parameters,
        params: Parameters,
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[None]],
    ) -> _Whole | None:
        """A whole batch, by a record that gives its blocks at ``params``; None where there is none."""
        if self._refused_whole:
            return None
        inputs = _Inputs(args, next(iter(blocks.values())))
        sizes = [(tuple(t.shape), t.dtype, t.device) for t in (*inputs.tensors, *blocks.values())]
        key = f"{inputs.key} {sizes} {self.module.training}"
        buffers = dict(self.module.named_buffers())

        def fits(whole: _Whole) -> bool:
            with context():
                return whole.gives(blocks, params)

        if key in self._kept_whole and fits(whole := _Whole(self._kept_whole[key], inputs, buffers)):
            return whole
        self._kept_whole = {}
        try:
            with context():
                graph = _graph_of_batch(self.module, params, buffers, inputs)
            self._refused_whole = not fits(whole := _Whole(graph, inputs, buffers))
        except Exception:  # noqa: BLE001  # a module may do anything, and what cannot be recorded is no error
            self._refused_whole = True
        if self._refused_whole:
            return None
        self._kept_whole = {key: graph}
        return whole

    def refuse(self, name: str, reason: str) -> _Rows | None:
        """From now on tell no rows of the block apart."""
        self.refused[name] = reason
        return None


def _key(name: str, inputs: _Inputs, block: Tensor) -> str:
    """All that a record of single rows depends on."""
    return f"{name} {inputs.key} {tuple(block.shape[1:])} {block.dtype} {block.device}"


class _Inputs:
    """Tensors among a module's arguments, and which of them have a row for each residual of a block."""

    def __init__(self, args: tuple[Any, ...], block: Tensor) -> None:
        self._leaves, self._structure = tree_flatten(args)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.dims = [0 if t.ndim > 0 and block.ndim > 0 and len(t) == len(block) else None for t in self.tensors]
        shapes = [tuple(t.shape[1:]) for t, dim in zip(self.tensors, self.dims, strict=True) if dim == 0]
        self.key = f"{self._structure} {self.dims} {shapes}"

    def args(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The module's arguments with other tensors."""
        others = iter(tensors)
        return tree_unflatten([next(others) if isinstance(x, Tensor) else x for x in self._leaves], self._structure)


class _Record:
    """One block for a single row, as a graph of operations on (weights, buffers, tensors of the inputs).

    Attributes:
        graph: the graph; it returns the residuals of the row, (k,).
        scale: the largest residual where the record was made.
        derivative_is_checked: whether its Jacobian was compared with the module's.
    """

    def __init__(self, graph: GraphModule, scale: float) -> None:
        self.graph, self.scale = graph, scale
        self.derivative_is_checked = False

    def remove_detachments(self) -> None:
        """Let derivatives pass where the graph detaches: what autograd kept for a backward pass is recorded so in torch 2.6."""
        for node in self.graph.graph.nodes:
            if node.target is torch.ops.aten.detach.default:
                node.replace_all_uses_with(node.args[0])
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()


class _Rows:
    """One block of a batch, row by row."""

    def __init__(self, record: _Record, inputs: _Inputs, buffers: Parameters) -> None:
        self.record, self._inputs, self._buffers = record, inputs, buffers

    def values(self, params: Parameters) -> Tensor:
        """The residuals, (n_b, k)."""
        with torch.no_grad():
            over_rows = vmap(self.record.graph, in_dims=(None, None, self._inputs.dims))
            return over_rows(params, self._buffers, self._inputs.tensors)

    def give(self, block: Tensor, params: Parameters) -> bool:
        """Whether these are the values of a block. A single row is rounded otherwise than the whole batch."""
        return _is_equal(self.values(params), block, self.record.scale)

    def jacobian(self, params: Parameters, out: Tensor) -> Tensor:
        """Write the rows (n_b k, P) to ``out``, and return the residuals, (n_b, k)."""

        def of_row(tensors: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
            residuals, pull, *_ = vjp(lambda p: self.record.graph(p, self._buffers, tensors), dict(params))
            if len(residuals) == 1:
                (gradients,) = pull(torch.ones_like(residuals))
                return {name: g[None] for name, g in gradients.items()}, residuals
            rows = torch.eye(len(residuals), dtype=residuals.dtype, device=residuals.device)
            return vmap(lambda u: pull(u)[0])(rows), residuals

        dims = self._inputs.dims
        count = next(len(t) for t, dim in zip(self._inputs.tensors, dims, strict=True) if dim == 0)
        per_row = len(out) // count
        at_once = max(1, min(_ROWS_AT_ONCE // per_row, _NUMBERS_AT_ONCE // (per_row * out.shape[1])))
        values = []
        for first in range(0, count, at_once):
            tensors = [
                t if dim is None else t[first : first + at_once]
                for t, dim in zip(self._inputs.tensors, dims, strict=True)
            ]
            gradients, residuals = vmap(of_row, in_dims=(dims,))(tensors)
            values.append(residuals.detach())
            rows = out[first * per_row : (first + at_once) * per_row]
            for columns, (name, p) in zip(_columns(rows, params), params.items(), strict=True):
                columns.copy_(gradients[name].reshape(len(rows), p.numel()))
        return torch.cat(values)


class _Whole:
    """A batch by a graph of operations on (weights, buffers, tensors of the inputs) that returns its blocks."""

    def __init__(self, graph: GraphModule, inputs: _Inputs, buffers: Parameters) -> None:
        self._graph, self._inputs, self._buffers = graph, inputs, buffers

    def values(self, params: Parameters) -> dict[str, Tensor]:
        """The residuals by block."""
        with torch.no_grad():
            return self._graph(dict(params), dict(self._buffers), self._inputs.tensors)

    def gives(self, blocks: Parameters, params: Parameters) -> bool:
        """Whether these are the values of the blocks."""
        values = self.values(params)
        return values.keys() == blocks.keys() and all(_is_equal(values[name], blocks[name]) for name in blocks)


def _is_equal(values: Tensor, block: Tensor, scale: float = 0.0) -> bool:
    """Whether values are those of a block but for rounding, in which the largest of them, or ``scale``, counts."""
    tolerance = torch.finfo(block.dtype).eps ** 0.5 * max(scale, block.abs().max().item())
    return values.numel() == block.numel() and bool(((values.view_as(block) - block).abs() <= tolerance).all())


def _graph_of_batch(module: nn.Module, params: Parameters, buffers: Parameters, inputs: _Inputs) -> GraphModule:
    def batch(params: Parameters, buffers: Parameters, tensors: list[Tensor]) -> Mapping[str, Tensor]:
        values = {**{key: b.clone() for key, b in buffers.items()}, **params}
        return dict(residual_blocks(call_with(module, values, inputs.args(tensors))))

    return _recorded(batch, params, buffers, inputs.tensors)


def _graph_of_single_row(
    module: nn.Module, name: str, params: Parameters, buffers: Parameters, inputs: _Inputs
) -> GraphModule:
    def single_row(params: Parameters, buffers: Parameters, tensors: list[Tensor]) -> Tensor:
        rows = [t[None] if dim == 0 else t for t, dim in zip(tensors, inputs.dims, strict=True)]
        returned = call_with(module, {**{key: b.clone() for key, b in buffers.items()}, **params}, inputs.args(rows))
        return residual_blocks(returned)[name].reshape(-1)

    first_rows = [t[0] if dim == 0 else t for t, dim in zip(inputs.tensors, inputs.dims, strict=True)]
    return _recorded(single_row, params, buffers, first_rows)


def _recorded(
    function: Callable[[Parameters, Parameters, list[Tensor]], Any],
    params: Parameters,
    buffers: Parameters,
    tensors: list[Tensor],
) -> GraphModule:
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes of the tracer about its own deprecations
        graph = make_fx(function)(dict(params), dict(buffers), tensors)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _columns(rows: Tensor, params: Parameters) -> Sequence[Tensor]:
    """The columns of each parameter."""
    return rows.split([p.numel() for p in params.values()], dim=1)


def _is_jacobian(rows: Tensor, residuals: Tensor, point: Parameters) -> bool:
    """Whether uᵀJ is that of autograd, for one random u."""
    u = torch.randn(len(residuals), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(residuals)
    expected = _backward(residuals, point, u, batched=False)
    return bool((rows.mT @ u - expected).norm() <= torch.finfo(rows.dtype).eps ** 0.5 * rows.norm())


def _jacobian_by_backward_passes(residuals: Tensor, point: Parameters, out: Tensor) -> None:
    """Write J to ``out``, a backward pass through the whole batch for each row."""
    at_once = max(1, min(64, _NUMBERS_AT_ONCE // out.shape[1]))
    for first in range(0, len(out), at_once):
        rows = out[first : first + at_once]
        u = torch.zeros(len(rows), len(out), dtype=out.dtype, device=out.device)
        u[:, first:].fill_diagonal_(1.0)
        try:
            rows.copy_(_backward(residuals, point, u, batched=True))
        except RuntimeError:  # an operation whose derivative has no batching rule
            for row, cotangent in zip(rows, u, strict=True):
                row.copy_(_backward(residuals, point, cotangent, batched=False))


def _backward(residuals: Tensor, point: Parameters, u: Tensor, batched: bool) -> Tensor:
    """Jᵀu, flat, for one u or for a batch of them."""
    if not residuals.requires_grad:
        return u.new_zeros(*u.shape[:-1], sum(p.numel() for p in point.values()))
    gradients = torch.autograd.grad(
        residuals,
        list(point.values()),
        u.to(residuals.dtype),
        retain_graph=True,
        is_grads_batched=batched,
        allow_unused=True,
        materialize_grads=True,
    )
    return torch.cat([g.reshape(*u.shape[:-1], -1) for g in gradients], dim=-1)
