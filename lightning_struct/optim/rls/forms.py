"""Form of P, and how it is updated: asked for once for all weights, and decided for each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

InverseForm: TypeAlias = Literal["full", "low_rank", "rank1"]

# A weight with more inputs has the low-rank form where no form is asked for: a product with P would cost more than the
# rest of its step.
LARGEST_FULL = 512
# Settings that have no meaning beside a form that is asked for.
_WITHOUT_MEANING: dict[InverseForm, tuple[str, ...]] = {
    "full": ("rank",),
    "low_rank": ("block_size",),
    "rank1": ("rank", "block_size"),  # a max_size holds: its P takes less than any
}


@dataclass(frozen=True)
class InverseSettings:
    """Settings of the P of all weights; see :class:`~lightning_struct.optim.RLS`.

    Attributes:
        form: of P; None: chosen by the number of inputs.
        forgetting: λ.
        rank: r of the low-rank form.
        block_size: a full P of more rows is block-diagonal; None: none is.
        max_size: P of more inputs has the rank-1 form; None: of none.
        interval: P is updated in the first of so many steps.
        limits_gain: the gain is bounded: samples of the rows are wanted.
        by_rows: P is updated by every row, not by their mean, and that before the step; for linear layers and the full
            form.

    Raises:
        ValueError: there is no such form, it does not forget, or another setting has no meaning beside it.
    """

    form: InverseForm | None
    forgetting: float = 1.0
    rank: int = 32
    block_size: int | None = None
    max_size: int | None = None
    interval: int = 1
    limits_gain: bool = False
    by_rows: bool = False

    def __post_init__(self) -> None:
        if self.form not in (None, "full", "low_rank", "rank1"):
            raise ValueError(f"form must be 'full', 'low_rank', 'rank1' or None, got {self.form!r}")
        if self.form == "low_rank" and self.forgetting < 1:
            raise ValueError("form='low_rank' does not forget: use forgetting=1, or form='full' or 'rank1'")
        if self.form is not None:
            self._refuse_without_meaning(_WITHOUT_MEANING[self.form])

    def _refuse_without_meaning(self, names: tuple[str, ...]) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name in names and given != field.default:
                raise ValueError(f"{field.name}={given!r} has no meaning beside form={self.form!r}; leave it out")

    def form_of(self, features: int) -> InverseForm:
        """Form of the P of a weight with so many inputs, not counting biases."""
        if self.max_size is not None and features > self.max_size:
            return "rank1"
        if self.form is not None:
            return self.form
        is_large = features > LARGEST_FULL and self.forgetting == 1 and self.block_size is None
        return "low_rank" if is_large else "full"
