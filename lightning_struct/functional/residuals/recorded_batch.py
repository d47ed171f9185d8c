"""Residuals of a whole batch by a record: a graph of the operations on tensors that a module does for the batch.

The residuals alone are wanted several times in a step. A batch that is as large as the last one is recorded as a whole:
the module's work in Python, its own derivatives above all, is then done once, and not in each call.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.residuals.residuals import residual_blocks
from lightning_struct.functional.torch_tools import (
    TorchDispatchMode,
    call_with,
    captured,
    copy_each,
    norms_of_each,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    unfused_kernels,
    writes_in_place,
)

_log = logging.getLogger(__name__)
# Rounding, in units of the last place of the largest number that took part: factors of a small difference enlarge it.
_ROUNDING = 1e5

Parameters: TypeAlias = Mapping[str, Tensor]
# Makes a context manager around each call of the module, as one that repeats random numbers.
Context: TypeAlias = Callable[[], AbstractContextManager[None]]


def called_blocks(module: nn.Module, tensors: Parameters, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The blocks that a module returns with these weights and buffers, by kernels that can be differentiated twice."""
    with unfused_kernels(module):
        return residual_blocks(call_with(module, tensors, args))


class BatchRecords:
    """Records of a module for whole batches: the last one is kept.

    Args:
        module: returns residuals.

    Attributes:
        refused: whether batches cannot be recorded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[str, Replayed] = {}  # the last one
        self.refused = False

    def __getstate__(self) -> dict[str, Any]:  # a copy records anew
        return {**vars(self), "_kept": {}}

    def record_of(
        self, blocks: Parameters, params: Parameters, args: tuple[Any, ...], context: Context
    ) -> RecordedBatch | None:
        """A whole batch, by a record that gives its blocks at ``params``; None if there is none."""
        if self.refused:
            return None
        inputs = BatchInputs(args, next(iter(blocks.values())))
        sizes = [(tuple(t.shape), t.dtype, t.device) for t in (*inputs.tensors, *blocks.values())]
        key = f"{inputs.key} {sizes} {self._module.training}"
        buffers = dict(self._module.named_buffers())

        def batch(params: Parameters, buffers: Parameters, tensors: list[Tensor]) -> Mapping[str, Tensor]:
            values = {**{key: b.clone() for key, b in buffers.items()}, **params}
            return called_blocks(self._module, values, inputs.args(tensors))

        def fits(whole: RecordedBatch) -> bool:
            with context():
                return whole.gives(blocks, params)

        if key in self._kept and fits(whole := RecordedBatch(self._kept[key], inputs, buffers)):
            return whole
        self._kept = {}
        try:
            with context():
                record = Replayed(recorded_graph(batch, params, buffers, inputs.tensors))
            self.refused = not fits(whole := RecordedBatch(record, inputs, buffers))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # noqa: BLE001  # a module may do anything, and a failure to record is no error
            _log.info("the operations of a batch cannot be recorded: %s", first_line(error))
            self.refused = True
        if self.refused:
            return None
        self._kept = {key: record}
        return whole


class Replayed:
    """A recorded graph that a GPU runs as one CUDA graph: the host starts it at once, not operation by operation.

    It is captured in the second call with tensors of the same sizes, and anew for other ones. On the CPU, and if it
    cannot be captured or draws random numbers, each call runs the operations.

    Args:
        graph: see :func:`recorded_graph`.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.graph, self._key = graph, ""
        self._inputs: list[Tensor] = []
        self._captured: tuple[Callable[[], None], Any] | None = None
        random = torch.Tag.nondeterministic_seeded
        self._refused = any(random in getattr(node.target, "tags", ()) for node in graph.graph.nodes)

    def __call__(self, *tensors: Tensor) -> Any:
        if self._refused:
            return self.graph(*tensors)
        constants = [t.data_ptr() for t in (*self.graph.parameters(), *self.graph.buffers())]  # they may move
        key = f"{[(t.shape, t.dtype, t.device) for t in tensors]} {constants}"
        if key != self._key:
            self._key, self._captured = key, None
            return self.graph(*tensors)
        if self._captured is None:
            self._inputs = [t.clone() for t in tensors]
            self._captured = captured(partial(self.graph, *self._inputs), tensors[0].device)
            self._refused = self._captured is None
        if self._captured is None:
            return self.graph(*tensors)
        copy_each(self._inputs, tensors)
        replay, results = self._captured
        replay()
        return tree_map(torch.clone, results)


