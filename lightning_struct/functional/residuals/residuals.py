"""Residuals of a module in blocks, and f = Σ_b w_b ½ mean_i r²_{b,i} of them: nonlinear least squares."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from lightning_struct.functional.checks import check_dense, checked

ONLY_BLOCK = "residual"


@checked
@dataclass(frozen=True)
class LeastSquares:
    """f = Σ_b w_b ½ mean_i r²_{b,i} of the residuals r that the module itself returns, in blocks b.

    A block is a tensor (n_b, ...) under a name: the residuals of a differential equation in the interior, of its
    boundary values, of measurements. n_b may differ from block to block. Of a block (n_b, k) the squares are summed
    over k and averaged over n_b. A tensor () is a block of one row, as of what is known about a parameter. A module
    that returns one tensor has one block, ``"residual"``.

    Args:
        weights: w_b > 0 by the name of the block, for all blocks. If not given, they are 1; beside a block of that name
            ``equation`` those of all others, its conditions, rise while they hold most of the loss and do not fall
            (:class:`~lightning_struct.functional.residuals.penalties.Penalties`).
        equation: name of the block in which an equation holds, whose conditions the others are.

    Raises:
        TypeError: weights that are no mapping of names to numbers, or a name that is no string.
        ValueError: a weight that is not finite and positive.

    Example:
        >>> LeastSquares({"interior": 1.0, "boundary": 10.0}).weights_of(["boundary", "interior"])
        {'boundary': 10.0, 'interior': 1.0}
    """

    weights: Mapping[str, float] | None = None
    equation: str = "interior"

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping | None):
            example = "LeastSquares({'interior': 1.0, 'boundary': 10.0})"
            raise TypeError(f"LeastSquares takes weights by the name of the block, as {example}, got {self.weights!r}")
        for name, weight in (self.weights or {}).items():
            if not (isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.numel() == 1)):
                remedy = "To weight rows, multiply the residuals by the roots of the weights in the module"
                got = type(weight).__name__
                raise TypeError(f"the weight of block {name!r} must be one number, got {got}. {remedy}")
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of block {name!r} must be finite and > 0, got {weight}")

    def weights_of(self, blocks: Collection[str]) -> dict[str, float]:
        """w_b of the blocks that the module returned, in their order.

        Raises:
            ValueError: a block without a weight, or a weight without a block; it is named.
        """
        if self.weights is None:
            return dict.fromkeys(blocks, 1.0)
        if missing := [name for name in blocks if name not in self.weights]:
            returned = f"the module returned {_listed(missing)} that LeastSquares(weights=...) has no weight for"
            raise ValueError(f"{returned}; it has weights for {_names(self.weights)}")
        if unknown := [name for name in self.weights if name not in blocks]:
            weights = f"LeastSquares has a weight for {_listed(unknown)} that the module did not return"
            raise ValueError(f"{weights}; it returned {_names(blocks)}")
        return {name: float(self.weights[name]) for name in blocks}


def residual_blocks(returned: Any) -> dict[str, Tensor]:
    """Blocks (n_b, ...) by name that a module returned; a tensor is the block ``"residual"``.

    Raises:
        TypeError: neither a tensor nor a mapping of names to tensors of floating-point numbers; a loss.
    """
    if isinstance(returned, Tensor):
        if returned.ndim == 0:
            remedy = "leave out the sum or average of their squares. If there is only one, return it in the shape (1,)"
            expected = "its residuals, one for each point or measurement"
            raise TypeError(
                f"with loss='least_squares' the module returns {expected}. It returned a single number: {remedy}"
            )
        returned = {ONLY_BLOCK: returned}
    if not isinstance(returned, Mapping) or not returned:
        got = "an empty mapping" if isinstance(returned, Mapping) else type(returned).__name__
        expected = "its residuals: a tensor, or a mapping of names to tensors"
        raise TypeError(f"with loss='least_squares' the module returns {expected}. It returned {got}")
    for name, block in returned.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of blocks of residuals are strings, such as 'interior'; got {name!r}")
        if not (isinstance(block, Tensor) and block.is_floating_point()):
            got = f"a tensor of {block.dtype}" if isinstance(block, Tensor) else type(block).__name__
            if isinstance(block, Tensor) and block.is_complex():
                got += ". Return real and imaginary parts: torch.view_as_real(residuals)"
            raise TypeError(f"block {name!r} of the residuals must be a tensor of floating-point numbers, got {got}")
        check_dense(f"block {name!r} of the residuals", block)
    return {name: block if block.ndim > 0 else block[None] for name, block in returned.items()}


def _names(blocks: Collection[str]) -> str:
    return ", ".join(map(repr, blocks))


def _listed(names: Collection[str]) -> str:
    return f"the block{'s' if len(names) > 1 else ''} {_names(names)}"
