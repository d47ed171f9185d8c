"""The inverse autocorrelation matrix P of recursive least squares (Zhang et al.).

    u = P x̄                        equations (38), (54), (85), (95)
    h = λ + kT x̄·u                 equations (39), (55), (86), (96), T = 1 but for sequences
    P ← P/λ - kT/(λh) u uᵀ         equations (37), (53), (84), (94)

The P of one trained matrix with d inputs is d x d; ``groups`` of outputs that read different inputs have one each. All
tensors here have the groups in the first dimension. The last of the d inputs, ``constants``, belong to the biases: in
products of matrices they are kept apart from the others, the features, so that weights and biases need not be joined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

# Bound on the diagonal of P for λ < 1; it starts at 1.
LARGEST_DIAGONAL = 2.0
# In units of rounding: no update makes x̄ᵀP x̄ / x̄ᵀx̄ smaller.
SMALLEST_ALONG_MEAN = 16.0


class InverseAutocorrelation(ABC):
    """P of each group, symmetric and positive definite; A = P⁻¹.

    Subclasses are dataclasses whose fields are λ, ``forgetting``, and the state of P: tensors, the main one first, and
    counters.

    Attributes:
        form: name of the form.
        is_dense: a product with P costs d multiply-adds for each number.
    """

    form: ClassVar[str]
    is_dense: ClassVar[bool] = False
    forgetting: float

    def state(self) -> dict[str, Any]:
        """The tensors themselves, not copies, and the counters, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "forgetting"}  # type: ignore[arg-type]

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """P of this form and λ with the tensors and counters of a :meth:`state`, which may have other entries."""
        return replace(self, **{name: state[name] for name in self.state()})  # type: ignore[type-var]

    @property
    def main(self) -> tuple[str, Tensor]:
        """Name and tensor of the first entry of the state: P, its root, its factors, or the mean of its inputs."""
        return next(iter(self.state().items()))

    @abstractmethod
    def apply(self, mean: Tensor) -> Tensor:
        """u = P x̄, (groups, d), of x̄, (groups, d): equation (54)."""

    @abstractmethod
    def multiply(self, features: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """Rows times P: (groups, r, d - m) and (groups, r, m) of rows [features, constants] of the same shapes."""

    @abstractmethod
    def update_(self, mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> None:
        """Replace A by λA + w x̄x̄ᵀ, equations (35) and (74), and so P by that of equation (53), in place.

        Args:
            mean: x̄, (groups, d).
            applied: u = P x̄, (groups, d).
            h: of :func:`gain`, (groups,).
            weight: w = kT.
        """

    def add_product_(self, targets: Sequence[Tensor], features: Tensor, constants: Tensor, factor: Tensor) -> None:
        """targets ← targets + factor [features, constants] P, in place, with ``factor`` of shape (groups,)."""
        for target, product in zip(targets, self.multiply(features, constants), strict=True):
            target.addcmul_(product, factor[:, None, None])

    def subtract_product_(self, targets: Sequence[Tensor], features: Tensor, constants: Tensor, factor: float) -> None:
        """targets ← targets - factor [features, constants] P, in place."""
        for target, product in zip(targets, self.multiply(features, constants), strict=True):
            target.sub_(product, alpha=factor)


def gain(mean: Tensor, applied: Tensor, weight: float, forgetting: float) -> Tensor:
    """h = λ + w x̄·u, (groups,), by which the step and the update are divided: equations (55) and (96).

    Args:
        mean: x̄, (groups, d).
        applied: u = P x̄, (groups, d).
        weight: w = kT.
        forgetting: λ.

    Example:
        >>> mean = torch.tensor([[1.0, 2.0]])
        >>> inverse = FullInverse.identity(1, 2, mean)
        >>> applied = inverse.apply(mean)  # P₀ = I
        >>> gain(mean, applied, weight=0.1, forgetting=1.0)  # 1 + 0.1 · 5
        tensor([1.5000])
    """
    return dots(mean, applied).clamp_(min=0).mul_(weight).add_(forgetting)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows, (groups,) of (groups, d), by one operation."""
    return torch.bmm(left[:, None], right[:, :, None])[:, 0, 0]


@dataclass(frozen=True)
class FullInverse(InverseAutocorrelation):
    """P itself, for λ = 1: (I + Σ w x̄x̄ᵀ)⁻¹ exactly, by the symmetric update P ← P - vvᵀ with v = √(w/h) u.

    Args:
        P: (groups, d, d), float32 or float64, changed in place.
    """

    form = "full"
    is_dense = True
    P: Tensor
    forgetting: float = field(default=1.0, init=False)

    @staticmethod
    def identity(groups: int, size: int, like: Tensor) -> FullInverse:
        """P₀ = I, (groups, size, size), in the dtype and on the device of ``like``."""
        return FullInverse(_identity(groups, size, like))

    def apply(self, mean: Tensor) -> Tensor:
        return torch.bmm(self.P, mean.unsqueeze(-1)).squeeze(-1)

    def multiply(self, features: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        return _split(_product(features, constants, self.P), features.shape[-1])

    def update_(self, mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> None:
        v = _difference(mean, applied, h, weight)  # P ← P - (kT/h) u uᵀ: (53) with λ = 1
        self.P.addcmul_(v[:, :, None], v[:, None, :], value=-1)


@dataclass(frozen=True)
class SquareRootInverse(InverseAutocorrelation):
    """S with P = S Sᵀ, for λ < 1, with a bound.

    With λ < 1 the paper's formulas let P grow as λ⁻ˢ in directions without inputs, and rounding makes P
    indefinite. Here no diagonal entry of P exceeds :data:`LARGEST_DIAGONAL`: if one would, its row and column are
    scaled down to it, P ← DPD with D = min(1, (2/diag(P))^½). So |P_ij| <= 2 and all eigenvalues are below 2d: no step
    is longer than 2d times that of gradient descent, and the scale of an input that stays zero is at most doubled.
    Until an entry gets there, P is the one of the paper's formulas. The root keeps it positive definite in float32 too;
    multiplying by it takes twice as long.

    S ← (S - β u fᵀ)/√λ with f = Sᵀx̄ and β = w/(h + √(λh)) (Potter's form of the update).

    Args:
        root: (groups, d, d), float32 or float64, changed in place.
        forgetting: λ, in (0, 1).
    """

    form = "full"
    is_dense = True
    root: Tensor
    forgetting: float

    @staticmethod
    def identity(groups: int, size: int, like: Tensor, forgetting: float) -> SquareRootInverse:
        """P₀ = I, (groups, size, size), in the dtype and on the device of ``like``."""
        return SquareRootInverse(_identity(groups, size, like), forgetting)

    def apply(self, mean: Tensor) -> Tensor:
        return torch.bmm(self.root, torch.bmm(self.root.mT, mean[..., None]))[..., 0]

    def multiply(self, features: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        return _split(torch.bmm(_product(features, constants, self.root), self.root.mT), features.shape[-1])

    def update_(self, mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> None:
        factors = torch.bmm(self.root.mT, mean[..., None])[..., 0]
        step = applied * (weight / (h + (self.forgetting * h).sqrt()))[:, None]
        self.root.addcmul_(step[:, :, None], factors[:, None, :], value=-1)
        diagonal = torch.linalg.vecdot(self.root, self.root) / self.forgetting
        self.root.mul_((self.forgetting * (diagonal / LARGEST_DIAGONAL).clamp(min=1)).rsqrt()[:, :, None])


@dataclass
class LowRankInverse(InverseAutocorrelation):
    """V with P ≈ I - VᵀV, for λ = 1: the largest directions of the updates of :class:`FullInverse`.

    Every update adds its v = √(w/h) u as a row. When 2r rows are full, r orthogonal rows replace them, the directions
    in which VᵀV is largest. So P is exact for the first 2r updates. Along directions that are cut off afterwards it is
    nearly the identity: its eigenvalues are never below those of the full form. A product costs 4r multiply-adds a
    number, in place of d.

    Args:
        factors: V, (groups, 2r, d), changed in place; zero rows are free.
        count: the number of rows in use, which grows with each update.
    """

    form = "low_rank"
    factors: Tensor
    count: int
    forgetting: float = field(default=1.0, init=False)

    @staticmethod
    def identity(groups: int, size: int, like: Tensor, rank: int) -> LowRankInverse:
        """P₀ = I of this size, in the dtype and on the device of ``like``; r is ``rank``."""
        return LowRankInverse(like.new_zeros(groups, 2 * rank, size), 0)

    @property
    def _used(self) -> Tensor:
        return self.factors[:, : self.count]

    def apply(self, mean: Tensor) -> Tensor:
        along = torch.bmm(self._used, mean[..., None])
        return mean - torch.bmm(along.mT, self._used)[:, 0]

    def multiply(self, features: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        along = _product(features, constants, self._used.mT)
        of_features, of_constants = _split(self._used, features.shape[-1])
        return torch.baddbmm(features, along, of_features, alpha=-1), constants.baddbmm(along, of_constants, alpha=-1)

    def add_product_(self, targets: Sequence[Tensor], features: Tensor, constants: Tensor, factor: Tensor) -> None:
        used, factor = self._used, factor[:, None, None]
        along = _product(features, constants, used.mT).mul_(factor)
        parts = _split(used, features.shape[-1])
        for target, rows, part in zip(targets, (features, constants), parts, strict=True):
            target.addcmul_(rows, factor).baddbmm_(along, part, alpha=-1)

    def subtract_product_(self, targets: Sequence[Tensor], features: Tensor, constants: Tensor, factor: float) -> None:
        self.add_product_(targets, features, constants, features.new_full((len(features),), -factor))

    def update_(self, mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> None:
        self.factors[:, self.count] = _difference(mean, applied, h, weight)
        self.count += 1
        if self.count == self.factors.shape[1]:
            self._compress_()

    def _compress_(self) -> None:
        rank = self.factors.shape[1] // 2
        vectors = torch.linalg.eigh(torch.bmm(self.factors, self.factors.mT))[1]  # of VVᵀ; eigenvalues ascend
        self.factors[:, :rank] = torch.bmm(vectors[:, :, rank:].mT, self.factors)
        self.factors[:, rank:] = 0
        self.count = rank


@dataclass(frozen=True)
class RankOneInverse(InverseAutocorrelation):
    """P ≈ (I + μ m mᵀ)⁻¹ = I - μ/(1 + μ|m|²) m mᵀ with μ = Σ w and m the mean of x̄: two vectors in place of a matrix.

    With λ < 1, μ and m forget; the identity does not, so that all eigenvalues are in (0, 1].

    Args:
        mean: m, (groups, d), changed in place.
        mass: μ, (groups,), changed in place.
        forgetting: λ, in (0, 1].
    """

    form = "rank1"
    mean: Tensor
    mass: Tensor
    forgetting: float = 1.0

    @staticmethod
    def identity(groups: int, size: int, like: Tensor, forgetting: float = 1.0) -> RankOneInverse:
        """P₀ = I of this size, in the dtype and on the device of ``like``."""
        return RankOneInverse(like.new_zeros(groups, size), like.new_zeros(groups), forgetting)

    def _scaled(self) -> Tensor:
        """c m, (groups, d)."""
        c = self.mass / (1 + self.mass * torch.linalg.vecdot(self.mean, self.mean))
        return c[:, None] * self.mean

    def apply(self, mean: Tensor) -> Tensor:
        return mean - torch.linalg.vecdot(self.mean, mean)[:, None] * self._scaled()

    def multiply(self, features: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        n = features.shape[-1]
        along, scaled = _product(features, constants, self.mean[:, :, None]), self._scaled()[:, None]
        return features - along * scaled[..., :n], constants - along * scaled[..., n:]

    def update_(self, mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> None:
        self.mass.mul_(self.forgetting).add_(weight)
        self.mean.add_((weight / self.mass)[:, None] * (mean - self.mean))


def _difference(mean: Tensor, applied: Tensor, h: Tensor, weight: float) -> Tensor:
    """v = √(w/h) u, shorter if the P - vvᵀ would else be at rounding along x̄: large inputs make it indefinite."""
    finfo = torch.finfo(mean.dtype)
    # x̄ᵀP x̄; the update multiplies it by 1 - w/h · x̄ᵀP x̄
    energy = dots(mean, applied).clamp_(min=finfo.tiny)
    left = torch.sub(energy, dots(mean, mean), alpha=SMALLEST_ALONG_MEAN * finfo.eps)
    factor = torch.minimum(h.reciprocal().mul_(weight), left.div_(energy).div_(energy)).clamp_(min=0)
    return applied * factor.sqrt_().unsqueeze(1)


def _identity(groups: int, size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device).repeat(groups, 1, 1)


def _split(rows: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Views of the features and of the constants of rows (groups, r, d)."""
    return rows[..., :features], rows[..., features:]


def _product(features: Tensor, constants: Tensor, matrix: Tensor) -> Tensor:
    """[features, constants] @ matrix."""
    n = features.shape[-1]
    return torch.bmm(features, matrix[:, :n]).baddbmm_(constants, matrix[:, n:])
