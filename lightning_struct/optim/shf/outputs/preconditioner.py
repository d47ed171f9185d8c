"""The right preconditioner of SHF on outputs: diagonals, Kronecker factors and their averages, users' objects."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, all_reduce_together
from lightning_struct.functional.checks import first_line, warn
from lightning_struct.functional.curvature.kronecker import (
    DiagonalRoot,
    KroneckerRoot,
    NotPositiveDefinite,
    unchecked_roots,
    with_inverses,
)
from lightning_struct.functional.curvature.preconditioner import (
    empirical_fisher_diagonal,
    fisher_scaling,
    jacobi_scaling,
    randomized_gauss_newton_diagonal,
)
from lightning_struct.functional.layers.per_sample.contributions import Contribution
from lightning_struct.functional.layers.probes import Probe, probe_layers
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.functional.randomness import restored_random_state
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.functional.torch_tools import average_each, copy_each
from lightning_struct.optim.memory import bytes_as_text, check_memory, table
from lightning_struct.optim.shf.outputs.batch_model import BatchModel
from lightning_struct.optim.shf.outputs.curvature_blocks import CurvatureBlock, DiagonalBlock, curvature_blocks
from lightning_struct.optim.shf.samples import FlatWeights
from lightning_struct.optim.shf.settings import AUTO, Kronecker
from lightning_struct.optim.shf.step_state import Memory

# By the name of a block, its factors by their own names.
Factors: TypeAlias = dict[str, dict[str, Tensor]]
Preconditioner: TypeAlias = Tensor | RightPreconditioner | None
# The factors are damped anew before their interval ends if λ has become larger by this factor.
_LARGER = 1.5
# BatchShare of a batch, for the costs of a step and of a sample.
_TYPICAL_BATCH = 128
# A factor of more rows is kept as its diagonal: Cholesky factors of 4,096 rows take seconds on a CPU.
_LARGEST_FACTOR = 4096


@dataclass(frozen=True)
class StepPreconditioner:
    """The preconditioner of one step.

    Attributes:
        at: λ -> the preconditioner; a step that fails is tried again with a larger λ.
        factors: the averages of the Kronecker factors; None with another preconditioner.
        factor_damping: λ of the step that they were updated in.
    """

    at: Callable[[float], Preconditioner]
    factors: Factors | None = None
    factor_damping: float = 0.0


def check_per_sample(given: Any, module: nn.Module) -> None:
    """Raise ValueError if a diagonal preconditioner, made of gradients per sample, meets batch normalisation."""
    layer = coupling_layer(module) if isinstance(given, str) else None
    if layer is not None:
        raise ValueError(
            f"preconditioner={given!r} is made of gradients per sample, and the layer {layer} normalises over the "
            f"batch, which leaves them undefined: use preconditioner=None or 'kronecker', or put the layer in eval mode"
        )


def preconditioner_of_step(given: Any, model: BatchModel, seed: int) -> StepPreconditioner:
    """The preconditioner that is given by its name or as an object, or none.

    Args:
        given: the option.
        model: of the batch.
        seed: seed of the random signs.
    """
    if given is None:
        return StepPreconditioner(lambda _: None)
    if isinstance(given, str):
        return StepPreconditioner(partial(_diagonal, given, model, seed))
    return StepPreconditioner(partial(_updated, given, model))


def _diagonal(name: str, model: BatchModel, seed: int, damping: float) -> Tensor:
    try:
        return diagonal_scaling(name, model, seed, damping)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"preconditioner={name!r} is made of gradients per sample, and the module takes no single sample "
            f"({first_line(error)}), as if nodes of a graph depend on each other: use preconditioner=None or "
            "'kronecker'"
        ) from error


def diagonal_scaling(name: str, model: BatchModel, seed: int, damping: float) -> Tensor:
    """c of a diagonal right preconditioner by its name (section 4.4).

    Args:
        name: ``"diagonal"`` (Algorithm 3), ``"diagonal_sum"`` or ``"fisher"``.
        model: of the batch.
        seed: seed of the random signs.
        damping: λ.
    """
    share = len(model.targets) / model.curvature_n
    if name == "fisher":
        diagonal = empirical_fisher_diagonal(model.linearization, model.loss, model.targets)
        return fisher_scaling(all_reduce(model.weights.flat(diagonal).mul_(share)), damping)
    signs = model.random_signs(seed)
    diagonal = randomized_gauss_newton_diagonal(model.linearization, model.loss, model.targets, probe=signs)
    mean = all_reduce(model.weights.flat(diagonal).mul_(share))
    if name == "diagonal":
        return jacobi_scaling(mean)  # Algorithm 3
    return mean.mul_(model.curvature_n).add_(1.0).reciprocal_()  # the formula in the text of section 4.4


def _updated(given: Any, model: BatchModel, damping: float) -> RightPreconditioner:
    if hasattr(given, "update"):
        given.update(model.linearization, model.loss, model.targets, damping)
    return _OnFlatVectors(given, model.weights)


class _OnFlatVectors:
    """A preconditioner on dicts of tensors, for solvers on flat vectors."""

    def __init__(self, preconditioner: RightPreconditioner, weights: FlatWeights) -> None:
        self._preconditioner, self._weights = preconditioner, weights

    def solve(self, y: Tensor) -> Tensor:
        return self._weights.flat(self._preconditioner.solve(self._weights.unflat(y)))

    def solve_transpose(self, x: Tensor) -> Tensor:
        return self._weights.flat(self._preconditioner.solve_transpose(self._weights.unflat(x)))

    def solve_normal(self, x: Tensor) -> Tensor:
        if not hasattr(self._preconditioner, "solve_normal"):
            return self.solve(self.solve_transpose(x))
        return self._weights.flat(self._preconditioner.solve_normal(self._weights.unflat(x)))


class BlockPreconditioner:
    """C of all blocks, on flat vectors of all parameters."""

    def __init__(self, roots: Sequence[tuple[CurvatureBlock, KroneckerRoot | DiagonalRoot]]) -> None:
        self._blocks = [block for block, _ in roots]
        self._roots = [root for _, root in roots]

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return self._apply(y, lambda root, part: root.solve(part))

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return self._apply(x, lambda root, part: root.solve_transpose(part))

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x."""
        return self._apply(x, lambda root, part: root.solve_normal(part))

    def _apply(self, vector: Tensor, operation: Callable[[KroneckerRoot | DiagonalRoot, Tensor], Tensor]) -> Tensor:
        result = torch.empty_like(vector)
        parts = [operation(root, block.read(vector)) for block, root in zip(self._blocks, self._roots, strict=True)]
        pairs = [p for block, part in zip(self._blocks, parts, strict=True) for p in block.targets(result, part)]
        copy_each([target for target, _ in pairs], [source for _, source in pairs])
        return result


