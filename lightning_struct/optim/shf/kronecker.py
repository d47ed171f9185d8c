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
from lightning_struct.functional.per_sample.contributions import Contribution
from lightning_struct.functional.per_sample.rules import called_layers, has_rule, owned_parameters
from lightning_struct.optim.rls.layers import layer_type
from lightning_struct.optim.rls.memory import as_text, available_memory
from lightning_struct.optim.shf.batch_model import BatchModel

# By the name of a block, its factors by their own names.
Factors: TypeAlias = dict[str, dict[str, Tensor]]
# The layers that use a parameter, with its name below each of them.
Users: TypeAlias = frozenset[tuple[nn.Module, str]]


class Block(ABC):
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
class KroneckerBlock(Block):
    """A weight (groups · rows, ...), with its bias as the last column; or a bias alone.

    Attributes:
        places: of the parameters in the flat vector of all.
        groups, rows, columns: the matrix is (groups, rows, columns).
        diagonal_inputs, diagonal_outputs: keep the diagonal of this factor only.
    """

    name: str
    parameters: tuple[str, ...]
    users: Users
    places: tuple[slice, ...]
    groups: int
    rows: int
    columns: int
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
        parts = [vector[place].view(self.groups, self.rows, -1) for place in self.places]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def write(self, vector: Tensor, part: Tensor) -> None:
        end = 0
        for place in self.places:
            target = vector[place].view(self.groups, self.rows, -1)
            begin, end = end, end + target.shape[2]
            target.copy_(part[:, :, begin:end])


@dataclass(frozen=True, eq=False)
class DiagonalBlock(Block):
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

    def __init__(self, roots: Sequence[tuple[Block, KroneckerRoot | DiagonalRoot]]) -> None:
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
        self._blocks = _make_blocks(module, parameters, max_size, _excluded(module, exclude))
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
            of_block: dict[Block, list[Contribution]] = defaultdict(list)
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

    def _memory(self, block: Block) -> int:
        return 2 * block.numbers * self._itemsize

    def _check_memory(self, device: torch.device) -> None:
        needed, free = sum(map(self._memory, self._blocks)), available_memory(device)
        if free is not None and needed > free:
            largest = sorted(self._blocks, key=lambda block: -block.numbers)[:3]
            named = ", ".join(f"{b.name} {as_text(self._memory(b))} ({b.description})" for b in largest)
            raise MemoryError(
                f"The Kronecker factors take {as_text(needed)}, but {as_text(free)} are free on {device}; the largest: "
                f"{named}. Lower max_factor_size, or exclude layers"
            )

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


def _excluded(module: nn.Module, exclude: Sequence[str | nn.Module]) -> set[nn.Module]:
    """All modules that are named, and those below them."""
    by_name = dict(module.named_modules())
    excluded: set[nn.Module] = set()
    for item in [exclude] if isinstance(exclude, str | nn.Module) else exclude:
        found = by_name.get(item) if isinstance(item, str) else item
        if found is None or not any(found is child for child in module.modules()):
            what = repr(item) if isinstance(item, str) else f"this {type(item).__name__}"
            raise ValueError(f"exclude_factors has {what}, which is no module of {type(module).__name__}")
        excluded.update(found.modules())
    return excluded


@dataclass(eq=False)
class _Weights:
    """How the layers with Kronecker factors use a parameter.

    Attributes:
        users: the layers.
        groups: as each of them sees it.
        partners: as a weight, its bias in each use; as a bias, its weight, or None where that is not trained, or where only
            a part of the bias is added to its products.
    """

    users: set[tuple[nn.Module, str]] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    partners: set[nn.Parameter | None] = field(default_factory=set)


def _make_blocks(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    max_size: int | None,
    excluded: set[nn.Module],
) -> list[Block]:
    trained = set(parameters.values())
    weights: dict[nn.Parameter, _Weights] = defaultdict(_Weights)
    biases: dict[nn.Parameter, _Weights] = defaultdict(_Weights)
    others: dict[nn.Parameter, set[tuple[nn.Module, str]]] = defaultdict(set)
    for layer in called_layers(module):
        own = {name: p for name, p in owned_parameters(layer).items() if p in trained}
        kind = layer_type(layer) if layer not in excluded and has_rule(layer) else None
        for matrix in () if kind is None else kind.matrices(layer):
            weight, bias = own.pop(matrix.weight, None), own.get(matrix.bias or "")
            whole = matrix.bias_rows == slice(None)
            if weight is not None:
                weights[weight].users.add((layer, matrix.weight))
                weights[weight].groups.add(matrix.groups)
                weights[weight].partners.add(bias if whole else None)
            if bias is not None and matrix.bias is not None:
                biases[bias].users.add((layer, matrix.bias))
                biases[bias].groups.add(matrix.groups)
                biases[bias].partners.add(weight if whole else None)
        in_factors = {p for p in own.values() if p in biases}
        if has_rule(layer) or next(layer.children(), None) is None:
            for name, p in own.items():
                if p not in in_factors:
                    others[p].add((layer, name))

    bias_of: dict[nn.Parameter, nn.Parameter] = {}
    for weight, uses in weights.items():
        (bias,) = uses.partners if len(uses.partners) == 1 else (None,)
        alone = not (others.keys() & {weight, bias}) and len(uses.groups) == 1
        if bias is not None and biases[bias].partners == {weight} and alone:
            bias_of[weight] = bias

    names = {p: name for name, p in parameters.items()}
    stops = list(accumulate(p.numel() for p in names))
    places = {p: slice(stop - p.numel(), stop) for p, stop in zip(names, stops, strict=True)}

    def block(p: nn.Parameter) -> Block:
        uses = weights.get(p) or biases.get(p)
        if uses is None or p in others or len(uses.groups) > 1:
            users = others.get(p, set()) | (set() if uses is None else uses.users)
            return DiagonalBlock(names[p], frozenset(users), places[p], p.shape)
        (groups,) = uses.groups
        parts = [p, bias_of[p]] if p in bias_of else [p]
        rows = p.shape[0] // groups
        columns = sum(part.numel() for part in parts) // p.shape[0]
        return KroneckerBlock(
            names[p],
            tuple(names[part] for part in parts),
            frozenset(uses.users),
            tuple(places[part] for part in parts),
            groups,
            rows,
            columns,
            diagonal_inputs=max_size is not None and columns > max_size,
            diagonal_outputs=max_size is not None and rows > max_size,
        )

    joined = set(bias_of.values())
    return [block(p) for p in names if p not in joined]
