"""Running a layer once more from its recorded input, with the dropout masks of its forward pass.

Whoever records a layer that :func:`has_active_dropout` keeps the :func:`~.randomness.random_state` from before the
call, and evaluates the layer's rule inside :func:`~.randomness.restored_random_state`; the rule checks that it got the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.calls import Samples, admissible_sizes
from lightning_struct.functional.layers.per_sample.contributions import Uncovered

# Relative to the norm of the output. Another mask changes it by about the square root of the dropout probability;
# rounding, also that of bfloat16 or TF32 over many steps, by less.
_TOLERANCE = 0.05


def has_active_dropout(layer: nn.Module) -> bool:
    """Whether an ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` has dropout inside that is active."""
    return layer.training and float(layer.dropout) > 0  # type: ignore[arg-type]


def check_rerun(recorded: Tensor, computed: Tensor) -> None:
    """Compare the output of a layer with dropout inside, of any shape, with what was computed again.

    Raises:
        Uncovered: they differ by more than rounding.
    """
    norm = torch.linalg.vector_norm
    recorded = recorded.to(computed.dtype)
    if not norm(computed - recorded) <= _TOLERANCE * norm(recorded):
        raise Uncovered(
            "its dropout cannot be repeated: the random generators were not put back to their state before the call, "
            "the kernel draws its own random numbers (as cuDNN's recurrent layers do), or the output was changed in "
            "place"
        )


def by_sample(sequences: Tensor, samples: Samples) -> Tensor:
    """(n, k·T, features) from (k·n, T, features), where each k sequences in a row are one sample.

    Args:
        sequences: of one call of the layer.
        samples: n, or the sizes that it may have; k is 1 with several, and if None.

    Raises:
        Uncovered: the number of sequences is no multiple of n, or none of the sizes.
    """
    number = sequences.shape[0]
    admissible = admissible_sizes(samples)
    if admissible is None or number in admissible:
        return sequences
    if len(admissible) != 1:
        raise Uncovered(f"it read {number} sequences, not {' or '.join(map(str, admissible))}")
    (n,) = admissible
    if number % n:
        raise Uncovered(f"it read {number} sequences, which is no multiple of {n} samples")
    return sequences.reshape(n, -1, sequences.shape[2])
