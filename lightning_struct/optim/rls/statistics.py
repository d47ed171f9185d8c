"""Statistics of a weight's inputs since the last step: sums of rows, their numbers, and samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.optim.rls.gain_limit import Sample

# Uses in earlier passes of which no gradient has come that are kept.
MOST_WAITING = 64

# Rows that are kept of all uses of a weight since the last step, for the bound on the gain.
MOST_SAMPLED = 2048

# A gradient is taken for the product of the rows that were recorded if it differs from it by so many units in the last
# place.
ROUNDING = 32.0


class Bias(NamedTuple):
    """``parameter[rows]``, which is added to the products of a weight."""

    parameter: nn.Parameter
    rows: slice = slice(None)

    def of(self, tensor: Tensor) -> Tensor:
        """The bias's part of a tensor of the parameter's shape, a view."""
        return tensor if self.rows == slice(None) else tensor[self.rows]


@dataclass(frozen=True, eq=False)
class Use:
    """The rows X that one call of a layer multiplied by one weight, of each group.

    Attributes:
        total: (groups, n), the sum of the rows.
        rows: their number in each group.
        sequences: rows[0] / sequences is their mean length; None if it is 1.
        bias: the place among the weight's biases of the one that was added; None without.
        inputs: (rows, n), X itself, where the step may want it.
        sample: (groups, s, n), rows of X that stand for all of them, where the step's gain is bounded.
        positions: whether several of the rows are of one sample, over which the loss may be summed.
    """

    total: Tensor
    rows: tuple[int, ...]
    sequences: int | None = None
    bias: int | None = None
    inputs: Tensor | None = None
    sample: Tensor | None = None
    positions: bool = False


class Arrival(NamedTuple):
    """A use whose output has got a gradient, in a backward pass that may or may not reach the weight.

    Attributes:
        use: the rows.
        cotangent: the gradient; None if it was not kept.
        backward: the number of the pass.
        may_be_differentiated: whether the pass has made a graph of its own, in training.
    """

    use: Use
    cotangent: Tensor | None
    backward: int
    may_be_differentiated: bool


@dataclass(eq=False)
class Statistics:
    """Sums over the uses of a weight since the last step.

    Counted are the uses of the passes that add to the gradient of the weight, when they do: see :meth:`count_arrived`.

    Attributes:
        total: (groups, n); None before the first use.
        counts: by group the rows, then the sequences, then those of the largest use in each backward pass, then by bias
            and group the rows to which it was added.
        pairs: inputs and cotangents of the outputs of each use, (r, n) and (r, outputs); None if not all were kept.
        paired: rows of the pairs.
        samples: rows of the first uses.
        sampled: how many these are.
        unsampled: rows of the uses after these.
        versions: of the gradients that the uses have got into, as autograd counts their changes.
        in_pass: the most sequences of a use in the backward pass that is going on.
        positions: whether a use had several rows of one sample.
        arrived: uses that wait for a gradient of the weight, those of the last pass at the end.
    """

    groups: int
    biases: int
    total: Tensor | None = None
    counts: list[float] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] | None = None
    paired: int = 0
    samples: list[Sample] = field(default_factory=list)
    sampled: int = 0
    unsampled: float = 0.0
    versions: dict[nn.Parameter, int] = field(default_factory=dict)
    in_pass: int = 0
    positions: bool = False
    arrived: dict[Use, Arrival] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.pairs, self.paired, self.versions = None, [], 0, {}
        self.samples, self.sampled, self.unsampled = [], 0, 0.0
        self.counts = [0.0] * (self.groups * (1 + self.biases) + 2)
        self.in_pass, self.positions = 0, False
        # Lightning clears gradients after the forward pass, in which a loss may have taken derivatives.
        self.arrived = {use: arrival for use, arrival in self.arrived.items() if arrival.may_be_differentiated}

    def end_step(self) -> None:
        """Forget everything, also passes that might be differentiated yet."""
        self.reset()
        self.arrived.clear()

    def arrive(self, arrival: Arrival) -> None:
        """Take note of a use whose output has got a gradient."""
        self.arrived.pop(arrival.use, None)
        if self.arrived and next(reversed(self.arrived.values())).backward != arrival.backward:
            self._begin_pass(arrival.backward)
        self.arrived[arrival.use] = arrival

    def _begin_pass(self, backward: int) -> None:
        """Let uses of other passes wait only if these may be differentiated."""
        of_pass = {use: other for use, other in self.arrived.items() if other.backward == backward}
        waiting = [
            other for other in self.arrived.values() if other.backward != backward and other.may_be_differentiated
        ]
        self.arrived = {other.use: other for other in waiting[-MOST_WAITING:]} | of_pass

    def count_arrived(self, backward: int, most_rows: float, most_sampled: float) -> None:
        """Count the uses of a backward pass that has added to the gradient of the weight.

        Passes by ``torch.autograd.grad`` do not; but where the loss is made of their derivatives, the gradient may come
        through these alone. So if no output has got a gradient in this pass, those count that made a graph.

        Args:
            backward: the number of the pass.
            most_rows, most_sampled: as of :meth:`add`.
        """
        arrived, self.arrived = list(self.arrived.values()), {}
        of_pass = [arrival for arrival in arrived if arrival.backward == backward]
        for arrival in of_pass or [arrival for arrival in arrived if arrival.may_be_differentiated]:
            self.add(arrival.use, arrival.cotangent if of_pass else None, most_rows, most_sampled)

    def note_gradient(self, parameter: Tensor, ends_pass: bool) -> None:
        """Called when a backward pass has added to the gradient of the weight or of a bias.

        Args:
            parameter: the weight or the bias.
            ends_pass: whether no more uses are to come in this pass.
        """
        if ends_pass:
            self.in_pass = 0
        if parameter.grad is not None:
            self.versions[parameter] = parameter.grad._version  # type: ignore[index]

    def forget_cleared(self) -> None:
        """Reset everything if the gradients that belong to it have been cleared by whomever."""
        if self.versions and all(_is_cleared(parameter, version) for parameter, version in self.versions.items()):
            self.reset()

    def add(self, use: Use, cotangent: Tensor | None, most_rows: float, most_sampled: float) -> None:
        """Count one use, whose output has got this gradient.

        Args:
            use: one call of a layer.
            cotangent: that gradient; None if it was not kept.
            most_rows: of more rows no pairs are kept.
            most_sampled: rows that are kept of the samples; the last use that is kept may exceed it.
        """
        self.total = use.total if self.total is None else self.total + use.total
        for group, rows in enumerate(use.rows):
            self.counts[group] += rows
            if use.bias is not None:
                self.counts[self.groups * (1 + use.bias) + 2 + group] += rows
        sequences = use.rows[0] if use.sequences is None else use.sequences
        self.counts[self.groups] += sequences
        self.counts[self.groups + 1] += max(sequences - self.in_pass, 0)
        self.in_pass = max(sequences, self.in_pass)
        self.positions = self.positions or use.positions
        if use.sample is not None:
            if self.sampled < most_sampled:
                self.sampled += use.sample.shape[1]
                self.samples.append(Sample(self._with_biases(use.sample, use.bias), use.rows[0] / use.sample.shape[1]))
            else:
                self.unsampled += use.rows[0]
        if use.inputs is None or cotangent is None or cotangent.dtype != use.inputs.dtype or self.pairs is None:
            self.pairs = None
            return
        self.pairs.append((use.inputs, cotangent.reshape(len(use.inputs), -1)))
        self.paired += len(use.inputs)
        if self.paired >= most_rows:
            self.pairs = None

    def _with_biases(self, rows: Tensor, bias: int | None) -> Tensor:
        """A copy of the rows with the entries of the biases: others may write to what a layer has read."""
        joined = nn.functional.pad(rows, (0, self.biases))
        if bias is not None:
            joined.select(2, bias - self.biases).fill_(1)
        return joined

    def mean(self) -> Tensor:
        """x̄ of each group, (groups, n + biases); a bias's entry is the share of rows to which it is added."""
        assert self.total is not None
        rows = self.counts[: self.groups]
        if len(set(rows)) == 1:
            features = self.total / rows[0]
        else:
            features = torch.stack([total / number for total, number in zip(self.total, rows, strict=True)])
        shares = [count / rows[i % self.groups] for i, count in enumerate(self.counts[self.groups + 2 :])]
        if set(shares) <= {1.0}:
            return nn.functional.pad(features, (0, self.biases), value=1.0)
        constants = torch.tensor(shares, dtype=features.dtype, device=features.device)
        return torch.cat([features, constants.view(self.biases, self.groups).t()], 1)

    @property
    def samples_seen(self) -> float:
        """Number of samples that the loss is averaged over: a use reads one row of each, or a sequence of rows."""
        return self.counts[self.groups + 1] or self.counts[0]

    @property
    def steps(self) -> float:
        """T: rows of each sample, in all uses of a backward pass. The loss is a sum over them."""
        return self.counts[0] / self.samples_seen

    @property
    def uses(self) -> float:
        """T without the steps of sequences: uses of the weight in a backward pass."""
        return (self.counts[self.groups] or self.counts[0]) / self.samples_seen


