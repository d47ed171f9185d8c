"""Noise of the gradients from the samples' own gradients, measured by hooks on the layers."""

import math
import re
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators import common
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics, relative_variance
from lightning_struct.collective import all_reduce, world_size
from lightning_struct.functional.layers.calls import rows_of_graphs, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.functional.layers.per_sample.layer_contributions import reader_of
from lightning_struct.functional.layers.per_sample.recorder import Checksums, GradientNormRecorder, ParameterNorms
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import refuse_sharded_weights
from lightning_struct.utilities.lightning_internals import accumulates, loss_scale

CHANGED = (
    "the gradient is not the sum of the shares of the layer's calls. The parameter is used outside of its layer, "
    "penalised in the loss or differentiated twice, or the gradient was changed after the backward pass, as by "
    "clipping after loss.backward(): a callback sees the end of self.manual_backward(loss) only"
)

# Batches whose gradients are compared with the measured ones, from the start of a run.
CHECKED_BATCHES = 3

# Part of ‖G‖² that has to be measured, or another estimator decides. Single numbers outside of all layers do not count:
# the weight of a loss or a temperature may have most of the gradient in one step, and little in the next.
MEASURED_PART = 0.5

# In a reason for which a parameter cannot be measured.
SHAPE = re.compile(r"\([\d, ]+\)")

# Time of a measurement, in steps, at most: by rules alone, with convolutions, and if layers have to be run again.
BY_RULES, CONVOLVED, RUN_AGAIN = 1.0, 1.6, 3.4

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Errors that matter for no decision, relative to the whole gradient.
NEGLIGIBLE = 0.01


