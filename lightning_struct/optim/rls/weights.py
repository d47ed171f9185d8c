"""A weight that RLS trains, with its biases: its P, and its step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.collective import world_size
from lightning_struct.functional.curvature.recursive_least_squares import (
    BlockDiagonalInverse,
    FullInverse,
    InverseAutocorrelation,
    LowRankInverse,
    RankOneInverse,
    SquareRootInverse,
    gain,
)
from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.torch_tools import current_backward
from lightning_struct.optim.rls.factored_gradient import factored_gradient
from lightning_struct.optim.rls.forms import InverseSettings
from lightning_struct.optim.rls.gain_limit import (
    LARGEST_CHANGE,
    TOGETHER,
    Gain,
    GainLimit,
    Sample,
    joined_samples,
    sample_rows,
)
from lightning_struct.optim.rls.statistics import MOST_SAMPLED, Arrival, Bias, Statistics


class WeightNorms(NamedTuple):
    """Norms of a weight and its biases together, before a step.

    Attributes:
        theta: of their values.
        gradient: of their gradients; biases that are part of a parameter count as the whole of it.
    """

    theta: float
    gradient: float


class TrainedWeight:
    """A weight that multiplies rows of inputs, as (groups, outputs, n), and the biases added to its products.

    Args:
        name: of the parameter below the module.
        parameter: of shape (groups·outputs, *features), each group reading inputs of its own.
        settings: of P.
        groups: see ``parameter``.
        transposed: the shape of ``parameter`` is (groups·inputs, outputs, *kernel), and n is inputs times kernel.

    Attributes:
        form: of P.
        parameters: the weight and the biases, each once.
        users: how many layers use the weight.
        reads_sequences: the positions of a linear layer's inputs are steps of sequences.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        settings: InverseSettings,
        *,
        groups: int = 1,
        transposed: bool = False,
    ) -> None:
        self.name, self.parameter, self.groups, self.transposed = name, parameter, groups, transposed
        self.biases: list[Bias] = []
        self.parameters = [parameter]
        self.users, self.reads_sequences = 0, False
        self.outputs = parameter.shape[1] if transposed else parameter.shape[0] // groups
        self.features = parameter.numel() // (groups * self.outputs)
        self.settings, self.form = settings, settings.form_of(self.features)
        self.statistics = Statistics(groups, 0)
        self._test_vector: Tensor | None = None

    def add_layer(self, bias: Bias | None, reads_sequences: bool = False) -> None:
        """A layer that uses the weight, with this bias; one that reads sequences is enough for the weight to do so."""
        self.users += 1
        self.reads_sequences = self.reads_sequences or reads_sequences
        if bias is not None:
            self.biases.append(bias)
            self.parameters = list(dict.fromkeys([self.parameter, *(bias.parameter for bias in self.biases)]))
            self.statistics = Statistics(self.groups, len(self.biases))

    @property
    def size(self) -> int:
        """d, the rows of P."""
        return self.features + len(self.biases)

    @property
    def blocks(self) -> int:
        """Diagonal blocks of P in each group."""
        if self.form != "full" or self.settings.block_size is None:
            return 1
        return -(-self.size // self.settings.block_size)

    @property
    def memory(self) -> int:
        """Bytes of P."""
        rows = {"full": self.size / self.blocks, "low_rank": 2 * self.settings.rank, "rank1": 1}[self.form]
        return round(self.groups * self.size * rows) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """That of P and of the step: the parameter's, float32 at least."""
        dtype = self.parameter.dtype
        return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32

    def arrive(self, arrival: Arrival) -> None:
        """Take note of a use of the weight, whose output has got a gradient."""
        self.statistics.forget_cleared()
        self.statistics.arrive(arrival)

    def note_gradient(self, parameter: Tensor) -> None:
        """Note that a backward pass has added to the gradient of the weight or of a bias.

        That of the weight comes when all its uses have got theirs.
        """
        ends_pass = parameter is self.parameter or not self.parameter.requires_grad
        if ends_pass:
            most_sampled = math.inf if self.settings.by_rows else MOST_SAMPLED
            self.statistics.count_arrived(current_backward(), self.most_rows, most_sampled)
        self.statistics.note_gradient(parameter, ends_pass)

    def bias_index(self, parameter: nn.Parameter | None) -> int | None:
        """The place of a bias among those of the weight; None if it is none of them."""
        return next((i for i, bias in enumerate(self.biases) if bias.parameter is parameter), None)

    @property
    def most_rows(self) -> float:
        """Number of rows below which dZᵀ(X P) takes fewer multiply-adds than (dZᵀ X) P."""
        return self.outputs * self.size / (self.outputs + self.size)

    def keeps_rows(self, inputs: Tensor) -> bool:
        """Whether the step may want these rows (r, n) themselves, to multiply them by P before the cotangents.

        Only on a CPU and in one process: whether they make up the gradient cannot be seen elsewhere without waiting for
        the device, and the gradients of DDP are those of all processes.
        """
        return (
            self.form == "full"
            and self.users == self.groups == 1
            and len(inputs) < self.most_rows
            and inputs.dtype == self.parameter.dtype == self.dtype
            and inputs.device.type == "cpu"
            and world_size() == 1
        )

    def sample(self, rows: Tensor) -> Tensor | None:
        """(1, s, n) of the rows (r, n): all of them, or enough for the bound on the gain; None where there is none."""
        if self.settings.by_rows:
            return rows.to(self.dtype)[None]
        return sample_rows(rows.to(self.dtype))[None] if self.settings.limits_gain else None

    def initial_state(self) -> dict[str, Any]:
        """P₀ = I, as tensors by name, and the number of steps."""
        like = torch.empty((), dtype=self.dtype, device=self.parameter.device)
        if self.form == "rank1":
            rank1 = RankOneInverse.identity(self.groups, self.size, like)
            return {"steps": 0, "mean": rank1.mean, "mass": rank1.mass}
        if self.form == "low_rank":
            low_rank = LowRankInverse.identity(self.groups, self.size, like, self.settings.rank)
            return {"steps": 0, "factors": low_rank.factors, "count": low_rank.count}
        groups, _, size = self.shape
        if self.settings.forgetting < 1:
            return {"steps": 0, "root": SquareRootInverse.identity(groups, size, like, self.settings.forgetting).root}
        return {"steps": 0, "P": FullInverse.identity(groups, size, like).matrix}

    @property
    def main_tensor(self) -> str:
        """Name in a state of P, its root, its factors or the mean of its inputs."""
        return {"rank1": "mean", "low_rank": "factors", "full": "root" if self.settings.forgetting < 1 else "P"}[
            self.form
        ]

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is where the weight is, and in the precision of its step."""
        tensor = state[self.main_tensor]
        return tensor.dtype == self.dtype and tensor.device == self.parameter.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the :attr:`main_tensor` of a state."""
        if self.form == "rank1":
            return self.groups, self.size
        if self.form == "low_rank":
            return self.groups, 2 * self.settings.rank, self.size
        if self.blocks == 1:
            return self.groups, self.size, self.size
        assert self.settings.block_size is not None
        return self.groups * self.blocks, self.settings.block_size, self.settings.block_size

    def inverse(self, state: Mapping[str, Any]) -> InverseAutocorrelation:
        """P of a state as :meth:`initial_state` made it."""
        if self.form == "rank1":
            return RankOneInverse(state["mean"], state["mass"], self.settings.forgetting)
        if self.form == "low_rank":
            return LowRankInverse(state["factors"], state["count"])
        full = (
            SquareRootInverse(state["root"], self.settings.forgetting)
            if self.settings.forgetting < 1
            else FullInverse(state["P"])
        )
        if self.blocks == 1:
            return full
        assert self.settings.block_size is not None
        return BlockDiagonalInverse(full, self.groups, self.settings.block_size)

    def gain(self, state: dict[str, Any]) -> Gain:
        """The gain of the coming step; its direction is kept in the state."""
        first = "direction" not in state
        if first:
            state["direction"] = self._random(self.groups, self.size)
        statistics, direction = self.statistics, state["direction"]
        # Of what other processes alone have read there are no rows here.
        sample = joined_samples(statistics.samples) if statistics.samples else Sample(direction[:, None][:, :0], 1.0)
        represented = sum(sample.share * sample.rows.shape[1] for sample in statistics.samples)
        steps = statistics.steps if self.reads_sequences else statistics.uses
        scale = steps / statistics.counts[0] * (1 + statistics.unsampled / max(represented, 1.0))
        return Gain(self.inverse(state), sample.rows, sample.share * scale, direction, first)

    def step_(
        self,
        state: dict[str, Any],
        mean: Tensor,
        group: Mapping[str, float],
        *,
        clip: float,
        limit: GainLimit | None = None,
        together: bool = False,
        norms: WeightNorms | None = None,
    ) -> None:
        """θ ← (1 - lr·δ) θ + ω with ω ← αω - lr (η/h) P ∇, then P ← its update, then θ ← θ - γ P sgn(θ).

        Args:
            state: of :meth:`initial_state`; changed in place.
            mean: x̄, (groups, d).
            group: that of the weight, with the options ``ratio`` k, ``gradient_scale`` η, ``lr``, by which the step is
                multiplied, bounded or not, ``momentum`` α, ``l1`` γ and ``weight_decay`` δ.
            clip: the coefficient of clipping.
            limit: of the gain; None where it is small for sure.
            together: other weights step, too.
            norms: where the change is bounded, see :mod:`.gain_limit`.
        """
        inverse, weight = self.inverse(state), group["ratio"] * self.statistics.steps
        lr = float(group["lr"])  # which may be a tensor
        if self.settings.by_rows:
            inverse = self._update_by_rows_(inverse, group["ratio"])
            applied, h = mean, torch.ones_like(mean[:, 0])
        else:
            applied = inverse.apply(mean)
            h = gain(mean, applied, weight, self.settings.forgetting)
        rate = self._rate(h, group["gradient_scale"], lr * clip * (TOGETHER if together else 1.0), limit)
        theta = self._theta()
        kept = 1 - lr * group["weight_decay"]
        if kept != 1:
            for part in theta:
                part.mul_(kept)
        momentum, most = group["momentum"], None
        if norms is not None:
            most = (1 - momentum) * lr * LARGEST_CHANGE * max(kept * norms.theta, self.first_norm)
            if self._is_small_for_sure(inverse, rate, norms.gradient, most):
                most = None
        self._move_(theta, state, momentum, inverse, rate.neg_(), most)
        if not self.settings.by_rows and state["steps"] % self.settings.interval == 0:
            self._update_inverse_(state, inverse, mean, applied, h, weight)
        # The paper's equations (98) and (100) take the signs before the step and the new P; taken here are those after
        # it.
        if l1 := group["l1"]:
            self._shrink_(theta, inverse, l1)
        state["steps"] += 1
        self._write(*theta)

    def _rate(self, h: Tensor, scale: float, factor: float, limit: GainLimit | None) -> Tensor:
        """The factor of ∇ P, (groups,): η/h within the limit of the gain, times ``factor``."""
        if self.settings.by_rows:
            scale = scale * self.statistics.samples_seen  # the loss is averaged over them
        rate = h.reciprocal().mul_(scale * factor)
        return rate if limit is None else rate.mul_(limit.coefficient(h, scale))

    def theta_parts(self) -> list[Tensor]:
        """What θ consists of: the weight, and of parameters of biases the parts that are added to its products."""
        return [self.parameter, *(bias.of(bias.parameter) for bias in self.biases)]

    def _theta(self) -> list[Tensor]:
        """θ: (groups, outputs, n) and (groups, outputs, m), the parameters themselves where :meth:`_write` finds it.

        That is where dtype and strides allow it, of the biases where there is one. What is frozen is copied.
        """
        features = self._features(self.parameter).to(self.dtype)
        constants = self._constants([bias.parameter for bias in self.biases])
        if self.parameter.grad is None:
            features = features.clone()
        if any(bias.parameter.grad is None for bias in self.biases):
            constants = constants.clone()
        return [features, constants]

    def _is_small_for_sure(self, inverse: InverseAutocorrelation, rate: Tensor, gradient: float, most: float) -> bool:
        """Whether the norm of ∇ alone says so: P <= I where it does not forget. A look waits for other devices."""
        return rate.device.type == "cpu" and inverse.forgetting == 1 and max(rate.tolist()) * gradient <= most

    def _move_(
        self,
        theta: Sequence[Tensor],
        state: dict[str, Any],
        momentum: float,
        inverse: InverseAutocorrelation,
        factor: Tensor,
        most: float | None,
    ) -> None:
        """Θ ← Θ + Ω with Ω ← αΩ + ``factor`` ∇ P, of which the second part has the norm ``most`` at most."""
        if not momentum:  # equations (62), (63) and (97)
            self._add_step_(theta, 1.0, inverse, factor, most)
            return
        if "velocity" not in state:
            state["velocity"] = [torch.zeros_like(part) for part in theta]
        self._add_step_(state["velocity"], momentum, inverse, factor, most)  # equation (99)
        for part, velocity in zip(theta, state["velocity"], strict=True):
            part.add_(velocity)  # equation (100)

    def _update_inverse_(
        self,
        state: dict[str, Any],
        inverse: InverseAutocorrelation,
        mean: Tensor,
        applied: Tensor,
        h: Tensor,
        weight: float,
    ) -> None:
        """P ← P/λ - w/(λh) u uᵀ, equations (53), (84) and (94), for all steps of an interval at once."""
        if self.settings.interval > 1:
            weight = weight * self.settings.interval
            h = gain(mean, applied, weight, self.settings.forgetting)
        inverse.update_(mean, applied, h, weight)
        if isinstance(inverse, LowRankInverse):
            state["count"] = inverse.count

    def _shrink_(self, theta: Sequence[Tensor], inverse: InverseAutocorrelation, l1: float) -> None:
        """θ ← θ - γ sgn(θ) P."""
        features, constants = (part.sign() for part in theta)
        if isinstance(inverse, LowRankInverse):
            inverse.add_product_(theta, features, constants, features.new_full((self.groups,), -l1))
            return
        for part, product in zip(theta, inverse.multiply(features, constants), strict=True):
            part.sub_(product, alpha=l1)

    def _update_by_rows_(self, inverse: InverseAutocorrelation, ratio: float) -> FullInverse | SquareRootInverse:
        """P⁻¹ ← λ P⁻¹ + k XᵀX, one row after the other; returned is the P that forgets no more."""
        assert isinstance(inverse, FullInverse | SquareRootInverse)
        for row in torch.cat([sample.rows for sample in self.statistics.samples], 1).unbind(1):
            applied = inverse.apply(row)
            inverse.update_(row, applied, gain(row, applied, ratio, inverse.forgetting), ratio)
            if isinstance(inverse, SquareRootInverse):
                inverse = replace(inverse, forgetting=1.0)
        return inverse

    @property
    def first_norm(self) -> float:
        """The norm that a weight of this shape has where ``nn.Linear`` draws it."""
        return math.sqrt(self.groups * self.outputs / 3)

    def _add_step_(
        self,
        targets: Sequence[Tensor],
        beta: float,
        inverse: InverseAutocorrelation,
        factor: Tensor,
        most: float | None,
    ) -> None:
        """targets ← beta targets + factor ∇ P, for weight and biases.

        Args:
            targets: changed in place.
            beta: see above.
            inverse: P.
            factor: (groups,).
            most: bound on the norm of factor ∇ P, which is scaled to it where it is larger.
        """
        for target in targets if beta != 1 else ():
            target.mul_(beta)
        few = self._few_rows()
        if few is None:
            gradient = self._gradient()
            if most is None and isinstance(inverse, LowRankInverse):
                inverse.add_product_(targets, *gradient, factor)
                return
            products = inverse.multiply(*gradient)
        else:
            inputs, cotangents = few
            products = inverse.multiply(inputs, inputs.new_ones(1, inputs.shape[1], len(self.biases)))
            if most is None:
                left = (cotangents * factor.view(-1, 1, 1)).mT
                for target, product in zip(targets, products, strict=True):
                    target.baddbmm_(left, product)
                return
            products = torch.bmm(cotangents.mT, products[0]), torch.bmm(cotangents.mT, products[1])
        if most is not None:
            norms = torch.cat([torch.linalg.vector_norm(product, dim=2) for product in products], 1)
            norm = torch.linalg.vector_norm(norms * factor.unsqueeze(1))
            factor = factor * (most / norm.clamp_(min=max(most, torch.finfo(norm.dtype).tiny)))
        factor = factor.view(-1, 1, 1)
        for target, product in zip(targets, products, strict=True):
            target.addcmul_(product, factor)

    def _gradient(self) -> tuple[Tensor, Tensor]:
        """∇: (groups, outputs, n) and (groups, outputs, m), zero where there is none."""
        weight = self.parameter.grad
        features = self._features(torch.zeros_like(self.parameter) if weight is None else weight).to(self.dtype)
        return features, self._constants([bias.parameter.grad for bias in self.biases])

    def _random(self, *shape: int) -> Tensor:
        like = self.parameter.new_empty(0, dtype=self.dtype)
        return normal_numbers(*shape, like=like, dtype=self.dtype)

    def _few_rows(self) -> tuple[Tensor, Tensor] | None:
        """X, (1, r, n), and dZ, (1, r, outputs), with dZᵀX the gradient; None if too many, or not the gradient."""
        pairs, weight = self.statistics.pairs, self.parameter.grad
        if not pairs or weight is None or any(bias.parameter.grad is None for bias in self.biases):
            return None
        if self._test_vector is None:
            self._test_vector = self._random(self.size)
        self._test_vector = self._test_vector.to(weight)
        columns = [bias.of(bias.parameter.grad) for bias in self.biases if bias.parameter.grad is not None]
        rows = factored_gradient(pairs, self._features(weight)[0], columns, self._test_vector)
        return None if rows is None else (rows[0][None], rows[1][None])

    def _features(self, tensor: Tensor) -> Tensor:
        """(groups, outputs, n) of a tensor of the parameter's shape, a view where its strides allow one."""
        if self.transposed:
            return tensor.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(2)
        return tensor.reshape(self.groups, self.outputs, self.features)

    def _constants(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(groups, outputs, m) of tensors of the biases' shapes, zero for None; a view of one where it may be."""
        shape = self.groups, self.outputs, 1
        columns = [
            self.parameter.new_zeros(shape) if tensor is None else bias.of(tensor).reshape(shape)
            for bias, tensor in zip(self.biases, tensors, strict=True)
        ]
        if not columns:
            return self.parameter.new_zeros(self.groups, self.outputs, 0, dtype=self.dtype)
        return (columns[0] if len(columns) == 1 else torch.cat(columns, 2)).to(self.dtype)

    def _write(self, features: Tensor, constants: Tensor) -> None:
        """Copy θ to the parameters that have a gradient, unless it is these themselves."""
        weight = self.parameter
        if weight.grad is not None and features.data_ptr() != weight.data_ptr():
            if self.transposed:  # the inverse of _features
                inputs = len(weight) // self.groups
                features = features.unflatten(2, (inputs, *weight.shape[2:])).transpose(1, 2).flatten(0, 1)
            weight.copy_(features.view(weight.shape))
        for place, bias in enumerate(self.biases):
            part = bias.of(bias.parameter)
            if bias.parameter.grad is not None and constants.data_ptr() != part.data_ptr():
                part.copy_(constants[:, :, place].reshape(part.shape))
