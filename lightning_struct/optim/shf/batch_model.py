"""The damped least-squares model of one batch, over all processes that hold a share of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_gather_rows, all_reduce, rank
from lightning_struct.functional.gauss_newton import batch_normalising_layer, linearize
from lightning_struct.functional.gradient_norms import variance_from_sums
from lightning_struct.functional.kronecker import Probe, probe_layers
from lightning_struct.functional.losses import GaussNewtonLoss
from lightning_struct.functional.per_sample.contributions import Contribution, Uncovered
from lightning_struct.functional.per_sample.contributions import squared_norms as norms_of_shares
from lightning_struct.functional.per_sample.rules import called_layers, owned_parameters
from lightning_struct.functional.preconditioner import (
    empirical_fisher_diagonal,
    fisher_scaling,
    jacobi_scaling,
    random_signs,
    randomized_gauss_newton_diagonal,
)
from lightning_struct.functional.randomness import random_state, restored_random_state
from lightning_struct.functional.stateless import call_with
from lightning_struct.functional.vectors import inner

Batches = Sequence[tuple[Any, Tensor]]


@dataclass(frozen=True)
class _Samples:
    """Inputs and targets of this process, and how many samples each process has."""

    args: tuple[Any, ...]
    targets: Tensor
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def first_row(self) -> int:
        """Of this process's samples, among those of all."""
        return sum(self.counts[: rank()])

    def rows_of_args(self, rows: slice) -> tuple[Any, ...]:
        return tuple(a[rows] if isinstance(a, Tensor) else a for a in self.args)

    def split(self, counts: tuple[int, ...]) -> tuple[_Samples, _Samples]:
        """The first so many samples of each process, and the others."""
        begin, end = slice(counts[rank()]), slice(counts[rank()], None)
        others = tuple(count - first for count, first in zip(self.counts, counts, strict=True))
        first = self if counts == self.counts else _Samples(self.rows_of_args(begin), self.targets[begin], counts)
        return first, _Samples(self.rows_of_args(end), self.targets[end], others)


