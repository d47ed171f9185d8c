"""Layers of learned diagonals between Walsh-Hadamard transforms: Fastfood and RandomizedHadamard."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import checked, positive_size
from lightning_struct.functional.structured.arguments import computing_dtype, require_one_of
from lightning_struct.functional.structured.cost_model import making_is_faster, prepared_matrix_is_faster
from lightning_struct.functional.structured.transforms import hadamard_transform
from lightning_struct.nn.classic import Init
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear

if TYPE_CHECKING:
    from typing_extensions import Self


# Entries of the largest constant that is kept, to make matrices of one size by half of the transforms.
_LARGEST_CONSTANT = 2**22


class _HadamardLinear(StructuredLinear):
    """A layer with learned diagonals between Walsh-Hadamard transforms, and t such terms."""

    terms: int = 1

    @property
    def length(self) -> int:
        """N, the size of the transforms: the smallest power of two that neither size of the layer exceeds."""
        return 1 << (max(self.in_features, self.out_features) - 1).bit_length()

    def _dense(self) -> Tensor:
        return self._prepare_factors().to_dense()

    def _makes_matrix(self, rows: int) -> bool:
        return making_is_faster(self.out_features, self.in_features, 2 * rows, break_even=2048 * self.terms)

    def _prepares_dense(self, rows: int) -> bool:
        return prepared_matrix_is_faster(self.out_features, self.in_features, 2 * self.terms, rows, least=1024)

    def _prepare_factors(self) -> HadamardTerms:
        raise NotImplementedError


class Fastfood(_HadamardLinear):
    """A layer with M = S H G Π H B: Fastfood with three learned diagonal matrices (Le et al. 2013, Yang et al. 2015).

    B has n entries, S has m, and G has k = max(m, n): 3n if square. H are orthonormal Walsh-Hadamard transforms of the
    smallest power of two N ≥ k; between them Π picks k of the N coordinates, in an order that is drawn once. Where n, k
    or m is less than N, vectors are filled up with zeros before a transform, and cut after it.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        init: ``"variance"``: B of random signs, G of N(0, 1), S of the lengths of Gaussian vectors (Le et al.), scaled
            such that the variance of the input is kept; ``"reference"``: with the scale of the authors' code, whose
            transforms are not normalised: outputs are some 1000 times larger.

    Raises:
        ValueError: a size is not positive, or ``init`` is unknown.

    Example:
        >>> layer = Fastfood(100, 50)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 250)
    """

    weight_names: ClassVar[tuple[str, ...]] = ("S", "G", "B")
    _places: ClassVar[tuple[str, ...]] = ("order",)

    order: Tensor
    """(k,) int64, the coordinates that Π picks."""

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Init = "variance",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        require_one_of("init", init, get_args(Init))
        self.init = init
        middle = max(self.in_features, self.out_features)
        self.S = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.G = nn.Parameter(torch.empty(middle, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("order", torch.empty(middle, device=device, dtype=torch.int64))
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw B, G, S and the order."""
        if self.S.is_meta:  # there are no numbers to draw, and torch has no such distribution there
            return
        n, k = self.B.numel(), self.G.numel()
        self.order.copy_(torch.randperm(self.length, device=self.order.device)[:k])
        self.B.bernoulli_(0.5).mul_(2).sub_(1)
        nn.init.normal_(self.G)
        chi_squared = torch.distributions.Chi2(torch.full_like(self.S, n, dtype=computing_dtype(self.S))).sample()
        self.S.copy_(chi_squared.sqrt() / self.G.norm())
        if self.init == "reference":
            self.S.mul_(self.length)
        else:
            # The variance falls by n/N in the first transform, by ‖G‖²/N in the second, and rises by n/‖G‖² in S.
            self.S.mul_(self.length / n)

    def _prepare_factors(self) -> HadamardTerms:
        return HadamardTerms(self.G[None], self.S[None], self.B[None], self.order[None], self.length)


@dataclass(frozen=True)
class HadamardTerms:
    """M = Σ T_j H G_j Π_j H S_j by its factors: a ``PreparedMatrix``.

    Args:
        G: (t, k), the diagonals.
        output_signs, input_signs: (t, m) and (t, n), T and S.
        order: (t, k) int64, the coordinates that Π_j picks of the t N of all terms.
        length: N, the size of H.
    """

    G: Tensor
    output_signs: Tensor
    input_signs: Tensor
    order: Tensor
    length: int

    def to_dense(self, rows: Tensor | None = None) -> Tensor:
        """(m, n), by its shorter side; ``rows`` may have been kept."""
        rows = self.rows() if rows is None else rows
        shorter, longer, _, places = self._sides()
        spread = self.G.new_zeros(rows[0].numel()).index_copy(0, places.flatten(), self.G.flatten())
        products = hadamard_transform(rows * spread.view(rows.shape[1:]))[..., : longer.shape[1]]
        products = products * longer * shorter.T[..., None]
        M = products.sum(1) if len(shorter) > 1 else products[:, 0]
        return M if shorter is self.output_signs else M.T

    def rows(self) -> Tensor:
        """(min(m, n), t, N): those by which G is multiplied, at its places, before a transform makes all entries."""
        shorter, _, picked, places = self._sides()
        H = hadamard_transform(torch.eye(self.length, dtype=self.G.dtype, device=self.G.device)[: shorter.shape[1]])
        rows = H.new_zeros(len(H), len(shorter) * self.length)
        rows.index_copy_(1, places.flatten(), H[:, picked.flatten() % self.length] / self.length)
        return rows.view(-1, len(shorter), self.length)

    def _sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The signs of the shorter and of the longer side, and the coordinates of G's entries beside each."""
        at = torch.arange(len(self.order) * self.length, device=self.order.device).view(-1, self.length)
        ends = (self.output_signs, at[:, : self.order.shape[1]]), (self.input_signs, self.order)
        (shorter, picked), (longer, places) = sorted(ends, key=lambda end: end[0].shape[1])
        return shorter, longer, picked, places

    def matmul(self, x: Tensor) -> Tensor:
        spread = self._transformed(x.unsqueeze(-2) * self.input_signs)  # H S_j x, (..., t, N)
        picked = spread.flatten(-2)[..., self.order] * self.G
        return (self._transformed(picked)[..., : self.output_signs.shape[1]] * self.output_signs).sum(-2)

    def _transformed(self, x: Tensor) -> Tensor:
        return hadamard_transform(F.pad(x, (0, self.length - x.shape[-1])), normalize=True)


