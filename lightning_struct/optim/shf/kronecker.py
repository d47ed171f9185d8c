"""The Kronecker-factored right preconditioner of SHF: which block each parameter is in, its factors and their averages."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, world_size
from lightning_struct.functional.kronecker import (
    DiagonalRoot,
    KroneckerRoot,
    NotPositiveDefinite,
    diagonal_root,
    kronecker_root,
    second_moments,
    squared_shares,
)
from lightning_struct.functional.layers import called_layers, excluded_modules, kind_of, owned_parameters
from lightning_struct.functional.per_sample.contributions import Contribution
from lightning_struct.functional.per_sample.rules import has_rule
from lightning_struct.optim.memory import as_text, check_memory
from lightning_struct.optim.shf.batch_model import BatchModel

# By the name of a block, its factors by their own names.
Factors: TypeAlias = dict[str, dict[str, Tensor]]
# The layers that use a parameter, with its name below each of them.
Users: TypeAlias = frozenset[tuple[nn.Module, str]]


class CurvatureBlock(ABC):
    """Parameters whose part of the Gauss-Newton matrix is approximated together.

    Attributes:
        name: of the first parameter.
        parameters: names of all.
        users: the layers whose calls the factors are made of.
    """

    name: str
    parameters: tuple[str, ...]
    users: Users

    @property
    @abstractmethod
    def description(self) -> str:
        """The form, and the sizes of the factors."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors by name."""

    @abstractmethod
    def sums(self, uses: Sequence[Contribution], gradients: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        """What is added up over chunks and processes, of the uses in one chunk."""

    @abstractmethod
    def factors(self, sums: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        """Of the sums over all samples."""

    @abstractmethod
    def reached(self, sums: Sequence[Tensor]) -> bool:
        """Whether any use was seen."""

    @abstractmethod
    def root(self, factors: Mapping[str, Tensor], damping: float) -> KroneckerRoot | DiagonalRoot:
        """C of the block."""

    @abstractmethod
    def read(self, vector: Tensor) -> Tensor:
        """The block's part of a flat vector, as its C takes it."""

    @abstractmethod
    def write(self, vector: Tensor, part: Tensor) -> None:
        """The inverse of :meth:`read`."""

    @property
    def numbers(self) -> int:
        """In the factors."""
        return sum(torch.Size(shape).numel() for shape in self.sizes.values())


@dataclass(frozen=True, eq=False)
class KroneckerBlock(CurvatureBlock):
    """A weight (groups · rows, ...), with its bias as the last column; or a bias alone.

    Attributes:
        places: of the parameters in the flat vector of all.
        groups, rows, columns: the matrix is (groups, rows, columns).
        transposed: the weight is stored as (inputs, rows), of one group.
        diagonal_inputs, diagonal_outputs: keep the diagonal of this factor only.
    """

    name: str
    parameters: tuple[str, ...]
    users: Users
    places: tuple[slice, ...]
    groups: int
    rows: int
    columns: int
    transposed: bool
    diagonal_inputs: bool
    diagonal_outputs: bool

    @property
    def description(self) -> str:
        sides = [f"{self.columns} inputs", f"{self.rows} outputs"]
        for i, diagonal in enumerate((self.diagonal_inputs, self.diagonal_outputs)):
            sides[i] += " (diagonal)" if diagonal else ""
        return "kronecker: " + (f"{self.groups} groups of " if self.groups > 1 else "") + " x ".join(sides)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        def shape(size: int, diagonal: bool) -> tuple[int, ...]:
            return (self.groups, size) if diagonal else (self.groups, size, size)

        return {
            "inputs": shape(self.columns, self.diagonal_inputs),
            "outputs": shape(self.rows, self.diagonal_outputs),
        }

    def sums(self, uses: Sequence[Contribution], gradients: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        moments: list[Sequence[Tensor]] = [
            second_moments(
                use,
                groups=self.groups,
                transposed=self.transposed,
                bias=len(self.places) > 1,
                diagonal_inputs=self.diagonal_inputs,
                diagonal_outputs=self.diagonal_outputs,
            )
            for use in uses
        ]
        nothing = [like.new_zeros(shape) for shape in (*self.sizes.values(), (self.groups,))]
        return [sum(sums[1:], sums[0]).to(like) for sums in zip(*(moments or [nothing]), strict=True)]

    def factors(self, sums: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        inputs, outputs, positions = sums
        positions = positions.clamp(min=1).view(-1, *[1] * (inputs.ndim - 1))
        return {"inputs": inputs / positions, "outputs": outputs / samples}

    def reached(self, sums: Sequence[Tensor]) -> bool:
        return bool(sums[2].any())

    def root(self, factors: Mapping[str, Tensor], damping: float) -> KroneckerRoot:
        return kronecker_root(factors["inputs"], factors["outputs"], damping)

    def read(self, vector: Tensor) -> Tensor:
        parts = self._parts(vector)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def write(self, vector: Tensor, part: Tensor) -> None:
        end = 0
        for target in self._parts(vector):
            begin, end = end, end + target.shape[2]
            target.copy_(part[:, :, begin:end])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """(groups, rows, columns) of the weight and (groups, rows, 1) of the bias, views of a flat vector."""
        parts = [vector[place].view(self.groups, self.rows, -1) for place in self.places]
        if self.transposed:
            parts[0] = vector[self.places[0]].view(1, -1, self.rows).mT
        return parts


@dataclass(frozen=True, eq=False)
class DiagonalBlock(CurvatureBlock):
    """One parameter of any shape.

    Its diagonal is that of the uses' squared shares. Where no use was seen, as of a parameter outside of the layers that
    torch knows, it is the mean of the squared gradient of the probe, the same for all entries: unbiased too, but a single
    entry of it is mostly noise.
    """

    name: str
    users: Users
    place: slice
    shape: torch.Size

    @property
    def parameters(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    @property
    def description(self) -> str:
        return "diagonal"

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"diagonal": tuple(self.shape)}

    def sums(self, uses: Sequence[Contribution], gradients: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        squares = like.new_zeros(self.shape)
        for use in uses:
            squares += squared_shares(use)
        return [squares, gradients[self.name], like.new_tensor([float(len(uses))])]

    def factors(self, sums: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        squares, gradient, uses = sums
        mean = gradient.square().mean().expand(self.shape)
        return {"diagonal": torch.where(uses > 0, squares, mean) / samples}

    def reached(self, sums: Sequence[Tensor]) -> bool:
        return True

    def root(self, factors: Mapping[str, Tensor], damping: float) -> DiagonalRoot:
        return diagonal_root(factors["diagonal"], damping)

    def read(self, vector: Tensor) -> Tensor:
        return vector[self.place].view(self.shape)

    def write(self, vector: Tensor, part: Tensor) -> None:
        vector[self.place].view(self.shape).copy_(part)


class BlockPreconditioner:
    """C of all blocks, on flat vectors of all parameters."""

    def __init__(self, roots: Sequence[tuple[CurvatureBlock, KroneckerRoot | DiagonalRoot]]) -> None:
        self._roots = roots

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
        for block, root in self._roots:
            block.write(result, operation(root, block.read(vector)))
        return result


class KroneckerFactors:
    """Which block each trained parameter of a module is in, and how the factors of the blocks come from a batch.

    Linear, Conv1d/2d/3d, RNN, LSTM, GRU and MultiheadAttention have Kronecker factors, for each group of a convolution and
    each of the stacked projections of an attention their own; the factors of a weight that several layers use, or that
    one uses several times, are of all uses. All other parameters, and what is excluded, have a diagonal.

    Args:
        module: the network.
        parameters: name -> parameter, those that are trained, in the order of the flat vector.
        max_size: a side of a block with more rows is kept as a diagonal.
        exclude: modules, or their names, whose parameters have a diagonal.

    Raises:
        ValueError: ``exclude`` has what is no module below ``module``.
        MemoryError: the factors take more than there is.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        max_size: int | None = None,
        exclude: Sequence[str | nn.Module] = (),
    ) -> None:
        self._blocks = _make_blocks(module, parameters, max_size, excluded_modules(module, exclude, "exclude_factors"))
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
        """A table: the parameters of each block, its form, and the memory of its factors and their roots."""
        rows = [("parameters", "form", "memory")]
        rows += [(", ".join(b.parameters), b.description, as_text(self._memory(b))) for b in self._blocks]
        rows.append(("total", "", as_text(sum(map(self._memory, self._blocks)))))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)

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
        totals = _reduced(totals)
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
            FloatingPointError: a factor holds NaN or infinity, or has no Cholesky factor, in float64 either. Its block is
                named.
        """
        roots = []
        for block in self._blocks:
            try:
                roots.append((block, block.root(factors[block.name], damping)))
            except (FloatingPointError, NotPositiveDefinite) as error:
                raise FloatingPointError(
                    f"preconditioner='kronecker', block {', '.join(block.parameters)}: {error}. The weights are unchanged; "
                    "raise the damping, look at the data of this batch, or exclude the layer from the factors"
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
        return 2 * block.numbers * self._itemsize

    def _check_memory(self, device: torch.device) -> None:
        needed = {block.name: (self._memory(block), block.description) for block in self._blocks}
        check_memory("The Kronecker factors", needed, device, "Lower max_factor_size, or exclude layers")

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
            warnings.warn(
                f"preconditioner='kronecker': nothing came back to the layers of {', '.join(unseen)} in this batch, which "
                "are preconditioned by the damping alone. Where a weight is used without calling its layer, exclude the "
                "layer from the factors, which gives it a diagonal",
                stacklevel=5,
            )


def averaged(old: Factors, new: Factors, decay: float) -> Factors:
    """decay · old + (1 - decay) · new."""
    return {name: {k: torch.lerp(t, old[name][k], decay) for k, t in block.items()} for name, block in new.items()}


def _reduced(totals: list[list[Tensor]]) -> list[list[Tensor]]:
    if world_size() == 1:
        return totals
    flat = [t for sums in totals for t in sums]
    parts = iter(all_reduce(torch.cat([t.reshape(-1) for t in flat])).split([t.numel() for t in flat]))
    return [[next(parts).view(t.shape) for t in sums] for sums in totals]


@dataclass(eq=False)
class _Uses:
    """How the layers of a module use one trained parameter.

    Attributes:
        factored: the layers with Kronecker factors that use it, with its name below each.
        matrices: as which (groups, transposed) they see it.
        partners: the biases added to its products; of a bias, the weights whose products it is added to. None stands for
            one that is missing, not trained, or added to a part of the products.
        is_bias: it is added to products, and multiplies nothing.
        others: further uses, in layers without Kronecker factors.
    """

    factored: set[tuple[nn.Module, str]] = field(default_factory=set)
    matrices: set[tuple[int, bool]] = field(default_factory=set)
    partners: set[nn.Parameter | None] = field(default_factory=set)
    is_bias: bool = True
    others: set[tuple[nn.Module, str]] = field(default_factory=set)

    @property
    def has_factors(self) -> bool:
        """Whether one pair of Kronecker factors describes all uses."""
        return bool(self.factored) and not self.others and len(self.matrices) == 1

    @property
    def only_partner(self) -> nn.Parameter | None:
        return next(iter(self.partners)) if len(self.partners) == 1 else None


def _make_blocks(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    max_size: int | None,
    excluded: set[nn.Module],
) -> list[CurvatureBlock]:
    """One block for each weight with its bias, if they are always used together, and for each other parameter."""
    uses = _uses_of(set(parameters.values()), module, excluded)
    bias_of = _joined_biases(uses)
    names = {p: name for name, p in parameters.items()}
    stops = list(accumulate(p.numel() for p in names))
    places = {p: slice(stop - p.numel(), stop) for p, stop in zip(names, stops, strict=True)}

    def block(p: nn.Parameter) -> CurvatureBlock:
        if not uses[p].has_factors:
            return DiagonalBlock(names[p], frozenset(uses[p].factored | uses[p].others), places[p], p.shape)
        ((groups, transposed),) = uses[p].matrices
        parts = [p, bias_of[p]] if p in bias_of else [p]
        outputs = p.shape[1] if transposed else p.shape[0]
        columns = sum(part.numel() for part in parts) // outputs
        return KroneckerBlock(
            names[p],
            tuple(names[part] for part in parts),
            frozenset(uses[p].factored),
            tuple(places[part] for part in parts),
            groups,
            rows=outputs // groups,
            columns=columns,
            transposed=transposed,
            diagonal_inputs=max_size is not None and columns > max_size,
            diagonal_outputs=max_size is not None and outputs // groups > max_size,
        )

    joined = set(bias_of.values())
    return [block(p) for p in names if p not in joined]


def _uses_of(trained: set[nn.Parameter], module: nn.Module, excluded: set[nn.Module]) -> dict[nn.Parameter, _Uses]:
    uses: dict[nn.Parameter, _Uses] = defaultdict(_Uses)
    for layer in called_layers(module):
        own = {name: p for name, p in owned_parameters(layer).items() if p in trained}
        kind = kind_of(layer) if layer not in excluded and has_rule(layer) else None
        factored: set[str] = set()
        for matrix in () if kind is None else kind.matrices(layer):
            weight, bias = own.get(matrix.weight), own.get(matrix.bias or "")
            whole = matrix.bias_rows == slice(None)
            if weight is not None:
                uses[weight].is_bias = False
                uses[weight].factored.add((layer, matrix.weight))
                uses[weight].matrices.add((matrix.groups, matrix.transposed))
                uses[weight].partners.add(bias if whole else None)
                factored.add(matrix.weight)
            if bias is not None and matrix.bias is not None:
                uses[bias].factored.add((layer, matrix.bias))
                uses[bias].matrices.add((matrix.groups, False))
                uses[bias].partners.add(weight if whole else None)
                factored.add(matrix.bias)
        if has_rule(layer) or next(layer.children(), None) is None:
            for name in own.keys() - factored:
                uses[own[name]].others.add((layer, name))
    return uses


def _joined_biases(uses: Mapping[nn.Parameter, _Uses]) -> dict[nn.Parameter, nn.Parameter]:
    """The bias of each weight whose products have no other bias, if it is added to these products alone."""
    bias_of: dict[nn.Parameter, nn.Parameter] = {}
    for weight, of_weight in uses.items():
        bias = of_weight.only_partner
        if bias is None or of_weight.is_bias or not of_weight.has_factors:
            continue
        if uses[bias].only_partner is weight and not uses[bias].others:
            bias_of[weight] = bias
    return bias_of
