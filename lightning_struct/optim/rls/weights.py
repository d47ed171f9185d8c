"""A weight that RLS trains, with its biases: its P, and its step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_struct.collective import world_size
from lightning_struct.functional.per_sample.awaited import current_backward
from lightning_struct.functional.recursive_least_squares import (
    BlockDiagonalInverse,
    FullInverse,
    InverseAutocorrelation,
    LowRankInverse,
    RankOneInverse,
    SquareRootInverse,
    gain,
)
from lightning_struct.optim.rls.factored_gradient import factored_gradient
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

InverseForm: TypeAlias = Literal["full", "low_rank", "rank1"]


class TrainedWeight:
    """A weight that multiplies rows of inputs, as (groups, outputs, n), and the biases added to its products.

    Args:
        name: of the parameter below the module.
        parameter: of shape (groups·outputs, *features), each group reading inputs of its own.
        groups: see ``parameter``.
        transposed: the shape of ``parameter`` is (groups·inputs, outputs, *kernel), and n is inputs times kernel.
        forgetting: λ.

    Attributes:
        form: of P.
        rank: r of the low-rank form.
        block_size: P of more rows is block-diagonal; None: of none.
        interval: P is updated in the first of so many steps.
        limits_gain: whether samples of the rows are wanted.
        reads_sequences: the positions of a linear layer's inputs are steps of sequences.
        by_rows: P is updated by every row, not by their mean, and that before the step; for linear layers and the full
            form.
    """

    form: InverseForm = "full"
    rank = 32
    block_size: int | None = None
    interval = 1
    limits_gain = False
    reads_sequences = False
    by_rows = False

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        groups: int = 1,
        transposed: bool = False,
        forgetting: float = 1.0,
    ) -> None:
        self.name, self.parameter, self.groups, self.transposed = name, parameter, groups, transposed
        self.forgetting = forgetting
        self.biases: list[Bias] = []
        self.layers = 0
        self.outputs = parameter.shape[1] if transposed else parameter.shape[0] // groups
        self.features = parameter.numel() // (groups * self.outputs)
        self.statistics = Statistics(groups, 0)
        self._test_vector: Tensor | None = None

    def add_layer(self, bias: Bias | None) -> None:
        """A layer that uses the weight, with this bias."""
        self.layers += 1
        if bias is not None:
            self.biases.append(bias)
            self.statistics = Statistics(self.groups, len(self.biases))

    @property
    def size(self) -> int:
        """d, the rows of P."""
        return self.features + len(self.biases)

    @property
    def blocks(self) -> int:
        """Diagonal blocks of P in each group."""
        if self.form != "full" or self.block_size is None:
            return 1
        return -(-self.size // self.block_size)

    @property
    def memory(self) -> int:
        """Bytes of P."""
        rows = {"full": self.size / self.blocks, "low_rank": 2 * self.rank, "rank1": 1}[self.form]
        return round(self.groups * self.size * rows) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """That of P and of the step: the parameter's, float32 at least."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight and the biases, each once."""
        return list(dict.fromkeys([self.parameter, *(bias.parameter for bias in self.biases)]))

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
            most_sampled = math.inf if self.by_rows else MOST_SAMPLED
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
            and self.layers == self.groups == 1
            and len(inputs) < self.most_rows
            and inputs.dtype == self.parameter.dtype == self.dtype
            and inputs.device.type == "cpu"
            and world_size() == 1
        )

    def sample(self, rows: Tensor) -> Tensor | None:
        """(1, s, n) of the rows (r, n): all of them, or enough for the bound on the gain; None where there is none."""
        if self.by_rows:
            return rows.to(self.dtype)[None]
        return sample_rows(rows.to(self.dtype))[None] if self.limits_gain else None

    def initial_state(self) -> dict[str, Any]:
        """P₀ = I, as tensors by name, and the number of steps."""
        like = torch.empty((), dtype=self.dtype, device=self.parameter.device)
        if self.form == "rank1":
            rank1 = RankOneInverse.identity(self.groups, self.size, like)
            return {"steps": 0, "mean": rank1.mean, "mass": rank1.mass}
        if self.form == "low_rank":
            low_rank = LowRankInverse.identity(self.groups, self.size, like, self.rank)
            return {"steps": 0, "factors": low_rank.factors, "count": low_rank.count}
        groups, _, size = self.shape
        if self.forgetting < 1:
            return {"steps": 0, "root": SquareRootInverse.identity(groups, size, like, self.forgetting).root}
        return {"steps": 0, "P": FullInverse.identity(groups, size, like).matrix}

    @property
    def main_tensor(self) -> str:
        """Name in a state of P, its root, its factors or the mean of its inputs."""
        return {"rank1": "mean", "low_rank": "factors", "full": "root" if self.forgetting < 1 else "P"}[self.form]

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
            return self.groups, 2 * self.rank, self.size
        if self.blocks == 1:
            return self.groups, self.size, self.size
        assert self.block_size is not None
        return self.groups * self.blocks, self.block_size, self.block_size

    def inverse(self, state: Mapping[str, Any]) -> InverseAutocorrelation:
        """P of a state as :meth:`initial_state` made it."""
        if self.form == "rank1":
            return RankOneInverse(state["mean"], state["mass"], self.forgetting)
        if self.form == "low_rank":
            return LowRankInverse(state["factors"], state["count"])
        full = SquareRootInverse(state["root"], self.forgetting) if self.forgetting < 1 else FullInverse(state["P"])
        if self.blocks == 1:
            return full
        assert self.block_size is not None
        return BlockDiagonalInverse(full, self.groups, self.block_size)

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
        clip: float | Tensor,
        limit: GainLimit | None = None,
        together: bool = False,
        bounded: bool = False,
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
            bounded: whether the change is bounded; see :mod:`.gain_limit`.
        """
        ratio, scale, lr, momentum = group["ratio"], group["gradient_scale"], group["lr"], group["momentum"]
        inverse, weight = self.inverse(state), ratio * self.statistics.steps
        if self.by_rows:
            inverse = self._update_by_rows_(inverse, ratio)
            applied, h = mean, torch.ones_like(mean[:, 0])
            scale = scale * self.statistics.samples_seen  # the loss is averaged over them
        else:
            applied = inverse.apply(mean)
            h = gain(mean, applied, weight, self.forgetting)
        rate = scale / h  # η/h
        if limit is not None:
            rate = rate * limit.coefficient(h, scale)
        rate = rate * lr * clip * (TOGETHER if together else 1.0)
        features = self._features(self.parameter.detach()).to(self.dtype)
        constants = self._constants([bias.parameter for bias in self.biases])
        if self.parameter.grad is None:
            features = features.clone()  # it is frozen: only the biases are written
        if decay := lr * group["weight_decay"]:
            features.mul_(1 - decay)
            constants.mul_(1 - decay)
        most = None
        if bounded:  # lr multiplies what the bounds leave
            norm = get_total_norm([features, constants]).clamp(min=self.first_norm)
            most = (1 - momentum) * lr * LARGEST_CHANGE * norm
        if momentum:
            if "velocity" not in state:
                state["velocity"] = [torch.zeros_like(features), torch.zeros_like(constants)]
            velocity = state["velocity"]
            self._add_bounded_step_(velocity, momentum, inverse, -rate, most)  # Ω ← αΩ - (η/h) P ∇, equation (99)
            features.add_(velocity[0])  # Θ ← Θ + Ω, equation (100)
            constants.add_(velocity[1])
        else:
            # equations (62), (63) and (97)
            self._add_bounded_step_([features, constants], 1.0, inverse, -rate, most)
        if not self.by_rows and state["steps"] % self.interval == 0:  # equations (53), (84) and (94)
            # A step that updates P does it for those that do not.
            of_update = weight * self.interval
            h_of_update = h if self.interval == 1 else gain(mean, applied, of_update, self.forgetting)
            inverse.update_(mean, applied, h_of_update, of_update)
            if isinstance(inverse, LowRankInverse):
                state["count"] = inverse.count
        # The paper's equations (98) and (100) take the signs before the step and the new P; taken here are those after
        # it.
        l1 = group["l1"]
        if l1 and isinstance(inverse, LowRankInverse):
            inverse.add_product_([features, constants], features.sign(), constants.sign(), torch.full_like(h, -l1))
        elif l1:
            shrinkages = inverse.multiply(features.sign(), constants.sign())
            features.sub_(shrinkages[0], alpha=l1)
            constants.sub_(shrinkages[1], alpha=l1)
        state["steps"] += 1
        self._write(features, constants)

    def _update_by_rows_(self, inverse: InverseAutocorrelation, ratio: float) -> FullInverse | SquareRootInverse:
        """P⁻¹ ← λ P⁻¹ + k XᵀX, one row after the other; returned is the P that forgets no more."""
        assert isinstance(inverse, FullInverse | SquareRootInverse)
        for row in torch.cat([sample.rows for sample in self.statistics.samples], 1).unbind(1):
            applied = inverse.apply(row)
            inverse.update_(row, applied, gain(row, applied, ratio, inverse.forgetting), ratio)
            if isinstance(inverse, SquareRootInverse):
                inverse = replace(inverse, forgetting=1.0)
        return inverse

    def _add_bounded_step_(
        self,
        targets: Sequence[Tensor],
        beta: float,
        inverse: InverseAutocorrelation,
        factor: Tensor,
        most: Tensor | None,
    ) -> None:
        """:meth:`_add_step_`, with ``factor`` ∇ P scaled to the norm ``most`` if its own is larger."""
        if most is None or self._is_small_for_sure(inverse, factor, most):
            self._add_step_(targets, beta, inverse, factor)
            return
        step = [torch.zeros_like(target) for target in targets]
        self._add_step_(step, 1.0, inverse, factor)
        norm = get_total_norm(step)
        share = (most / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        for target, part in zip(targets, step, strict=True):
            target.mul_(beta).addcmul_(part, share)

    def _is_small_for_sure(self, inverse: InverseAutocorrelation, factor: Tensor, most: Tensor) -> bool:
        """Whether the norm of ∇ alone says so: P <= I where it does not forget. A look waits for the device."""
        if most.device.type != "cpu" or inverse.forgetting < 1:
            return False
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return bool(factor.abs().max() * get_total_norm(gradients) <= most)

    @property
    def first_norm(self) -> float:
        """The norm that a weight of this shape has where ``nn.Linear`` draws it."""
        return math.sqrt(self.groups * self.outputs / 3)

    def _add_step_(
        self, targets: Sequence[Tensor], beta: float, inverse: InverseAutocorrelation, factor: Tensor
    ) -> None:
        """targets ← beta targets + factor ∇ P, for weight and biases; ``factor`` is (groups,)."""
        few = self._few_rows()
        if few is None:
            weight, biases = self.parameter.grad, [bias.parameter.grad for bias in self.biases]
            features = self._features(torch.zeros_like(self.parameter) if weight is None else weight).to(self.dtype)
            constants = self._constants(biases)
            if beta != 1:
                for target in targets:
                    target.mul_(beta)
            if isinstance(inverse, LowRankInverse):
                inverse.add_product_(targets, features, constants, factor)
                return
            for target, product in zip(targets, inverse.multiply(features, constants), strict=True):
                target.addcmul_(product, factor[:, None, None])
            return
        inputs, cotangents = few
        ones = inputs.new_ones(1, inputs.shape[1], len(self.biases))
        left = (cotangents * factor[:, None, None]).mT
        for target, product in zip(targets, inverse.multiply(inputs, ones), strict=True):
            target.baddbmm_(left, product, beta=beta)

    def _random(self, *shape: int) -> Tensor:
        """The same normal numbers every time, for vectors that must not be orthogonal to anything in particular."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator, dtype=self.dtype).to(self.parameter.device)

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
        """(groups, outputs, m) of tensors of the biases' shapes, zero for None; a copy."""
        columns = [
            self.parameter.new_zeros(self.groups, self.outputs)
            if tensor is None
            else bias.of(tensor.detach()).reshape(self.groups, self.outputs)
            for bias, tensor in zip(self.biases, tensors, strict=True)
        ]
        if not columns:
            return self.parameter.new_zeros(self.groups, self.outputs, 0, dtype=self.dtype)
        return torch.stack(columns, 2).to(self.dtype)

    def _write(self, features: Tensor, constants: Tensor) -> None:
        weight = self.parameter.detach()
        if self.parameter.grad is not None and features.data_ptr() != weight.data_ptr():
            if self.transposed:  # the inverse of _features
                inputs = len(weight) // self.groups
                features = features.unflatten(2, (inputs, *weight.shape[2:])).transpose(1, 2).flatten(0, 1)
            weight.copy_(features.view(weight.shape))
        for bias, values in zip(self.biases, constants.unbind(2), strict=True):
            if bias.parameter.grad is not None:
                part = bias.of(bias.parameter.detach())
                part.copy_(values.reshape(part.shape))
