"""A weight that RLS trains, with its biases: its P, and its step."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.collective import world_size
from lightning_struct.functional.curvature.recursive_least_squares import (
    InverseAutocorrelation,
    gain,
)
from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.torch_tools import tree_map
from lightning_struct.optim.rls.gain_limit import (
    LARGEST_CHANGE,
    TOGETHER,
    Gain,
    Sample,
    joined_samples,
    limit_coefficient,
    sample_rows,
)
from lightning_struct.optim.rls.settings import Settings
from lightning_struct.optim.rls.statistics import Statistics


class StepBounds(NamedTuple):
    """Bounds on the step of one weight; see :mod:`.gain_limit`.

    Attributes:
        clip: the coefficient of clipping.
        max_gain: c, or the part of it that counts; None: the gain is not bounded.
        weights: how many step together.
        largest_gain: (groups,), the largest eigenvalue of G; None if it is small for sure.
        norms: of the weight and its biases together, and of their gradients, if the norm of the step is bounded.
    """

    clip: float
    max_gain: float | None
    weights: int
    largest_gain: Tensor | None = None
    norms: tuple[float, float] | None = None


class TrainedWeight:
    """A weight that multiplies rows of inputs, as (groups, outputs, n), and the biases added to its products.

    Args:
        name: of the parameter below the module.
        parameter: of shape (groups·outputs, *features), each group reading inputs of its own.
        settings: of the optimizer.
        groups: see ``parameter``.
        transposed: the shape of ``parameter`` is (groups·inputs, outputs, *kernel), and n is inputs times kernel.

    Attributes:
        biases: those that are added to its products, one for each layer that has one of its own.
        users: how many layers use the weight.
        statistics: of its inputs since the last step.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, settings: Settings, *, groups: int = 1, transposed: bool = False
    ) -> None:
        self.name, self.parameter, self.groups, self.transposed = name, parameter, groups, transposed
        self.biases: list[nn.Parameter] = []
        self.users = 0
        self.outputs = parameter.shape[1] if transposed else parameter.shape[0] // groups
        self.features = parameter.numel() // (groups * self.outputs)
        self.settings = settings
        self._test_vector: Tensor | None = None
        self.forget()

    def add_layer(self, bias: nn.Parameter | None) -> None:
        """Take in a layer that uses the weight, with this bias."""
        self.users += 1
        if bias is not None:
            self.biases.append(bias)
            self.forget()
            self.__dict__.pop("blank", None)  # made for one input less

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight and the biases."""
        return [self.parameter, *self.biases]

    @property
    def size(self) -> int:
        """d, the rows of P."""
        return self.features + len(self.biases)

    @property
    def memory(self) -> int:
        """Bytes of P, or of the numbers that stand for it."""
        return self.blank.main[1].numel() * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of P and of the step: the parameter's, float32 at least."""
        dtype = self.parameter.dtype
        return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32

    # --- inputs ------------------------------------------------------------------------------------------------------

    @property
    def most_rows(self) -> float:
        """Number of rows below which dZᵀ(X P) takes fewer multiply-adds than (dZᵀ X) P."""
        return self.outputs * self.size / (self.outputs + self.size)

    def kept_rows(self, rows: Tensor) -> Tensor | None:
        """The rows (r, n), if the step may want to multiply them by P before the cotangents; else None.

        Only on a CPU and in one process: whether they make up the gradient cannot be seen elsewhere without waiting for
        the device, and under DDP the gradients come from all processes.
        """
        is_kept = (
            self.blank.is_dense
            and self.users == self.groups == 1
            and len(rows) < self.most_rows
            and rows.dtype == self.parameter.dtype == self.dtype
            and rows.device.type == "cpu"
            and world_size() == 1
        )
        return rows if is_kept else None

    @property
    def takes_samples(self) -> bool:
        """Whether the gain of its steps is bounded, which needs samples of the rows."""
        return self.settings.max_gain is not None

    def sample(self, rows: Tensor) -> Tensor | None:
        """(1, s, n) of the rows (r, n): all of them, or enough to bound the gain; None if it has no bound."""
        return sample_rows(rows.to(self.dtype))[None] if self.takes_samples else None

    def forget(self) -> None:
        """Drop the inputs since the last step."""
        self.statistics = Statistics(len(self.biases), self.most_rows)

    # --- state -------------------------------------------------------------------------------------------------------

    def _identity(self, like: Tensor) -> InverseAutocorrelation:
        return self.settings.identity(self.features, self.groups, self.size, like)

    @cached_property
    def blank(self) -> InverseAutocorrelation:
        """P on the device "meta": shapes without numbers."""
        return self._identity(torch.empty((), device="meta"))

    def initial_state(self) -> dict[str, Any]:
        """P₀ = I, as tensors by name, and the number of steps."""
        return {"steps": 0, **self._identity(self.parameter.new_empty((), dtype=self.dtype)).state()}

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is on the device of the weight and in the precision of its step."""
        tensor = state[self.blank.main[0]]
        return tensor.dtype == self.dtype and tensor.device == self.parameter.device

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless a state is of a P of this form and shape.

        Raises:
            ValueError: it is not.
        """
        (name, P), form, forgetting = self.blank.main, self.blank.form, self.settings.forgetting
        if name not in state:
            raise ValueError(
                f"the state of {self.name} is of another form of P than {form!r} with forgetting={forgetting}"
            )
        if (shape := state[name].shape) != P.shape:
            raise ValueError(f"the state of {self.name} has P of shape {tuple(shape)}, expected {tuple(P.shape)}")

    def converted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a state, with its tensors on the device of the weight, in the dtype of its step."""
        device, dtype = self.parameter.device, self.dtype
        return tree_map(lambda v: v.to(device, dtype, copy=True) if isinstance(v, Tensor) else v, dict(state))

    # --- step --------------------------------------------------------------------------------------------------------

    def gain(self, state: dict[str, Any]) -> Gain:
        """The gain of the coming step; its direction is kept in the state."""
        first = "direction" not in state
        if first:
            state["direction"] = self._random(self.groups, self.size)
        statistics, direction = self.statistics, state["direction"]
        # A process has no rows of layers that only other processes have called.
        sample = joined_samples(statistics.samples) if statistics.samples else Sample(direction[:, None][:, :0], 1.0)
        represented = sum(sample.share * sample.rows.shape[1] for sample in statistics.samples)
        scale = statistics.uses / statistics.counts[0] * (1 + statistics.unsampled / max(represented, 1.0))
        return Gain(self.blank.with_state(state), sample.rows, sample.share * scale, direction, first)

    def step_(self, state: dict[str, Any], mean: Tensor, group: Mapping[str, Any], bounds: StepBounds) -> None:
        """θ ← (1 - lr·δ) θ + ω with ω ← αω - lr (η/h) P ∇, then P ← its update, then θ ← θ - γ P sgn(θ).

        Args:
            state: of :meth:`initial_state`; changed in place.
            mean: x̄, (groups, d).
            group: the group of the weight, with the options ``ratio`` k, ``gradient_scale`` η, ``lr``, by which the
                step is multiplied, bounded or not, ``momentum`` α, ``l1`` γ and ``weight_decay`` δ.
            bounds: of the step.
        """
        P, kT = self.blank.with_state(state), group["ratio"] * self.statistics.steps
        scale, lr, momentum = group["gradient_scale"], float(group["lr"]), group["momentum"]  # lr may be a tensor
        u = P.apply(mean)  # u = P x̄: (54)
        h = gain(mean, u, kT, P.forgetting)  # h = λ + kT x̄ᵀu: (55)
        together = bounds.max_gain is not None and bounds.weights > 1
        factor = h.reciprocal().mul_(-scale * (lr * bounds.clip * (TOGETHER if together else 1.0)))  # -η/h
        if bounds.largest_gain is not None and bounds.max_gain is not None:
            factor.mul_(limit_coefficient(bounds.largest_gain, bounds.max_gain, bounds.weights, h, scale))

        theta = self._theta()
        kept = 1 - lr * group["weight_decay"]
        if kept != 1:
            for part in theta:
                part.mul_(kept)
        most = None
        if bounds.norms is not None:
            theta_norm, gradient_norm = bounds.norms
            first_norm = math.sqrt(self.groups * self.outputs / 3)  # of a weight of this shape as nn.Linear draws it
            most = (1 - momentum) * lr * LARGEST_CHANGE * max(kept * theta_norm, first_norm)
            # Unless it forgets, P <= I. Looking at the factor waits for devices other than a CPU.
            if factor.device.type == "cpu" and P.forgetting == 1 and -min(factor.tolist()) * gradient_norm <= most:
                most = None
        if momentum:
            if "velocity" not in state:
                state["velocity"] = [torch.zeros_like(part) for part in theta]
            for velocity in state["velocity"]:
                velocity.mul_(momentum)
            self._add_step_(state["velocity"], P, factor, most)  # Ω ← αΩ - (η/h) ∇ P: (99)
            for part, velocity in zip(theta, state["velocity"], strict=True):
                part.add_(velocity)  # Θ ← Θ + Ω: (100)
        else:
            self._add_step_(theta, P, factor, most)  # Θ ← Θ - (η/h) ∇ P: (62), (63) and (97)

        P.update_(mean, u, h, kT)  # P ← P/λ - kT/(λh) u uᵀ: (53), (84) and (94)
        state.update(P.state())
        if l1 := group["l1"]:
            # Θ ← Θ - γ sgn(Θ) P: (98) and (100), which take the signs before the step; taken here are those after it.
            features, constants = (part.sign() for part in theta)
            P.subtract_product_(theta, features, constants, l1)
        state["steps"] += 1
        self._write(*theta)

    def _add_step_(
        self, targets: Sequence[Tensor], P: InverseAutocorrelation, factor: Tensor, most: float | None
    ) -> None:
        """targets ← targets + factor ∇ P, for weight and biases.

        Args:
            targets: changed in place.
            P: see above.
            factor: (groups,).
            most: bound on the norm of factor ∇ P, which is scaled to it if it is larger.
        """
        few = self._few_rows()
        if few is None and most is None:
            P.add_product_(targets, *self._gradient(), factor)
            return
        if few is None:
            products = P.multiply(*self._gradient())
        else:
            inputs, cotangents = few
            products = P.multiply(inputs, inputs.new_ones(1, inputs.shape[1], len(self.biases)))
            if most is None:
                left = (cotangents * factor.view(-1, 1, 1)).mT
                for target, product in zip(targets, products, strict=True):
                    target.baddbmm_(left, product)
                return
            products = torch.bmm(cotangents.mT, products[0]), torch.bmm(cotangents.mT, products[1])
        norms = torch.cat([torch.linalg.vector_norm(product, dim=2) for product in products], 1)
        norm = torch.linalg.vector_norm(norms * factor.unsqueeze(1))
        assert most is not None
        factor = factor / norm.div_(max(most, torch.finfo(norm.dtype).tiny)).clamp_(min=1.0)
        for target, product in zip(targets, products, strict=True):
            target.addcmul_(product, factor.view(-1, 1, 1))

    # --- θ and its gradient ------------------------------------------------------------------------------------------

    def _theta(self) -> list[Tensor]:
        """θ: (groups, outputs, n) and (groups, outputs, m).

        These are views of the parameters if dtype and strides allow it; :meth:`_write` copies them otherwise, and
        leaves frozen parameters alone.
        """
        features = self._features(self.parameter).to(self.dtype)
        constants = self._constants(self.biases)
        if self.parameter.grad is None:
            features = features.clone()
        if any(bias.grad is None for bias in self.biases):
            constants = constants.clone()
        return [features, constants]

    def _gradient(self) -> tuple[Tensor, Tensor]:
        """∇: (groups, outputs, n) and (groups, outputs, m), zero without a gradient."""
        weight = self.parameter.grad
        features = self._features(torch.zeros_like(self.parameter) if weight is None else weight).to(self.dtype)
        return features, self._constants([bias.grad for bias in self.biases])

    def _random(self, *shape: int) -> Tensor:
        return normal_numbers(*shape, like=self.parameter.new_empty(0, dtype=self.dtype), dtype=self.dtype)

    def _few_rows(self) -> tuple[Tensor, Tensor] | None:
        """X, (1, r, n), and dZ, (1, r, outputs), with dZᵀX the gradient; None if too many, or not the gradient."""
        weight = self.parameter.grad
        columns = [bias.grad for bias in self.biases if bias.grad is not None]
        if not self.statistics.pairs or weight is None or len(columns) < len(self.biases):
            return None
        if self._test_vector is None:
            self._test_vector = self._random(self.size)
        self._test_vector = self._test_vector.to(weight)
        rows = self.statistics.factored_gradient(self._features(weight)[0], columns, self._test_vector)
        return None if rows is None else (rows[0][None], rows[1][None])

    def _features(self, tensor: Tensor) -> Tensor:
        """(groups, outputs, n) of a tensor of the parameter's shape, a view if its strides allow one."""
        if self.transposed:
            return tensor.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(2)
        return tensor.reshape(self.groups, self.outputs, self.features)

    def _constants(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(groups, outputs, m) of tensors of the biases' shapes, zero for None; a view if one bias allows it."""
        shape = self.groups, self.outputs, 1
        columns = [self.parameter.new_zeros(shape) if tensor is None else tensor.reshape(shape) for tensor in tensors]
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
            if bias.grad is not None and constants.data_ptr() != bias.data_ptr():
                bias.copy_(constants[:, :, place].reshape(bias.shape))
