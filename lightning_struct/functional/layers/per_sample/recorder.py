"""Recording of per-sample squared gradient norms by hooks, during one ordinary forward and backward pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_struct.functional.checks import Size, checked, first_line, positive_size
from lightning_struct.functional.layers.calls import LayerCall, SampleCount, admissible_sizes, tensors_in
from lightning_struct.functional.layers.kinds import couples_samples
from lightning_struct.functional.layers.per_sample.contributions import (
    Contribution,
    Dense,
    Uncovered,
    at_least_float32,
    squared_norms,
)
from lightning_struct.functional.layers.per_sample.layer_contributions import CannotRunAgain, has_rule
from lightning_struct.functional.layers.per_sample.recorded_calls import (
    RecordedCall,
    edge_of,
    is_watched,
    recorded_calls,
    watch,
)
from lightning_struct.functional.layers.per_sample.sample_layout import ModuleCall, places
from lightning_struct.functional.layers.recorder import CallRecorder, WeakHook
from lightning_struct.functional.layers.registry import owned_parameters
from lightning_struct.functional.randomness import random_signs
from lightning_struct.functional.torch_tools import current_backward

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class ArrivedShares:
    """Shares of a parameter's gradient that have arrived before it is accumulated.

    ``outer`` is the backward pass that a checkpoint's own, ``backward``, belongs to; ``fresh`` says that the gradient
    was None.
    """

    backward: int
    outer: int
    fresh: bool
    calls: list[RecordedCall] = field(default_factory=list)
    shares: list[Contribution] = field(default_factory=list)
    reason: str | None = None


class Checksums(NamedTuple):
    """Projections of one parameter's gradient G on four pairs of random signs, r over its rows and s over its columns.

    Attributes:
        measured: (4,), rᵀ(Σᵢ cᵢ)s; linear in the gradient: the mean over processes is that of the mean gradient.
        gradient: (4,), rᵀGs.
        scale: the unit of the comparison, ‖G‖ or a tenth of (Σᵢ‖cᵢ‖²)^½ if that is larger (then G is mostly rounding).
        tolerance: the largest ``relative_error`` that is rounding.
    """

    measured: Tensor
    gradient: Tensor
    scale: Tensor
    tolerance: float

    @property
    def relative_error(self) -> Tensor:
        """A scalar, an estimate of ‖Σᵢ cᵢ - G‖ / ``scale``; 0 if both are 0."""
        error = torch.linalg.vector_norm(self.measured - self.gradient) / math.sqrt(len(self.gradient))
        return error / self.scale.clamp(min=torch.finfo(self.scale.dtype).tiny)


def checksum_of_shares(parameter: nn.Parameter, shares: Sequence[Contribution], seed: int) -> Tensor:
    """(4,), rᵀ(Σᵢ cᵢ)s of all shares of one backward pass."""
    left, right = _signs(parameter, seed)
    with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
        projections = [share.projections(left, right) for share in shares]
        return projections[0] if len(projections) == 1 else torch.stack(projections).sum(0)


def checksums(parameter: nn.Parameter, measured: Tensor, squared_norms: Sequence[Tensor], seed: int) -> Checksums:
    """Checksums of the measured shares and of the parameter's ``.grad`` as it is now.

    Args:
        parameter: with a gradient, dense or sparse.
        measured: the sum of :func:`checksum_of_shares` over the backward passes.
        squared_norms: ‖cᵢ‖² of the shares, of each pass.
        seed: of the signs, the same as for ``measured``.
    """
    assert parameter.grad is not None
    gradient = at_least_float32(parameter.grad.detach())
    left, right = (vector.to(gradient.dtype) for vector in _signs(parameter, seed))
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        projected = torch.linalg.vecdot(left[:, gradient.indices()[0]] @ gradient.values(), right)
        norm = torch.linalg.vector_norm(gradient.values())
    else:
        projected = torch.linalg.vecdot(left @ gradient.reshape(left.shape[1], right.shape[1]), right)
        norm = torch.linalg.vector_norm(gradient)
    spread = torch.stack([norms.sum() for norms in squared_norms]).sum().sqrt()
    scale = torch.maximum(norm, 0.1 * spread.to(norm.dtype))
    tolerance = 1e-6 if gradient.dtype == torch.float64 else 0.05
    return Checksums(measured, projected, scale, tolerance)


def _signs(parameter: nn.Parameter, seed: int) -> tuple[Tensor, Tensor]:
    """r over the rows of the parameter and s over its columns, (4, rows) and (4, columns) of ±1, always the same."""
    rows = parameter.shape[0] if parameter.ndim else 1
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return _signs_of(rows, parameter.numel() // max(1, rows), dtype, parameter.device, seed)


@lru_cache(maxsize=64)  # of shapes; layers of one shape share theirs
@torch.inference_mode(False)
def _signs_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator, like = torch.Generator().manual_seed(seed), torch.empty(0, dtype=dtype, device="cpu")
    left, right = (random_signs(4, size, like=like, generator=generator).to(device) for size in (rows, columns))
    return left, right


_DIFFERENTIATED_TWICE = "it is differentiated twice, as by a penalty on gradients"


@dataclass
class ParameterNorms:
    """Measured norms of one parameter.

    Attributes:
        name: qualified name in the module.
        parameter: the parameter.
        squared_norms: (n_b,) for each backward pass b since its gradient was last set to None, ‖cᵢ‖² of the samples'
            shares of the gradient, at least float32.
        passes: a number for each of them, the same for all parameters and rising.
        checksum: of all shares, see :func:`checksum_of_shares`; None if a pass was not checked.
    """

    name: str
    parameter: nn.Parameter
    squared_norms: list[Tensor] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    checksum: Tensor | None = None


class GradientNormRecorder(CallRecorder):
    """Measures, in ordinary forward and backward passes, each sample's share of the gradient of each parameter.

    The share cᵢ of sample i is its part of ``parameter.grad``: one backward pass adds Σᵢ cᵢ. A parameter
    may be used by several layers, and a layer called several times: the shares of one backward pass are summed before
    their norms are taken. Further backward passes are further samples, until the gradient is None again. Derivatives
    that do not reach ``.grad``, such as ``torch.autograd.grad`` in the inputs, are not measured.

    Uses inside the ``forward`` of the layer that owns the parameter are measured. A layer whose type has no rule
    is run again in the backward pass under ``torch.func.vmap``, which is named in one warning; batch normalisation in
    training gets one too. Parameters that cannot be measured are *uncovered*. With ``check`` so are those whose
    gradients turn out to come, in part, from elsewhere.

    The inputs of the layers are kept until the graph is freed, also within checkpointed parts.

    Args:
        module: a plain module, not a wrapper that replaces it when it is called.
        samples: n, or the sizes that it may have; if None, the size of the first dimension of each layer's input, which
            a tensor that the module reads must have, too. May be set before each forward pass. See
            :func:`~lightning_struct.functional.layers.per_sample.layer_contributions.contributions`.
        probes: if not None, norms that are expensive are estimated by so many random projections, without bias; see
            :func:`~lightning_struct.functional.layers.per_sample.contributions.squared_norms`.
        uncovered: whether :meth:`results` raises if a parameter with a gradient is uncovered, or leaves it out. Then
            an error within a hook does not end the pass either: it makes the parameters of its layer uncovered.
        check: keep the numbers that :meth:`verify` needs. May be set before each backward pass.
        seed: of the random projections.
        part: (r, P): of the samples of P processes together, these are the r-th and every P-th after it. Then the
            random projections are those that one process would take.

    Attributes:
        samples, check: as above.
        rows: the sample of each row, (rows,), by the number of rows, of inputs that have other rows than samples, such
            as nodes and edges of graphs; see
            :func:`~lightning_struct.functional.layers.calls.rows_of_graphs`.
        batch: tensors of the batch. If the module is not called itself, a part of it that reads one of them stands for
            it below.
        ambiguous: whether positions may come first: layers are uncovered that read k·n rows, or outside of the module's
            call a tensor whose first two dimensions may both be n. Else each k rows in a row are taken for
            one sample, and the first dimension for n.

    If by chance both of the first two dimensions of an input of a layer have a size that n may have, or if a table is
    read by ids (n,) that are no part of the module's inputs, the module is run once more with one sample less, which
    shows the dimension of the samples; parameters without one are uncovered.

    Raises:
        ValueError: ``uncovered`` is neither ``"raise"`` nor ``"skip"``; ``probes`` is below 1.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> with GradientNormRecorder(model) as recorder:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        >>> [(norms.name, norms.squared_norms[0].shape) for norms in recorder.results()]
        [('weight', torch.Size([4])), ('bias', torch.Size([4]))]
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        *,
        samples: SampleCount = None,
        probes: Size | None = None,
        uncovered: Literal["raise", "skip"] = "raise",
        check: bool = False,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if uncovered not in ("raise", "skip"):
            raise ValueError(f"uncovered must be 'raise' or 'skip', got {uncovered!r}")
        sizes = [*samples] or [0] if isinstance(samples, Collection) else [] if samples is None else [samples]
        for size in sizes:
            positive_size("samples", size)
        super().__init__()
        self.samples = samples
        self.rows: Mapping[int, Tensor] = {}
        self.batch: Sequence[Tensor] = ()
        self.ambiguous = False
        self.check = check
        self._module, self._probes, self._raises, self._seed = module, probes, uncovered == "raise", seed
        self._names: dict[nn.Parameter, str] = {}
        self._layers: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._projection_seed, self._part = seed, part
        self._module_call: ModuleCall | None = None
        self._latest_call: ModuleCall | None = None
        self._no_call = ModuleCall(module, (), {}, (), self._running_again)
        self._rerunning = False
        self._warned: set[str] = set()
        self._without_rule: dict[nn.Module, str] = {}
        self._failed: dict[nn.Module, str] = {}
        self._faults: dict[nn.Parameter, str] = {}
        self._arrived: dict[nn.Parameter, ArrivedShares] = {}
        self._measured: dict[nn.Parameter, ParameterNorms] = {}
        self._uncovered: dict[nn.Parameter, str] = {}
        self._differentiated_twice: set[nn.Parameter] = set()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def attach(self) -> None:
        """Hook the layers and parameters of the module.

        Raises:
            RuntimeError: they are hooked already.
        """
        if self._handles:
            raise RuntimeError("the recorder is attached already: remove() it first")
        self._names = {parameter: name for name, parameter in self._module.named_parameters()}
        for name, layer in self._module.named_modules():
            if "parametrizations" in name.split("."):
                continue  # its parameters belong to the layer that they parametrize
            parameters = owned_parameters(layer)
            if not has_rule(layer):  # a weight that a layer below it has too is used there
                children = (child for name, child in layer.named_children() if name != "parametrizations")
                below = {parameter for child in children for parameter in child.parameters()}
                parameters = {name: parameter for name, parameter in parameters.items() if parameter not in below}
            if not parameters:
                continue
            self._layers[layer] = parameters
            # No user is asked to declare the layers of this package.
            if not has_rule(layer) and type(layer).__module__.partition(".")[0] != __name__.partition(".")[0]:
                self._without_rule[layer] = f"{name or 'the module'} ({type(layer).__name__})"
            with self._guard(layer):  # a ScriptModule takes no hooks
                self._hook_layer(layer, watched=is_watched(layer))
        for name, part in self._module.named_modules():
            if "parametrizations" not in name.split(".") and not isinstance(part, torch.jit.ScriptModule):
                before, after = WeakHook(self._before_module), WeakHook(self._after_module)
                self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(part.register_forward_hook(after, always_call=True))
        for parameter in self._names:
            self._hook_parameter(parameter)

    def remove(self) -> None:
        """Take the hooks away. The measurements stay."""
        super().remove()
        self._module_call = self._latest_call = None
        self._layers.clear()
        self._faults.clear()
        self._arrived.clear()

    def results(self) -> list[ParameterNorms]:
        """Norms of each parameter that got a gradient and is covered, in the order of the module.

        Raises:
            ValueError: parameters are uncovered; all are named, with the reasons.
        """
        if self._raises and self._uncovered:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.uncovered.items())
            raise ValueError(f"per-sample gradient norms cannot be measured of {reasons}")
        return [
            replace(measured, squared_norms=list(measured.squared_norms), passes=list(measured.passes))
            for parameter in self._names
            if parameter not in self._uncovered and (measured := self._measured.get(parameter)) is not None
        ]

    @property
    def uncovered(self) -> dict[str, str]:
        """Reasons by the names of the parameters whose gradients were not measured."""
        return {name: self._uncovered[p] for p, name in self._names.items() if p in self._uncovered}

    def reseed(self, seed: int) -> None:
        """Let the random projections, from the next one on, be those of another seed."""
        self._projection_seed = seed
        self._generators.clear()

    def reset(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the measurements, of all parameters or these, as after their gradients are filled with zeros."""
        for parameter in self._names if parameters is None else parameters:
            self._measured.pop(parameter, None)
            self._uncovered.pop(parameter, None)

    def checksums(self) -> dict[str, Checksums]:
        """Checksums of the covered parameters' ``.grad`` as it is now, by name, to be compared with the measured
        shares.

        Parameters without gradient, or with a backward pass without ``check``, are left out.
        """
        return {self._names[parameter]: sums for parameter, sums in self._checksums_of(self._names)}

    def verify(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Mark as uncovered every parameter whose gradient is not the sum of the shares that were measured.

        Args:
            parameters: those that are looked at; all if None.
        """
        for parameter, sums in self._checksums_of(self._names if parameters is None else parameters):
            if sums.relative_error > sums.tolerance:
                self.mark_uncovered(
                    parameter,
                    "its gradient is not the sum of the samples' shares: it is used outside of its own layer, "
                    "penalised in the loss, differentiated twice, or was changed after the backward pass",
                )

    def _checksums_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Checksums]]:
        for parameter in parameters:
            gradient, measured = parameter.grad, self._measured.get(parameter)
            if gradient is None or measured is None or measured.checksum is None or parameter in self._uncovered:
                continue
            yield parameter, checksums(parameter, measured.checksum, measured.squared_norms, self._seed)

    def mark_uncovered(self, parameter: nn.Parameter, reason: str) -> None:
        """Leave the parameter out of the results until its gradient is None again."""
        self._uncovered[parameter] = reason

    # --- forward -----------------------------------------------------------------------------------------------------

    def _guard(self, layer: nn.Module) -> AbstractContextManager[None]:
        return self._excused(self._layers.get(layer, {}).values())

    @contextmanager
    def _excused(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """After an error the parameters are uncovered until :meth:`remove`; it is raised if that is asked for."""
        try:
            yield
        except Exception as error:
            if self._raises:
                raise
            for parameter in parameters:
                self._faults.setdefault(parameter, f"to measure it fails ({first_line(error)})")

    def _is_recorded(self, layer: nn.Module) -> bool:
        return layer in self._layers and not self._rerunning and torch.is_grad_enabled()

    def _watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return watch(layer, args, kwargs)

    def _before_module(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._module_call is not None or self._rerunning or not torch.is_grad_enabled() or current_backward() != -1:
            return
        with self._guard(part):
            if part is self._module or not places(tensors_in((args, kwargs))).isdisjoint(places(self.batch)):
                sizes = admissible_sizes(self.samples)
                self._module_call = self._latest_call = ModuleCall(part, args, kwargs, sizes, self._running_again)

    def _after_module(self, part: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self._module_call is not None and self._module_call.module is part and not self._rerunning:
            self._module_call = None

    @contextmanager
    def _running_again(self, call: ModuleCall) -> Iterator[None]:
        outer, self._module_call, self._rerunning = self._module_call, call, True
        try:
            yield
        finally:
            self._module_call, self._rerunning = outer, False

    def _after_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if self._module_call is not None:
            read = tensors_in((args, kwargs, outputs))
            self._module_call.shapes.append((layer, [tensor.shape for tensor in read if not tensor.is_nested]))
        super()._after_call(layer, args, kwargs, outputs)

    def _called(self, call: LayerCall, watched: Any) -> None:
        # A checkpointed part runs again in the backward pass, outside of the module's call.
        module_call = (self._module_call if current_backward() == -1 else self._latest_call) or self._no_call
        of_pass = replace(
            call, samples=self.samples, rows=self.rows, ambiguous=self.ambiguous, module_call=module_call
        )  # fmt: skip
        measured = set(self._layers[call.layer].values())
        for made, results in recorded_calls(of_pass, watched):
            # pruned layers have parameters under other names since
            made.parameters = {name: p for name, p in made.parameters.items() if p in measured}
            if made.parameters:
                self._expect(made, results)

    def _expect(self, call: RecordedCall, results: Sequence[Tensor]) -> None:
        """Await the cotangents of the results of a call."""
        edges = [edge_of(result) for result in results]
        differentiable = [i for i, edge in enumerate(edges) if edge is not None]
        if not differentiable:
            return
        for parameter in call.parameters.values():
            self._hook_parameter(parameter)
        if couples_samples(call.call.layer):
            self._warn_once(
                "batch normalisation in training couples the samples of a batch through their statistics: of the "
                "layers before it, each sample's share of the gradient is measured, and not its own gradient"
            )
        number = len(edges)
        # Neither the call nor its hook may hold the graph, which holds the hook.
        if number == 1 and (edge := edges[0]) is not None:
            edge.node.register_prehook(partial(self._arrive_at_node, call, edge.output_nr))
            return

        def arrive(cotangents: Sequence[Tensor | None]) -> None:
            every: list[Tensor | None] = [None] * number
            for i, cotangent in zip(differentiable, cotangents, strict=True):
                every[i] = cotangent
            self._arrive(call, every)

        register_multi_grad_hook([results[i] for i in differentiable], arrive)

    def _arrive_at_node(self, call: RecordedCall, output: int, cotangents: Sequence[Tensor | None]) -> None:
        if cotangents[output] is not None:
            self._arrive(call, [cotangents[output]])

    # --- backward ----------------------------------------------------------------------------------------------------

    def _arrive(self, call: RecordedCall, cotangents: list[Tensor | None]) -> None:
        """The cotangents of a layer's outputs are known; those of its parameters are about to be."""
        if self._rerunning or not self._handles:
            return
        if torch.is_grad_enabled():
            self._differentiated_twice.update(call.parameters.values())
            return
        backward = current_backward()
        shares: dict[str, Contribution] = {}
        reason: str | None = None
        with self._excused(call.parameters.values()):
            try:
                shares = self._contributions(call, cotangents)
            except Uncovered as problem:
                reason = str(problem)
        if not self._faults.keys().isdisjoint(call.parameters.values()):
            return
        for name, parameter in call.parameters.items():
            arrived = self._arrived.get(parameter)
            if arrived is None or arrived.backward != backward:
                outer = backward if call.backward == -1 else call.backward
                arrived = self._arrived[parameter] = ArrivedShares(backward, outer, parameter.grad is None)
            arrived.calls.append(call)
            arrived.reason = arrived.reason or reason
            if reason is None:
                arrived.shares.append(shares[name])

    def _contributions(self, made: RecordedCall, cotangents: list[Tensor | None]) -> dict[str, Contribution]:
        layer, parameters = made.call.layer, made.parameters
        if layer in self._failed:
            raise Uncovered(self._failed[layer])
        if any(parameter.is_complex() for parameter in parameters.values()):
            raise Uncovered("it is complex")
        has_samples = any(cotangent is not None and cotangent.numel() for cotangent in cotangents)
        if not has_samples and any(parameter.numel() for parameter in parameters.values()):
            return {name: Dense(p.detach().new_zeros(0, *p.shape)) for name, p in parameters.items()}
        self._rerunning = True
        try:
            shares = made.contributions(cotangents)
        except CannotRunAgain as reason:
            self._failed[layer] = str(reason)
            raise
        finally:
            self._rerunning = False
        if layer in self._without_rule:
            names = [name for layer, name in self._without_rule.items() if layer not in self._failed]
            self._warn_once(
                "these layers have no rule for per-sample gradients (see register_layer) and are run again under "
                f"torch.func.vmap, which takes longer: {', '.join(names)}"
            )
        return shares

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self._rerunning:
            return
        if parameter not in self._faults:
            with self._excused([parameter]):
                self._accumulate(parameter)
        if parameter in self._faults:
            self.mark_uncovered(parameter, self._faults[parameter])

    def _accumulate(self, parameter: nn.Parameter) -> None:
        arrived = self._arrived.pop(parameter, None)
        if arrived is None or arrived.backward != current_backward():
            twice = parameter in self._differentiated_twice
            self._differentiated_twice.discard(parameter)
            self.mark_uncovered(parameter, _DIFFERENTIATED_TWICE if twice else "it is used outside of its own layer")
            return
        if arrived.fresh:
            self.reset([parameter])
        measured = self._measured.setdefault(parameter, ParameterNorms(self._names[parameter], parameter))
        reason = arrived.reason
        if parameter in self._differentiated_twice:
            self._differentiated_twice.discard(parameter)
            reason = _DIFFERENTIATED_TWICE
        elif arrived.outer in measured.passes:
            reason = "it is used in more than one part with reentrant checkpoints"
        elif any(parameter in call.accumulated for call in arrived.calls) and not arrived.fresh:
            reason = (
                "two backward passes went through the same forward pass: its samples' shares of both belong together"
            )
        for call in arrived.calls:
            call.accumulated.add(parameter)
        if reason is None:
            try:
                norms = self._norms(arrived, parameter.device)
            except Uncovered as problem:
                reason = str(problem)
        if reason is not None:
            self.mark_uncovered(parameter, reason)
            return
        measured.squared_norms.append(norms)
        measured.passes.append(arrived.outer)
        if not self.check:
            measured.checksum = None
        elif measured.checksum is not None or len(measured.passes) == 1:  # otherwise earlier passes were not checked
            total = checksum_of_shares(parameter, arrived.shares, self._seed)
            measured.checksum = total if measured.checksum is None else measured.checksum + total

    def _norms(self, arrived: ArrivedShares, device: torch.device) -> Tensor:
        """Squared norms over all uses.

        Uses with different sample counts (allowed only if ``samples`` lists several sizes) are of different samples.
        """
        shares, may_be = arrived.shares, arrived.calls[0].call.samples
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._projection_seed)
        options: Any = {"probes": self._probes, "generator": self._generators[device], "part": self._part}
        sizes = sorted({share.samples for share in shares}) if len(shares) > 1 else []
        if len(sizes) < 2 or not isinstance(may_be, Collection) or not set(sizes) <= set(may_be):
            return squared_norms(shares, **options)
        groups = [[share for share in shares if share.samples == size] for size in sizes]
        return torch.cat([squared_norms(group, **options) for group in groups])

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)
