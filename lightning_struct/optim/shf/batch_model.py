"""The damped least-squares model of one batch, over all processes that hold a share of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.curvature.preconditioner import (
    empirical_fisher_diagonal,
    fisher_scaling,
    jacobi_scaling,
    randomized_gauss_newton_diagonal,
)
from lightning_struct.functional.jacobian.gauss_newton import linearize
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.layers.gradient_norms import variance_from_sums
from lightning_struct.functional.layers.per_sample.contributions import Uncovered
from lightning_struct.functional.layers.probes import Probe, probe_layers
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.functional.randomness import random_signs, random_state, restored_random_state
from lightning_struct.functional.torch_tools import call_with
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.buffers import BufferUpdates, versions
from lightning_struct.optim.shf.objective import FlatWeights, Objective
from lightning_struct.optim.shf.samples import Samples
from lightning_struct.optim.shf.variance import sum_of_squared_norms

# What a share is of, where that is zero.
_TINY = 1e-300


class BatchModel:
    """f(w + d) ≈ f(w) + ∇f·d + ½‖A d‖²/m + ½ l2 ‖d‖², A = SᵀJ of m of the n samples; if m = n, ∇f = Aᵀ r/n + l2 w.

    The paper scales A and r by 1/√n; here the whole least-squares problem is multiplied by n instead, the damping with
    it, which spares two passes over the data per product and has the same solution.

    Directions are flat vectors (all weights, one after another). The samples and rows of A stay on their process;
    vectors in the space of the weights are the same on all of them.

    Args:
        module: the network; neither its weights nor its buffers are changed.
        loss: f is its mean over the n samples.
        weights: name -> the trainable weights, detached.
        inputs: this process's samples, a tensor or a tuple of tensors.
        targets: row i belongs to sample i.
        l2: weight of ½‖w‖².
        backend, chunk_size: passed to :func:`~lightning_struct.functional.linearize`.
        held_out: share of the samples of each process, its last ones, that the model is not made of.
        single_samples: where layers do not show the gradients of single samples, form these for the variance. Else it
            is estimated from the two halves of the batch, for one product more.
        layers_show: whether layers are asked for the gradients of single samples.
        curvature_share: share of the other samples of each process, its first ones, whose rows A has; f and ∇f are of
            all.

    Attributes:
        weights: w.
        objective: f, truly evaluated.
        n: samples over all processes that f is the mean of.
        samples: n, and those that are held out.
        value: f(w).
        largest_fall: ½‖b‖²/n, by which no step lowers the model more; f(w) where that is less and not negative.
        gradient: ∇f(w), flat.
        gradient_squared: ‖∇f(w)‖².
        variance: ‖Var‖₁ of the per-sample gradients (section 4.3), None where it is not defined.
        uncovered: why layers did not show the gradients of single samples, on any process; None if they did, or were
            not asked.
        linearization, outputs, targets: those of this process's samples that have rows in A.
        right_hand_side: b = -r of these.

    Raises:
        TypeError: a loss whose value is no tensor without dimensions.
        ValueError: a loss whose residual is not shaped like the outputs; a forward that changes its inputs in place; an
            empty batch, or one too small to hold samples out; NaN or infinity in the data or in f, on any of the
            processes.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: GaussNewtonLoss,
        weights: dict[str, Tensor],
        inputs: Any,
        targets: Tensor,
        *,
        l2: float = 0.0,
        backend: str | None = None,
        chunk_size: int | None = None,
        held_out: float = 0.0,
        curvature_share: float = 1.0,
        single_samples: bool = True,
        layers_show: bool = True,
    ) -> None:
        self._module, self._loss, self.weights = module, loss, FlatWeights(weights)
        self._l2, self._backend, self._chunk_size = l2, backend, chunk_size
        self._single_samples, self._layers_show = single_samples, layers_show
        self._dtype, self._device = self.weights.vector.dtype, self.weights.vector.device
        batch, held = Samples.of_batch(inputs, targets, self._device).hold_out(held_out)
        self.n, self.samples, self._args = batch.total, batch.total + held.total, batch.args
        self._random_state = random_state(*batch.args)
        self.objective = Objective(
            module, loss, self.weights, batch, held, self._random_state, l2=l2, chunk_size=chunk_size
        )
        before = versions(batch.args)
        self._linearize(batch)
        if versions(batch.args) != before:
            raise ValueError(
                "the forward of the module changes its inputs in place, and each evaluation in a step would change "
                "them again: let it work on a copy (x = x.clone(), or x = x / 2 instead of x /= 2)"
            )
        self._measure(per_sample=coupling_layer(module) is None)
        if curvature_share < 1.0:
            self._linearize(batch.split(tuple(math.ceil(curvature_share * count) for count in batch.counts))[0])
        self.right_hand_side = -self._residual

    @property
    def has_held_out(self) -> bool:
        """Whether any samples are held out."""
        return self.samples > self.n

    def write_buffers(self, buffers: BufferUpdates) -> None:
        """Let a forward write into the buffers of the module, as it is now."""
        with restored_random_state(self._random_state):
            buffers.run(self._args)

    def change_by_repetition(self) -> float:
        """How far the outputs of another forward are from these, at w and with the same random numbers, as a share."""
        args, _, rows = next(self._rows_of.chunks(self._chunk_size))
        with restored_random_state(self._random_state):
            again = call_with(self._module, self.weights.by_name, args).to(self._dtype)
        change, outputs = again - self.outputs[rows], self.outputs[rows]
        return math.sqrt(inner(change, change).item() / max(inner(outputs, outputs).item(), _TINY))

    def product_error(self) -> float:
        """How far uᵀJ Jᵀu is from ‖Jᵀu‖², as a share of the latter, for random signs u; on this process.

        Where the second derivative is lost behind a layer, it is the share of the parameters before it.
        """
        signs = self._random_signs(0)
        product = self.linearization.vjp(signs)
        squares = sum(inner(part, part).item() for part in product.values())
        return abs(inner(signs, self.linearization.jvp(product).to(self._dtype)).item() - squares) / max(squares, _TINY)

    @property
    def curvature_n(self) -> int:
        """m: samples over all processes that A has rows of."""
        return self._rows_of.total

    def _linearize(self, samples: Samples) -> None:
        """Make A of these samples."""
        self._rows_of, self.targets = samples, samples.targets
        with restored_random_state(self._random_state):
            self.linearization = linearize(
                self._module,
                self.weights.by_name,
                *samples.args,
                backend=self._backend,
                chunk_size=self._chunk_size,
            )
        self.outputs = self.linearization.outputs.to(self._dtype)
        self._residual = self._loss.residual(self.outputs, self.targets)
        if self._residual.shape != self.outputs.shape:
            raise ValueError(
                f"{type(self._loss).__name__}.residual returned {tuple(self._residual.shape)} for outputs of "
                f"{tuple(self.outputs.shape)}: it must be shaped like them"
            )

    def _measure(self, per_sample: bool) -> None:
        """f, ∇f, and ‖Var‖₁ where samples have gradients of their own (section 4.3)."""
        cotangent = self._loss.sqrt_hessian(self.outputs, self.targets, self._residual)
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        value_here = self._loss.value(self.outputs, self.targets)
        if not isinstance(value_here, Tensor) or value_here.ndim:
            raise TypeError(
                f"{type(self._loss).__name__}.value returned {_described(value_here)}: it must be a tensor without "
                "dimensions, the mean over samples"
            )
        sums[0] = value_here.to(torch.float64) * len(self.targets)
        self.uncovered: str | None = None
        if per_sample and bool(sums[0].isfinite()):
            sums[1] = self._sum_of_squared_norms(cotangent)
        sums[2] = self.uncovered is not None
        sums[3] = 0.5 * inner(self._residual, self._residual)
        value, squared_norms, uncovered, squares = all_reduce(sums).tolist()
        if uncovered and self.uncovered is None:
            self.uncovered = "they do not show it on another process"
        self.value = value / self.n + self.objective.penalty(self.weights.vector)
        if not math.isfinite(self.value):
            raise NotFinite(
                f"the loss at the current weights is {self.value}; they are unchanged. Lower the scale of the "
                "initialisation or of the data, or raise the damping"
            )
        self.largest_fall = min(squares / self.n, self.value if self.value > 0.0 else math.inf)
        mean = self.backward(self._residual).div_(self.n)
        mean_squared = inner(mean, mean).item()
        if not math.isfinite(mean_squared):
            raise NotFinite(
                f"the gradient at the current weights has the squared norm {mean_squared} in {self._dtype}; they are "
                "unchanged. Lower the scale of the data"
            )
        self.variance = None
        if per_sample and self.n > 1:
            if math.isnan(squared_norms):
                self.variance = self._variance_from_halves(mean)
            else:
                self.variance = variance_from_sums(squared_norms, self.n, mean_squared)
            if not math.isfinite(self.variance):
                self.variance = None
        self.gradient = mean.add_(self.weights.vector, alpha=self._l2)
        self.gradient_squared = inner(self.gradient, self.gradient).item()

    def _sum_of_squared_norms(self, cotangent: Tensor) -> Tensor:
        if self.linearization.backend != "layer_rules" and self._layers_show:
            try:
                return sum_of_squared_norms(
                    self._module,
                    self.weights.by_name,
                    self._rows_of,
                    cotangent,
                    chunk_size=self._chunk_size,
                    random_state=self._random_state,
                )
            except Uncovered as reason:
                self.uncovered = str(reason)
        if (self.uncovered is not None or not self._layers_show) and not self._single_samples:
            return torch.full((), math.nan, dtype=torch.float64, device=self._device)  # for the estimate by halves
        return self.linearization.squared_norms(cotangent).sum(dtype=torch.float64)

    def _variance_from_halves(self, mean: Tensor) -> float:
        """‖Var‖₁ from the mean gradients of the two halves of the batch: E‖ḡ₁ - ḡ₂‖² = (1/n₁ + 1/n₂) ‖Var‖₁."""
        first = self.n // 2
        second = self.n - first
        part = self._residual.clone()
        part[max(first - self._rows_of.first_row, 0) :] = 0.0  # the first half is that of all processes' samples
        of_first = self.backward(part).div_(first)
        difference = (of_first - mean).mul_(self.n / second)  # ḡ₂ = (n ḡ - n₁ ḡ₁)/n₂
        return inner(difference, difference).item() / (1 / first + 1 / second)

    def forward(self, d: Tensor) -> Tensor:
        """A d, this process's rows (Algorithm 4)."""
        tangent = self.linearization.jvp(self.weights.unflat(d)).to(self._dtype)
        return self._loss.sqrt_hessian_transpose(self.outputs, self.targets, tangent)

    def backward(self, u: Tensor) -> Tensor:
        """Aᵀ u over the rows of all processes (Algorithm 5): one flat all-reduce."""
        cotangent = self._loss.sqrt_hessian(self.outputs, self.targets, u)
        product = torch.empty_like(self.weights.vector)
        self.linearization.vjp(cotangent, out=self.weights.unflat(product))
        return all_reduce(product)

    def gradient_of_rows(self) -> Tensor:
        """Aᵀb where A has rows of all samples, from ∇f."""
        return torch.sub(self.weights.vector * self._l2, self.gradient).mul_(self.n)

    def curvature(self, d: Tensor) -> Tensor:
        """AᵀA d/m."""
        return self.backward(self.forward(d)).div_(self.curvature_n)

    def curvature_along(self, d: Tensor) -> float:
        """½‖A d‖²/m + ½ l2 ‖d‖²: what the model's f(w + d) - f(w) has besides the slope (section 4.2)."""
        rows = self.forward(d)
        squares = all_reduce(inner(rows, rows)).item() / self.curvature_n
        return 0.5 * squares + 0.5 * self._l2 * inner(d, d).item()

    def slope(self, d: Tensor) -> float:
        """∇f·d."""
        return inner(self.gradient, d).item()

    def joined_damping(self, damping: float, start: Tensor | None) -> tuple[float, Tensor]:
        """μ and m with λ²‖d - d0‖² + l2 ‖w + d‖² = μ²‖d - m‖² + constant."""
        strength = math.sqrt(damping * damping + self._l2)
        center = self.weights.vector * (-self._l2 / strength**2)
        return strength, center if start is None else center.add_(start, alpha=(damping / strength) ** 2)

    def scaling(self, choice: str, damping: float, seed: int) -> Tensor:
        """c of a diagonal right preconditioner by its name (section 4.4); ``seed`` is that of the random signs."""
        share = len(self.targets) / self.curvature_n
        if choice == "fisher":
            diagonal = empirical_fisher_diagonal(self.linearization, self._loss, self.targets)
            return fisher_scaling(all_reduce(self.weights.flat(diagonal).mul_(share)), damping)
        probe = self._random_signs(seed)
        diagonal = randomized_gauss_newton_diagonal(self.linearization, self._loss, self.targets, probe=probe)
        mean = all_reduce(self.weights.flat(diagonal).mul_(share))
        if choice == "diagonal":
            return jacobi_scaling(mean)  # Algorithm 3
        return mean.mul_(self.curvature_n).add_(1.0).reciprocal_()  # the formula in the text of section 4.4

    def probes(
        self, layers: Collection[nn.Module], parameters: Mapping[str, nn.Parameter], seed: int
    ) -> Iterator[Probe]:
        """Records of S times random signs back-propagated through ``layers``: this process's rows of A, chunk by chunk.

        Args:
            layers, parameters: passed to :func:`~lightning_struct.functional.layers.probes.probe_layers`.
            seed: seed of the random signs.
        """
        signs = self._random_signs(seed)
        with restored_random_state(self._random_state):
            for args, targets, rows in self._rows_of.chunks(self._chunk_size):
                yield probe_layers(
                    self._module,
                    args,
                    layers,
                    parameters,
                    lambda outputs, targets=targets, rows=rows: self._loss.sqrt_hessian(  # type: ignore[misc]
                        outputs.to(self._dtype), targets, signs[rows]
                    ),
                )

    def _random_signs(self, seed: int) -> Tensor:
        """A sign for each output of this process's samples that have rows in A."""
        # All processes draw the signs of the whole batch and take their rows, so that they are those of one process.
        generator = torch.Generator(self._device).manual_seed(seed)
        signs = random_signs(self.curvature_n, *self.outputs.shape[1:], like=self.outputs, generator=generator)
        return signs[self._rows_of.first_row :][: len(self.targets)]


def _described(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
