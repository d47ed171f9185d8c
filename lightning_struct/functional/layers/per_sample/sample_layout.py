"""The place of the samples in what a layer reads and returns, and the check that a layer ran again as it did before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.calls import LayerCall, Samples, admissible_sizes
from lightning_struct.functional.layers.per_sample.contributions import Uncovered


@dataclass(frozen=True)
class SampleLayout:
    """Place of the n samples: their ``dimension``. If that is 0 and larger than n, consecutive rows belong to one
    sample, or those of which ``sample_of_row`` says so.
    """

    samples: int
    dimension: int
    leading: int
    sample_of_row: Tensor | None = None

    def arranged(self, tensor: Tensor) -> Tensor:
        """(n, positions, *features) of (*leading, *features); zeros where a sample has fewer rows than another."""
        features = tensor.shape[self.leading :]
        if self.sample_of_row is not None:
            rows = tensor.reshape(tensor.shape[0], -1, *features)
            counts = torch.bincount(self.sample_of_row, minlength=self.samples)
            order = self.sample_of_row.argsort(stable=True)
            first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # of the rows of its sample, in that order
            place = torch.arange(len(order), device=order.device) - first
            padded = rows.new_zeros(self.samples, int(counts.max()), *rows.shape[1:])
            padded[self.sample_of_row[order], place] = rows[order]
            return padded.flatten(1, 2)
        tensor = tensor if self.dimension == 0 else tensor.movedim(self.dimension, 0)
        return tensor.reshape(self.samples, -1, *features)


def sample_layout(size: Sequence[int], leading: int, call: LayerCall, *, groups: bool = True) -> SampleLayout:
    """Layout of the samples among the first ``leading`` dimensions of an input of this size; see
    :func:`~lightning_struct.functional.layers.per_sample.layer_contributions.contributions`.

    Raises:
        Uncovered: none of them is that of the samples, or several may be.
    """
    if leading < 1:
        raise Uncovered(f"it read a tensor of shape {tuple(size)}, which has no dimension of samples")
    check_decided(size, leading, call)
    admissible = admissible_sizes(call.samples)
    if admissible is None:
        return SampleLayout(size[0], 0, leading)
    for dimension in range(min(leading, 2)):
        if size[dimension] in admissible:
            return SampleLayout(size[dimension], dimension, leading)
    if len(admissible) == 1 and (sample_of_row := call.rows.get(size[0])) is not None:
        return SampleLayout(admissible[0], 0, leading, sample_of_row)
    if groups and len(admissible) == 1 and size[0] % admissible[0] == 0:
        return SampleLayout(admissible[0], 0, leading)
    numbers = " or ".join(map(str, admissible))
    raise Uncovered(f"it read a tensor of shape {tuple(size)}, in which no dimension is that of {numbers} samples")


def check_decided(size: Sequence[int], leading: int, call: LayerCall) -> None:
    """Raise where either of the first two dimensions, of the ``leading`` ones, may be that of the samples.

    Raises:
        Uncovered: the call is ambiguous, and both have a size that n may have.
    """
    admissible = admissible_sizes(call.samples)
    if call.ambiguous and leading > 1 and admissible is not None and set(size[:2]) <= set(admissible):
        either = "either of the first two dimensions may be that of the samples"
        why = "as the module has layers with batch_first=False"
        raise Uncovered(f"of its tensor of shape {tuple(size)} {either}, {why}")


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
            "its dropout cannot be repeated: the random generators are not in their state before the call, the kernel "
            "draws its own random numbers (as cuDNN's recurrent layers do), or the output was changed in place"
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