def _is_cleared(parameter: nn.Parameter, version: int) -> bool:
    gradient = parameter.grad
    return gradient is None or (gradient._version != version and not gradient.any())


def factored_gradient(
    pairs: Sequence[tuple[Tensor, Tensor]], gradient: Tensor, columns: Sequence[Tensor], vector: Tensor
) -> tuple[Tensor, Tensor] | None:
    """X, (r, n), and c dZ, (r, outputs), with c dZᵀX the gradient; None if the rows do not make it up.

    The gradient ∇ of a weight is dZᵀX, of rank r for r rows. If r is small, ∇P = dZᵀ(XP) costs less than multiplying
    the whole gradient by P. But the gradient may have got a penalty's share since X and dZ were recorded, or been
    scaled by clipping or accumulation. One vector z tells: if ∇z = c dZᵀ(Xz), to rounding, for one number c, then
    ∇ = c dZᵀX (but for a set of z of measure zero), and c is the scale.

    Args:
        pairs: X and dZ in parts.
        gradient: (outputs, n), of the weight.
        columns: (outputs,), of each bias.
        vector: z, (n + number of biases,).
    """
    inputs, cotangents = (sides[0] if len(pairs) == 1 else torch.cat(sides) for sides in zip(*pairs, strict=True))
    features, constants = vector[: gradient.shape[1]], vector[gradient.shape[1] :]
    found = gradient @ features
    for column, value in zip(columns, constants, strict=True):
        found.addcmul_(column, value)
    rows = inputs @ features + constants.sum()
    expected = cotangents.t() @ rows
    squared = torch.dot(expected, expected)
    scale = torch.dot(expected, found) / squared.clamp(min=torch.finfo(squared.dtype).tiny)
    norm = torch.linalg.vector_norm
    rounding = ROUNDING * torch.finfo(found.dtype).eps * scale.abs() * norm(rows) * norm(cotangents)
    if not norm(found - scale * expected) <= rounding:
        return None
    return inputs, cotangents * scale
