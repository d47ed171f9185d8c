"""Layers and weights with a structured update beside them, which :func:`~lightning_struct.nn.add_adapters` makes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_struct.functional.checks import check_dense, checked, is_real
from lightning_struct.functional.layers.registry import kind_of
from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.nn.channels import CONVOLUTIONS, as_filters, has_filters, is_pointwise, linear_of, of_patches
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.torch_modules import is_traced, whole_call

if TYPE_CHECKING:
    from typing_extensions import Self

_PROBES = 16
Sides = Literal["none", "outputs", "both"]


class StructuredUpdate(nn.Module):
    """The map x → s D M D' x, zero at the start: a structured matrix M, diagonal matrices D and D', and a scale s.

    Of the factors of M the first one starts at zero and the others as they were drawn, so that gradients flow.

    D and D' are signs, two Rudin-Shapiro sequences, or start there. Most structured matrices weigh the frequencies of
    their inputs, and those of images and of hidden layers have most of their power in the mean, which leaves all other
    directions to be learned slowly. Signs spread it evenly. The LDR matrices with and without them are the same class:
    D A D is subdiagonal or tridiagonal if A is. A Toeplitz-like M between learned D and D' is an LDR-SD matrix, whose
    operators are D Z D⁻¹: all of that class whose subdiagonals have no zero.

    Args:
        adapter: M, without a bias.
        scale: s. None: such that s M moves with the first factor of M as a dense weight moves with its entries, on
            average over directions.
        learned_diagonals: sides whose diagonals are parameters: ``"none"``, ``"outputs"`` (D) or ``"both"``.

    Attributes:
        scale: s, (), a buffer.
        input_diagonal, output_diagonal: (n,) and (m,), parameters or buffers of signs.
        name: of the adapter that it belongs to, see :func:`add_adapters`.
        dropout: probability with which :class:`AdaptedLinear` sets an input to zero in training.
        is_enabled: whether it is added.

    Raises:
        TypeError: the adapter is no :class:`~lightning_struct.nn.StructuredLinear`.
        ValueError: the adapter has a bias, ``scale`` is 0 or not finite, or ``learned_diagonals`` is unknown.
    """

    scale: Tensor
    input_diagonal: Tensor
    output_diagonal: Tensor

    @checked
    def __init__(
        self, adapter: StructuredLinear, scale: float | None = None, learned_diagonals: Sides = "none"
    ) -> None:
        super().__init__()
        if adapter.bias is not None:
            raise ValueError("an adapter has no bias: make it with bias=False; train= has the model's biases trained")
        check_options(scale, learned_diagonals)
        self.adapter = adapter
        self.given_scale, self.learned_diagonals = scale, learned_diagonals
        self.name, self.dropout, self.is_enabled = "default", 0.0, True
        reference = adapter._reference
        self.register_buffer("scale", torch.empty((), device=reference.device, dtype=reference.dtype))
        for name, size, learned in (
            ("input_diagonal", adapter.in_features, learned_diagonals == "both"),
            ("output_diagonal", adapter.out_features, learned_diagonals != "none"),
        ):
            if learned:
                diagonal = torch.empty(size, device=reference.device, dtype=reference.dtype)
                self.register_parameter(name, nn.Parameter(diagonal))
            else:  # not in the state_dict, as they are always the same
                signs = torch.empty(size, device=reference.device, dtype=torch.int8)
                self.register_buffer(name, signs, persistent=False)
        if not reference.is_meta:
            self._start()

    def reset_parameters(self) -> None:
        """Draw new factors of M, the first one zero: after ``to_empty``, if it was made without values."""
        self.adapter.gain = 1.0
        self.adapter.reset_parameters()
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Set all that is not drawn, for factors of M that are."""
        if self.given_scale is None:
            self.scale.copy_(_unit_scale(self.adapter))
        else:
            self.scale.fill_(self.given_scale)
        self._set_diagonals(learned=True)
        self.adapter.gain = 0.0  # wherever it is drawn anew, it starts at zero again
        self.adapter.scale_(0.0)

    @torch.no_grad()
    def _set_diagonals(self, learned: bool = False) -> None:
        """Set the signs, which no ``state_dict`` has, and the ``learned`` diagonals, if the scale has a value."""
        if self.scale.is_meta:
            return
        for name in ("input_diagonal", "output_diagonal"):
            diagonal = getattr(self, name)
            if name in self._buffers:
                setattr(self, name, rudin_shapiro_signs(len(diagonal)).to(self.scale.device))
            elif learned:
                diagonal.copy_(rudin_shapiro_signs(len(diagonal)))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        had_no_values = self.scale.is_meta
        super()._apply(fn, recurse)
        if had_no_values:
            self._set_diagonals()
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        had_no_values = self.scale.is_meta
        super()._load_from_state_dict(*args, **options)
        if had_no_values:
            self._set_diagonals()

    def forward(self, x: Tensor) -> Tensor:
        """(..., out_features), in the dtype of x (under autocast in its dtype), for x (..., in_features)."""
        y = self.adapter((x * self.input_diagonal).to(self.scale.dtype))
        return (self.scale * self.output_diagonal * y).to(x.dtype)

    def to_dense(self) -> Tensor:
        """The matrix (out_features, in_features), with gradients to the parameters of M."""
        return (self.scale * self.output_diagonal)[:, None] * (self.adapter.to_dense() * self.input_diagonal)


