"""One call of a layer: its inputs and outputs, and the gradients that came back."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

from torch import Tensor

# n, or the sizes that n may have, or None: the first dimension of every input.
SampleCount: TypeAlias = int | Collection[int] | None

_REQUIRED: Any = object()


def admissible_sizes(samples: SampleCount) -> list[int] | None:
    """The sizes that n may have, in order; None if the first dimension decides.

    Example:
        >>> admissible_sizes(4), admissible_sizes({8, 4}), admissible_sizes(None)
        ([4], [4, 8], None)
    """
    if samples is None:
        return None
    return [samples] if isinstance(samples, int) else sorted(samples)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer, and the gradients that came back.

    Attributes:
        layer: the layer.
        args, kwargs: of the call.
        outputs: of the call; None if no rule of the layer asks for them.
        cotangents: gradients of the loss in the tensors of ``outputs``, in their order; None for those that got none.
        samples: n, or the sizes that n may have; None: the size of the first dimension.
        rows: sample of each row, (rows,), by the number of rows: of tensors with other rows than samples, as the nodes
            and edges of graphs.
        ambiguous: whether positions may come before samples.
        module_call: the call of the module in which it was made; see
            :class:`~lightning_struct.functional.layers.per_sample.sample_layout.ModuleCall`.
        of_base: whether it is a call of the ``forward`` of the base of the layer's kind, by the layer's own
            ``forward``.

    Example:
        >>> import torch
        >>> call = LayerCall(torch.nn.Linear(3, 2), (torch.ones(4, 3),), cotangents=[torch.ones(4, 2)])
        >>> call.input.shape, call.cotangent.shape, call.trains("bias")
        (torch.Size([4, 3]), torch.Size([4, 2]), True)
    """

    layer: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Any = None
    cotangents: Sequence[Tensor | None] = ()
    samples: SampleCount = None
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    ambiguous: bool = False
    module_call: Any = None
    of_base: bool = False

    def argument(self, place: int, name: str, default: Any = _REQUIRED) -> Any:
        """An argument by its place or its name, detached.

        Raises:
            TypeError: it was not given, and there is no ``default``.
        """
        value = self.args[place] if place < len(self.args) else self.kwargs.get(name, default)
        if value is _REQUIRED:
            raise TypeError(f"{type(self.layer).__name__} was called without its argument {name!r}")
        return value.detach() if isinstance(value, Tensor) else value

    @property
    def input(self) -> Tensor:
        """The first argument, detached."""
        return (self.args[0] if self.args else next(iter(self.kwargs.values()))).detach()

    @property
    def cotangent(self) -> Tensor:
        """The cotangent of the only output."""
        (cotangent,) = self.cotangents
        assert cotangent is not None
        return cotangent

    def trains(self, name: str | None) -> bool:
        """Whether a parameter of the layer itself is there and trainable."""
        parameter = None if name is None else self.layer._parameters.get(name)
        return parameter is not None and parameter.requires_grad


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and data classes, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, of.name) for of in fields(value)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested lists, tuples and dicts of the same structure, with ``function`` of all else in them."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def rows_of_arguments(args: tuple[Any, ...], rows: slice, samples: int) -> tuple[Any, ...]:
    """Rows of a module's arguments: of tensors, also in dicts, that have a row for each of the samples.

    All other arguments stay whole.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(entry) for name, entry in value.items()}
        return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (samples,) else value

    return tuple(cut(arg) for arg in args)


def rows_of_graphs(batch: Any) -> dict[int, Tensor]:
    """The graph of each node and of each edge, by the number of nodes and of edges.

    Graphs are recognized by the attributes of PyTorch Geometric and chemprop: ``batch``, (nodes,), the graph of each
    node, and ``edge_index``, (2, edges), the nodes of each edge. Numbers that belong to two kinds of rows are left out.

    Args:
        batch: argument of ``training_step``; graphs may be inside of tuples, lists and mappings.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> graphs = SimpleNamespace(batch=torch.tensor([0, 0, 1]), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> rows_of_graphs((graphs, torch.ones(2)))
        {3: tensor([0, 0, 1]), 2: tensor([0, 0])}
    """
    found: dict[int, Tensor] = {}
    ambiguous: set[int] = set()
    for nodes, edges in _graphs(batch):
        for rows in (nodes, nodes[edges[0]]):
            if len(rows) in found and not rows.equal(found[len(rows)]):
                ambiguous.add(len(rows))
            found[len(rows)] = rows
    return {number: rows for number, rows in found.items() if number not in ambiguous}


def _graphs(value: Any) -> Iterator[tuple[Tensor, Tensor]]:
    nodes, edges = getattr(value, "batch", None), getattr(value, "edge_index", None)
    if isinstance(nodes, Tensor) and isinstance(edges, Tensor) and nodes.ndim == 1 and edges.ndim == 2:
        if not nodes.is_floating_point() and not edges.is_floating_point() and edges.shape[0] == 2:
            yield nodes, edges
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _graphs(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _graphs(item)


def refuse_other_dtypes(inputs: Any, weights: Mapping[str, Tensor], error: RuntimeError) -> None:
    """Raise TypeError if inputs and weights have different dtypes, as torch's error of a layer does not name them."""
    of_inputs = {tensor.dtype for tensor in tensors_in(inputs)}
    of_weights = {weight.dtype for weight in weights.values()}
    if "dtype" in str(error) or "type" in str(error):
        taken, has = (", ".join(sorted(map(str, dtypes))) for dtypes in (of_inputs, of_weights))
        raise TypeError(f"the module cannot take inputs of {taken} with weights of {has}: convert one") from error
