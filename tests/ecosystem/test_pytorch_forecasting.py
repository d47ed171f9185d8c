"""pytorch-forecasting: a temporal fusion transformer and DeepAR."""

from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_struct import RLS
from tests.ecosystem.harness import assert_batches_grow, train_thrice

forecasting = pytest.importorskip("pytorch_forecasting")


def windows() -> Any:
    import pandas as pd

    time, series = np.meshgrid(np.arange(40), np.arange(6))
    value = np.sin(time / 4 + series) + 0.1 * np.cos(7 * time * (series + 1))
    table = pd.DataFrame(
        {"time": time.ravel(), "series": series.ravel().astype(str), "value": value.ravel().astype("float32")}
    )
    return forecasting.TimeSeriesDataSet(
        table, "time", "value", ["series"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["value"], time_varying_known_reals=["time"],
        target_normalizer=forecasting.data.GroupNormalizer(groups=["series"]),
    )  # fmt: skip


def transformer(data: Any) -> Any:
    return forecasting.TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, learning_rate=1e-2, log_interval=0
    )


def deepar(data: Any) -> Any:
    return forecasting.DeepAR.from_dataset(data, hidden_size=8, rnn_layers=2, learning_rate=1e-2, log_interval=0)


def fit(make: Any, callbacks: list[Any]) -> None:
    data = windows()
    trainer = L.Trainer(
        max_epochs=2, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        make(data),
        data.to_dataloader(train=True, batch_size=4, num_workers=0, drop_last=False),
        data.to_dataloader(train=False, batch_size=32, num_workers=0),
    )


def window_names(batch: Any) -> list[Any]:
    inputs, _ = batch
    return list(
        zip(
            inputs["groups"].flatten().tolist(),
            inputs["decoder_time_idx"][:, 0].tolist(),
            inputs["encoder_lengths"].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("make", [transformer, deepar])
def test_growing_batches(make: Any) -> None:
    row = train_thrice(
        f"pytorch-forecasting: {make.__name__}",
        "pytorch-forecasting",
        lambda callbacks: fit(make, callbacks),
        samples_of=window_names,
    )
    assert_batches_grow(row)


def test_rls_trains_the_lstm_of_deepar() -> None:
    torch.manual_seed(0)
    summary = RLS(deepar(windows()), auxiliary=partial(torch.optim.Adam, lr=1e-2)).summary()
    assert "rnn.weight_ih_l0" in summary and "rnn.weight_hh_l1" in summary
