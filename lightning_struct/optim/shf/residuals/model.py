"""The least-squares problem of one batch of a module that returns residuals, over all its processes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_struct.collective import all_gather_rows, all_reduce, gather_numbers, rank, world_size
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.jacobian.gauss_newton import linearize
from lightning_struct.functional.jacobian.linearization import Linearization
from lightning_struct.functional.randomness import RandomState, random_state, restored_random_state
from lightning_struct.functional.residuals.jacobians import (
    DenseJacobian,
    Jacobian,
    JacobianForm,
    jacobian_form,
    matrix_form,
)
from lightning_struct.functional.residuals.residual_rows import BatchResiduals, RowRecords
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.torch_tools import joined, norms_of_each, tree_leaves
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.samples import (
    FlatWeights,
    any_not_finite,
    arguments,
    check_data,
    not_finite,
    refusal_of_batch,
)
from lightning_struct.optim.shf.step_state import BufferUpdates

# Parts of a batch whose gradients tell the variance, where J is not formed.
_PARTS = 8


class ResidualBatch:
    """f(w) = Σ_b w_b ½ mean_i r²_{b,i} = ½‖r(w)‖² of a batch, the rows of r scaled by √(w_b/n_b).

    Directions are flat vectors (all weights, one after another). The rows stay on their process.

    Args:
        records: of the module, whose weights and buffers are not changed.
        loss: the weights w_b.
        weights: name -> the trainable weights, detached.
        inputs: this process's share: a tuple of the module's arguments, or its one argument.
        counts: name -> rows n_b of the blocks of the step before; None in the first step.
        penalties: name -> w_b of conditions whose weights have risen.

    Attributes:
        weights: w.
        args: arguments of the module.
        counts: name -> rows n_b of the blocks over all processes.
        samples: their sum.
        rows: residuals over all processes: a sample may have several.
        block_losses: name -> ½ mean_i r²_{b,i}, without w_b.
        penalties: those that are in force, none beside weights that were given.
        value: f(w).
        plain_value: f(w) without penalties.
        residual: r(w), this process's rows, (N,).
        scale: √(w_b/n_b) of these rows.
        own_counts, sizes: rows and residuals of each block on this process.

    Raises:
        TypeError: the module did not return residuals.
        ValueError: on any process NaN or infinity in the inputs or in a block, an empty block, blocks of other names
            than before or than those that have weights, squares that are too large. The message names the block; all
            processes raise alike.
    """

    def __init__(
        self,
        records: RowRecords,
        loss: LeastSquares,
        weights: dict[str, Tensor],
        inputs: Any,
        *,
        counts: Mapping[str, int] | None = None,
        penalties: Mapping[str, float] | None = None,
    ) -> None:
        self.weights = FlatWeights(weights)
        self._dtype, self._device = self.weights.vector.dtype, self.weights.vector.device
        args = arguments(inputs)
        check_data(args, None)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        of_inputs = any_not_finite(tensors, self._device)[None]
        if self._device.type == "cpu":  # else they are looked at with the loss
            _refuse_not_finite(all_gather_rows(of_inputs).tolist(), ())
        self.args, self._repeated = args, _repeating(random_state(*tensors), self._device)
        self._batch = BatchResiduals(records, weights, args, self._repeated)
        blocks = self._batch.blocks
        _check_names(blocks, counts, self._device)
        self.penalties = {} if loss.weights else dict(penalties or {})
        shares = {**loss.weights_of(blocks), **self.penalties}
        before, counts = counts, _checked_counts(blocks, self._device)
        if counts == before:
            self._batch.record_whole()
        self.samples = sum(counts.values())
        self.counts, self.own_counts, self.sizes = counts, list(map(len, blocks.values())), self._batch.sizes
        self.scale = torch.cat(
            [
                block.new_full((block.numel(),), math.sqrt(shares[name] / counts[name]), dtype=self._dtype)
                for name, block in blocks.items()
            ]
        ).to(self._device)
        # In the dtype of the weights, as those of all other values of f: autocast and modules may round residuals.
        wide = {name: block.to(self._dtype) for name, block in blocks.items()}
        squares = [inner(block, block) for block in wide.values()]
        self.rows = sum(counts[name] * _row_size(block) for name, block in blocks.items())
        self.residual = self._scaled(joined([block.reshape(-1) for block in blocks.values()]))
        of_all = inner(self.residual, self.residual)  # as `squares_of` has it, to be compared with that
        of_blocks = not_finite(torch.stack(norms_of_each(list(blocks.values()), order=math.inf)))
        flags = all_gather_rows(torch.cat([of_inputs, of_blocks.to(self._device)]))
        losses = all_reduce(torch.stack([*squares, of_all]))
        numbers = torch.cat([flags.reshape(-1), losses]).tolist()  # one look at the device
        size = flags.shape[1]
        _refuse_not_finite([numbers[r * size :][:size] for r in range(len(flags))], blocks)
        *of_each, of_residual = numbers[flags.numel() :]
        self.value = 0.5 * of_residual
        block_losses = [0.5 * square / counts[name] for name, square in zip(blocks, of_each, strict=True)]
        self.block_losses = dict(zip(blocks, block_losses, strict=True))
        self.plain_value = sum(block_losses) if self.penalties else self.value
        if not math.isfinite(self.value):
            too_large = [name for name, value in self.block_losses.items() if not math.isfinite(value)]
            raise NotFinite(
                f"the squares of the residuals of {_listed(too_large or blocks)} are too large for {self._dtype}; the "
                "weights are unchanged. Divide the residuals by their usual size in the module"
            )

    def write_buffers(self, buffers: BufferUpdates) -> None:
        """Let a forward write into the buffers of the module."""
        with self._repeated(), torch.enable_grad():  # residuals may be derivatives in the inputs
            buffers.run(self.args)

    def residual_at(self, d: Tensor) -> Tensor:
        """r(w + d), this process's rows."""
        return self._scaled(self._batch.values(self.weights.unflat(self.weights.vector + d)))

    def squares_of(self, residual: Tensor) -> Tensor:
        """‖r‖² over all processes, (), float64."""
        return all_reduce(inner(residual, residual))

    def plain_value_of(self, residual: Tensor, value: float) -> float:
        """½‖r‖² without penalties, over all processes, of residuals with this ½‖r‖²."""
        if not self.penalties:
            return value
        parts = zip(self.block_losses, residual.split(self.sizes), strict=True)
        squares = [inner(part, part) / self.penalties.get(name, 1.0) for name, part in parts]
        return 0.5 * all_reduce(torch.stack(squares).sum()).item()

    @cached_property
    def form_for_gram(self) -> JacobianForm:
        """The form in which J Jᵀ or JᵀJ is cheapest: with outer products if N < P. The same on all processes."""
        if self._device.type == "mps" or self.rows >= len(self.weights.vector):  # mps has no float64
            return self._dense_form
        sizes = [self.counts[name] * _row_size(block) for name, block in self._batch.blocks.items()]
        form = self._form(sizes, for_gram=True) or self._dense_form
        described = f"{sorted(form.kept)} {self._batch.product_counts()}"
        return form if _is_the_same_everywhere(described, self._device) else self._dense_form

    @cached_property
    def form_for_products(self) -> JacobianForm | None:
        """The smallest form; None if J would take a backward pass for each row."""
        return self._form(self.sizes, for_gram=False)

    @property
    def multiplications(self) -> int | None:
        """By the weights, in a pass of all samples; None if rows of residuals cannot be told apart, on any process."""
        counts = self._batch.product_counts()
        if not all(known for (known,) in gather_numbers([counts is not None], self._device)):
            return None
        uses = zip(self.counts.values(), counts or (), strict=True)
        sizes = {name: weight.numel() for name, weight in self.weights.by_name.items()}
        return sum(rows * times * sizes[name] for rows, of_block in uses for name, times in of_block.items())

    def jacobian(self, form: JacobianForm) -> Jacobian:
        """J, (N, P), this process's rows; as a matrix on all processes if one has no other form."""
        jacobian = self._batch.jacobian(self.weights.by_name, form.kept)
        jacobian.scale_rows(self.scale)
        are_matrices = gather_numbers([isinstance(jacobian, DenseJacobian)], self._device)
        return DenseJacobian(jacobian.dense()) if any(is_matrix for (is_matrix,) in are_matrices) else jacobian

    @property
    def _dense_form(self) -> JacobianForm:
        return matrix_form(self.rows, len(self.weights.vector))

    def _form(self, rows: Sequence[int], *, for_gram: bool) -> JacobianForm | None:
        counts = self._batch.product_counts()
        if counts is None:
            return None
        sizes = {name: p.shape for name, p in self.weights.by_name.items()}
        return jacobian_form(counts, rows, sizes, for_gram=for_gram)

    def passes(self) -> Linearization:
        """Products with J at w, without the scale of the rows, by passes through the module."""
        return linearize(
            lambda params: self._batch.graph(params).to(self._dtype), self.weights.by_name, backend="double_backward"
        )

    def _scaled(self, residual: Tensor) -> Tensor:
        return residual.to(self._dtype) * self.scale