class AdaptedLinear(nn.Module):
    """y = W x + b + Δ x: an affine layer, unchanged, and a structured update Δ, which is trained.

    :func:`add_adapters` puts such layers into a model, and :func:`merge_adapters` removes them.

    Args:
        base: an ``nn.Linear``, or another layer that is declared to be affine, such as transformers'
            ``Conv1D``; a convolution, whose matrix maps patches to channels (a transposed one: channels to patches); or
            an ``nn.Embedding``, as a matrix for indices with a one at their place.
        adapter: a structured layer of the same sizes as ``base``, without a bias; its first factor is set to zero.
        scale: see :class:`StructuredUpdate`.
        dropout: probability with which an input of Δ is set to zero in training; not of patches and indices.
        learned_diagonals: see :class:`StructuredUpdate`.

    Raises:
        TypeError, ValueError: as :class:`StructuredUpdate`; or the sizes differ, or ``dropout`` is not a probability
            below 1.

    Example:
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> base = nn.Linear(64, 32)
        >>> layer = AdaptedLinear(base, LDRSubdiagonal(64, 32, bias=False))
        >>> x = torch.randn(5, 64)
        >>> torch.equal(layer(x), base(x))
        True
    """

    @checked
    def __init__(
        self,
        base: nn.Module,
        adapter: StructuredLinear,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        learned_diagonals: Sides = "none",
    ) -> None:
        super().__init__()
        check_options(scale, learned_diagonals, dropout)
        update = StructuredUpdate(adapter, scale, learned_diagonals)
        linear = linear_of(base)
        if (linear.in_features, linear.out_features) != (adapter.in_features, adapter.out_features):
            raise ValueError(f"{adapter} has not the sizes of {base}")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.base = base
        update.dropout = 0.0 if has_filters(base) and not is_pointwise(base) else dropout
        self.update = update

    @property
    def updates(self) -> list[StructuredUpdate]:
        """The updates of all adapters of the layer, in the order in which they were added."""
        return [module for module in self.children() if isinstance(module, StructuredUpdate)]

    def remove_update(self, name: str) -> None:
        """Remove the update of an adapter; the first of the others is ``update`` then, as if it were the only one."""
        others = [update for update in self.updates if update.name != name]
        for attribute in [attribute for attribute, module in self.named_children() if module is not self.base]:
            delattr(self, attribute)
        for index, update in enumerate(others):
            setattr(self, f"update_{update.name}" if index else "update", update)

    @property
    def active(self) -> StructuredUpdate | None:
        """The update that is added; None if there is none at present."""
        return next((update for update in self.updates if update.is_enabled), None)

    @property
    def weight(self) -> Tensor:
        """W + Δ, computed at each access: for code that reads the weight of a layer.

        (out_features, in_features); of a convolution and of an embedding in the form that it has there.
        """
        base: Any = self.base
        weight = base.weight if has_filters(base) else linear_of(base).weight
        if (update := self.active) is not None:
            delta = update.to_dense()
            weight = updated(weight, as_filters(base, delta) if has_filters(base) else delta)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the base, if there is one; as a tensor, since the parameter is one of the base alone."""
        bias = linear_of(self.base).bias
        return None if bias is None else bias.view_as(bias)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A ``weight`` that is set, as to tie it to an embedding's, and a ``bias`` are those of the base.

        Raises:
            ValueError: the base has none that is stored alike.
        """
        if name not in ("weight", "bias", "weight_orig"):  # the last one is made by torch.nn.utils.prune
            super().register_parameter(name, param)
            return
        now, kind = self.base._parameters.get(name), kind_of(self.base)
        is_transposed = kind is not None and any(matrix.transposed for matrix in kind.matrices(self.base))
        if param is None or now is None or now.shape != param.shape or is_transposed:
            given = "None" if param is None else f"a parameter {tuple(param.shape)}"
            raise ValueError(
                f"{name!r} of the adapted layer {self.base} cannot be {given}: only one of the same form can be set, "
                "or tied to another module's. Leave it out by exclude=..., or do that before, or to its base"
            )
        setattr(self.base, name, param)

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        """(..., out_features) for an input (..., in_features); of images and indices, and further ones, as the base."""
        update = self.active
        if update is None:
            return self.base(input, *args)
        if is_traced(input):
            return whole_call(self, input, *args)
        check_dense("input", input, has_numbers=not update.scale.is_meta)
        base: Any = self.base
        if self._makes_weight(update, input):
            return functional_call(base, {"weight": self.weight}, (input, *args))
        y = base(input, *args)
        x = F.dropout(input, update.dropout, self.training)
        return y + (of_patches(update, x, base) if has_filters(base) else update(x)).to(y.dtype)

    def _makes_weight(self, update: StructuredUpdate, x: Tensor) -> bool:
        """Whether to multiply by W + Δ: in training, one product for two, if Δ is made for its own in any case."""
        base: Any = self.base
        has_rows = not torch.compiler.is_compiling() and not torch.jit.is_tracing()
        if has_filters(base) and not is_pointwise(base):
            may_be_few = has_rows and type(base) in CONVOLUTIONS and base.groups == 1 and not base._forward_hooks
            shorter = min(self.in_features, self.out_features)
            return not may_be_few or 2 * x.numel() >= shorter * base.in_channels * prod(base.stride)
        is_plain = (type(base) is nn.Linear or has_filters(base)) and type(base.weight) is nn.Parameter
        if not (is_plain and self.training and torch.is_grad_enabled()) or update.dropout or base._forward_hooks:
            return False
        # In half precision, with autocast too, a sum would lose small updates. Compilers do not ask for rows.
        is_exact = base.weight.dtype == x.dtype == update.scale.dtype and not torch.is_autocast_enabled(x.device.type)
        return is_exact and has_rows and update.adapter._makes_matrix(x.numel() // self.in_features)

    def extra_repr(self) -> str:
        return f"dropout={self.update.dropout}" if self.update.dropout else ""


class UpdatedWeight(nn.Module):
    """The parametrization W → W + Δ of a weight that no module is called with, as those of ``nn.MultiheadAttention``.

    Args:
        updates: of blocks of rows of W, by the first row of each; the other rows stay. Those of a second adapter for
            the same rows have its name behind the row: "8_name".
    """

    def __init__(self, updates: Mapping[str, StructuredUpdate]) -> None:
        super().__init__()
        self.updates = nn.ModuleDict(updates)

    def add(self, others: UpdatedWeight) -> None:
        """Take in the updates of other rows or of another adapter."""
        both = {**self.updates, **others.updates}
        self.updates = nn.ModuleDict({key: both[key] for key in sorted(both, key=_row_of)})

    def remove_updates(self, name: str) -> None:
        """Remove the updates of an adapter."""
        self.updates = nn.ModuleDict({key: update for key, update in self.updates.items() if update.name != name})

    def of_row(self, row: int) -> list[StructuredUpdate]:
        """The updates of the block of rows that begins there."""
        return [update for key, update in self.updates.items() if _row_of(key) == row]  # type: ignore[misc]

    def forward(self, weight: Tensor) -> Tensor:
        """W + Δ, (rows, columns), for W."""
        blocks = []
        end = 0
        for key, update in self.updates.items():
            assert isinstance(update, StructuredUpdate)
            if not update.is_enabled:
                continue
            delta = update.to_dense()
            start = _row_of(key)
            blocks += [weight[end:start], updated(weight[start : start + len(delta)], delta)]
            end = start + len(delta)
        return torch.cat([*blocks, weight[end:]])


def _row_of(key: str) -> int:
    return int(key.partition("_")[0])


def check_options(scale: float | None, learned_diagonals: Sides, dropout: float = 0.0) -> None:
    """Refuse options of :class:`AdaptedLinear` that no layer can have.

    Raises:
        ValueError: one is out of range.
    """
    if scale is not None and (not is_real(scale) or scale == 0):
        raise ValueError(f"scale must be finite and not 0, with which nothing is trained, but is {scale!r}")
    require_one_of("learned_diagonals", learned_diagonals, get_args(Sides))
    if not is_real(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, but is {dropout!r}")


def rudin_shapiro_signs(size: int) -> Tensor:
    """The first entries of the Rudin-Shapiro sequence, (size,), int8: -1 to the number of pairs of ones in the index.

    Its power is spread evenly over the frequencies.

    Example:
        >>> rudin_shapiro_signs(8).tolist()
        [1, 1, 1, -1, 1, 1, -1, 1]
    """
    return torch.tensor([(-1) ** (index & index >> 1).bit_count() for index in range(size)], dtype=torch.int8)


def _unit_scale(adapter: StructuredLinear) -> Tensor:
    """‖θ‖ / ‖M‖, by E‖M x‖² = ‖M‖²: M is linear in its first factor θ, so a step of s M is as long as that of θ."""
    factor = adapter._reference
    x = torch.randn(_PROBES, adapter.in_features, device=factor.device, dtype=factor.dtype)
    return factor.norm() / adapter._multiply(x).square().sum(-1).mean().sqrt()


def updated(weight: Tensor, update: Tensor) -> Tensor:
    """W + Δ in the dtype of W, added in that of Δ."""
    return (weight.to(update.dtype) + update).to(weight.dtype)