class RecordedBatch:
    """A batch by a graph of operations on weights, buffers and tensors of the inputs that returns its blocks."""

    def __init__(self, record: Replayed, inputs: BatchInputs, buffers: Parameters) -> None:
        self._record, self._inputs, self._buffers = record, inputs, buffers

    def values(self, params: Parameters) -> dict[str, Tensor]:
        """The residuals by block."""
        with torch.no_grad():
            return self._record(*tree_leaves((params, self._buffers, self._inputs.tensors)))

    def gives(self, blocks: Parameters, params: Parameters) -> bool:
        """Whether these are the values of the blocks."""
        values = self.values(params)
        largest = partial(largest_number, self._record.graph, params, self._buffers, self._inputs.tensors)
        return values.keys() == blocks.keys() and all(
            is_equal_up_to_rounding(values[name], block, largest) for name, block in blocks.items()
        )


class BatchInputs:
    """Tensors among a module's arguments, and which of them have a row for each residual of a block.

    Args:
        args: the module's arguments: tensors, in any nested sequences and mappings.
        block: residuals of the block, (n_b, ...).

    Attributes:
        rows: n_b.
        tensors: the tensors among the arguments.
        dims: 0 for each tensor that has n_b rows, None for the others.
        key: the structure of the arguments and the shapes of single rows.
    """

    def __init__(self, args: tuple[Any, ...], block: Tensor) -> None:
        self._leaves, self._structure = tree_flatten(args)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.rows = len(block)
        self.dims = [0 if t.ndim > 0 and t.shape[:1] == block.shape[:1] else None for t in self.tensors]
        shapes = [tuple(t.shape[1:]) for t, dim in zip(self.tensors, self.dims, strict=True) if dim == 0]
        self.key = f"{self._structure} {self.dims} {shapes}"

    def row(self, index: int) -> list[Tensor]:
        """The tensors of one residual."""
        return [t[index] if dim == 0 else t for t, dim in zip(self.tensors, self.dims, strict=True)]

    def args(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The module's arguments with other tensors."""
        others = iter(tensors)
        return tree_unflatten([next(others) if isinstance(x, Tensor) else x for x in self._leaves], self._structure)


def is_equal_up_to_rounding(values: Tensor, block: Tensor, largest: Callable[[], float]) -> bool:
    """Whether values are those of a block but for rounding.

    Args:
        values: as many.
        block: the residuals.
        largest: the largest number that they were computed from; rounding may leave a share of it if the
            residuals are small. It is asked for only if it matters.
    """
    if values.numel() != block.numel():
        return False
    maxima = torch.stack(norms_of_each([values.view_as(block) - block, block], order=math.inf))
    (difference, size), eps = maxima.tolist(), torch.finfo(block.dtype).eps
    return difference <= eps**0.5 * size or difference <= min(eps**0.5, _ROUNDING * eps) * largest()


def largest_number(graph: GraphModule, params: Parameters, buffers: Parameters, tensors: Sequence[Tensor]) -> float:
    """The largest finite number that a recorded graph works with, by its magnitude."""
    interpreter = _Largest(graph)
    with torch.no_grad():
        interpreter.run(*tree_leaves((params, buffers, tensors)))
    return torch.stack(interpreter.largest).max().item()


class _Largest(Interpreter):
    """Runs a graph and keeps the largest number of each tensor."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.largest: list[Tensor] = []

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.users and isinstance(result, Tensor) and result.is_floating_point() and result.numel() > 0:
            self.largest.append(result.nan_to_num(0.0, 0.0, 0.0).abs().max().float())
        return result


def recorded_graph(
    function: Callable[..., Any], params: Parameters, buffers: Parameters, tensors: list[Tensor]
) -> GraphModule:
    """A function as a graph of the operations on tensors that it does for these arguments.

    ``make_fx`` does the same, and keeps shapes, traces of the stack and more for every operation: it takes ten times as
    long.

    Args:
        function: of (weights by name, buffers by name, tensors of the inputs).
        params: name -> weight.
        buffers: name -> buffer.
        tensors: tensors of the inputs.

    Returns:
        GraphModule: a function of all these tensors one after another, as ``tree_leaves`` has them.

    Raises:
        RuntimeError: the operations depend on the values of tensors.
    """
    recorder = _Recorder(tree_leaves((params, buffers, tensors)))
    with torch.enable_grad(), recorder:
        results = function(dict(params), dict(buffers), tensors)
    return recorder.graph_of(results)


class _Recorder(TorchDispatchMode):
    """Context in which operations on some tensors, and on the tensors made of them, are written down.

    Other tensors are constants, with the values that they have when they are used. New tensors of several numbers are
    none, since later operations may write to parts of them; a single number is one, since a module may read it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._graph, self._constants = Graph(), dict[str, Tensor]()
        self._nodes = WeakTensorKeyDictionary()
        for number, tensor in enumerate(tensors):
            self._nodes[tensor] = node = self._graph.placeholder(f"input_{number}")
            node.meta["memory"] = _memory_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)  # linear in inference mode needs it
        if parts is not NotImplemented:
            return parts
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_new = not operands or (func is torch.ops.aten.lift_fresh.default and operands[0].numel() > 1)
        is_recorded = is_new or any(operand in self._nodes for operand in operands)
        if is_recorded and torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"its operations depend on the values of tensors ({func})")
        if not is_recorded and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        copied = is_new or writes_in_place(func)
        node = self._graph.call_function(func, *tree_map(partial(self._node, copied=copied), (args, kwargs)))
        results = func(*args, **kwargs)
        if isinstance(results, Tensor):
            self._nodes[results], node.meta["shape"] = node, results.shape
            node.meta["memory"] = _memory_of(results)
        elif isinstance(results, Sequence):
            for number, result in enumerate(results):
                if isinstance(result, Tensor):
                    self._nodes[result] = part = self._graph.call_function(getitem, (node, number))
                    part.meta["memory"] = _memory_of(result)
        return results

    def graph_of(self, results: Any) -> GraphModule:
        """The graph that returns these results."""
        self._graph.output(tree_map(self._node, results))
        self._remove_what_no_result_needs()
        return GraphModule(self._constants, self._graph)

    def _remove_what_no_result_needs(self) -> None:
        """Remove operations whose results are not used, and writes to memory that is not read afterwards."""
        needed, read = set[Node](), set[int]()
        for node in reversed(list(self._graph.nodes)):
            memories = {operand.meta["memory"] for operand in node.all_input_nodes if "memory" in operand.meta}
            is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())  # later draws follow it
            is_read = writes_in_place(node.target) and not memories.isdisjoint(read)
            if node in needed or is_read or is_drawn or node.op in ("placeholder", "output"):
                needed.update(node.all_input_nodes)
                read |= memories
            else:
                self._graph.erase_node(node)

    def _node(self, value: Any, copied: bool = False) -> Any:
        """The node of a tensor, or of a copy of a constant; other values stay as they are."""
        if not isinstance(value, Tensor):
            return value
        if value in self._nodes:
            return self._nodes[value]
        name = f"constant_{len(self._constants)}"
        self._constants[name] = value if isinstance(value, nn.Parameter) else value.detach().clone()
        node = self._graph.get_attr(name)
        return self._graph.call_function(torch.ops.aten.clone.default, (node,)) if copied else node


def _memory_of(tensor: Tensor) -> int:
    """A number that a tensor shares with its views."""
    return tensor.untyped_storage()._cdata


def without_writes(
    graph: GraphModule, params: Parameters, buffers: Parameters, tensors: list[Tensor]
) -> GraphModule | None:
    """A recorded graph with operations that make new tensors instead of writing to given ones.

    ``vmap`` cannot write a batch to a tensor that has none, as to the state from which a recurrent layer starts.

    Returns:
        None if the graph has no such operation.
    """
    if not any(writes_in_place(node.target) for node in graph.graph.nodes):
        return None
    return recorded_graph(lambda *arguments: functionalize(graph)(*tree_leaves(arguments)), params, buffers, tensors)
