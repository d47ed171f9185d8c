"""timm: a vision transformer and a convolutional network on images."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.callbacks import ValidationMeritStopping
from lightning_struct.nn import LowRank, replace_linear
from tests.ecosystem.harness import assert_batches_grow, train_thrice

timm = pytest.importorskip("timm")


class Classifier(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(number: int) -> TensorDataset:
    labels = torch.arange(number) % 4
    return TensorDataset(torch.randn(number, 3, 32, 32) + labels[:, None, None, None], labels)


def fit(model: nn.Module, callbacks: list[Any], number: int = 128, epochs: int = 2) -> Classifier:
    module = Classifier(model)
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(images(number), 4, shuffle=True), DataLoader(images(16), 8))
    return module


def vision_transformer() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4
    )


def convnext() -> nn.Module:
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=4)


@pytest.mark.parametrize("make", [vision_transformer, convnext])
def test_growing_batches(make: Any) -> None:
    def train(callbacks: list[Any]) -> None:
        fit(make(), callbacks)

    assert_batches_grow(train_thrice(f"timm: {make.__name__}", "timm", train))


def test_training_stops_on_validation() -> None:
    torch.manual_seed(0)
    stopping = ValidationMeritStopping(patience=1, min_delta=10.0)
    module = fit(vision_transformer(), [stopping], number=32, epochs=20)
    assert module.trainer.current_epoch < 5


def test_linear_layers_are_replaced() -> None:
    torch.manual_seed(0)
    model = vision_transformer()
    replace_linear(model, lambda i, o, bias: LowRank(i, o, rank=2, bias=bias), exclude="head")
    assert any(isinstance(layer, LowRank) for layer in model.modules())
    fit(model, [], number=16, epochs=1)
