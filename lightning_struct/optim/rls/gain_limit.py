"""Bound on the gain of a step: it keeps RLS stable along directions in which P has not shrunk.

P starts at the identity and shrinks along mean inputs alone, so that nothing in the equations bounds a step along the
other directions. By the step θ ← θ - ∇P the outputs of a weight for the rows X that it has just read change by -G times
the gradient in the outputs, with::

    G = (T/r) X P Xᵀ        r rows, T uses of the weight

If the loss is the squared error of these outputs, averaged over the rows of a use, the step overshoots as soon as an
eigenvalue of G exceeds 2, and diverges. (If the loss is a sum over the T positions of a sample, G is a sum over them,
too. The steps of recurrent layers count as rows: the effect of most of them on the loss dies away.) With one sample at
a time the paper's own h is a bound, k x'Px/(1 + k x'Px) < 1; with batches nothing is. So each step is multiplied by
:func:`limit_coefficient`, a function of the largest eigenvalue, which power iteration estimates.

This bounds the change of a weight's own outputs. The layers behind it, trained by RLS or not, may enlarge a step, and
weights that step together multiply each other. So the norm of a step is at most :data:`LARGEST_CHANGE` times the norm
of its weight (with momentum α, 1 - α times that), or times the norm that ``nn.Linear`` begins with if this is larger. A
module that is a single layer and reads one row of each sample has nothing behind it: there the change is not bounded,
but the gain by :data:`SINGLE` times c, so that a squared error without the ½, as ``nn.MSELoss`` is for one output, is
stable, too. Beside the bound on the change, the bound on the gain is more careful than it need be: the loss is less
steep in the outputs of a hidden layer than in those of the last. So the steps of several weights are :data:`TOGETHER`
times as long, as far as the change allows it.

The paper has none of these bounds.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_struct.collective import all_reduce_together
from lightning_struct.functional.curvature.recursive_least_squares import InverseAutocorrelation, dots

Name = TypeVar("Name", bound=Hashable)

# Power iterations in a step, which go on from the direction of the last step; and in the first step.
ITERATIONS, FIRST_ITERATIONS = 2, 16

# Chosen on seven small tasks. Most steps of good classifiers are shorter; an autoencoder that diverges takes steps of
# twice the weight and more.
LARGEST_CHANGE = 0.05

# Chosen on fifteen small tasks, at constant rates: 6 is faster at first on most, and ends higher after long training.
TOGETHER = 3.0

# Of the bound on the gain, in a module that is a single layer.
SINGLE = 0.5

# Of more rows a sample is taken: between so many, and so many numbers as far as that leaves more rows.
LEAST_ROWS, MOST_ROWS, MOST_NUMBERS = 64, 512, 2**19
_GOLDEN = (5**0.5 - 1) / 2


class Sample(NamedTuple):
    """Rows that stand for all that a use of a weight multiplied.

    Attributes:
        rows: (groups, s, d), with the entries of the biases: one for the bias that was added, zero for others.
        share: rows of the use by rows of the sample.
    """

    rows: Tensor
    share: float


def sample_size(rows: int, features: int) -> int:
    """Rows of the sample of so many rows."""
    return min(rows, MOST_ROWS, max(LEAST_ROWS, MOST_NUMBERS // features))


@lru_cache(maxsize=1024)
def sampled_indices(number: int, total: int, device: torch.device) -> Tensor:
    """(number,), indices below ``total``, evenly spread and without a period, or all of them in order."""
    if number == total:
        return torch.arange(total, device=device)
    places = torch.arange(number, dtype=torch.float64, device="cpu") * _GOLDEN % 1
    return (places * total).long().to(device)


def sample_rows(rows: Tensor, number: int | None = None) -> Tensor:
    """(s, n) of the rows (r, n): themselves, if they are few."""
    number = sample_size(*rows.shape) if number is None else number
    return rows if number == len(rows) else rows[sampled_indices(number, len(rows), rows.device)]


def joined_samples(samples: Sequence[Sample]) -> Sample:
    """One sample with the rows of all; rows with another share than the first are scaled by the root of the ratio."""
    first = samples[0]
    if len(samples) == 1:
        return first
    rows = [rows if share == first.share else rows * (share / first.share) ** 0.5 for rows, share in samples]
    return Sample(torch.cat(rows, 1), first.share)


@dataclass(frozen=True, eq=False)
class Gain:
    """The products from which the largest eigenvalue of G is estimated.

    Attributes:
        inverse: P.
        rows: (groups, s, d), a sample of the rows X.
        scale: T/r, times r/s.
        direction: (groups, d), the start of the power iteration; changed in place.
        first: nothing is known of the direction yet.
    """

    inverse: InverseAutocorrelation
    rows: Tensor
    scale: float
    direction: Tensor
    first: bool

    def trace(self) -> float:
        """An upper bound of all eigenvalues if P <= I: the trace of (T/r) XᵀX."""
        return self.scale * torch.linalg.vector_norm(self.rows).item() ** 2

    def product(self, applied: Tensor) -> Tensor:
        """(T/r) XᵀX of (groups, d)."""
        along, rows = torch.bmm(self.rows, applied.unsqueeze(-1)).mT, self.rows
        return torch.baddbmm(applied.unsqueeze(1), along, rows, beta=0, alpha=self.scale).squeeze(1)


def largest_gains(gains: Mapping[Name, Gain]) -> dict[Name, Tensor]:
    """Estimates from below of the largest eigenvalue of G, (groups,), by power iteration; ``direction`` is moved on.

    With q the direction and C = (T/r) XᵀX, q ← C P q; the estimate is the Rayleigh quotient of P^½CP^½, whose
    eigenvalues are the same as those of G, at P^½q. Under torch.distributed the products
    of all weights are summed over processes together.
    """
    largest: dict[Name, Tensor] = {}
    directions = {name: gain.direction for name, gain in gains.items()}
    last = {name: FIRST_ITERATIONS if gain.first else ITERATIONS for name, gain in gains.items()}
    for iteration in range(1, max(last.values(), default=0) + 1):
        going_on = {name: gain for name, gain in gains.items() if iteration <= last[name]}
        applied = {name: gain.inverse.apply(directions[name]) for name, gain in going_on.items()}
        own = [gain.product(applied[name]) for name, gain in going_on.items()]
        products = dict(zip(going_on, all_reduce_together(own), strict=True))
        for name, gain in going_on.items():
            product, tiny = products[name], torch.finfo(gain.direction.dtype).tiny
            norm = torch.linalg.vector_norm(product, dim=1, keepdim=True)
            if iteration == last[name]:
                before = dots(applied[name], directions[name]).clamp_(min=tiny)
                largest[name] = dots(applied[name], product).div_(before)
                torch.where(norm > tiny, product.div_(norm), gain.direction, out=gain.direction)
            else:
                directions[name] = product.div_(norm.clamp_(min=tiny))
    return largest


def limit_coefficient(largest: Tensor, bound: float, weights: int, h: Tensor, scale: float) -> Tensor:
    """min(1, max(c, h/n) / λ_max), (groups,), by which the step (η/h) ∇ P of a weight is multiplied.

    The gain of the step is the gain of G over h: it becomes at most c/h, or 1/n if this is more. (With one sample at a
    time and one weight, h > λ_max for k = 1, and the step stays the step of least squares.) If η > 1 it is bounded
    likewise; if η < 1 the step is that part of the one with η = 1. ``lr`` multiplies the result.

    Args:
        largest: λ_max, (groups,), the largest eigenvalue of G.
        bound: c, ``max_gain``.
        weights: n, how many step together: the changes that they make to the outputs add up.
        h: (groups,), the denominator of the step.
        scale: η.
    """
    allowed = (h / weights).clamp_(min=bound)
    largest = largest if scale <= 1 else largest * scale
    return allowed.div_(torch.maximum(largest, allowed))
