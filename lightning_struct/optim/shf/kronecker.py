"""The Kronecker-factored right preconditioner of SHF: its factors, how they are measured, and their averages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce_together
from lightning_struct.functional.curvature.kronecker_roots import (
    DiagonalRoot,
    KroneckerRoot,
    NotPositiveDefinite,
    with_inverses,
)
from lightning_struct.functional.layers.per_sample.contributions import Contribution
from lightning_struct.optim.memory import bytes_as_text, check_memory, table
from lightning_struct.optim.requirements import warn
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.curvature_blocks import CurvatureBlock, DiagonalBlock, curvature_blocks

# By the name of a block, its factors by their own names.
Factors: TypeAlias = dict[str, dict[str, Tensor]]


class BlockPreconditioner:
    """C of all blocks, on flat vectors of all parameters."""

    def __init__(self, roots: Sequence[tuple[CurvatureBlock, KroneckerRoot | DiagonalRoot]]) -> None:
        self._blocks = [block for block, _ in roots]
        self._roots = [root for _, root in roots]
        self._has_inverses = False

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return self._apply(y, lambda root, part: root.solve(part))

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return self._apply(x, lambda root, part: root.solve_transpose(part))

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x."""
        if not self._has_inverses:
            self._roots, self._has_inverses = with_inverses(self._roots), True
        return self._apply(x, lambda root, part: root.solve_normal(part))

    def _apply(self, vector: Tensor, operation: Callable[[KroneckerRoot | DiagonalRoot, Tensor], Tensor]) -> Tensor:
        result = torch.empty_like(vector)
        for block, root in zip(self._blocks, self._roots, strict=True):
            block.write(result, operation(root, block.read(vector)))
        return result


class KroneckerFactors:
    """The Kronecker factors of all trained parameters of a module, block by block, and how they come from a batch.

    Linear, Conv1d/2d/3d, RNN, LSTM, GRU and MultiheadAttention have Kronecker factors, for each group of a convolution
    and each of the stacked projections of an attention their own; the factors of a weight that several layers use, or
    that one uses several times, are of all uses. So have layers that were declared to be like one of them (see
    :func:`~lightning_struct.functional.register_layer`). All other parameters have a diagonal.

    Args:
        module: the network.
        parameters: name -> parameter, those that are trained, in the order of the flat vector.
        max_size: a side of a block with more rows is kept as a diagonal.
        inverted: whether conjugate gradients use the preconditioner, which keep the inverses of the factors too.

    Raises:
        MemoryError: the factors take more than there is.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        max_size: int | None = None,
        inverted: bool = False,
    ) -> None:
        self.max_size, self._inverted = max_size, inverted
        self._blocks = curvature_blocks(module, parameters, max_size)
        self._layers = list(dict.fromkeys(layer for block in self._blocks for layer, _ in block.users))
        self._parameters = {
            block.name: parameters[block.name] for block in self._blocks if isinstance(block, DiagonalBlock)
        }
        self._block_of = {user: block for block in self._blocks for user in block.users}
        self._warned = False
        first = next(iter(parameters.values()))
        self._itemsize = first.element_size()
        self._check_memory(first.device)

    def summary(self) -> str:
        """A table: the parameters of each block, its form, and the memory of its factors, their roots and inverses."""
        rows = [("parameters", "form", "memory")]
        rows += [(", ".join(b.parameters), b.description, bytes_as_text(self._memory(b))) for b in self._blocks]
        rows.append(("total", "", bytes_as_text(sum(map(self._memory, self._blocks)))))
        return table(rows)

    @property
    def cubed_rows(self) -> float:
        """Sum of the cubed numbers of rows of the factors that are matrices, which is what factoring them takes."""
        blocks = (block for block in self._blocks if not isinstance(block, DiagonalBlock))
        shapes = (shape for block in blocks for shape in block.sizes.values() if len(shape) == 3)
        return float(sum(groups * rows**3 for groups, rows, _ in shapes))

    def measure(self, model: BatchModel, seed: int) -> Factors:
        """The factors of a batch, over all processes: one flat all-reduce.

        Args:
            model: of the batch.
            seed: of the random signs.
        """
        totals: list[list[Tensor]] | None = None
        for uses, gradients in model.probes(self._layers, self._parameters, seed):
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
        self._warn_of_unreached(totals)
        return {
            block.name: block.factors(sums, model.curvature_n) for block, sums in zip(self._blocks, totals, strict=True)
        }

    def preconditioner(self, factors: Factors, damping: float) -> BlockPreconditioner:
        """C of the damped factors.

        Args:
            factors: averages over steps.
            damping: μ > 0.

        Raises:
            FloatingPointError: a factor holds NaN or infinity, or has no Cholesky factor, in float64 either. Its block
                is named.
        """
        tried = [block.unchecked_root(factors[block.name], damping) for block in self._blocks]
        good = torch.stack([is_good for _, is_good in tried]).tolist()  # one look at the device for all
        roots = []
        for block, (root, _), is_good in zip(self._blocks, tried, good, strict=True):
            try:
                roots.append((block, root if is_good else block.root(factors[block.name], damping)))
            except (FloatingPointError, NotPositiveDefinite) as error:
                raise FloatingPointError(
                    f"preconditioner='kronecker', block {', '.join(block.parameters)}: {error}. The weights are "
                    "unchanged; raise the damping, or look at the data of this batch"
                ) from error
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
        return copies * block.numbers * self._itemsize

    def _check_memory(self, device: torch.device) -> None:
        needed = {block.name: (self._memory(block), block.description) for block in self._blocks}
        check_memory("The Kronecker factors", needed, device, "Lower Kronecker(max_size=...)")

    def _warn_of_unreached(self, totals: Sequence[Sequence[Tensor]]) -> None:
        if self._warned:
            return
        self._warned = True
        unseen = [
            name
            for block, sums in zip(self._blocks, totals, strict=True)
            if not block.reached(sums)
            for name in block.parameters
        ]
        if unseen:
            warn(
                f"preconditioner='kronecker': nothing came back to the layers of {', '.join(unseen)} in this batch, "
                "which are preconditioned by the damping alone. A weight may be used without calling its layer"
            )


def averaged(old: Factors, new: Factors, decay: float) -> Factors:
    """decay · old + (1 - decay) · new, written over ``new``."""
    return {name: {k: t.lerp_(old[name][k], decay) for k, t in block.items()} for name, block in new.items()}
