"""Rules for the damping: of Levenberg and Marquardt, and by the loss of the next batch."""

import math
from dataclasses import dataclass

from lightning_struct.functional.checks import Extended, Measured, checked

# A larger λ than this changes nothing: its square is beyond the range in which float32 adds a curvature to it. Without
# a bound λ grows at each step of a run that has converged, until it overflows.
MAX_DAMPING = 1e9
# The rule by the next batch: the lowest σ (data without replacement makes r too low, by the share of all samples that
# the last batches have had), and the largest power of ``drop`` by which λ changes in a shortened step.
_SHORTEST_STEP, _SLOWER = 0.1, 0.2


@checked
def reduction_ratio_rule(
    damping: float,
    reduction_ratio: Measured,
    *,
    drop: float = 0.99,
    lower: float = 0.25,
    upper: Extended = 0.75,
    min_damping: float = 0.0,
    max_damping: Extended = MAX_DAMPING,
) -> float:
    """The next λ (SHF paper, section 4.2 and Algorithm 1): λ/drop where ρ < lower, drop·λ where ρ > upper, else λ.

    Args:
        damping: λ > 0.
        reduction_ratio: ρ, the reduction of the loss over the one that the quadratic model predicted; NaN counts as a
            model that failed.
        drop: in (0, 1].
        lower: below it the model is trusted less.
        upper: above it the model is trusted more; lower <= upper.
        min_damping: λ is never set below it.
        max_damping: λ is never set above it.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> [reduction_ratio_rule(10.0, ratio, drop=0.5) for ratio in (0.1, 0.5, 0.9)]
        [20.0, 10.0, 5.0]
    """
    check_levenberg_marquardt(drop, lower, upper, min_damping, max_damping)
    # λ <- λ/drop if ρ < 1/4, drop·λ if ρ > 3/4 (section 4.2)
    if math.isnan(reduction_ratio) or reduction_ratio < lower:
        damping = damping / drop
    elif reduction_ratio > upper:
        damping = damping * drop
    return min(max(damping, min_damping), max_damping)


def check_levenberg_marquardt(drop: float, lower: float, upper: float, min_damping: float, max_damping: float) -> None:
    """Raise ValueError for settings that :func:`reduction_ratio_rule` has no meaning for."""
    if not 0.0 < drop <= 1.0:
        raise ValueError(f"drop must be in (0, 1], got {drop}")
    if not lower <= upper:
        raise ValueError(f"lower must be <= upper, got {lower} and {upper}")
    if not (0.0 <= min_damping <= max_damping and max_damping > 0.0):
        raise ValueError(f"0 <= min_damping <= max_damping > 0 must hold, got {min_damping} and {max_damping}")


@checked
@dataclass(frozen=True)
class ScaledDamping:
    """A step scale and a damping, as :func:`next_batch_rule` sets them.

    Attributes:
        scale: σ in (0, 1]: the step is σ times the direction of the solve.
        damping: λ.
    """

    scale: float
    damping: float


@checked
def next_batch_rule(
    now: ScaledDamping,
    ratio: float,
    fitted: Extended,
    *,
    drop: float | None,
    min_damping: float = 0.0,
    max_damping: Extended = MAX_DAMPING,
) -> ScaledDamping:
    """The next step scale σ and damping λ, from how much of a step's gain the next batch shows (not in the SHF paper).

    A step lowers the loss of the batch that it was made of, and that of the next batch by r times as much: r is 1 where
    the step is all signal, and near 0 or below if it fits the noise of its batch. Along a Newton step of noisy data
    the best scale is σ = 2 r for small σ. σ grows where r > σ/4, half the ratio at the best scale, and else shrinks, by
    no more than a factor of 1.22 (e^.2) a step and down to .1.

    λ falls at full steps with r > ¼, at its full rate from r = ¾ on. Where noise shortens the steps, r says nothing
    about λ, but p does: a step fits the share σ p of its own batch's loss. λ falls where p < 1 and rises where p > 1,
    slowly, and in proportion to 1 - σ. Where p = 1, a full step would fit half of the loss of its batch, and the noise
    of steps of σ = .1 adds a few per cent to the loss.

    Args:
        now: σ and λ of the last step.
        ratio: r, averaged over steps.
        fitted: p, averaged over steps.
        drop: λ is multiplied by it to fall, and divided by it to rise; None leaves λ alone.
        min_damping: λ is never set below it.
        max_damping: λ is never set above it.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> next_batch_rule(ScaledDamping(1.0, 2.0), 0.9, 0.8, drop=0.5)  # a full step that the next batch confirms
        ScaledDamping(scale=1.0, damping=1.0)
        >>> next_batch_rule(ScaledDamping(1.0, 2.0), -0.3, 0.8, drop=0.5).scale < 0.82  # one that harms it
        True
        >>> next_batch_rule(ScaledDamping(0.1, 2.0), 0.0, 0.3, drop=0.5).damping < 2.0  # that fits little of its own
        True
    """
    check_levenberg_marquardt(1.0 if drop is None else drop, 0.0, 0.0, min_damping, max_damping)
    change = min(max(0.5 * (ratio / now.scale - 0.25), -0.2), 0.2)
    scale, damping = now.scale * math.exp(change), now.damping
    if drop is not None and scale >= 1.0:
        damping *= drop ** min(max(2 * ratio - 0.5, 0.0), 1.0)
    elif drop is not None:
        damping *= drop ** (_SLOWER * (1.0 - now.scale) * max(1.0 - fitted, -1.0))
    return ScaledDamping(min(max(scale, _SHORTEST_STEP), 1.0), min(max(damping, min_damping), max_damping))
