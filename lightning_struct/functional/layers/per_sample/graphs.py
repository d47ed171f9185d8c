"""Batches of graphs: nodes and edges of all graphs of a batch are rows of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def rows_of_graphs(batch: Any) -> dict[int, Tensor]:
    """The graph of each node and of each edge, by the number of nodes and of edges.

    Graphs are recognized by what PyTorch Geometric and chemprop call ``batch``, (nodes,), the graph of each node, and
    ``edge_index``, (2, edges), the nodes of each edge. Numbers that belong to two kinds of rows are left out.

    Args:
        batch: what ``training_step`` gets; graphs may be inside of tuples, lists and mappings.

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
