"""Predictions of a Trainer, in a file."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_struct.callbacks.pictures import log_directory
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check
from lightning_struct.utilities.namespaces import BasePredictionWriter, MisconfigurationException, lightning_classes

INDICES = "indices"  # key of the positions in the file


class PredictionWriter(BasePredictionWriter):
    """Writes the tensors that ``predict`` returns to ``NAME.pt`` in the log directory.

    The file has a dict: ``NAME`` (n, ...), and ``indices`` (n,), int64, the positions of the samples in the data set.
    With a warning it is without ``indices`` if the positions are not known, as those in an ``IterableDataset``, or
    if ``predict_step`` returns more or fewer rows than samples. With several processes each writes its own samples,
    to ``NAME_0.pt`` and so on. Under ``fast_dev_run`` nothing is written.

    For example::

        Trainer(callbacks=[PredictionWriter("reconstructions")]).predict(model, datamodule=datamodule)
        torch.load("lightning_logs/version_0/reconstructions.pt")["reconstructions"]

    Args:
        name: name of the file, and key of the predictions in it; not ``"indices"``, and without a folder.

    Raises:
        MisconfigurationException: ``name`` is no such name; there are several loaders; the first batch of the
            predictions, or a later one when all are there, is anything but a tensor of rows, all of one shape.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[PredictionWriter("reconstructions")], logger=False, accelerator="cpu")
    """

    def __init__(self, name: str = "predictions") -> None:
        is_name = isinstance(name, str) and name not in ("", INDICES) and PurePath(name).name == name
        check("name", name, is_name, f"the name of a file without a folder, other than {INDICES!r}")
        self.name = name

    @property
    def interval(self) -> Any:  # type: ignore[override]
        """Lightning's interval of writing: the end of the predictions."""
        return lightning_classes("callbacks.prediction_writer.WriteInterval")[0]("epoch")

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *numbers: int) -> None:
        if len(numbers) > 1:  # (batch, loader)
            raise MisconfigurationException("PredictionWriter writes the predictions of one loader: leave out others")
        _check_rows([outputs])  # all others would be predicted in vain

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        _check_rows(predictions)
        directory = log_directory(trainer)
        directory.mkdir(parents=True, exist_ok=True)
        alone = trainer.world_size == 1
        file = directory / (f"{self.name}.pt" if alone else f"{self.name}_{trainer.global_rank}.pt")
        written = {self.name: torch.cat(list(predictions)).cpu()}
        indices = [batch for batches in batch_indices for batch in batches]
        if [len(batch) for batch in indices] == [len(prediction) for prediction in predictions]:
            written[INDICES] = torch.tensor([index for batch in indices for index in batch], dtype=torch.int64)
        else:
            rank_zero_warn(
                f"PredictionWriter leaves {INDICES!r} out: {sum(map(len, predictions))} rows were predicted, and the "
                f"places of {sum(map(len, indices))} samples in the data set are known"
            )
        torch.save(written, file)
        files = file if alone else f"{directory / self.name}_0.pt to _{trainer.world_size - 1}.pt, one for each process"
        rank_zero_info(f"{self.name.capitalize()} written to {files}")


def _check_rows(predictions: Sequence[Any]) -> None:
    """Raise unless predictions are tensors of rows of one shape."""
    others = {type(prediction).__name__ for prediction in predictions if not isinstance(prediction, torch.Tensor)}
    if others:
        raise MisconfigurationException(
            f"PredictionWriter writes tensors, but predict_step returned {', '.join(sorted(others))}: return a tensor"
        )
    shapes = {tuple(prediction.shape[1:]) if prediction.dim() else None for prediction in predictions}
    if None in shapes or len(shapes) > 1:
        raise MisconfigurationException(
            "PredictionWriter writes one tensor (n, ...) with a row for each sample, but predict_step returned the "
            f"shapes {', '.join(sorted({str(tuple(prediction.shape)) for prediction in predictions}))}: have it "
            "return rows of one shape, or leave out this callback"
        )
