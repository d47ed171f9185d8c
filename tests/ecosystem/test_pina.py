"""PINA: a physics-informed network for Poisson's equation."""

from typing import Any

import pytest

from lightning_struct.functional.layers.calls import tensors_in
from tests.ecosystem.harness import assert_batches_grow, train_thrice

pina = pytest.importorskip("pina")


def fit(callbacks: list[Any]) -> None:
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PINN

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(144, "random")
    model = FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16])
    trainer = pina.Trainer(
        PINN(problem, model), batch_size=4, train_size=0.9, val_size=0.1, max_epochs=2, callbacks=callbacks,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.train()


def points(batch: Any) -> list[tuple[float, ...]]:
    """Points in the domain and on its boundary, which are drawn apart from one another."""
    return [tuple(point) for tensor in tensors_in([values for _, values in batch]) for point in tensor.tolist()]


def test_growing_batches() -> None:
    # its loader takes one batch of each condition, and makes them itself: more of them are accumulated
    row = train_thrice("PINA: PINN, accumulated", "pina-mathlab", fit, samples_of=points)
    assert "a _Aggregator, which is not a torch DataLoader" in row.grown.messages[0]
    assert_batches_grow(row, announced=("a _Aggregator", "estimator='layers'"))
