"""Gradients of one recorded function in its weight matrices, as sums of the outer products that they are made of.

If a record multiplies by a weight matrix, x Wᵀ or x W, and does nothing else with it, the gradient in W is a sum of
outer products over the multiplications: of the factor x and the derivative of the result. Both are a few
vectors, where W is a matrix.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.fx import Graph, GraphModule, Node

from lightning_struct.functional.torch_tools import joined, tree_leaves, tree_map

_aten = torch.ops.aten
_SAME, _TURNED = (_aten.alias.default,), (_aten.t.default, _aten.transpose.int)
# OuterFactors products: (..., m, rows of W) and (..., m, columns of W).
OuterFactors: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Use:
    """One product x V with V = Wᵀ (``turned``) or V = W."""

    name: str
    operand: Node
    turned: bool


class WeightProducts:
    """The products of a record with its weight matrices.

    Args:
        graph: a recorded function of weights, buffers and tensors that returns residuals (k,).
        weights: the weights by name.

    Attributes:
        counts: name -> the number of outer products that the gradient of one residual in this weight is a sum of. The
            other weights are not there.
    """

    def __init__(self, graph: GraphModule, weights: Mapping[str, Tensor]) -> None:
        names = tree_leaves({name: name for name in weights})  # in the order of the placeholders
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._graph = graph
        live, self._uses = _ancestors_of_output(graph.graph), dict[Node, _Use]()
        for name, node in zip(names, placeholders, strict=False):
            uses = {user: use for user, use in _uses_of(name, node) if user in live}
            if weights[name].ndim == 2 and None not in uses.values():
                self._uses |= uses  # type: ignore[arg-type]
        self._sizes = [node.meta["shape"] for node in self._uses]
        self._probed = _probed(graph, self._uses)
        self.counts: dict[str, int] = {}
        for use, size in zip(self._uses.values(), self._sizes, strict=True):
            self.counts[use.name] = self.counts.get(use.name, 0) + size[0]

    def forget(self) -> None:
        """From now on take no gradient as outer products."""
        self._uses, self._sizes, self.counts = {}, [], {}
        self._probed = _probed(self._graph, {})

    def gradients(
        self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, OuterFactors]]:
        """Residuals (k,) and their gradients, which ``torch.func.vmap`` can be taken of.

        Returns:
            The residuals; name -> gradients (k, ...) of the weights that are not in ``counts``; and for those that are,
            name -> (k, m, rows of W) and (k, m, columns of W), whose m outer products add up to the gradient.
        """
        others = {name: w for name, w in weights.items() if name not in self.counts}
        reference = next(iter(weights.values()))
        probes = [reference.new_zeros(size) for size in self._sizes]

        def residuals_of(others: dict[str, Tensor], probes: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return self._probed(*tree_leaves(({**weights, **others}, buffers, tensors)), *probes)

        residuals, pull, operands = vjp(residuals_of, others, probes, has_aux=True)  # type: ignore[misc]
        if len(residuals) == 1:
            pulled: Any = tree_map(lambda t: t[None], pull(torch.ones_like(residuals)))
        else:
            pulled = vmap(pull)(torch.eye(len(residuals), dtype=residuals.dtype, device=residuals.device))
        gradients, slopes = pulled  # for each residual
        parts: dict[str, list[OuterFactors]] = {}
        for use, operand, slope in zip(self._uses.values(), operands, slopes, strict=True):
            operand = operand.expand(len(residuals), *operand.shape)
            parts.setdefault(use.name, []).append((slope, operand) if use.turned else (operand, slope))
        sums = {
            name: (joined([left for left, _ in of], 1), joined([right for _, right in of], 1))
            for name, of in parts.items()
        }
        return residuals, gradients, sums


def _ancestors_of_output(graph: Graph) -> set[Node]:
    """The operations that the output depends on; recording leaves in-place ones that nothing needs."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in found:
            found |= {node, *node.all_input_nodes}
    return found


def _uses_of(name: str, node: Node, turned: bool = False) -> Iterator[tuple[Node, _Use | None]]:
    """The products with a weight, or with a view of it; None if it is also used in another way."""
    for user in node.users:
        if user.target in _SAME:
            yield from _uses_of(name, user, turned)
        elif user.target in _TURNED:
            yield from _uses_of(name, user, not turned)
        elif user.target is _aten.mm.default and user.args[1] is node and user.args[0] is not node:
            yield user, _Use(name, user.args[0], turned)  # type: ignore[arg-type]
        elif user.target is _aten.addmm.default and user.args[2] is node and not (user.kwargs or node in user.args[:2]):
            yield user, _Use(name, user.args[1], turned)  # type: ignore[arg-type]
        else:
            yield user, None


def _probed(module: GraphModule, uses: Mapping[Node, _Use]) -> GraphModule:
    """A record of (all leaves of its arguments, a probe per use), the probes added to the products with weights.

    It returns the residuals, and the factors of the products.
    """
    graph, copies = Graph(), dict[Node, Node]()
    residuals: Any = graph.graph_copy(module.graph, copies)
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    operands: list[Any] = []
    for number, (node, use) in enumerate(uses.items()):
        with graph.inserting_after(last):
            last = graph.placeholder(f"probe_{number}")
        product = copies[node]
        with graph.inserting_before(product):  # a view, since another operation may change the shape in place
            operands.append(graph.call_function(_aten.alias.default, (copies[use.operand],)))
        with graph.inserting_after(product):
            moved = graph.call_function(_aten.add.Tensor, (product, last))
        product.replace_all_uses_with(moved)
        moved.args = (product, last)
    if residuals in (copies[node] for node in uses):
        residuals = next(iter(residuals.users))
    graph.output((residuals, operands))
    return GraphModule(module, graph)