class SampleGradients(common.GradientEstimator):
    """Measures the gradients of single samples in the batches of a step, by hooks on the layers.

    The shares cᵢ that the samples have in the gradient G are measured in the units of G, whatever the loss averages
    over and whatever it was multiplied by: Σᵢ‖cᵢ‖² and ‖G‖² alone tell the relative variance of G. The reported
    one is that of gᵢ = n cᵢ, whose mean is G.

    A step of an optimizer is on all samples of all backward passes since the gradients were last zeroed. Parameters
    that cannot be measured are left out, each with one warning.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        asked: the user's choice. Without ``every_n_steps`` there are as many as ``max_overhead`` allows if a measured
            step takes twice as long as another, 2.6 times as long with convolutions, or 4.4 times as long if layers
            have to be run again: the most that was seen. ``probes``: see
            :class:`~lightning_struct.functional.GradientNormRecorder`.
        max_overhead: share of the time of the steps that measuring may take.

    Raises:
        MisconfigurationException: the strategy shards the weights.
    """

    name = "layers"

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, asked: common.NoiseEstimator, max_overhead: float
    ) -> None:
        refuse_sharded_weights(trainer, "GrowingBatchSize(estimator='layers')")
        super().__init__(trainer, module)
        layers = [layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))]
        steps = CONVOLVED if any(isinstance(layer, CONVOLUTIONS) for layer in layers) else BY_RULES
        steps = RUN_AGAIN if any(reader_of(layer).runs_again for layer in layers) else steps
        self.every_n_steps = asked.every_n_steps or math.ceil(steps / max_overhead)
        part = trainer.global_rank, trainer.world_size
        self._recorder = GradientNormRecorder(module, probes=asked.probes, uncovered="skip", part=part)
        sequential = [layer for layer in layers if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention))]
        self._recorder.ambiguous = any(not layer.batch_first for layer in sequential)  # positions may come first
        self._squared_norms: dict[nn.Parameter, Tensor] = {}
        self._checksums: dict[str, Checksums] = {}
        self._unmeasured: set[Optimizer] = set()
        self._of_batch: dict[int, GradientStatistics] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._left_out: dict[str, str] = {}
        self._warned: set[str] = set()
        self._checked, self._measuring = 0, False

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        self._of_batch = {}
        if step % self.every_n_steps:
            self.pause()
            return
        self._recorder.check = self._checked < CHECKED_BATCHES
        self._checked += 1
        if not self._measuring:
            self._measuring = True
            self._recorder.attach()
            self._names = {parameter: name for name, parameter in self._module.named_parameters()}
        first, second = common.leading_sizes(batch)
        expected = set(expected_sizes)
        self._recorder.samples = expected & first or expected & second or expected | first or None
        self._recorder.rows = rows_of_graphs(batch)
        self._recorder.batch = tensors_in(batch)
        self._recorder.reseed(step - 1)

    def pause(self) -> None:
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
        for parameter in self._measured():
            self._squared_norms[parameter] = _squared_norm(parameter)

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._measuring:
            return
        given = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [p for p in given if p in self._names]
        others = set(given).difference(parameters)
        if others and not others.isdisjoint(self._module.parameters()):
            self.pause()  # the module has got them since: from the next batch on they are measured, too
            return
        if not any(p.grad is not None for p in parameters):
            return
        results: dict[nn.Parameter, ParameterNorms] = {}
        with self.faults.deferred():
            results = self._measured()
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
                raise common.Unmeasurable(
                    f"can measure none, or a small part, of the gradient of {type(optimizer).__name__}"
                    + "".join(f"; {names}: {reason}" for names, reason in _by_reason(self._left_out))
                )
        new = {name: reason for name, reason in self._left_out.items() if name not in self._warned}
        self._warned.update(new)
        for names, reason in _by_reason(new):
            rank_zero_warn(f"GrowingBatchSize leaves {names} out of the variance of the gradients: {reason}")
        if n == 0:
            return
        if not math.isfinite(variance + gradient):
            raise common.GradientNotFinite
        unscaled = (loss_scale(self._trainer) or 1.0) ** 2
        measured = GradientStatistics(n, variance / unscaled if n > 1 else None, gradient / unscaled, None)
        number = self._trainer.optimizers.index(optimizer)
        self._of_batch[number] = max(self._of_batch.get(number, measured), measured, key=relative_variance)

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        # The layers may have seen more than the samples read (a discriminator sees the data, and as many fakes) or
        # fewer (pairs): the relative variance stays as it was measured.
        return {
            number: measured
            if measured.variance is None
            else replace(measured, batch_size=samples, variance=measured.variance * samples / measured.batch_size)
            for number, measured in self._of_batch.items()
        }

    def state_dict(self) -> dict[str, Any]:
        unmeasured = [i for i, optimizer in enumerate(self._trainer.optimizers) if optimizer in self._unmeasured]
        return {"left_out": dict(self._left_out), "unmeasured": unmeasured, "checked": self._checked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left_out, self._checked = dict(state["left_out"]), state["checked"]
        optimizers = self._trainer.optimizers
        self._unmeasured = {optimizers[i] for i in state["unmeasured"] if i < len(optimizers)}

    def _measured(self) -> dict[nn.Parameter, ParameterNorms]:
        """Measurements of the present gradients: Lightning clears all of them before a validation."""
        return {norms.parameter: norms for norms in self._recorder.results() if norms.parameter.grad is not None}

    def _reduced(
        self, parameters: list[nn.Parameter], results: dict[nn.Parameter, ParameterNorms]
    ) -> tuple[int, float, float]:
        """n, ‖Var‖₁ and ‖G‖² of the measured parameters, over all processes; zeros if these are a small part."""
        names, uncovered = [self._names[parameter] for parameter in parameters], self._recorder.uncovered
        # of each parameter: Σ‖cᵢ‖², ‖G‖² as measured and as it is now, n, and whether it could not be measured
        sums = torch.zeros(5, len(parameters), dtype=torch.float64, device=self._module.device)
        with self.faults.deferred():
            measured = [i for i, parameter in enumerate(parameters) if parameter in results]
            of_passes = [results[parameters[i]].squared_norms for i in measured]
            with_gradient = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
            sums[2, with_gradient] = torch.stack([_squared_norm(parameters[i]).double() for i in with_gradient])
            if measured:
                vectors = [torch.cat(vectors).double() for vectors in of_passes]
                sums[0, measured] = pad_sequence(vectors, batch_first=True).sum(1)
                sums[1, measured] = torch.stack([self._squared_norms[parameters[i]].double() for i in measured])
            counts = [0] * len(parameters)
            for i, vectors in zip(measured, of_passes, strict=True):
                counts[i] = sum(len(squared_norms) for squared_norms in vectors)
            sums[3:] = torch.tensor([counts, [name in uncovered for name in names]], dtype=torch.float64)
        share, gradient, present, count, not_covered = self.faults.summed(sums.flatten()).view(5, -1)
        # DDP averages the gradients: a process's share of its own is a share of G times the number of processes.
        share, gradient = share / world_size() ** 2, gradient / world_size()
        elsewhere = "it could not be measured in another process"
        hidden = [name for name, somewhere in zip(names, not_covered, strict=True) if somewhere]
        self._left_out = {name: uncovered.get(name, elsewhere) for name in hidden} | self._left_out
        count[[i for i, name in enumerate(names) if name in self._left_out]] = 0
        # the gradients may have been clipped since they were measured: hence both sums of their present values
        counts_alone = torch.tensor([p.numel() > 1 for p in parameters], device=count.device)
        if present[count > 0].sum() < MEASURED_PART * present[(count > 0) | counts_alone].sum():
            return 0, 0.0, 0.0
        n = int(count.max())
        used = count > (1 if n > 1 else 0)
        m, c, g = count[used], share[used], gradient[used]
        variance = (m / (m - 1) * (c - g / m)).sum().item() if n > 1 else 0.0
        return n, n * max(variance, 0.0), g.sum().item()

    def _verify(self, parameters: list[nn.Parameter]) -> None:
        """Leave out parameters whose gradients are not the sum of the measured shares, over all processes.

        Only the parameters of the optimizer that steps are compared: others may have gradients that are never used, as
        a discriminator has from the loss of its generator.
        """
        names = [self._names[parameter] for parameter in parameters]
        rows = torch.zeros(len(names), 6, dtype=torch.float64, device=self._module.device)
        with self.faults.deferred():
            for row, of in zip(rows, map(self._checksums.get, names), strict=True):
                if of is not None:
                    bounds = torch.stack([of.scale * of.tolerance, of.scale])
                    row.copy_(torch.cat([of.measured - of.gradient, bounds]))
        sums = (all_reduce(rows) / world_size()).cpu()
        error, bound, scale = sums[:, :-2].square().mean(1).sqrt(), sums[:, -2], sums[:, -1]
        # Some gradients are nothing but rounding, as of attention's key biases, which its softmax takes away.
        differs = (error > bound) & (error > NEGLIGIBLE * torch.linalg.vector_norm(scale))
        self._left_out = {name: CHANGED for name, wrong in zip(names, differs, strict=True) if wrong} | self._left_out


def _squared_norm(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = at_least_float32(values.detach()).reshape(-1)
    return torch.dot(flat, flat)


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of the names that share a reason, and the reason, with the shape that the first of them has.

    Experts read another shape in each layer and batch.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(SHAPE.sub("", reason), []).append(name)
    return [(", ".join(of_reason), reasons[of_reason[0]]) for of_reason in names.values()]
