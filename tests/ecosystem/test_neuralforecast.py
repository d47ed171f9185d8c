"""neuralforecast: a model that draws its own windows from a batch of series."""

import logging
from typing import Any

import numpy as np
import pytest

from tests.ecosystem.harness import assert_batches_grow, train_thrice

neuralforecast = pytest.importorskip("neuralforecast")


def fit(callbacks: list[Any]) -> None:
    import pandas as pd
    from neuralforecast.models import NHITS

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    time, series = np.meshgrid(np.arange(60), np.arange(64))
    table = pd.DataFrame(
        {
            "unique_id": series.ravel().astype(str),
            "ds": time.ravel(),
            "y": (np.sin(time / 3 + series) + 0.1 * np.cos(5.0 * time * series)).ravel(),
        }
    )
    model = NHITS(
        h=4, input_size=12, max_steps=32, batch_size=4, windows_batch_size=32, mlp_units=3 * [[16, 16]],
        val_check_steps=8, callbacks=callbacks, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, random_seed=1,
    )  # fmt: skip
    neuralforecast.NeuralForecast(models=[model], freq=1).fit(table, val_size=8)


def test_growing_batches() -> None:
    row = train_thrice("neuralforecast: NHITS", "neuralforecast", fit, namespace="pytorch_lightning")
    assert_batches_grow(row, steps_are_fixed=True)
