"""The blocks of parameters whose curvature SHF approximates together, and which parameters are in which block."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.functional.curvature.kronecker import (
    DiagonalRoot,
    KroneckerRoot,
    diagonal_root,
    kronecker_root,
    second_moments,
)
from lightning_struct.functional.layers.per_sample.contributions import Contribution
from lightning_struct.functional.layers.per_sample.layer_contributions import has_rule
from lightning_struct.functional.layers.registry import called_layers, kind_of, owned_parameters

# The layers that use a parameter, with its name below each of them.
Users: TypeAlias = frozenset[tuple[nn.Module, str]]
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """A weight (groups · rows, ...), with its bias as the last column; or a bias alone.

    Attributes:
        name: of the first parameter.
        parameters: names of all.
        users: the layers whose calls the factors are made of, with the name of the parameter below each.
        places: of its parameters in the flat vector of all.
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
        """The form, and the sizes of the factors."""
        sides = [f"{self.columns} inputs", f"{self.rows} outputs"]
        for i, diagonal in enumerate((self.diagonal_inputs, self.diagonal_outputs)):
            sides[i] += " (diagonal)" if diagonal else ""
        return "kronecker: " + (f"{self.groups} groups of " if self.groups > 1 else "") + " x ".join(sides)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors by name."""

        def shape(size: int, diagonal: bool) -> tuple[int, ...]:
            return (self.groups, size) if diagonal else (self.groups, size, size)

        return {"inputs": shape(self.columns, self.diagonal_inputs), "outputs": shape(self.rows, self.diagonal_outputs)}

    def sums(self, uses: Sequence[Contribution], gradients: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        """Sums over the uses in one chunk, which are added up over chunks and processes."""
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
        if not moments:
            moments = [[like.new_zeros(shape) for shape in (*self.sizes.values(), (self.groups,))]]
        return [sum(sums[1:], sums[0]).to(like) for sums in zip(*moments, strict=True)]

    def factors(self, sums: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        """The factors, from the sums over all samples."""
        inputs, outputs, positions = sums
        positions = positions.clamp(min=1).view(-1, *[1] * (inputs.ndim - 1))
        return {"inputs": inputs / positions, "outputs": outputs / samples}

    def was_used(self, sums: Sequence[Tensor]) -> bool:
        """Whether any use was seen."""
        return bool(sums[2].any())

    def root(self, factors: Mapping[str, Tensor], damping: float) -> KroneckerRoot:
        """C of the block."""
        return kronecker_root(factors["inputs"], factors["outputs"], damping)

    def read(self, vector: Tensor) -> Tensor:
        """The block's part of a flat vector, as its C takes it."""
        parts = self._parts(vector)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def targets(self, vector: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of a flat vector, and of what :meth:`read` gave of it, that belong there."""
        targets = self._parts(vector)
        return zip(targets, part.split([target.shape[2] for target in targets], 2), strict=True)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """(groups, rows, columns) of the weight and (groups, rows, 1) of the bias, views of a flat vector."""
        parts = [vector[place].view(self.groups, self.rows, -1) for place in self.places]
        if self.transposed:
            parts[0] = vector[self.places[0]].view(1, -1, self.rows).mT
        return parts


@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """One parameter of any shape; its methods are those of :class:`KroneckerBlock`.

    Its diagonal is that of the uses' squared shares. If no use was seen, as of a parameter outside of the layers
    that torch knows, it is the mean of the squared gradient of the probe, the same for all entries: unbiased too, but a
    single entry of it is mostly noise.
    """

    name: str
    users: Users
    place: slice
    shape: torch.Size

    @property
    def parameters(self) -> tuple[str, ...]:
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
            squares += use.squared_shares()
        return [squares, gradients[self.name], like.new_tensor(len(uses))]

    def factors(self, sums: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        squares, gradient, uses = sums
        mean = gradient.square().mean().expand(self.shape)
        return {"diagonal": torch.where(uses > 0, squares, mean) / samples}

    def was_used(self, sums: Sequence[Tensor]) -> bool:
        return True

    def root(self, factors: Mapping[str, Tensor], damping: float) -> DiagonalRoot:
        return diagonal_root(factors["diagonal"], damping)

    def read(self, vector: Tensor) -> Tensor:
        return vector[self.place].view(self.shape)

    def targets(self, vector: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.read(vector), part


# Parameters whose part of the Gauss-Newton matrix is approximated together.
CurvatureBlock: TypeAlias = KroneckerBlock | DiagonalBlock


@dataclass(eq=False)
class _Uses:
    """Uses that the layers of a module make of one trained parameter.

    Attributes:
        factored: the layers with Kronecker factors that use it, with its name below each.
        matrices: as which (groups, transposed) they see it.
        partners: the biases added to its products; of a bias, the weights whose products it is added to. None stands
            for one that is missing, not trained, or added to a part of the products.
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


def curvature_blocks(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], max_size: int | None
) -> list[CurvatureBlock]:
    """One block for each weight with its bias, if they are always used together, and for each other parameter.

    Args:
        module: the network.
        parameters: name -> parameter, those that are trained, in the order of the flat vector.
        max_size: a side with more rows keeps the diagonal of its factor only; None: any size is kept.
    """
    uses = _uses_of(set(parameters.values()), module)
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


def _uses_of(trained: set[nn.Parameter], module: nn.Module) -> dict[nn.Parameter, _Uses]:
    uses: dict[nn.Parameter, _Uses] = defaultdict(_Uses)
    for layer in called_layers(module):
        own = {name: p for name, p in owned_parameters(layer).items() if p in trained}
        kind = kind_of(layer) if has_rule(layer) else None
        factored: set[str] = set()
        # contributions of transposed convolutions have the inputs in the place of the cotangents, and no factors
        for matrix in () if kind is None or kind.base in _TRANSPOSED_CONVOLUTIONS else kind.matrices(layer):
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
