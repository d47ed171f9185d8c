"""Settings of RLS that are said once for all weights and decided for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_struct.functional.layers import plain_name
from lightning_struct.optim.rls.memory import check_memory
from lightning_struct.optim.rls.weights import InverseForm, TrainedWeight

# A weight with more inputs has the low-rank form where no form is asked for: a product with P would cost more than the rest
# of its step.
LARGEST_FULL = 512


@dataclass(frozen=True)
class InverseSettings:
    """Settings of the P of all weights; see :class:`~lightning_struct.optim.RLS`."""

    form: InverseForm | None
    rank: int
    block_size: int | None
    max_size: int | None
    interval: int
    limits_gain: bool

    def apply(self, weights: Sequence[TrainedWeight]) -> None:
        """Decide for weights that have no P yet.

        Raises:
            MemoryError: their P take more than is free.
        """
        for weight in weights:
            weight.form = self._form_of(weight)
            weight.rank, weight.interval, weight.limits_gain = self.rank, self.interval, self.limits_gain
            if self.block_size is not None and weight.size > self.block_size:
                weight.block_size = self.block_size
        check_memory(weights)

    def _form_of(self, weight: TrainedWeight) -> InverseForm:
        if self.max_size is not None and weight.size > self.max_size:
            return "rank1"
        if self.form is None:
            return "low_rank" if self._is_large(weight) else "full"
        return self.form

    def _is_large(self, weight: TrainedWeight) -> bool:
        return weight.features > LARGEST_FULL and weight.forgetting == 1 and self.block_size is None

    def chosen(self, weights: Sequence[TrainedWeight]) -> str:
        """The end of a sentence about the weights whose form was chosen by their size; empty without."""
        if self.form is not None or not (number := sum(weight.form == "low_rank" for weight in weights)):
            return ""
        return (
            f"; {number} with more than {LARGEST_FULL:,} inputs have the low-rank form (form='full' for the exact one)"
        )


class GradientScales:
    """η by the names of modules and weights.

    Args:
        scale: of all, or a dict of it by the names of modules or weights.
        names: of all modules and parameters.

    Raises:
        ValueError: a name is none of them.
    """

    def __init__(self, scale: float | Mapping[str, float], names: Collection[str]) -> None:
        self._all = None if isinstance(scale, Mapping) else float(scale)
        self._by_name = (
            {plain_name(name): float(value) for name, value in scale.items()} if isinstance(scale, Mapping) else {}
        )
        if unknown := self._by_name.keys() - set(names):
            raise ValueError(
                f"gradient_scale names {', '.join(map(repr, sorted(unknown)))}, which are neither modules nor parameters"
            )

    def of(self, weight: TrainedWeight) -> float:
        """η of a weight: that of the longest name that is above it, or its own."""
        if self._all is not None:
            return self._all
        parts = weight.name.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return next((self._by_name[name] for name in above if name in self._by_name), 1.0)
