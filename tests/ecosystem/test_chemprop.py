"""chemprop: message passing on molecules."""

from typing import Any

import lightning as L
import numpy as np
import pytest

from tests.ecosystem.harness import assert_batches_grow, train_thrice

chemprop = pytest.importorskip("chemprop")

MOLECULES = ["C" * a + tail for a in range(1, 33) for tail in ("O", "N", "CC(=O)O", "c1ccccc1")]


def fit(callbacks: list[Any]) -> None:
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(m, np.array([len(m) / 10])) for m in MOLECULES]
    training = data.MoleculeDataset(points, chemprop.featurizers.SimpleMoleculeMolGraphFeaturizer())
    model = models.MPNN(
        nn.BondMessagePassing(d_h=32, depth=2), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32, hidden_dim=32)
    )
    trainer = L.Trainer(
        max_epochs=3, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        model,
        data.build_dataloader(training, batch_size=4, num_workers=0, shuffle=True),
        data.build_dataloader(training, batch_size=16, num_workers=0, shuffle=False),
    )


def targets(batch: Any) -> list[float]:
    return batch.Y.flatten().tolist()


def test_growing_batches() -> None:
    assert_batches_grow(train_thrice("chemprop: MPNN", "chemprop", fit, samples_of=targets))