class ResidualModel:
    """r(w + d) ≈ r + J d of a batch, and so f(w + d) ≈ ½‖r + J d‖².

    Args:
        batch: its residuals.
        jacobian: J, this process's rows; None for products by passes through the module.
        method: ``"exact"`` or ``"lsmr"``, the solver that J is for.

    Attributes:
        batch, jacobian, method: these.
        weights, residual, value, samples, rows, block_losses: those of the batch.
        gradient, gradient_squared: ∇f = Jᵀr, flat, and ‖∇f‖².
        variance: ‖Var‖₁ of the gradients of single samples, or an estimate without J. A sample is a row of a block. Of
            blocks b with n_b rows it is N Σ_b w_b² tr Σ_b/n_b, N the rows of all: N times the variance of ∇f, so that N
            can stand for the size of the batch in the norm test. None for a batch of one.
        objective: of the module's outputs, if the residuals are their errors; it evaluates validation data.

    Raises:
        ValueError: NaN or infinity in J.
    """

    def __init__(self, batch: ResidualBatch, jacobian: Jacobian | None, method: str) -> None:
        self.batch, self.jacobian, self.method = batch, jacobian, method
        self.weights, self.residual, self.value = batch.weights, batch.residual, batch.value
        self.samples, self.rows, self.block_losses = batch.samples, batch.rows, batch.block_losses
        self._passes = batch.passes() if jacobian is None else None
        self.objective: Any = None
        self.gradient: Tensor
        self.gradient_squared: float
        self.variance: float | None
        if jacobian is None:
            self._measure_parts()
        else:
            self._measure(jacobian)

    def forward(self, d: Tensor) -> Tensor:
        """J d, this process's rows."""
        if self._passes is None:
            assert self.jacobian is not None
            return self.jacobian.product(d)
        return self._passes.jvp(self.weights.unflat(d)) * self.batch.scale

    def backward(self, u: Tensor) -> Tensor:
        """Jᵀu over the rows of all processes."""
        if self._passes is None:
            assert self.jacobian is not None
            return all_reduce(self.jacobian.transposed_product(u))
        return all_reduce(self.weights.flat(self._passes.vjp(u * self.batch.scale)))

    def write_buffers(self, buffers: BufferUpdates) -> None:
        """Let a forward write into the buffers of the module."""
        self.batch.write_buffers(buffers)

    def _measure(self, jacobian: Jacobian) -> None:
        """∇f and ‖Var‖₁ from the rows of J."""
        squares, sums, first = [], [], 0
        for size, count in zip(self.batch.sizes, self.batch.own_counts, strict=True):
            rows = slice(first, first + size)
            squares.append(jacobian.squared_norms(self.residual[rows], count, rows))
            sums.append(jacobian.transposed_product(self.residual[rows], rows))
            first += size
        bad = not_finite(torch.stack([part.sum(dtype=torch.float64) for part in jacobian.parts()])).any()
        of_samples, sums_of_all = all_reduce(torch.stack([bad, *squares])), all_reduce(torch.stack(sums))
        self.gradient = sums_of_all.sum(0)
        of_blocks = [inner(block_sum, block_sum) for block_sum in sums_of_all]
        of_gradient = inner(self.gradient, self.gradient)
        is_bad, *numbers = torch.cat([of_samples, torch.stack([*of_blocks, of_gradient])]).tolist()
        if is_bad:
            raise NotFinite(
                "the derivatives of the residuals in the weights hold NaN or infinity, the residuals do not: look for "
                "a root or a norm at zero. The weights are unchanged"
            )
        shared_squares, squared_sums = numbers[: len(squares)], numbers[len(squares) : 2 * len(squares)]
        total = 0.0
        for count, square, squared_sum in zip(self.batch.counts.values(), shared_squares, squared_sums, strict=True):
            if count > 1:
                total += max(square - squared_sum / count, 0.0) * count / (count - 1)
        self.variance = None if self.samples == 1 else self.samples * total
        self.gradient_squared = numbers[2 * len(squares)]

    def _measure_parts(self) -> None:
        """∇f, and an estimate of the variance from the gradients of a few parts of the batch, a product each.

        A part has every so many-th row of each block, counted over all processes. The variance is None if some block
        has fewer than two rows.
        """
        parts = min(_PARTS, *self.batch.counts.values())
        if parts < 2:
            self.gradient, self.variance = self.backward(self.residual), None
            self.gradient_squared = inner(self.gradient, self.gradient).item()
            return
        own, device = self.batch.own_counts, self.residual.device
        before = gather_numbers(own, device)[: rank()]  # rows of the processes before this one
        firsts = [sum(counts) for counts in zip(*before, strict=True)] or [0] * len(own)
        part_of = torch.cat(
            [
                torch.arange(first, first + count, device=device).repeat_interleave(size // count) % parts
                for first, count, size in zip(firsts, own, self.batch.sizes, strict=True)
            ]
        )
        gradients = torch.stack([self.backward(self.residual * (part_of == part)) for part in range(parts)])
        self.gradient, deviations = gradients.sum(0), gradients - gradients.mean(0)
        numbers = torch.stack([inner(self.gradient, self.gradient), inner(deviations, deviations)]).tolist()
        self.gradient_squared, self.variance = numbers[0], self.samples * numbers[1] * parts / (parts - 1)


def _repeating(state: RandomState, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which the module runs as now: from the same random numbers, and in the same autocast."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    @contextmanager
    def context() -> Iterator[None]:
        with restored_random_state(state), torch.autocast(device.type, dtype=dtype, enabled=enabled):
            yield

    return context


def _refuse_not_finite(flags: Sequence[Sequence[float]], blocks: Iterable[str]) -> None:
    """Raise for NaN or infinity in the inputs of a process, the first of its flags, or in its blocks."""
    for r, (inputs, *of_blocks) in enumerate(flags):
        if inputs:
            raise refusal_of_batch(_on_rank(r))
        for name, bad in zip(blocks, of_blocks, strict=False):
            if bad:
                raise NotFinite(
                    f"block {name!r} of the residuals holds NaN or infinity at the current weights{_on_rank(r)}; they "
                    "are unchanged. Look at its equation and its points, or lower the scale of the initialisation"
                )


def _check_names(blocks: Mapping[str, Tensor], names: Collection[str] | None, device: torch.device) -> None:
    if not _is_the_same_everywhere("\n".join(blocks), device):  # first: it asks all of them
        raise ValueError(f"the module returned the blocks {_listed(blocks)} here, and others on another process")
    if names is not None and list(blocks) != list(names):
        raise ValueError(
            f"the module returned the blocks {_listed(blocks)}, in the step before {_listed(names)}: the blocks of "
            "residuals and their order stay the same. The weights are unchanged"
        )


def _checked_counts(blocks: Mapping[str, Tensor], device: torch.device) -> dict[str, int]:
    """n_b over all processes."""
    shares = gather_numbers([len(block) if block.numel() else 0 for block in blocks.values()], device)
    for r, share in enumerate(shares):
        for name, count in zip(blocks, share, strict=True):
            if count == 0:
                raise ValueError(
                    f"block {name!r} of the residuals is empty{_on_rank(r)}: a mean over no rows is not defined. Leave "
                    "the block out, or give it points"
                )
    return dict(zip(blocks, map(sum, zip(*shares, strict=True)), strict=True))


def _is_the_same_everywhere(text: str, device: torch.device) -> bool:
    """Whether all processes have this text; one collective."""
    digests = gather_numbers([zlib.crc32(text.encode())], device)
    return all(digest == digests[0] for digest in digests)


def _row_size(block: Tensor) -> int:
    """Residuals in a row of a block that is not empty."""
    return block.numel() // len(block)


def _on_rank(rank: int) -> str:
    return f" on rank {rank}" if world_size() > 1 else ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