class KroneckerFactors:
    """The Kronecker factors of all trained parameters of a module, block by block, and their averages over the steps.

    Linear, Conv1d/2d/3d, RNN, LSTM, GRU and MultiheadAttention have Kronecker factors, for each group of a convolution
    and each of the stacked projections of an attention their own; the factors of a weight that several layers use, or
    that one uses several times, are of all uses. So have layers that were declared to be like one of them (see
    :func:`~lightning_struct.functional.register_layer`). All other parameters have a diagonal.

    Args:
        module: the network.
        parameters: name -> parameter, those that are trained, in the order of the flat vector.
        given: the option; its ``interval`` and ``max_size`` may be left to be chosen.
        inverted: whether conjugate gradients use the preconditioner, which keep the inverses of the factors too.
        l2: weight of ½‖w‖² in the loss.

    Attributes:
        settings: the option, completed.
        max_size: its ``max_size``.

    Raises:
        MemoryError: the factors take more than there is; if ``max_size`` is left, it is halved until they fit.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        given: Kronecker,
        *,
        inverted: bool = False,
        l2: float = 0.0,
    ) -> None:
        self._inverted, self._l2, self._warned = inverted, l2, False
        self._cache: tuple[Factors, float, BlockPreconditioner] | None = None
        first = next(iter(parameters.values()))
        self._itemsize = first.element_size()
        size = _LARGEST_FACTOR if isinstance(given.max_size, str) else given.max_size
        while True:
            self._blocks = curvature_blocks(module, parameters, size)
            needed = {block.name: (self._memory(block), block.description) for block in self._blocks}
            try:
                check_memory("The Kronecker factors", needed, first.device, "Lower Kronecker(max_size=...)")
                break
            except MemoryError:
                if given.max_size != AUTO or size is None or size == 1:
                    raise
                size //= 2
        self.max_size = size
        interval = self._chosen_interval(sum(p.numel() for p in parameters.values()))
        self.settings = replace(given.completed(Kronecker(interval=interval)), max_size=size)
        self._layers = list(dict.fromkeys(layer for block in self._blocks for layer, _ in block.users))
        self._parameters = {
            block.name: parameters[block.name] for block in self._blocks if isinstance(block, DiagonalBlock)
        }
        self._block_of = {user: block for block in self._blocks for user in block.users}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def summary(self) -> str:
        """A table: the parameters of each block, its form, and the memory of its factors, their roots and inverses."""
        rows = [("parameters", "form", "memory")]
        rows += [(", ".join(b.parameters), b.description, bytes_as_text(self._memory(b))) for b in self._blocks]
        rows.append(("total", "", bytes_as_text(sum(map(self._memory, self._blocks)))))
        return table(rows)

    def of_step(self, model: BatchModel, memory: Memory, damping: float, seed: int) -> StepPreconditioner:
        """The preconditioner of a step, from the averages with its batch in them if the interval asks for it.

        Args:
            model: the model of the batch.
            memory: the optimizer's: the averages of before and the number of the step.
            damping: λ of the step.
            seed: seed of the random signs.
        """
        assert self.settings.interval is not None
        old = None if memory.factors is None else self.taken_over(memory.factors, model.gradient)
        if old is not None and memory.steps % self.settings.interval:
            return self._with(old, memory.factor_damping)
        self._cache = None  # makes room for the new ones
        new = self.measure(model, seed)
        return self._with(new if old is None else averaged(old, new, self.settings.decay), damping)

    def _with(self, factors: Factors, factor_damping: float) -> StepPreconditioner:
        return StepPreconditioner(partial(self._at, factors, factor_damping), factors, factor_damping)

    def _at(self, factors: Factors, factor_damping: float, damping: float) -> BlockPreconditioner:
        raised = damping > _LARGER * factor_damping  # as when a step is tried again; less is not worth the roots
        strength = math.sqrt((damping if raised else factor_damping) ** 2 + self._l2)  # μ
        if self._cache is None or self._cache[0] is not factors or self._cache[1] != strength:
            self._cache = None
            self._cache = factors, strength, self.preconditioner(factors, strength)
        return self._cache[2]

    def measure(self, model: BatchModel, seed: int) -> Factors:
        """The factors of a batch, over all processes: one flat all-reduce.

        Args:
            model: of the batch.
            seed: of the random signs.
        """
        totals: list[list[Tensor]] | None = None
        for uses, gradients in self._probes(model, seed):
            of_block: dict[CurvatureBlock, list[Contribution]] = defaultdict(list)
            for layer, name, use in uses:
                if (block := self._block_of.get((layer, name))) is not None:
                    of_block[block].append(use)
            sums = [block.sums(of_block[block], gradients, model.gradient) for block in self._blocks]
            if totals is None:
                totals = sums
            else:
                totals = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(totals, sums, strict=True)]
        assert totals is not None
        reduced = iter(all_reduce_together([total for sums in totals for total in sums]))
        totals = [[next(reduced) for _ in sums] for sums in totals]
        self._warn_of_unused(totals)
        return {
            block.name: block.factors(sums, model.curvature_n) for block, sums in zip(self._blocks, totals, strict=True)
        }

    def _probes(self, model: BatchModel, seed: int) -> Iterator[Probe]:
        """Records of S times random signs back-propagated through the layers, chunk by chunk of this process's rows."""
        signs = model.random_signs(seed)
        with restored_random_state(model.random_state):
            for args, targets, rows in model.rows.chunks(model.settings.chunk_size):
                yield probe_layers(
                    model.module,
                    args,
                    self._layers,
                    self._parameters,
                    lambda outputs, targets=targets, rows=rows: model.loss.sqrt_hessian(  # type: ignore[misc]
                        outputs.to(signs.dtype), targets, signs[rows]
                    ),
                )

    def preconditioner(self, factors: Factors, damping: float) -> BlockPreconditioner:
        """C of the damped factors.

        Args:
            factors: averages over steps.
            damping: μ > 0.

        Raises:
            FloatingPointError: a factor holds NaN or infinity, or has no Cholesky factor, in float64 either. Its block
                is named.
        """
        tried = unchecked_roots([[factors[b.name][k] for k in b.sizes] for b in self._blocks], damping)
        roots = []
        for block, (root, is_good, has_inverses) in zip(self._blocks, tried, strict=True):
            if not is_good:
                try:
                    root = block.root(factors[block.name], damping)
                except (FloatingPointError, NotPositiveDefinite) as error:
                    raise FloatingPointError(
                        f"preconditioner='kronecker', block {', '.join(block.parameters)}: {error}. The weights are "
                        "unchanged; raise the damping, or look at the data of this batch"
                    ) from error
            elif self._inverted and has_inverses and isinstance(root, KroneckerRoot):
                root = with_inverses(root)
            roots.append((block, root))
        return BlockPreconditioner(roots)

    def taken_over(self, factors: Factors, like: Tensor) -> Factors:
        """Averages of before, with the dtype and on the device of ``like``: a state may be loaded from others.

        Raises:
            ValueError: they are of other blocks.
        """
        found = {name: {k: tuple(t.shape) for k, t in block.items()} for name, block in factors.items()}
        if found != {block.name: block.sizes for block in self._blocks}:
            raise ValueError(
                "the averages of the Kronecker factors are of another network, or of other options of the factors: "
                "load the state into an SHF that is made as the one that was saved"
            )
        if all(t.dtype == like.dtype and t.device == like.device for block in factors.values() for t in block.values()):
            return factors
        return {name: {k: t.to(like) for k, t in block.items()} for name, block in factors.items()}

    def _memory(self, block: CurvatureBlock) -> int:
        copies = 3 if self._inverted and not isinstance(block, DiagonalBlock) else 2  # factors, roots, inverses
        return copies * sum(torch.Size(shape).numel() for shape in block.sizes.values()) * self._itemsize

    def _chosen_interval(self, weights: int) -> int:
        """Steps between factorisations, at most ten, for which these take about a fifth of the operations."""
        blocks = (block for block in self._blocks if not isinstance(block, DiagonalBlock))
        shapes = (shape for block in blocks for shape in block.sizes.values() if len(shape) == 3)
        factorisation = 1.5 * float(sum(groups * rows**3 for groups, rows, _ in shapes))
        # Forward and backward of 6 operations a weight and sample, and three products with the curvature of 8.
        step = 30.0 * _TYPICAL_BATCH * weights
        return min(max(math.ceil(factorisation / (0.2 * step)), 1), 10)

    def _warn_of_unused(self, totals: Sequence[Sequence[Tensor]]) -> None:
        if self._warned:
            return
        self._warned = True
        unseen = [
            name
            for block, sums in zip(self._blocks, totals, strict=True)
            if not block.was_used(sums)
            for name in block.parameters
        ]
        if unseen:
            warn(
                f"preconditioner='kronecker': nothing came back to the layers of {', '.join(unseen)} in this batch, "
                "which are preconditioned by the damping alone. A weight may be used without calling its layer"
            )


def averaged(old: Factors, new: Factors, decay: float) -> Factors:
    """decay · old + (1 - decay) · new, written over ``new``."""
    of_old = [old[name][k] for name, block in new.items() for k in block]
    average_each([t for block in new.values() for t in block.values()], of_old, decay)
    return new
