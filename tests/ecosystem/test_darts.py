"""darts: N-BEATS and a recurrent network on windows of a series."""

from typing import Any

import numpy as np
import pytest

from tests.ecosystem.harness import assert_batches_grow, train_thrice

darts = pytest.importorskip("darts")


def fit(name: str, callbacks: list[Any]) -> None:
    from darts import models

    series = darts.TimeSeries.from_values(np.sin(np.arange(168) / 3).astype(np.float32))
    options: dict[str, Any] = {
        "batch_size": 4, "n_epochs": 2, "random_state": 0,
        "pl_trainer_kwargs": {
            "callbacks": callbacks, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False,
        },
    }  # fmt: skip
    if name == "NBEATSModel":
        options |= {"num_stacks": 2, "num_blocks": 1, "num_layers": 2, "layer_widths": 16, "output_chunk_length": 4}
    else:
        options |= {"model": "LSTM", "hidden_dim": 8, "training_length": 16}
    model = getattr(models, name)(input_chunk_length=12, **options)
    model.fit(series[:128], val_series=series[128:])


@pytest.mark.parametrize("name", ["NBEATSModel", "RNNModel"])
def test_growing_batches(name: str) -> None:
    row = train_thrice(f"darts: {name}", "darts", lambda callbacks: fit(name, callbacks), namespace="pytorch_lightning")
    assert_batches_grow(row)
