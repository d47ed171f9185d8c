"""Statistics of a weight's inputs since the last step: sums of rows, their numbers, and samples of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.optim.rls.gain_limit import Sample

# A gradient is taken for the product of the rows that were recorded if it differs from it by so many units in the last
# place.
ROUNDING = 32.0

# Rows that are kept of all uses of a weight since the last step, for the bound on the gain; the last use may exceed it.
MOST_SAMPLED = 2048


@dataclass(frozen=True, eq=False)
class Use:
    """The rows X that one call of a layer multiplied by one weight.

    Attributes:
        total: (groups, n), the sum of the rows.
        rows: their number.
        sequences: rows / sequences is their mean length; None if it is 1.
        bias: the index, among the weight's biases, of the one that was added; None without.
        inputs: (rows, n), X itself, if the step may want it.
        sample: (groups, s, n), rows of X that stand for all of them, if the step's gain is bounded.
        positions: whether several of the rows are of one sample, over which the loss may be summed.
    """

    total: Tensor
    rows: int
    sequences: int | None = None
    bias: int | None = None
    inputs: Tensor | None = None
    sample: Tensor | None = None
    positions: bool = False


class UseInPass(NamedTuple):
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

    Args:
        biases: how many are added to its products.
        most_rows: of more rows no pairs are kept.

    Attributes:
        total: (groups, n); None before the first use.
        counts: the rows, the sequences, the sequences of the largest use in each pass, then by bias the rows to which
            it was added.
        pairs: inputs and cotangents of the outputs of each use, (r, n) and (r, outputs); None if not all were kept.
        samples: rows of the first uses.
        sampled: how many these are.
        unsampled: rows of the uses after these.
        versions: of the gradients that the uses have got into, as autograd counts their changes.
        in_pass: the most sequences of a use in the backward pass that is going on.
        positions: whether a use had several rows of one sample.
    """

    biases: int
    most_rows: float
    total: Tensor | None = None
    counts: list[float] = field(init=False)
    pairs: list[tuple[Tensor, Tensor]] | None = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sampled: int = 0
    unsampled: float = 0.0
    versions: dict[nn.Parameter, int] = field(default_factory=dict)
    in_pass: int = 0
    positions: bool = False

    def __post_init__(self) -> None:
        self.counts = [0.0] * (3 + self.biases)

    def add(self, use: Use, cotangent: Tensor | None) -> None:
        """Count one use, whose output has got this gradient; None if it was not kept."""
        self.total = use.total if self.total is None else self.total + use.total
        self.counts[0] += use.rows
        if use.bias is not None:
            self.counts[3 + use.bias] += use.rows
        sequences = use.rows if use.sequences is None else use.sequences
        self.counts[1] += sequences
        self.counts[2] += max(sequences - self.in_pass, 0)
        self.in_pass = max(sequences, self.in_pass)
        self.positions = self.positions or use.positions
        if use.sample is not None:
            if self.sampled < MOST_SAMPLED:
                self.sampled += use.sample.shape[1]
                # A copy, with the entries of the biases: others may write to the inputs of a layer.
                has_all = use.bias is not None and self.biases == 1
                sample = nn.functional.pad(use.sample, (0, self.biases), value=float(has_all))
                if use.bias is not None and not has_all:
                    sample.select(2, use.bias - self.biases).fill_(1)
                self.samples.append(Sample(sample, use.rows / use.sample.shape[1]))
            else:
                self.unsampled += use.rows
        if use.inputs is None or cotangent is None or cotangent.dtype != use.inputs.dtype or self.pairs is None:
            self.pairs = None
            return
        self.pairs.append((use.inputs, cotangent.reshape(len(use.inputs), -1)))
        if sum(len(inputs) for inputs, _ in self.pairs) >= self.most_rows:
            self.pairs = None

    def is_cleared(self) -> bool:
        """Whether all gradients that these uses produced have been cleared."""
        gradients = [(parameter.grad, version) for parameter, version in self.versions.items()]
        return bool(gradients) and all(
            gradient is None or (gradient._version != version and not gradient.any()) for gradient, version in gradients
        )

    def mean(self) -> Tensor:
        """x̄ of each group, (groups, n + biases); a bias's entry is the share of rows to which it is added."""
        assert self.total is not None
        rows, _, _, *with_bias = self.counts
        features, shares = self.total / rows, [count / rows for count in with_bias]
        if set(shares) <= {1.0}:
            return nn.functional.pad(features, (0, self.biases), value=1.0)
        constants = torch.tensor(shares, dtype=features.dtype, device=features.device)
        return torch.cat([features, constants.expand(len(features), -1)], 1)

    @property
    def samples_seen(self) -> float:
        """Number of samples that the loss is averaged over: a use reads one row of each, or a sequence of rows."""
        return self.counts[2] or self.counts[0]

    @property
    def steps(self) -> float:
        """T: rows of each sample, in all uses of a backward pass. The loss is a sum over them."""
        return self.counts[0] / self.samples_seen

    @property
    def uses(self) -> float:
        """T without the steps of sequences: uses of the weight in a backward pass."""
        return (self.counts[1] or self.counts[0]) / self.samples_seen

    def factored_gradient(
        self, gradient: Tensor, columns: list[Tensor], vector: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """X, (r, n), and c dZ, (r, outputs), with c dZᵀX the gradient; None if the rows do not make it up.

        The gradient ∇ of a weight is dZᵀX, of rank r for r rows. If r is small, ∇P = dZᵀ(XP) costs less than
        multiplying the whole gradient by P. But the gradient may have got a penalty's share since X and dZ were
        recorded, or been scaled by clipping or accumulation. One vector z tells: if ∇z = c dZᵀ(Xz), to rounding, for
        one number c, then ∇ = c dZᵀX (but for a set of z of measure zero), and c is the scale.

        Args:
            gradient: (outputs, n), of the weight.
            columns: (outputs,), of each bias.
            vector: z, (n + number of biases,).
        """
        assert self.pairs
        inputs, cotangents = (s[0] if len(s) == 1 else torch.cat(s) for s in zip(*self.pairs, strict=True))
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
        is_product = norm(found - scale * expected) <= rounding
        return (inputs, cotangents * scale) if is_product else None
