"""GeneratorLinear: what the classes have in common whose parameters include a matrix G Hᵀ of low rank."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.functional.structured.prepared import LeadingSubmatrix, PreparedMatrix
from lightning_struct.nn.approximation import truncated_factors
from lightning_struct.nn.structured import StructuredLinear, positive_size

Init = Literal["variance", "reference"]
Pad = Literal["square"]


class GeneratorLinear(StructuredLinear):
    """A layer whose matrix is made of generators G (m, r) and H (n, r), and of operators that a derived class adds.

    The parameters G and H are those of Thomas et al., section 3; the operators A and B are fixed or learned.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        rank: r, from 1 to the smaller of both sizes.
        init: ``"variance"``: G and H from one normal distribution, such that outputs of independent inputs of one
            variance have that variance on average; ``"reference"``: N(0, 1/(rm)) and N(0, 1/(rn)), as in the authors'
            code.
        pad: ``"square"`` makes the matrix a part of a square one of size max(m, n), as the authors' code does: inputs
            are filled up with zeros, outputs cut off. It has more parameters. None: rectangular as it is.

    Raises:
        ValueError: a size or the rank is not positive, the rank is larger than the matrix, or ``init`` or ``pad`` is
            unknown.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G", "H")

    G: nn.Parameter
    H: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        bias: bool = True,
        *,
        init: Init = "variance",
        pad: Pad | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.rank = _checked_rank(rank, self.in_features, self.out_features)
        if pad is not None and pad not in get_args(Pad):
            raise ValueError(f"pad must be 'square' or None, but is {pad!r}")
        require_one_of("init", init, get_args(Init))
        self.init = init
        self.pad = pad
        largest = max(self.in_features, self.out_features)
        self.rows, self.columns = (largest, largest) if pad == "square" else (self.out_features, self.in_features)
        self.G = nn.Parameter(torch.empty(self.rows, self.rank, device=device, dtype=dtype))
        self.H = nn.Parameter(torch.empty(self.columns, self.rank, device=device, dtype=dtype))
        self._add_operators(device, dtype)
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw G and H."""
        if self.init == "reference":
            nn.init.normal_(self.G, std=(self.rank * self.rows) ** -0.5)
            nn.init.normal_(self.H, std=(self.rank * self.columns) ** -0.5)
        else:
            # The expectation of ‖M‖² is r σ⁴ times the sum of squares; ‖M‖² = out_features keeps the variance.
            std = (self.out_features / (self.rank * self._sum_of_squares())) ** 0.25
            nn.init.normal_(self.G, std=std)
            nn.init.normal_(self.H, std=std)

    def _dense(self) -> Tensor:
        dense = self._square_to_dense()
        return dense[: self.out_features, : self.in_features] if self.pad == "square" else dense

    def extra_repr(self) -> str:
        pad = f", pad={self.pad!r}" if self.pad else ""
        return f"{super().extra_repr()}, rank={self.rank}{pad}"

    def _add_operators(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Register the parameters or buffers of the operators, where the class has any."""

    def _sum_of_squares(self) -> float:
        """The expectation of ‖M‖² (Frobenius, after M is cut) for r = 1 and G, H of unit variance."""
        raise NotImplementedError

    def _square_to_dense(self) -> Tensor:
        """The matrix (rows, columns) before it is cut."""
        identity = torch.eye(self.columns, device=self.H.device, dtype=self.H.dtype)
        return self._square_multiply(identity).T

    def _square_multiply(self, x: Tensor) -> Tensor:
        """The product with the matrix before it is cut: (..., rows) for x (..., columns)."""
        raise NotImplementedError

    def _squared(self, weight: Tensor) -> Tensor:
        """``weight`` filled up with zeros to (rows, columns)."""
        return F.pad(weight, (0, self.columns - self.in_features, 0, self.rows - self.out_features))

    def _generators(self) -> tuple[Tensor, Tensor]:
        """G and H. A column alone is a view, so that its gradient has the strides of the parameter, as DDP wants it."""
        if self.rank > 1:
            return self.G, self.H
        return self.G.flatten().unsqueeze(1), self.H.flatten().unsqueeze(1)

    def _set_generators(self, R: Tensor) -> None:
        """Make G Hᵀ the matrix of rank r nearest to R (rows, columns)."""
        G, H = truncated_factors(R, self.rank)
        self.G.copy_(G)
        self.H.copy_(H)

    def _multiply(self, x: Tensor) -> Tensor:
        filled_up = x if self.columns == self.in_features else F.pad(x, (0, self.columns - self.in_features))
        y = self._square_multiply(filled_up)
        return y if self.rows == self.out_features else y[..., : self.out_features]

    def _part(self, matrix: PreparedMatrix) -> PreparedMatrix:
        """The matrix (out_features, in_features) as a part of the matrix (rows, columns)."""
        if self.pad is None:
            return matrix
        return LeadingSubmatrix(matrix, self.columns - self.in_features, self.out_features)


def _checked_rank(rank: int, in_features: int, out_features: int) -> int:
    rank, largest = positive_size("rank", rank), min(in_features, out_features)
    if rank > largest:
        raise ValueError(
            f"rank must be at most min(in_features, out_features) = {largest}, but is {rank}: give a smaller one, or "
            "take nn.Linear"
        )
    return rank


def sum_of_overlaps(m: int, n: int) -> int:
    """The sum of squares of a Toeplitz-like matrix without corners: Σ of min(a, b) + 1 over a < m and b < n."""
    return sum(min(a, n) * (min(a, n) + 1) // 2 + max(n - a, 0) * a for a in range(1, m + 1))
