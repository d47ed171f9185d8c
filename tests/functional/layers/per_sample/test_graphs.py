"""Gradient norms of graphs, whose nodes and edges are rows of one tensor."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightning_struct.functional import GradientNormRecorder
from lightning_struct.functional.layers.calls import rows_of_graphs


class Network(nn.Module):
    """Messages along edges, sums at nodes, one output for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.message, self.norm = nn.Embedding(3, 4), nn.Linear(4, 5), nn.LayerNorm(5)
        self.update, self.head = nn.Linear(9, 4), nn.Linear(4, 2)

    def forward(self, graphs: SimpleNamespace) -> Tensor:
        nodes = self.kinds(graphs.kinds)
        start, end = graphs.edge_index
        messages = torch.tanh(self.norm(self.message(nodes[start])))
        gathered = nodes.new_zeros(len(nodes), 5).index_add(0, end, messages)
        nodes = torch.tanh(self.update(torch.cat([nodes, gathered], 1)))
        return self.head(nodes.new_zeros(graphs.number, 4).index_add(0, graphs.batch, nodes))


GRAPHS = SimpleNamespace(
    number=3,
    batch=torch.tensor([0, 0, 1, 1, 1, 2, 2]),
    edge_index=torch.tensor([[0, 1, 2, 3, 4, 4, 5, 6, 3, 2], [1, 0, 3, 2, 3, 2, 6, 5, 4, 4]]),
    kinds=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
)


def losses(network: nn.Module) -> Tensor:
    return network(GRAPHS).square().sum(1)


def test_norms_are_those_of_the_gradients_of_single_graphs() -> None:
    torch.manual_seed(0)
    network = Network().double()
    expected = []
    for i in range(3):
        gradients = torch.autograd.grad(losses(network)[i], list(network.parameters()))
        expected.append(torch.stack([g.square().sum() for g in gradients]))
    with GradientNormRecorder(network, samples=3, check=True) as recorder:
        recorder.rows = rows_of_graphs((GRAPHS, torch.ones(3)))
        losses(network).sum().backward()
    recorder.verify()
    measured = torch.stack([norms.squared_norms[0] for norms in recorder.results()], 1)
    torch.testing.assert_close(measured, torch.stack(expected))


def test_as_many_nodes_as_edges_are_told_apart_by_nothing() -> None:
    graphs = SimpleNamespace(batch=torch.tensor([0, 0, 1]), edge_index=torch.tensor([[0, 1, 0], [1, 0, 1]]))
    assert rows_of_graphs(graphs) == {}
