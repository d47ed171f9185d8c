"""lightly: SimCLR, under both names of Lightning."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.ecosystem.harness import assert_batches_grow, train_thrice

lightly = pytest.importorskip("lightly")


class Views(Dataset):
    """Two random views of each image, as lightly's own collections have them, and its name."""

    def __init__(self, number: int) -> None:
        from lightly.transforms import SimCLRTransform
        from torchvision.transforms.functional import to_pil_image

        generator = torch.Generator().manual_seed(0)
        self.images = [to_pil_image(torch.rand(3, 16, 16, generator=generator)) for _ in range(number)]
        self.transform = SimCLRTransform(input_size=16, gaussian_blur=0.0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Any:
        return self.transform(self.images[place]), 0, f"{place}.png"


def fit(namespace: str, callbacks: list[Any]) -> None:
    lightning = importlib.import_module(namespace)
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 16, 3, 2),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.head, self.criterion = SimCLRProjectionHead(32, 32, 16, batch_norm=False), NTXentLoss()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (first, second), _, _ = batch
            return self.criterion(self.head(self.backbone(first)), self.head(self.backbone(second)))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    trainer = lightning.Trainer(
        max_epochs=2, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(SimCLR(), DataLoader(Views(128), 4, shuffle=True), DataLoader(Views(16), 8))


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_growing_batches(namespace: str) -> None:
    row = train_thrice(
        f"lightly: SimCLR, {namespace}",
        "lightly",
        lambda callbacks: fit(namespace, callbacks),
        namespace=namespace,
        samples_of=lambda batch: batch[2],
    )
    assert_batches_grow(row)