class RandomizedHadamard(_HadamardLinear):
    """A layer with M = Σ T_j H G_j Π_j H S_j, j = 1 ... t: learned diagonals G_j between random orthogonal transforms.

    H is the orthonormal Walsh-Hadamard transform of the smallest power of two N ≥ k = max(m, n), S_j and T_j are random
    signs, and Π_j picks k of the N coordinates in a random order. Where n, k or m is less than N, vectors are filled up
    with zeros before a transform, and cut after it. There are t k parameters, and M is linear in them.

    Randomised Hadamard transforms are those of Ailon and Chazelle (2006); with learned S and T besides, and one term, M
    is :class:`Fastfood`. Random parts are the same in each layer of the same size, and are not saved. It is meant for
    :func:`add_adapters`, where VeRA (`arXiv 2310.11454 <https://arxiv.org/abs/2310.11454>`__) has frozen random
    matrices: here a product takes O(n log n), and nothing frozen is stored.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        terms: t.

    Raises:
        ValueError: a size or ``terms`` is not positive.

    Example:
        >>> layer = RandomizedHadamard(100, 50, terms=2)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 200)
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G",)

    G: nn.Parameter
    """(t, k), the diagonals."""
    output_signs: Tensor
    input_signs: Tensor
    order: Tensor

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        terms: int = 1,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.terms = positive_size("terms", terms)
        k = max(self.in_features, self.out_features)
        self.G = nn.Parameter(torch.empty(terms, k, device=device, dtype=dtype))
        for name, size in (("output_signs", out_features), ("input_signs", in_features)):
            self.register_buffer(name, torch.empty(terms, size, device=device, dtype=torch.int8), persistent=False)
        # No buffer: averages of weights include these and round integers down, which leaves signs as they are.
        self.order = torch.empty(terms, k, device=device, dtype=torch.int64)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, terms={self.terms}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        had_no_values = self.order.is_meta
        super()._apply(fn, recurse)
        self.order = fn(self.order)
        if had_no_values:
            self._set_random_parts()
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.order.is_meta:  # and the parameters need not be any more
            self._set_random_parts()

    def _draw_weights(self) -> None:
        """Draw G from a normal distribution that keeps the variance of the input."""
        # The variance rises by n/N in the first transform, and by k/N in the second.
        nn.init.normal_(self.G, std=self.length / math.sqrt(self.G.numel() * self.in_features))
        self._set_random_parts()

    @torch.no_grad()
    def _set_random_parts(self) -> None:
        """Set signs and orders, which are always the same, if the parameters have values."""
        if self.G.is_meta:
            return
        parts = _random_parts(self.out_features, self.in_features, self.terms, self.length, self.G.device)
        self.output_signs, self.input_signs, self.order = parts

    def _dense(self) -> Tensor:
        sizes = self.out_features, self.in_features, self.terms, self.length
        is_kept = min(sizes[:2]) * self.terms * self.length <= _LARGEST_CONSTANT
        is_kept &= type(self.G) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()  # no fake one
        return self._prepare_factors().to_dense(_kept_rows(*sizes, self.G.dtype, self.G.device) if is_kept else None)

    def _prepare_factors(self) -> HadamardTerms:
        return HadamardTerms(self.G, self.output_signs, self.input_signs, self.order, self.length)

    def _start_near(self, weight: Tensor) -> None:
        """Project the rest of the weight on one term after the other, which are nearly orthogonal."""
        self.G.zero_()
        squared_norm = self.in_features * self.out_features / self.length**2  # of M with a single one in G
        for term in range(self.terms):
            with torch.enable_grad():  # the inner products of W and what M is with a single one in G
                M = self.to_dense()
                (products,) = torch.autograd.grad(M, self.G, weight - M.detach())
            self.G[term] = products[term] / squared_norm


def _random_parts(m: int, n: int, terms: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Signs of outputs (t, m) and inputs (t, n), int8, and orders (t, k), int64: always the same."""
    sides: tuple[list[list[int]], ...] = ([], [])
    orders = []
    for term in range(terms):
        numbers = random.Random(term)  # random() is the same in all versions of Python
        for signs, size in zip(sides, (m, n), strict=True):
            signs.append([1 if numbers.random() < 0.5 else -1 for _ in range(size)])
        keys = [numbers.random() for _ in range(length)]
        orders.append([place + term * length for place in sorted(range(length), key=keys.__getitem__)[: max(m, n)]])
    outputs, inputs = (torch.tensor(signs, dtype=torch.int8, device=device) for signs in sides)
    return outputs, inputs, torch.tensor(orders, device=device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _kept_rows(m: int, n: int, terms: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rows of :class:`HadamardTerms` for all :class:`RandomizedHadamard` of one size."""
    G = torch.empty(terms, max(m, n), dtype=dtype, device=device)
    return HadamardTerms(G, *_random_parts(m, n, terms, length, device), length).rows()
