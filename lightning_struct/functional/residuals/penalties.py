"""Weights of the conditions of an equation that rise as long as a condition does not fall.

If a function meets the equation and no condition, as a constant may, a fit stays there: steps that lower the residuals
of the conditions raise those of the equation at once. The classical remedy is a penalty that rises if the violation has
not fallen (Nocedal and Wright, Numerical Optimization, chapter 17).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Steps after which the losses are compared, and the share of the last ones above which a block has not fallen.
EVERY_N_STEPS, _FALLEN = 5, 0.5
# If the sum of the losses is so many times the last one, another problem has begun, as an interval of time. Its weights
# are 1 for good: what a problem in parts presses in one part costs it digits in the next.
_OTHER = 10.0
# A weight rises if the weighted loss of its block is above this multiple of the equation's, and falls below that one.
_HIGH, _LOW = 2.0, 0.01
_RISE, _FALL = 4.0, 0.5
# A weight that has reached this returns to 1 for good if the loss of its block is above a tenth of the one at first:
# the block holds noise, or contradicts another one.
_LARGEST_WEIGHT, _REST = 1e5, 0.1


@dataclass(frozen=True)
class Penalties:
    """Weights of blocks of residuals, by name, and what their rule knows. Values are replaced, not changed.

    Attributes:
        weights: w_b; all others are 1.
        last: losses of the blocks, ½ mean r² without weights, when they were compared last.
        first: of those whose weight has risen, the loss then.
        given_back: blocks whose weight stays 1.

    Example:
        >>> plateau = {"interior": 1e-4, "boundary": 0.12}
        >>> Penalties().compared(plateau, "interior").compared(plateau, "interior").weights
        {'boundary': 4.0}
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    given_back: tuple[str, ...] = ()

    def compared(self, losses: Mapping[str, float], equation: str) -> Penalties:
        """The penalties for the next steps.

        Args:
            losses: of all blocks, without weights.
            equation: name of the block that has no penalty.
        """
        if self.last and sum(losses.values()) > _OTHER * sum(self.last.values()):
            return replace(self, weights={}, last=dict(losses), given_back=tuple(losses))
        weights, first, given_back = dict(self.weights), dict(self.first), self.given_back
        for name, loss in losses.items():
            if name == equation or name in given_back or name not in self.last:
                continue
            weight = weights.get(name, 1.0)
            share = weight * loss / max(losses[equation], 1e-300)
            if share > _HIGH and loss > _FALLEN * self.last[name]:
                first.setdefault(name, loss)
                if weight >= _LARGEST_WEIGHT and loss > _REST * first[name]:
                    del weights[name]
                    given_back += (name,)
                else:
                    weights[name] = min(_RISE * weight, _LARGEST_WEIGHT)
            elif share < _LOW and weight > 1.0:
                weights[name] = max(weight * _FALL, 1.0)
        return replace(self, weights=weights, last=dict(losses), first=first, given_back=given_back)
