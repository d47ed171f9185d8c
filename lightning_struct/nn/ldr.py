"""The classes with learned displacement operators: LDR-SD and LDR-TD (Thomas et al., section 3)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_struct.functional.displacement import ldr_matmul, ldr_to_dense
from lightning_struct.functional.operators import DisplacementOperator, SubdiagonalOperator, TridiagonalOperator
from lightning_struct.nn.approximation import relative_error, stein_residual
from lightning_struct.nn.generators import GeneratorLinear, Init, Pad, sum_of_overlaps

Corner = Literal["learned", "zero"]


class LearnedOperatorLinear(GeneratorLinear):
    """M = Σ_i K(A, g_i) K(B, h_i)ᵀ, with p = min(m, n) columns in the Krylov matrices K(A, v) = [v, Av, A²v, ...].

    Formula (2) of the paper has Bᵀ where B is here. With B subdiagonal formula (2) spans the Hankel-like matrices; with Bᵀ
    subdiagonal, as here and in the authors' code, it contains the Toeplitz-like ones. They differ by the order of the
    outputs.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.
        corner: ``"learned"``: the corners of A and B are parameters, zero at the start; ``"zero"``: there are none, as it
            was in the authors' code, which never trained them.

    Raises:
        ValueError: as there, or ``corner`` is unknown.
    """

    subdiagonal_a: nn.Parameter
    subdiagonal_b: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        bias: bool = True,
        *,
        corner: Corner = "learned",
        init: Init = "variance",
        pad: Pad | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if corner not in get_args(Corner):
            raise ValueError(f"corner must be one of {', '.join(map(repr, get_args(Corner)))}, but is {corner!r}")
        self._corner: Corner = corner
        super().__init__(in_features, out_features, rank, bias, init=init, pad=pad, device=device, dtype=dtype)

    @property
    def corner(self) -> Corner:
        """``"learned"`` or ``"zero"``."""
        return self._corner

    @property
    @abstractmethod
    def operators(self) -> tuple[DisplacementOperator, DisplacementOperator]:
        """A (m x m) and B (n x n), as functions of the parameters."""

    def operator_entries(self) -> tuple[Tensor, Tensor]:
        """All that A learns, and all that B learns, flat."""
        entries = {name: weight.flatten() for name, weight in self._weights().items() if name not in ("G", "H")}
        a, b = (torch.cat([weight for name, weight in entries.items() if name.endswith(end)]) for end in ("_a", "_b"))
        return a, b

    def reset_parameters(self) -> None:
        """Draw G and H; A and B become Z_0, ones on the subdiagonal; the bias becomes zero."""
        super().reset_parameters()
        with torch.no_grad():
            for name in self.weight_names[2:]:
                if getattr(self, name) is not None:
                    getattr(self, name).fill_(1.0 if name.startswith("subdiagonal") else 0.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, corner={self.corner!r}"

    def _sum_of_squares(self) -> float:
        return sum_of_overlaps(self.out_features, self.in_features)

    def _square_to_dense(self) -> Tensor:
        a, b = self.operators
        return ldr_to_dense(a, b.T, self.G, self.H)

    def _square_multiply(self, x: Tensor) -> Tensor:
        a, b = self.operators
        return ldr_matmul(a, b.T, self.G, self.H, x)

    def _start_near(self, weight: Tensor) -> None:
        target = self._squared(weight)
        corners = [(0.0, 0.0), (1.0, -1.0)] if self.corner == "learned" else [(0.0, 0.0)]
        errors = [self._start_with_corners(target, *pair) for pair in corners]
        self._start_with_corners(target, *corners[errors.index(min(errors))])

    def _start_with_corners(self, target: Tensor, corner_a: float, corner_b: float) -> float:
        """The relative error of the start with A = Z_corner_a and B = Z_corner_b."""
        a, b = (
            SubdiagonalOperator(target.new_ones(size - 1), target.new_tensor(corner))
            for size, corner in zip(target.shape, (corner_a, corner_b), strict=True)
        )
        self._set_corners(corner_a, corner_b)
        self._set_generators(stein_residual(target, a, b))
        return relative_error(self._square_to_dense(), target)

    @abstractmethod
    def _set_corners(self, corner_a: float, corner_b: float) -> None:
        """Of operators without any other learned entry than those of a shift."""


class LDRSubdiagonal(LearnedOperatorLinear):
    """LDR-SD: A and B are subdiagonal with a corner. (m + n)(r + 1) parameters: 2n(r + 1) if square.

    Args:
        in_features, out_features, rank, bias, corner, init, pad, device, dtype: see :class:`LearnedOperatorLinear`.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G", "H", "subdiagonal_a", "corner_a", "subdiagonal_b", "corner_b")

    corner_a: nn.Parameter | None
    corner_b: nn.Parameter | None

    @property
    def operators(self) -> tuple[SubdiagonalOperator, SubdiagonalOperator]:
        zero = self.G.new_zeros(())
        return (
            SubdiagonalOperator(self.subdiagonal_a, zero if self.corner_a is None else self.corner_a),
            SubdiagonalOperator(self.subdiagonal_b, zero if self.corner_b is None else self.corner_b),
        )

    def _add_operators(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        for name, size in (("a", self.rows), ("b", self.columns)):
            self.register_parameter(
                f"subdiagonal_{name}", nn.Parameter(torch.empty(size - 1, device=device, dtype=dtype))
            )
            corner = nn.Parameter(torch.empty((), device=device, dtype=dtype)) if self.corner == "learned" else None
            self.register_parameter(f"corner_{name}", corner)

    def _set_corners(self, corner_a: float, corner_b: float) -> None:
        if self.corner_a is not None and self.corner_b is not None:
            self.corner_a.fill_(corner_a)
            self.corner_b.fill_(corner_b)


class LDRTridiagonal(LearnedOperatorLinear):
    """LDR-TD: A and B are tridiagonal with two corners. (m + n)(r + 3) parameters: 2n(r + 3) if square.

    It contains all other classes of low displacement rank (Proposition 2). Powers of an operator whose norm is above 1
    grow: at large sizes and learning rates they overflow, as in the paper's own form.

    Args:
        in_features, out_features, rank, bias, corner, init, pad, device, dtype: see :class:`LearnedOperatorLinear`.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G", "H") + tuple(
        f"{entries}_{name}"
        for name in ("a", "b")
        for entries in ("subdiagonal", "diagonal", "superdiagonal", "corners")
    )

    diagonal_a: nn.Parameter
    diagonal_b: nn.Parameter
    superdiagonal_a: nn.Parameter
    superdiagonal_b: nn.Parameter
    corners_a: nn.Parameter | None
    corners_b: nn.Parameter | None

    @property
    def operators(self) -> tuple[TridiagonalOperator, TridiagonalOperator]:
        zeros = self.G.new_zeros(2)
        return (
            TridiagonalOperator(
                self.subdiagonal_a,
                self.diagonal_a,
                self.superdiagonal_a,
                zeros if self.corners_a is None else self.corners_a,
            ),
            TridiagonalOperator(
                self.subdiagonal_b,
                self.diagonal_b,
                self.superdiagonal_b,
                zeros if self.corners_b is None else self.corners_b,
            ),
        )

    def _add_operators(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        for name, size in (("a", self.rows), ("b", self.columns)):
            lengths = {"subdiagonal": size - 1, "diagonal": size, "superdiagonal": size - 1, "corners": 2}
            for entries, length in lengths.items():
                absent = entries == "corners" and self.corner == "zero"
                parameter = None if absent else nn.Parameter(torch.empty(length, device=device, dtype=dtype))
                self.register_parameter(f"{entries}_{name}", parameter)

    def _set_corners(self, corner_a: float, corner_b: float) -> None:
        if self.corners_a is not None and self.corners_b is not None:
            self.corners_a[0] = corner_a
            self.corners_b[0] = corner_b