class BatchModel:
    """f(w + d) ≈ f(w) + ∇f·d + ½‖A d‖²/m + ½ l2 ‖d‖², with A = SᵀJ of m of the n samples; where m = n, ∇f = Aᵀ r/n + l2 w.

    The paper scales A and r by 1/√n; here the whole least-squares problem is multiplied by n instead, the damping with it,
    which spares two passes over the data per product and has the same solution.

    Directions are flat vectors (all weights, one after another). The samples and rows of A stay on their process; what
    lies in the space of the weights is the same on all of them.

    Args:
        module: the network; its weights are not changed, nor its buffers but for the statistics of batch normalisation,
            which are updated once.
        loss: f is its mean over the n samples.
        weights: name -> the trainable weights, detached.
        inputs: this process's samples, a tensor or a tuple of tensors.
        targets: row i belongs to sample i.
        l2: weight of ½‖w‖².
        backend, chunk_size: of :func:`~lightning_struct.functional.linearize`.
        held_out: share of the samples of each process, its last ones, that the model is not made of.
        curvature_share: share of the other samples of each process, its first ones, whose rows A has; f and ∇f are of all.

    Attributes:
        n: samples over all processes that f is the mean of.
        curvature_n: samples over all processes that have rows in A.
        samples: n, and those that are held out.
        value: f(w).
        gradient: ∇f(w), flat.
        gradient_squared: ‖∇f(w)‖².
        variance: ‖Var‖₁ of the per-sample gradients, None where it is not defined.
        uncovered: why it was taken from the gradients of single samples, which is dear, or None.
        linearization, outputs, targets: of the samples of this process that have rows in A.
        right_hand_side: -r of these.

    Raises:
        ValueError: an empty batch, or one too small to hold samples out; NaN or infinity in the data or in f, on any of
            the processes.
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
    ) -> None:
        self.module, self.loss, self.weights = module, loss, weights
        self._l2, self._backend, self._chunk_size = l2, backend, chunk_size
        self.uncovered: str | None = None
        self._sizes = [p.numel() for p in weights.values()]
        first = next(iter(weights.values()))
        self.dtype, self.device = first.dtype, first.device
        self._batch, self._held_out = self._take_samples(inputs, targets, held_out)
        self.n, self.samples = self._batch.total, self._batch.total + self._held_out.total
        self._batch_normalised = batch_normalising_layer(module) is not None
        self._random_state = random_state(*self._batch.args)
        if self._batch_normalised:
            with restored_random_state(self._random_state):
                module(*self._batch.args)
        self._weights_flat = self.flat(weights)
        self._linearize(self._batch)
        self._measure()
        if curvature_share < 1.0:
            counts = tuple(math.ceil(curvature_share * count) for count in self._batch.counts)
            self._linearize(self._batch.split(counts)[0])
        self.right_hand_side = -self._residual

    @property
    def held_out(self) -> bool:
        """Whether any samples are."""
        return self._held_out.total > 0

    @property
    def curvature_n(self) -> int:
        """Samples over all processes that A has rows of."""
        return self._rows_of.total

    def _take_samples(self, inputs: Any, targets: Tensor, held_out: float) -> tuple[_Samples, _Samples]:
        """What f is the mean of, and what is held out."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        tensors = [t for t in (*args, targets) if isinstance(t, Tensor)]
        rows = len(targets)
        mismatched = any(len(t) != rows for t in tensors)
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        shards = all_gather_rows(torch.tensor([rows, mismatched, not finite], device=self.device)).tolist()
        for r, (samples, bad_shape, bad_value) in enumerate(shards):
            where = f" on rank {r}" if len(shards) > 1 else ""
            if samples == 0:
                raise ValueError(f"the batch is empty{where}: SHF needs at least one sample on every process")
            if bad_shape:
                raise ValueError(f"inputs and targets differ in their number of samples{where}")
            if bad_value:
                raise ValueError(f"the batch holds NaN or infinity{where}; the weights are unchanged. Clean the data")
        samples = _Samples(args, targets, tuple(count for count, *_ in shards))
        kept, out = samples.split(tuple(count - int(held_out * count) for count in samples.counts))
        if held_out > 0 and out.total == 0:
            raise ValueError(
                f"held_out={held_out} of a batch of {samples.total} leaves no sample to measure the reduction ratio on: "
                "enlarge the batch or the share"
            )
        return kept, out

    def _linearize(self, samples: _Samples) -> None:
        """Make A of these samples."""
        self._rows_of, self.targets = samples, samples.targets
        with restored_random_state(self._random_state):
            self.linearization = linearize(
                self.module, self.weights, *samples.args, backend=self._backend, chunk_size=self._chunk_size
            )
        self.outputs = self.linearization.outputs.to(self.dtype)
        self._residual = self.loss.residual(self.outputs, self.targets)

    def _measure(self) -> None:
        """f, ∇f, and ‖Var‖₁ from per-sample squared norms (section 4.3)."""
        cotangent = self.loss.sqrt_hessian(self.outputs, self.targets, self._residual)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[0] = self.loss.value(self.outputs, self.targets).to(torch.float64) * len(self.targets)
        if not self._batch_normalised and bool(sums[0].isfinite()):
            sums[1] = self._sum_of_squared_norms(cotangent)
        value, squared_norms = all_reduce(sums).tolist()
        self.value = value / self.n + self._penalty(self._weights_flat)
        if not math.isfinite(self.value):
            raise ValueError(
                f"the loss at the current weights is {self.value}; they are unchanged. Lower the scale of the "
                "initialisation or of the data, or raise the damping"
            )
        mean = self.backward(self._residual).div_(self.n)
        mean_squared = inner(mean, mean).item()
        defined = not self._batch_normalised and self.n > 1
        self.variance = variance_from_sums(squared_norms, self.n, mean_squared) if defined else None
        self.gradient = mean.add_(self._weights_flat, alpha=self._l2)
        self.gradient_squared = inner(self.gradient, self.gradient).item()

    def _sum_of_squared_norms(self, cotangent: Tensor) -> Tensor:
        """Σᵢ‖Jᵢᵀuᵢ‖² over this process's samples."""
        if self.linearization.backend != "layer_rules":
            try:
                return self._sum_from_layers(cotangent)
            except Uncovered as reason:
                self.uncovered = str(reason)
        return self.linearization.squared_norms(cotangent).sum(dtype=torch.float64)

    def _sum_from_layers(self, cotangent: Tensor) -> Tensor:
        """The same from what each layer reads and what comes back to it.

        Raises:
            Uncovered: some weight is used outside of the layer that owns it, or samples cannot be told apart.
        """
        parameters = {name: p for name, p in self.module.named_parameters() if name in self.weights}
        names = {p: name for name, p in parameters.items()}
        layers = [layer for layer in called_layers(self.module) if owned_parameters(layer)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with restored_random_state(self._random_state):
            for args, _, rows in self._chunks(self._batch):
                probe = probe_layers(self.module, args, layers, parameters, lambda _, rows=rows: cotangent[rows])  # type: ignore[misc]
                shares: dict[str, list[Contribution]] = {name: [] for name in parameters}
                for layer, own_name, share in probe.uses:
                    if (name := names.get(owned_parameters(layer)[own_name])) is not None:
                        shares[name].append(share)
                for name, of_parameter in shares.items():
                    total += _checked_sum(name, of_parameter, probe.gradients[name])
        return total

    def flat(self, vector: dict[str, Tensor]) -> Tensor:
        """A dict of tensors by parameter name as one flat vector."""
        return torch.cat([vector[name].reshape(-1) for name in self.weights])

    def unflat(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`flat`, as views."""
        parts = vector.split(self._sizes)
        return {name: part.view(p.shape) for (name, p), part in zip(self.weights.items(), parts, strict=True)}

    def forward(self, d: Tensor) -> Tensor:
        """A d, this process's rows."""
        tangent = self.linearization.jvp(self.unflat(d)).to(self.dtype)
        return self.loss.sqrt_hessian_transpose(self.outputs, self.targets, tangent)

    def backward(self, u: Tensor) -> Tensor:
        """Aᵀ u over the rows of all processes: one flat all-reduce."""
        cotangent = self.loss.sqrt_hessian(self.outputs, self.targets, u)
        product = torch.empty_like(self._weights_flat)
        self.linearization.vjp(cotangent, out=self.unflat(product))
        return all_reduce(product)

    def curvature(self, d: Tensor) -> Tensor:
        """AᵀA d/m."""
        return self.backward(self.forward(d)).div_(self.curvature_n)

    def change(self, d: Tensor) -> float:
        """The model's f(w + d) - f(w)."""
        rows = self.forward(d)
        squares = all_reduce(inner(rows, rows)).item() / self.curvature_n
        return 0.5 * squares + 0.5 * self._l2 * inner(d, d).item() + self.slope(d)

    def slope(self, d: Tensor) -> float:
        """∇f·d."""
        return inner(self.gradient, d).item()

    def damping_center(self, damping: float, start: Tensor | None) -> tuple[float, Tensor]:
        """μ and m with λ²‖d - d0‖² + l2 ‖w + d‖² = μ²‖d - m‖² + constant."""
        strength = math.sqrt(damping * damping + self._l2)
        center = self._weights_flat * (-self._l2 / strength**2)
        return strength, center if start is None else center.add_(start, alpha=(damping / strength) ** 2)

    def value_at(self, d: Tensor, step: float = 1.0) -> float:
        """f(w + s d), truly evaluated, with the dropout masks of the linearisation."""
        weights = self._weights_flat.add(d, alpha=step)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with restored_random_state(self._random_state):
            for args, targets, _ in self._chunks(self._batch):
                total += self.loss.value(self._evaluate(weights, args), targets) * len(targets)
        return all_reduce(total).item() / self.n + self._penalty(weights)

    def validation_value(self, d: Tensor, batches: Batches) -> float:
        """φ(d) = f(w + d) on validation data (equation 20), the module in eval mode, without the penalty."""
        weights = self._weights_flat + d
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with _eval_mode(self.module):
            for inputs, targets in batches:
                if len(targets) == 0:  # its mean is NaN
                    continue
                outputs = self._evaluate(weights, inputs if isinstance(inputs, tuple) else (inputs,))
                total[0] += self.loss.value(outputs, targets) * len(targets)
                total[1] += len(targets)
        loss, samples = all_reduce(total).tolist()
        return loss / samples

    def held_out_change(self, d: Tensor) -> float:
        """f(w + d) - f(w) on the samples that are held out, the module in eval mode."""
        batches = [(self._held_out.args, self._held_out.targets)]
        loss = self.validation_value(d, batches) - self.validation_value(torch.zeros_like(d), batches)
        return loss + self._penalty(self._weights_flat + d) - self._penalty(self._weights_flat)

    def _evaluate(self, weights: Tensor, args: tuple[Any, ...]) -> Tensor:
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        return call_with(self.module, {**buffers, **self.unflat(weights)}, args).to(self.dtype)

    def _penalty(self, weights: Tensor) -> float:
        return 0.5 * self._l2 * inner(weights, weights).item() if self._l2 else 0.0

    def scaling(self, choice: str, damping: float, seed: int) -> Tensor:
        """c of a diagonal right preconditioner by its name; ``seed`` is that of the random signs."""
        share = len(self.targets) / self.curvature_n
        if choice == "fisher":
            diagonal = empirical_fisher_diagonal(self.linearization, self.loss, self.targets)
            return fisher_scaling(all_reduce(self.flat(diagonal).mul_(share)), damping)
        probe = self._random_signs(seed)
        diagonal = randomized_gauss_newton_diagonal(self.linearization, self.loss, self.targets, probe=probe)
        mean = all_reduce(self.flat(diagonal).mul_(share))
        return jacobi_scaling(mean) if choice == "diagonal" else mean.mul_(self.curvature_n).add_(1.0).reciprocal_()

    def _random_signs(self, seed: int) -> Tensor:
        """A sign for each output of this process's samples that have rows in A."""
        # All processes draw the signs of the whole batch and take their rows, so that they are those of one process.
        generator = torch.Generator(self.device).manual_seed(seed)
        signs = random_signs(self.curvature_n, *self.outputs.shape[1:], like=self.outputs, generator=generator)
        return signs[self._rows_of.first_row :][: len(self.targets)]

    def probes(
        self, layers: Collection[nn.Module], parameters: Mapping[str, nn.Parameter], seed: int
    ) -> Iterator[Probe]:
        """What S times random signs, back-propagated, finds in ``layers``: of this process's rows of A, chunk by chunk.

        Args:
            layers, parameters: of :func:`~lightning_struct.functional.kronecker.probe_layers`.
            seed: of the random signs.
        """
        signs = self._random_signs(seed)
        with restored_random_state(self._random_state):
            for args, targets, rows in self._chunks(self._rows_of):
                yield probe_layers(
                    self.module,
                    args,
                    layers,
                    parameters,
                    lambda outputs, targets=targets, rows=rows: self.loss.sqrt_hessian(  # type: ignore[misc]
                        outputs.to(self.dtype), targets, signs[rows]
                    ),
                )

    def _chunks(self, samples: _Samples) -> Iterator[tuple[tuple[Any, ...], Tensor, slice]]:
        count = len(samples.targets)
        size = self._chunk_size or count
        for first in range(0, count, size):
            rows = slice(first, first + size)
            yield samples.rows_of_args(rows), samples.targets[rows], rows


def _checked_sum(name: str, shares: Sequence[Contribution], gradient: Tensor) -> Tensor:
    """Sum of the squared norms of the samples' shares of one parameter's gradient, which must add up to it."""
    squares = norms_of_shares(shares).sum(dtype=torch.float64) if shares else gradient.new_zeros(())
    error = gradient.clone()
    for share in shares:
        error -= share.total().view_as(error)
    scale = torch.maximum(inner(gradient, gradient), 0.01 * squares)
    if not inner(error, error) <= torch.finfo(gradient.dtype).eps * scale:
        raise Uncovered(
            f"what the layers show of {name} does not add up to its gradient, as where it is used outside of its layer"
        )
    return squares


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
