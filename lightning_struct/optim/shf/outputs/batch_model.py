"""The damped least-squares model of one batch, over all processes that hold a share of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.jacobian.gauss_newton import linearize
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.layers.gradient_norms import variance_from_sums
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Uncovered, squared_norms
from lightning_struct.functional.layers.probes import probe_layers
from lightning_struct.functional.layers.registry import called_layers, coupling_layer, owned_parameters
from lightning_struct.functional.randomness import random_signs, random_state, restored_random_state
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.outputs.objective import Objective
from lightning_struct.optim.shf.samples import BatchShare, FlatWeights, refusal_of_batch
from lightning_struct.optim.shf.settings import CG, Settings
from lightning_struct.optim.shf.step_state import BufferUpdates, versions


class Line(NamedTuple):
    """A direction d as the line search and ρ need it: f(w + d), ∇f·d, and ½‖A d‖²/m + ½ l2 ‖d‖² (section 4.2)."""

    value: float
    slope: float
    curvature: float


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
        settings: ``l2``, ``backend``, ``chunk_size``, and the solver's ``curvature_share``: the share of the samples,
            the first ones, whose rows A has; f and ∇f are of all.
        layers: whether layers are asked for the gradients of single samples, for their variance.
        single_samples: whether to form these gradients if layers do not show them. Else the variance is estimated from
            the two halves of the batch, for one product more.
        change: of the weights in the last step, if f is wanted without it, too.

    Attributes:
        module, loss, settings: as given.
        weights: w.
        random_state: the state that random numbers start from in each evaluation.
        objective: f, truly evaluated.
        samples: n, over all processes.
        value: f(w).
        value_before: f(w - change), if a change was given.
        largest_fall: ½‖b‖²/n, the largest fall of the model by any step; f(w) if that is less and not negative.
        gradient: ∇f(w), flat.
        gradient_squared: ‖∇f(w)‖².
        variance: ‖Var‖₁ of the per-sample gradients (section 4.3), None if it is not defined.
        uncovered: why layers did not show the gradients of single samples, on any process; None if they did, or were
            not asked.
        block_losses: none.
        rows: samples that have rows in A.
        linearization, outputs, targets: those of this process's samples that have rows in A.

    Raises:
        TypeError: a loss whose value is no tensor without dimensions.
        ValueError: a loss whose residual is not shaped like the outputs; a forward that changes its inputs in place; an
            empty batch, or one too small for the share; NaN or infinity in the data or in f, on any of the
            processes.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: GaussNewtonLoss,
        weights: dict[str, Tensor],
        inputs: Any,
        targets: Tensor,
        settings: Settings,
        *,
        layers: bool = True,
        single_samples: bool = True,
        change: Tensor | None = None,
    ) -> None:
        self.module, self.loss, self.weights, self.settings = module, loss, FlatWeights(weights), settings
        self._layers, self._single_samples = layers, single_samples
        self._dtype, self._device = self.weights.vector.dtype, self.weights.vector.device
        batch = BatchShare.of_batch(inputs, targets, self._device)
        self.samples, self._args = batch.total, batch.args
        self.random_state = random_state(*batch.args)
        self.objective = Objective(module, loss, self.weights, batch, self.random_state, settings)
        before = versions(batch.args)
        self._linearize(batch)
        if versions(batch.args) != before:
            raise ValueError(
                "the forward of the module changes its inputs in place, and each evaluation in a step would change "
                "them again: let it work on a copy (x = x.clone(), or x = x / 2 instead of x /= 2)"
            )
        self._measure(batch.not_finite, change, per_sample=coupling_layer(module) is None)
        share = settings.solver.curvature_share if isinstance(settings.solver, CG) else 1.0
        if share < 1.0:
            self._linearize(batch.first(math.ceil(share * batch.total)))

    block_losses: Mapping[str, float] = {}

    def write_buffers(self, buffers: BufferUpdates) -> None:
        """Let a forward write into the buffers of the module, as it is now."""
        with restored_random_state(self.random_state):
            buffers.run(self._args)

    @property
    def right_hand_side(self) -> Tensor:
        """b = -r of this process's samples that have rows in A."""
        return -self._residual

    @property
    def curvature_n(self) -> int:
        """m: samples over all processes that A has rows of."""
        return self.rows.total

    def _linearize(self, samples: BatchShare) -> None:
        """Make A of these samples."""
        self.rows, self.targets = samples, samples.targets
        with restored_random_state(self.random_state):
            self.linearization = linearize(
                self.module,
                self.weights.by_name,
                *samples.args,
                backend=self.settings.backend,
                chunk_size=self.settings.chunk_size,
            )
        if self.linearization.outputs.is_complex():
            raise TypeError(
                f"the module returned {self.linearization.outputs.dtype}, and losses are of real numbers: return real "
                "and imaginary parts as two columns, torch.view_as_real(outputs)"
            )
        self.outputs = self.linearization.outputs.to(self._dtype)
        self._residual = self.loss.residual(self.outputs, self.targets)
        if self._residual.shape != self.outputs.shape:
            raise ValueError(
                f"{type(self.loss).__name__}.residual returned {tuple(self._residual.shape)} for outputs of "
                f"{tuple(self.outputs.shape)}: it must be shaped like them"
            )

    def _measure(self, not_finite: Tensor, change: Tensor | None, *, per_sample: bool) -> None:
        """f, ∇f, and ‖Var‖₁ where samples have gradients of their own (section 4.3), by one look at the device."""
        cotangent = self.loss.sqrt_hessian(self.outputs, self.targets, self._residual)
        value_here = self.loss.value(self.outputs, self.targets)
        if not isinstance(value_here, Tensor) or value_here.ndim:
            found = (
                f"a tensor of {tuple(value_here.shape)}"
                if isinstance(value_here, Tensor)
                else type(value_here).__name__
            )
            raise TypeError(
                f"{type(self.loss).__name__}.value returned {found}: it must be a tensor without dimensions, the mean "
                "over samples"
            )
        norms = uncovered_here = torch.zeros((), dtype=torch.float64, device=self._device)
        by_layers: SampleNorms | None = None
        self.uncovered: str | None = None
        if per_sample and self.linearization.backend != "layer_rules" and self._layers:
            try:
                by_layers = sample_norms_by_layers(self, cotangent)
                norms, uncovered_here = by_layers.sum, ~by_layers.complete.all()
            except Uncovered as reason:
                self.uncovered, uncovered_here = str(reason), torch.ones_like(norms)
        elif per_sample and (self._layers or self._single_samples):
            norms = self._sum_of_squared_norms(cotangent)
        total_here = value_here.to(torch.float64) * len(self.targets)
        squares_here = inner(self._residual, self._residual)
        sums = all_reduce(torch.stack([total_here, norms, uncovered_here, squares_here]))
        mean = self.backward(self._residual).div_(self.samples)
        weights, parts = self.weights.vector, {"mean": inner(mean, mean), "bad": not_finite}
        by_halves = per_sample and self.samples > 1 and not self._layers and not self._single_samples
        if by_halves:
            parts["half"] = self._squares_of_halves(mean)
        self.gradient = mean
        if self.settings.l2:
            self.gradient = mean.add(weights, alpha=self.settings.l2)
            parts |= {"gradient": inner(self.gradient, self.gradient), "weights": inner(weights, weights)}
        before = [] if change is None else self.objective.parts_at(change.to(weights), -1.0)
        numbers = torch.cat([sums, torch.stack([*parts.values(), *before])]).tolist()
        (total, squared_norms, uncovered, squares), of_before = numbers[:4], numbers[4 + len(parts) :]
        of_parts = dict(zip(parts, numbers[4:], strict=False))
        if of_parts["bad"]:
            raise refusal_of_batch()
        mean_squared = of_parts["mean"]
        self.gradient_squared = of_parts.get("gradient", mean_squared)
        self.value = self.objective.value_of(total, of_parts.get("weights", 0.0))
        self.value_before = self.objective.value_of(*of_before) if of_before else None
        if not math.isfinite(self.value):
            raise NotFinite(
                f"the loss at the current weights is {self.value}; they are unchanged. Lower the scale of the "
                "initialisation or of the data, or raise the damping"
            )
        self.largest_fall = min(0.5 * squares / self.samples, self.value if self.value > 0.0 else math.inf)
        if not math.isfinite(mean_squared):
            raise NotFinite(
                f"the gradient at the current weights has the squared norm {mean_squared} in {self._dtype}; they are "
                "unchanged. Lower the scale of the data"
            )
        if uncovered:  # in a first step: the next ones know it
            if by_layers is not None and not all(answers := by_layers.complete.tolist()):
                self.uncovered = by_layers.reason(answers)
            if self.uncovered is not None:
                norms = self._sum_of_squared_norms(cotangent)
            squared_norms = all_reduce(norms.clone()).item()
            self.uncovered = self.uncovered or "they do not show it on another process"
        self.variance = None
        if per_sample and self.samples > 1:
            if by_halves or math.isnan(squared_norms):
                half_squared = of_parts["half"] if by_halves else self._squares_of_halves(mean).item()
                self.variance = half_squared / (1 / (self.samples // 2) + 1 / (self.samples - self.samples // 2))
            else:
                self.variance = variance_from_sums(squared_norms, self.samples, mean_squared)
            if not math.isfinite(self.variance):
                self.variance = None

    def _sum_of_squared_norms(self, cotangent: Tensor) -> Tensor:
        """Σᵢ‖Jᵢᵀuᵢ‖² of this process's samples; NaN if the variance is to be estimated from halves."""
        if self.uncovered is not None and not self._single_samples:
            return torch.full((), math.nan, dtype=torch.float64, device=self._device)
        return self.linearization.squared_norms(cotangent).sum(dtype=torch.float64)

    def _squares_of_halves(self, mean: Tensor) -> Tensor:
        """‖ḡ₁ - ḡ₂‖² of the mean gradients of the two halves of the batch: on average (1/n₁ + 1/n₂) ‖Var‖₁."""
        first = self.samples // 2
        part = self._residual.clone()
        part[max(first - self.rows.first_row, 0) :] = 0.0  # the first half is that of all processes' samples
        of_first = self.backward(part).div_(first)
        difference = (of_first - mean).mul_(self.samples / (self.samples - first))  # ḡ₂ = (n ḡ - n₁ ḡ₁)/n₂
        return inner(difference, difference)

    def forward(self, d: Tensor) -> Tensor:
        """A d, this process's rows (Algorithm 4)."""
        tangent = self.linearization.jvp(self.weights.unflat(d)).to(self._dtype)
        return self.loss.sqrt_hessian_transpose(self.outputs, self.targets, tangent)

    def backward(self, u: Tensor) -> Tensor:
        """Aᵀ u over the rows of all processes (Algorithm 5): one flat all-reduce."""
        cotangent = self.loss.sqrt_hessian(self.outputs, self.targets, u)
        product = torch.empty_like(self.weights.vector)
        self.linearization.vjp(cotangent, out=self.weights.unflat(product))
        return all_reduce(product)

    def gradient_of_rows(self) -> Tensor:
        """Aᵀb where A has rows of all samples, from ∇f."""
        return torch.sub(self.weights.vector * self.settings.l2, self.gradient).mul_(self.samples)

    def curvature(self, d: Tensor) -> Tensor:
        """AᵀA d/m."""
        return self.backward(self.forward(d)).div_(self.curvature_n)

    def along(self, d: Tensor, curvature: float | None = None) -> Line:
        """f(w + d), and the slope and the curvature of the model along d: one look at the device."""
        parts = [*self.objective.parts_at(d), inner(self.gradient, d)]
        if curvature is None:
            rows = self.forward(d)
            parts += [all_reduce(inner(rows, rows)), inner(d, d)]
        numbers = torch.stack(parts).tolist()
        if curvature is None:
            *numbers, of_rows, of_d = numbers
            curvature = 0.5 * (of_rows / self.curvature_n) + 0.5 * self.settings.l2 * of_d
        *of_value, slope = numbers
        return Line(self.objective.value_of(*of_value), slope, curvature)

    def joined_damping(self, damping: float, start: Tensor | None) -> tuple[float, Tensor]:
        """μ and m with λ²‖d - d0‖² + l2 ‖w + d‖² = μ²‖d - m‖² + constant."""
        strength = math.sqrt(damping * damping + self.settings.l2)
        center = self.weights.vector * (-self.settings.l2 / strength**2)
        return strength, center if start is None else center.add_(start, alpha=(damping / strength) ** 2)

    def random_signs(self, seed: int) -> Tensor:
        """A sign for each output of this process's samples that have rows in A."""
        # All processes draw the signs of the whole batch and take their rows, so that they are those of one process.
        generator = torch.Generator(self._device).manual_seed(seed)
        signs = random_signs(self.curvature_n, *self.outputs.shape[1:], like=self.outputs, generator=generator)
        return signs[self.rows.first_row :][: len(self.targets)]


@dataclass(frozen=True)
class SampleNorms:
    """Squared norms of single samples' gradients, as the layers show them.

    Attributes:
        sum: Σᵢ‖Jᵢᵀuᵢ‖² over this process's samples, (), float64.
        complete: whether the layers' contributions add up to the gradient, for each parameter, chunk by chunk.
        names: of the parameters.
    """

    sum: Tensor
    complete: Tensor
    names: list[str]

    def reason(self, complete: Sequence[bool]) -> str:
        """The parameter for which it does not add up."""
        return (
            f"the layers' shares of {self.names[complete.index(False) % len(self.names)]} do not add up to its "
            "gradient, for instance because it is used outside of its layer"
        )


def sample_norms_by_layers(model: BatchModel, cotangent: Tensor) -> SampleNorms:
    """Σᵢ‖Jᵢᵀuᵢ‖² over this process's samples, from the inputs and output gradients of each layer.

    Args:
        model: with the samples i.
        cotangent: u, row i of sample i; shaped like the outputs.

    Raises:
        Uncovered: samples cannot be told apart.
    """
    parameters = {name: p for name, p in model.module.named_parameters() if name in model.weights.by_name}
    name_of = {p: name for name, p in parameters.items()}
    layers = [layer for layer in called_layers(model.module) if owned_parameters(layer)]
    squares: list[Tensor] = []
    complete: list[Tensor] = []
    with restored_random_state(model.random_state):
        for args, _, rows in model.rows.chunks(model.settings.chunk_size):
            probe = probe_layers(model.module, args, layers, parameters, lambda _, rows=rows: cotangent[rows])  # type: ignore[misc]
            shares: dict[str, list[Contribution]] = {name: [] for name in parameters}
            for layer, own_name, share in probe.uses:
                if (name := name_of.get(owned_parameters(layer)[own_name])) is not None:
                    shares[name].append(share)
            for name, of_parameter in shares.items():
                of_samples, is_complete = _sum_of_squares(of_parameter, probe.gradients[name])
                squares.append(of_samples)
                complete.append(is_complete)
    return SampleNorms(torch.stack(squares).sum(), torch.stack(complete), list(parameters))


def _sum_of_squares(shares: Sequence[Contribution], gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the squared norms of the samples' shares of one parameter's gradient, and whether these add up to it."""
    squares = squared_norms(shares).sum(dtype=torch.float64) if shares else gradient.new_zeros((), dtype=torch.float64)
    error = gradient.clone()
    for share in shares:
        error -= share.total().view_as(error)
    scale = torch.maximum(inner(gradient, gradient), 0.01 * squares)
    return squares, inner(error, error) <= torch.finfo(gradient.dtype).eps * scale
