"""PyTorch Geometric: graphs are classified."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct import RLS
from tests.ecosystem.harness import assert_batches_grow, train_thrice

geometric = pytest.importorskip("torch_geometric")


def graphs(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(number):
        nodes = 3 + i % 4
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        features = torch.randn(nodes, 8, generator=generator) + i % 2
        made.append(geometric.data.Data(x=features, edge_index=edges, y=torch.tensor([i % 2]), place=torch.tensor([i])))
    return made


class GraphClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GraphConv, Linear

        self.first, self.second, self.head = GraphConv(8, 16), GraphConv(16, 16), Linear(16, 2)

    def forward(self, data: Any) -> Tensor:
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(geometric.nn.global_mean_pool(x, data.batch))

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(data), data.y)

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(data, batch_idx), batch_size=data.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def fit(callbacks: list[Any]) -> nn.Module:
    from torch_geometric.loader import DataLoader

    module, data = GraphClassifier(), graphs(144)
    trainer = L.Trainer(
        max_epochs=2, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data[:128], 4, shuffle=True), DataLoader(data[128:], 8))
    return module


def test_growing_batches() -> None:
    row = train_thrice("PyG: GraphConv", "torch_geometric", fit, samples_of=lambda batch: batch.place.tolist())
    assert_batches_grow(row)


def test_rls_trains_its_linear_layers() -> None:
    summary = RLS(GraphClassifier(), auxiliary=partial(torch.optim.Adam, lr=1e-2)).summary()
    assert "first.lin_rel.weight" in summary and "head.weight" in summary
