"""The classes with learned displacement operators: LDR-SD and LDR-TD (Thomas et al., section 3)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import checked
from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.functional.structured.cost_model import LARGEST_PREPARED_MATRIX, prepared_matrix_is_faster
from lightning_struct.functional.structured.operators import (
    DisplacementOperator,
    SubdiagonalOperator,
    TridiagonalOperator,
)
from lightning_struct.functional.structured.prepared import PreparedMatrix
from lightning_struct.functional.structured.subdiagonal import (
    choose_subdiagonal_method,
    prepare_subdiagonal,
    subdiagonal_product,
    subdiagonal_to_dense,
)
from lightning_struct.functional.structured.tridiagonal import tridiagonal_matmul, tridiagonal_to_dense
from lightning_struct.nn.approximation import (
    BalancedCoordinates,
    fit_subdiagonals,
    leading_factors,
    log_range,
    refine_,
    relative_error,
    stein_residual,
)
from lightning_struct.nn.classic import GeneratorLinear, Init, Pad, sum_of_overlaps
from lightning_struct.nn.structured import Device, Dtype

_SWEEPS = 40  # of the least-squares fits from which the search for operators starts
_LARGEST_SEARCHED = 1024**2  # entries of a matrix above which there are a quarter as many, from the better shifts alone
Corner = Literal["learned", "zero"]
_CORNERS = {"corner": 1, "corners": 2}  # how many an operator has, by the name of its parameter


class _Start(NamedTuple):
    """A start of the search for an LDR matrix, and its relative error there."""

    error: float
    a: SubdiagonalOperator
    b: SubdiagonalOperator
    G: Tensor
    H: Tensor


class LearnedOperatorLinear(GeneratorLinear):
    """A layer with M = Σ_i K(A, g_i) K(B, h_i)ᵀ and learned operators A and B: Thomas et al., section 3, equation (2).

    The Krylov matrices K(A, v) = [v, Av, A²v, ...] have p = min(m, n) columns. Equation (2) has Bᵀ where B is here.
    With B subdiagonal, equation (2) spans the Hankel-like matrices; with Bᵀ subdiagonal, as here and in the authors'
    code, it contains the Toeplitz-like ones. They differ by the order of the inputs.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.
        corner: ``"learned"``: the corners of A and B are parameters, zero at the start; ``"zero"``: there are none, as
            it was in the authors' code, which never trained them.

    Raises:
        ValueError: as there, or ``corner`` is unknown.
    """

    _gain_of_rest: ClassVar[float] = 1.06
    corner_name: ClassVar[str]
    """The name of the parameters of corners, ``"corner"`` if an operator has one, ``"corners"`` if it has two."""

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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        require_one_of("corner", corner, get_args(Corner))
        self.corner: Corner = corner
        super().__init__(in_features, out_features, rank, bias, init=init, pad=pad, device=device, dtype=dtype)

    @property
    def operators(self) -> tuple[DisplacementOperator, DisplacementOperator]:
        """The operators A (m x m) and B (n x n), as functions of the parameters."""
        raise NotImplementedError

    def _entries(self, side: str) -> list[Tensor]:
        """The entries of an operator, "a" or "b", in the order of ``weight_names``; zeros for corners that are not."""
        entries = [getattr(self, name) for name in self.weight_names if name.endswith(f"_{side}")]
        return [self.G.new_zeros(_CORNERS[self.corner_name]) if part is None else part for part in entries]

    def log_ranges(self) -> tuple[Tensor, Tensor]:
        """The detrended log-ranges of A and B, () each.

        That is max - min of log|P| less its trend, with P the cumulative products of the subdiagonal. By e to its power
        the method ``"scaled"`` loses digits. It is infinite if an entry is zero.
        """
        a, b = (log_range(subdiagonal.detach()) for subdiagonal in (self.subdiagonal_a, self.subdiagonal_b))
        return a, b

    def operator_entries(self) -> tuple[Tensor, Tensor]:
        """The learned entries of A, and those of B, flat."""
        entries = {name: weight.flatten() for name, weight in self._weights().items() if name not in ("G", "H")}
        a, b = (torch.cat([weight for name, weight in entries.items() if name.endswith(end)]) for end in ("_a", "_b"))
        return a, b

    def _draw_weights(self) -> None:
        """Draw G and H; A and B become Z_0, ones on the subdiagonal."""
        super()._draw_weights()
        for name, entries in self._weights().items():
            if name not in ("G", "H"):
                entries.fill_(1.0 if name.startswith("subdiagonal") else 0.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, corner={self.corner!r}"

    def _add_operators(self, device: Device, dtype: Dtype) -> None:
        for name in self.weight_names[2:]:
            entries, _, side = name.rpartition("_")
            size = self.rows if side == "a" else self.columns
            length = {**_CORNERS, "diagonal": size}.get(entries, size - 1)
            is_absent = entries == self.corner_name and self.corner == "zero"
            parameter = None if is_absent else nn.Parameter(torch.empty(length, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

    def _sum_of_squares(self) -> float:
        return sum_of_overlaps(self.out_features, self.in_features)

    def _start_near(self, weight: Tensor) -> None:
        """Start at shifts, or at operators that are fitted to W from there, with the least error."""
        target, shifts = self._squared(weight), []
        for corners in [(0.0, 0.0), (1.0, -1.0)] if self.corner == "learned" else [(0.0, 0.0)]:
            a, b = (
                SubdiagonalOperator(target.new_ones(size - 1), target.new_tensor(corner))
                for size, corner in zip(target.shape, corners, strict=True)
            )
            shifts.append(self._start(target, a, b))
        shifts.sort(key=lambda start: start.error)
        large = target.numel() > _LARGEST_SEARCHED
        sweeps = _SWEEPS // 4 if large else _SWEEPS
        fitted = [
            self._start(target, *fit_subdiagonals(target, self.rank, shift.a, shift.b, sweeps))
            for shift in (shifts[:1] if large else shifts)
        ]
        self._set(min([*shifts, *fitted], key=lambda start: start.error))

    def _start(self, target: Tensor, a: SubdiagonalOperator, b: SubdiagonalOperator) -> _Start:
        """The start with these operators; its error is infinite where their powers overflow."""
        residual = stein_residual(target, a, b)
        if not bool(residual.isfinite().all()):  # the corners are such that equation (2) has no solution
            return _Start(math.inf, a, b, torch.zeros_like(self.G), torch.zeros_like(self.H))
        start = _Start(math.inf, a, b, *leading_factors(residual, self.rank))
        self._set(start)
        error = relative_error(self._square_to_dense(), target)
        return start._replace(error=error) if math.isfinite(error) else start

    def _set(self, start: _Start) -> None:
        for side, operator, generators, near in (("a", start.a, self.G, start.G), ("b", start.b, self.H, start.H)):
            getattr(self, f"subdiagonal_{side}").copy_(operator.subdiagonal)
            corners = getattr(self, f"{self.corner_name}_{side}")
            if corners is not None:
                corners[0] = operator.corner
            generators.copy_(near)

    def _refine(self, weight: Tensor, iterations: int) -> None:
        if not BalancedCoordinates.are_exact_for(self):
            return super()._refine(weight, iterations)
        coordinates = BalancedCoordinates(self)
        refine_(coordinates.variables, coordinates.to_dense, weight, iterations)
        coordinates.write_back()


@checked
class LDRSubdiagonal(LearnedOperatorLinear):
    """The LDR-SD layer: A and B are subdiagonal with a corner. (m + n)(r + 1) parameters: 2n(r + 1) if square.

    Thomas et al., section 3: M is equation (2) with the operators of Figure 2 (center), and Bᵀ for B.

    Products are computed by ``"scaled"``, one level of Fourier transforms, if that is exact enough for the entries of
    the operators, in float64 if need be, and else by ``"tree"``. The choice looks at the entries in each product, for
    which the host waits for the device. If they cannot be read, as when ``vmap`` maps over layers, it is ``"tree"``.

    Args:
        in_features, out_features, rank, bias, corner, init, pad, device, dtype: see :class:`LearnedOperatorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = LDRSubdiagonal(784, 784, rank=1, bias=False)
        >>> layer(torch.randn(8, 784)).shape, layer.weight_parameters, layer.method_in_use
        (torch.Size([8, 784]), 3136, 'scaled')
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G", "H", "subdiagonal_a", "corner_a", "subdiagonal_b", "corner_b")
    corner_name = "corner"

    @property
    def method_in_use(self) -> str:
        """The method of products with the operators as they are; in eval mode a dense matrix may be prepared."""
        return choose_subdiagonal_method(*self._all_weights()[:4])

    @property
    def operators(self) -> tuple[SubdiagonalOperator, SubdiagonalOperator]:
        (a, corner_a), (b, corner_b) = self._entries("a"), self._entries("b")
        return SubdiagonalOperator(a, corner_a.squeeze(0)), SubdiagonalOperator(b, corner_b.squeeze(0))

    def _all_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        (a, corner_a), (b, corner_b) = self._entries("a"), self._entries("b")
        return a, corner_a.squeeze(0), b, corner_b.squeeze(0), *self._generators()

    def _square_to_dense(self) -> Tensor:
        return subdiagonal_to_dense(*self._all_weights())

    def _square_multiply(self, x: Tensor) -> Tensor:
        return subdiagonal_product(*self._all_weights(), x, method="auto")

    def _prepares_dense(self, rows: int) -> bool:
        if self.method_in_use == "tree":
            return self.rows * self.columns <= LARGEST_PREPARED_MATRIX
        return prepared_matrix_is_faster(self.rows, self.columns, 2 + 2 * self.rank, rows)

    def _prepare_factors(self) -> PreparedMatrix:
        return self._part(prepare_subdiagonal(*self._all_weights()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict.pop(prefix + "choice", None)  # up to version 0.3 the layer remembered its methods
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@checked
class LDRTridiagonal(LearnedOperatorLinear):
    """The LDR-TD layer: A and B are tridiagonal with two corners. (m + n)(r + 3) parameters: 2n(r + 3) if square.

    Thomas et al., section 3: M is equation (2) with the operators of Figure 2 (right), and Bᵀ for B. With respect to
    such operators, the matrices of all other classes of low displacement rank have low rank, too (Proposition 2); but
    equation (2) covers only a part of the matrices that do (Proposition 3). Powers of an operator whose norm is above 1
    grow: at large sizes and learning rates they overflow, as in the paper's equation.

    Args:
        in_features, out_features, rank, bias, corner, init, pad, device, dtype: see :class:`LearnedOperatorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = LDRTridiagonal(32, 16, rank=2)
        >>> layer(torch.randn(8, 32)).shape, layer.weight_parameters
        (torch.Size([8, 16]), 240)
    """

    corner_name = "corners"
    weight_names: ClassVar[tuple[str, ...]] = (
        *("G", "H", "subdiagonal_a", "diagonal_a", "superdiagonal_a", "corners_a"),
        *("subdiagonal_b", "diagonal_b", "superdiagonal_b", "corners_b"),
    )

    @property
    def operators(self) -> tuple[TridiagonalOperator, TridiagonalOperator]:
        return TridiagonalOperator(*self._entries("a")), TridiagonalOperator(*self._entries("b"))

    def _square_to_dense(self) -> Tensor:
        return tridiagonal_to_dense(*self.operators, *self._generators())

    def _square_multiply(self, x: Tensor) -> Tensor:
        return tridiagonal_matmul(*self.operators, *self._generators(), x)

    def _refinement(self) -> int:
        # An evaluation multiplies Krylov matrices: O(m n min(m, n)).
        return super()._refinement() * 512**2 // max(512, self.in_features, self.out_features) ** 2
