"""Gradient statistics of the optimizer steps of any LightningModule, measured by hooks on its layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics
from lightning_struct.collective import all_reduce, world_size
from lightning_struct.functional.gradient_norms import Checksums, GradientNormRecorder, ParameterNorms
from lightning_struct.functional.per_sample.contributions import at_least_float32
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import accumulates, loss_scale
from lightning_struct.utilities.namespaces import MisconfigurationException

CHANGED = (
    "the gradient is not the sum of what the layer's calls contribute. The parameter is used outside of its layer, penalised "
    "in the loss or differentiated twice, or the gradient was changed after the backward pass, as by clipping after "
    "loss.backward(), of which, other than of self.manual_backward(loss), a callback is not told"
)

# Batches whose gradients are compared with what was measured, from the start of each fit.
CHECKED_BATCHES = 3


class GradientMeasurement:
    """Measures, while a Trainer runs, the gradients by which each optimizer steps.

    The shares cᵢ that the samples have in the gradient G are measured in the units of G, whatever the loss averages over
    and whatever it was multiplied by: Σᵢ‖cᵢ‖² and ‖G‖² alone tell the relative variance of G. Reported is what it is for
    gᵢ = n cᵢ, whose mean is G.

    A step of an optimizer is on all samples of all backward passes since the gradients were last zeroed. Of several
    optimizers that step in one batch, the one with the largest relative variance counts.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        probes: see :class:`~lightning_struct.functional.gradient_norms.GradientNormRecorder`.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, probes: int | None) -> None:
        self._trainer, self._module = trainer, module
        self._recorder = GradientNormRecorder(
            module, probes=probes, uncovered="skip", part=(trainer.global_rank, trainer.world_size)
        )
        self._squared_norms: dict[nn.Parameter, Tensor] = {}
        self._checksums: dict[str, Checksums] = {}
        self._unmeasured: set[Optimizer] = set()
        self._of_batch: list[GradientStatistics] = []
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._left_out: dict[str, str] = {}
        self._checked = 0
        self._measuring = False

    def begin_batch(self, batch: Any, expected_sizes: list[int], number: int) -> None:
        """Measure the batch that is about to be trained on.

        Args:
            batch: what ``training_step`` gets.
            expected_sizes: samples that were to be read of each loader.
            number: number of the step, the seed of its random projections.
        """
        if not self._measuring:
            self._recorder.attach()
            self._measuring = True
        first, second = _leading_sizes(batch)
        expected = set(expected_sizes)
        self._recorder.samples = expected & first or expected & second or expected | first or None
        self._recorder.check = self._checked < CHECKED_BATCHES
        self._checked += 1
        self._recorder.reseed(number)
        self._of_batch = []

    def pause(self) -> None:
        """Stop measuring until the next :meth:`begin_batch`."""
        if self._measuring:
            self._recorder.remove()
            self._recorder.reset()
            self._squared_norms.clear()
            self._checksums.clear()
            self._measuring = False

    def after_backward(self) -> None:
        """Read the gradients before they are clipped or unscaled, if an optimizer may step by them now."""
        if not self._measuring or (self._module.automatic_optimization and accumulates(self._trainer)):
            return
        if self._recorder.check:
            # manual_backward is called under the autocast of training_step, whose products of scaled gradients overflow
            with torch.autocast(self._module.device.type, enabled=False):
                self._checksums = self._recorder.checksums()
        for norms in self._recorder.results():
            gradient = norms.parameter.grad
            assert gradient is not None
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            flat = at_least_float32(values.detach()).reshape(-1)
            self._squared_norms[norms.parameter] = torch.dot(flat, flat)

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the statistics of the gradients by which ``optimizer`` is about to step.

        Raises:
            ValueError: a gradient is NaN or infinite, where no GradScaler skips such steps.
            MisconfigurationException: none of the gradients could be measured, nor those of any other optimizer.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self._names]
        if not self._measuring or not any(p.grad is not None for p in parameters):
            return
        results = {norms.parameter: norms for norms in self._recorder.results()}
        if not results.keys() & set(parameters) <= self._squared_norms.keys():
            self.after_backward()  # of loss.backward(), which calls no hook
        if self._recorder.check:
            self._verify(parameters)
        n, variance, gradient = self._reduced(parameters, results)
        self._recorder.reset(parameters)
        for parameter in parameters:
            self._squared_norms.pop(parameter, None)
        if n == 0:
            self._unmeasured.add(optimizer)
            if self._unmeasured.issuperset(self._trainer.optimizers):
                raise MisconfigurationException(
                    f"GrowingBatchSize could measure none of the gradients of {type(optimizer).__name__}"
                    + "".join(f"; {names}: {reason}" for names, reason in _by_reason(self._left_out))
                    + f". Where layers are compiled, or are not called as modules, give {type(self._module).__name__} a "
                    "method gradient_statistics() that returns GradientStatistics, or leave the callback out"
                )
            return
        scale = loss_scale(self._trainer)
        if math.isfinite(variance) and math.isfinite(gradient):
            unscaled = (scale or 1.0) ** 2
            self._of_batch.append(
                GradientStatistics(n, variance / unscaled if n > 1 else None, gradient / unscaled, None)
            )
        elif scale is None:  # a GradScaler skips such a step
            raise ValueError(
                f"The gradient of batch {self._trainer.fit_loop.batch_idx} in epoch {self._trainer.current_epoch} is NaN or "
                f"infinite, and {type(optimizer).__name__} is about to step by it. Trainer(detect_anomaly=True) shows where "
                "it comes from"
            )

    def statistics(self, samples: int) -> GradientStatistics | None:
        """Statistics of the batch under way; None if no optimizer stepped, or only by gradients that a GradScaler skips.

        Args:
            samples: number of samples read for the batch, over all processes. The layers may have seen more (a discriminator
                sees the data, and as many fakes) or fewer (pairs). The relative variance stays as it was measured.
        """
        measured = max(self._of_batch, key=_relative_variance, default=None)
        if measured is None or measured.variance is None:
            return measured
        variance = measured.variance * samples / measured.batch_size
        return GradientStatistics(samples, variance, measured.gradient_squared_norm, None)

    def _reduced(
        self, parameters: list[nn.Parameter], results: dict[nn.Parameter, ParameterNorms]
    ) -> tuple[int, float, float]:
        """n, ‖Var‖₁ and ‖G‖² of the measured parameters, over all processes."""
        device = self._module.device
        measured = [i for i, parameter in enumerate(parameters) if parameter in results]
        of_passes = [results[parameters[i]].squared_norms for i in measured]
        sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)
        if measured:
            vectors = [torch.cat(vectors).double() for vectors in of_passes]
            sums[0, measured] = pad_sequence(vectors, batch_first=True).sum(1)
            sums[1, measured] = torch.stack([self._squared_norms[parameters[i]].double() for i in measured])
        counts = [0] * len(parameters)
        for i, vectors in zip(measured, of_passes, strict=True):
            counts[i] = sum(len(squared_norms) for squared_norms in vectors)
        uncovered = self._recorder.uncovered
        hidden = [self._names[parameter] in uncovered for parameter in parameters]
        host = torch.tensor([*counts, *hidden], dtype=torch.float64, device=device)
        flat = all_reduce(torch.cat([sums.flatten(), host])).cpu()
        share, gradient, count, not_covered = flat.view(4, -1)
        # DDP averages the gradients: a process's share of its own is a share of G times the number of processes.
        share, gradient = share / world_size() ** 2, gradient / world_size()
        self._leave_out(
            {
                self._names[parameter]: uncovered.get(
                    self._names[parameter], "it could not be measured in another process"
                )
                for parameter, somewhere in zip(parameters, not_covered, strict=True)
                if somewhere
            }
        )
        for i, parameter in enumerate(parameters):
            if self._names[parameter] in self._left_out:
                count[i] = 0
        n = int(count.max())
        used = count > (1 if n > 1 else 0)
        m, c, g = count[used], share[used], gradient[used]
        variance = (m / (m - 1) * (c - g / m)).sum().item() if n > 1 else 0.0
        return n, n * max(variance, 0.0), g.sum().item()

    def _verify(self, parameters: list[nn.Parameter]) -> None:
        """Leave out parameters whose gradients are not the sum of the measured shares, over all processes.

        Only the parameters of the optimizer that steps are compared: others may have gradients that are never used, as a
        discriminator has from the loss of its generator.
        """
        nothing = torch.zeros(5, dtype=torch.float64, device=self._module.device)
        names, rows = [self._names[parameter] for parameter in parameters], []
        for name in names:
            of = self._checksums.get(name)
            error = None if of is None else torch.cat([of.measured - of.gradient, (of.scale * of.tolerance)[None]])
            rows.append(nothing if error is None else error.double())
        errors = (all_reduce(torch.stack(rows)) / world_size()).cpu()
        differs = errors[:, :-1].square().mean(1).sqrt() > errors[:, -1]
        self._leave_out({name: CHANGED for name, wrong in zip(names, differs, strict=True) if wrong})

    def _leave_out(self, reasons: dict[str, str]) -> None:
        new = {name: reason for name, reason in reasons.items() if name not in self._left_out}
        self._left_out.update(new)
        for names, reason in _by_reason(new):
            rank_zero_warn(
                f"GrowingBatchSize leaves {names} out of the variance of the gradients, and goes by the others: {reason}"
            )


def samples_in(batch: Any, expected_sizes: list[int]) -> int:
    """Number of samples in a batch of this process.

    It is the sum over the loaders that take part in the batch: in ``"max_size"`` mode some are at their end.
    """
    first, second = _leading_sizes(batch)
    for sizes in (first, second):
        read = sum(size for size in expected_sizes if size in sizes)
        if read:
            return read
    return sum(expected_sizes) or max(first, default=1)


def _leading_sizes(batch: Any) -> tuple[set[int], set[int]]:
    """Sizes of the first and of the second dimensions of the tensors in a batch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return {t.shape[0] for t in tensors if t.ndim}, {t.shape[1] for t in tensors if t.ndim > 1}


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of the names that share a reason, and the reason."""
    return [
        (", ".join(name for name, why in reasons.items() if why == reason), reason)
        for reason in dict.fromkeys(reasons.values())
    ]


def _relative_variance(statistics: GradientStatistics) -> float:
    variance, squared_norm = statistics.variance or 0.0, statistics.gradient_squared_norm
    return variance / squared_norm if squared_norm > 0 else math.inf * variance if variance else 0.0
