"""Jacobian products of a network, linearised once and used as often as wanted.

A Hessian-free step takes tens to hundreds of products with the same Jacobian J of the outputs in the weights. Running
the network again in each of them, as forward-over-reverse differentiation does, costs about twice as much as needed.
:func:`linearize` runs it once:

    v  ->  J v      ``Linearization.jvp``     (Algorithm 4)
    u  ->  Jᵀ u     ``Linearization.vjp``     (Algorithm 5)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize, vmap
from torch.func import jvp as torch_jvp
from torch.func import vjp as torch_vjp
from torch.fx import GraphModule, Node
from torch.fx.experimental.const_fold import split_const_subgraphs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_struct.functional.errors import first_line
from lightning_struct.functional.layer_call import tensors_in
from lightning_struct.functional.layer_chain import LayerChain, record_layer_chain
from lightning_struct.functional.layers import coupling_layer
from lightning_struct.functional.linearization import Linearization, Parameters
from lightning_struct.functional.per_sample.contributions import sample_chunks
from lightning_struct.functional.randomness import random_state, restored_random_state, set_random_state
from lightning_struct.functional.stateless import call_with
from lightning_struct.functional.vectors import inner

_log = logging.getLogger(__name__)

BACKENDS = ("layer_rules", "linearize", "double_backward")
# A trace takes 1 to 4 s for an LSTM, a small transformer or ResNet (CPU), and saves up to 2 ms a product.
_PRODUCTS_WORTH_A_TRACE = 1000


def linearize(
    function: nn.Module | Callable[..., Tensor],
    params: Parameters,
    *args: Any,
    backend: str | None = None,
    chunk_size: int | None = None,
    products: int | None = None,
) -> Linearization:
    """Linearise ``function`` in ``params`` at ``args``.

    Args:
        function: a module, which is called as ``functional_call(function, params, args)``, or a function of
            ``(params, *args)``. It returns one tensor (n, ...) whose row i depends on row i of the tensors in ``args``.
            A module's buffers are left as they are, and its parameters outside ``params`` are constants.
        params: name -> tensor, float32 or float64: the point, and what is differentiated.
        *args: passed on; tensors among them, and those in dicts that have as many rows, have the batch as their first
            dimension.
        backend: ``"layer_rules"``: hand-written rules, for a module that is a chain of Linear and elementwise layers,
            the cheapest by far; ``"linearize"``: a traced forward derivative as ``torch.func.linearize`` makes it, dear
            to set up and cheap in use, for long solves; ``"double_backward"``: a kept graph of the vector-Jacobian
            product, which covers everything that has a second derivative. If not given, the first of these that covers
            the function; ``.backend`` says which.
        chunk_size: form each product over chunks of so many samples, each linearised again in every product: about half
            as much time again, for the memory of one chunk.
        products: how many products will be asked for, about. Below 1000 the trace of ``"linearize"`` takes longer than
            it saves, and ``"double_backward"`` comes before it where ``backend`` is not given.

    Raises:
        ValueError: an unknown backend, a backend that does not cover the function, nothing to differentiate, or a name
            that the module does not have.
        TypeError: the function did not return one tensor.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> weights = dict(model.named_parameters())
        >>> linearization = linearize(model, weights, torch.randn(8, 3))
        >>> linearization.jvp({name: torch.ones_like(w) for name, w in weights.items()}).shape
        torch.Size([8, 2])
        >>> linearization.backend
        'layer_rules'
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if not params:
        raise ValueError("params is empty: there is nothing to differentiate (are all parameters frozen?)")
    if isinstance(function, nn.Module):
        _check_names(params, function)
    params = {name: p.detach() for name, p in params.items()}
    if chunk_size is not None:
        return _Chunked(function, params, args, backend, chunk_size)
    if backend in (None, "layer_rules"):
        chain = _layer_chain(function, params, args)
        if chain is not None:
            return chain
        if backend == "layer_rules":
            raise ValueError(
                "backend='layer_rules' needs a module that is a chain of Linear, elementwise and reshaping layers, "
                "called on one tensor; leave backend out for another module"
            )
    if backend == "double_backward":
        return _DoubleBackward(function, params, args)
    before = random_state(*args)
    if backend is None and products is not None and products < _PRODUCTS_WORTH_A_TRACE:
        try:
            return _DoubleBackward(function, params, args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation without a second derivative
            _log.info("backend='double_backward' fails, 'linearize' is tried: %s", first_line(error))
            set_random_state(before)
    try:
        return _Linearize(function, params, args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if backend == "linearize":
            raise ValueError(f"backend='linearize' does not cover this function: {error}") from error
        _log.info("backend='linearize' fails, 'double_backward' is taken: %s", first_line(error))
        set_random_state(before)
        return _DoubleBackward(function, params, args)


def _check_names(params: Parameters, module: nn.Module) -> None:
    """Raise a ValueError for names of tensors that a module does not have: their derivatives would be zero."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names.update(name for name, _ in module.named_buffers(remove_duplicate=False))
    if unknown := [name for name in params if name not in names]:
        raise ValueError(
            f"{type(module).__name__} has no {', '.join(unknown)}: params are named as by named_parameters()"
        )


def _layer_chain(
    function: nn.Module | Callable[..., Tensor], params: Parameters, args: tuple[Any, ...]
) -> LayerChain | None:
    """The chain, if it is one. A chain draws no random numbers; what a run in vain has drawn is put back."""
    if not isinstance(function, nn.Module):
        return None
    with restored_random_state(random_state(*args)):
        return record_layer_chain(function, params, args)


class _Autograd(Linearization):
    """The part that needs a graph of the outputs only: Jᵀu, and per-sample products by vmap."""

    def __init__(self, function: nn.Module | Callable[..., Tensor], params: Parameters, args: tuple[Any, ...]) -> None:
        self._module = function if isinstance(function, nn.Module) else None
        self._call = partial(_call, function) if isinstance(function, nn.Module) else function
        self._args = args
        self._point = {name: p.clone().requires_grad_() for name, p in params.items()}
        self._random_state = random_state(*args)
        with torch.enable_grad(), _twice_differentiable(self._module):
            self._graph = self._call(self._point, *args)
        if not isinstance(self._graph, Tensor):
            raise TypeError(
                f"the function must return one tensor, got {type(self._graph).__name__}: wrap it in a module that "
                "picks it out"
            )
        if not self._graph.requires_grad:
            raise ValueError(f"the outputs depend on none of the parameters {', '.join(params)}")
        self.outputs = self._graph.detach()
        self._is_mapped = not any(isinstance(a, dict) for a in args)  # vmap needs a row of each sample in all entries

    def vjp(self, u: Tensor, out: Parameters | None = None) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(
            self._graph, list(self._point.values()), u.to(self._graph.dtype), retain_graph=True, materialize_grads=True
        )
        return _written(dict(zip(self._point, gradients, strict=True)), out)

    def squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._point.items()}
        for gradients in self._per_sample_vjps(u):
            for name, g in gradients.items():
                total[name] += g.square().sum(0)
        return total

    def squared_norms(self, u: Tensor) -> Tensor:
        return torch.cat(
            [
                torch.stack([g.square().reshape(len(g), -1).sum(1) for g in gradients.values()]).sum(0)
                for gradients in self._per_sample_vjps(u)
            ]
        )

    def _per_sample_vjps(self, u: Tensor) -> Iterator[dict[str, Tensor]]:
        """Jᵢᵀuᵢ, a few samples at a time, stacked along a new first dimension."""
        self._refuse_coupled_samples()
        point = {name: p.detach() for name, p in self._point.items()}
        u = u.to(self._graph.dtype)

        def one(u_i: Tensor, *args_i: Any) -> dict[str, Tensor]:
            batch_of_one = tuple(a[None] if isinstance(a, Tensor) else a for a in args_i)
            return torch_vjp(lambda p: self._call(p, *batch_of_one), point)[1](u_i[None])[0]

        in_dims = (0, *(0 if isinstance(a, Tensor) else None for a in self._args))
        count = u.shape[0]
        for rows in sample_chunks(count, sum(p.numel() for p in point.values())):
            arguments = (u[rows], *rows_of_arguments(self._args, rows, count))
            with _twice_differentiable(self._module), restored_random_state(self._random_state):
                gradients = self._mapped(vmap(one, in_dims=in_dims, randomness="different"), arguments)
                if gradients is None:  # one sample at a time
                    singles = [self._vjp_of_sample(u, i) for i in range(count)[rows]]
                    gradients = {
                        name: torch.stack(g) for name, g in zip(point, zip(*singles, strict=True), strict=True)
                    }
            yield gradients

    def _mapped(self, mapped: Callable[..., dict[str, Tensor]], args: tuple[Any, ...]) -> dict[str, Tensor] | None:
        """The result of a function by vmap; None from the first layer without a batching rule on."""
        if not self._is_mapped:
            return None
        try:
            return mapped(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._is_mapped = False
            return None

    def _vjp_of_sample(self, u: Tensor, i: int) -> tuple[Tensor, ...]:
        row = slice(i, i + 1)
        with torch.enable_grad():
            outputs = self._call(self._point, *rows_of_arguments(self._args, row, len(u)))
        return torch.autograd.grad(outputs, list(self._point.values()), u[row], materialize_grads=True)

    def _refuse_coupled_samples(self) -> None:
        name = None if self._module is None else coupling_layer(self._module)
        if name is not None:
            raise ValueError(
                f"{name} normalises over the batch, so a gradient per sample is not defined: put it in eval mode, with "
                "running statistics, or do without per-sample quantities"
            )


class _DoubleBackward(_Autograd):
    """J v as the derivative of u -> Jᵀu: both graphs are kept."""

    backend = "double_backward"

    def __init__(self, function: nn.Module | Callable[..., Tensor], params: Parameters, args: tuple[Any, ...]) -> None:
        super().__init__(function, params, args)
        self._u = torch.zeros_like(self._graph, requires_grad=True)
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                self._graph, list(self._point.values()), self._u, create_graph=True, materialize_grads=True
            )
        reached = {name: g for name, g in zip(self._point, gradients, strict=True) if g.requires_grad}
        self._reached, self._vjp_graph = list(reached), list(reached.values())

    def jvp(self, v: Parameters) -> Tensor:
        tangents = [v[name].to(g.dtype) for name, g in zip(self._reached, self._vjp_graph, strict=True)]
        try:
            (tangent,) = torch.autograd.grad(self._vjp_graph, self._u, tangents, retain_graph=True)
        except NotImplementedError as error:
            raise ValueError(
                f"products with the Jacobian need a second derivative that torch does not have: {error} Compute the "
                "same by other operations, for example nn.EmbeddingBag by nn.Embedding and a sum or mean"
            ) from error
        return tangent


class _Linearize(_Autograd):
    """J v from a trace of the forward derivative, with all that does not depend on v computed once.

    This is ``torch.func.linearize``, but for one step: in-place operations are made functional before the trace is cut
    in two. Without it recurrent layers are right in the first product and wrong in all later ones (torch 2.15). A trace
    in which in-place writes are left (``padding_mode="circular"``) is refused, since the cut loses them: memory that
    was never written would be read. What else may be traced wrongly in silence is caught by a check against Jᵀu.
    """

    backend = "linearize"

    def __init__(self, function: nn.Module | Callable[..., Tensor], params: Parameters, args: tuple[Any, ...]) -> None:
        super().__init__(function, params, args)
        point = {name: p.detach() for name, p in self._point.items()}

        def tangent(*v: Tensor) -> Tensor:
            return torch_jvp(lambda p: self._call(p, *args), (point,), (dict(zip(point, v, strict=True)),))[1]

        with (
            torch.no_grad(),
            _twice_differentiable(self._module),
            restored_random_state(self._random_state),  # the same dropout mask as in the graph
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # notes of the tracer about its own deprecations
            trace = make_fx(functionalize(tangent))(*(torch.zeros_like(p) for p in point.values()))
            _refuse_lost_writes(trace)
            self._trace = split_const_subgraphs(trace)
            self._trace.run_folding()
        self._check_adjoint()

    def jvp(self, v: Parameters) -> Tensor:
        with torch.no_grad(), restored_random_state(self._random_state):
            return self._trace(*(v[name] for name in self._point))

    def _check_adjoint(self) -> None:
        """⟨u, J v⟩ = ⟨Jᵀu, v⟩ for one random pair."""
        generator = torch.Generator().manual_seed(0)
        v = {k: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for k, p in self._point.items()}
        u = torch.randn(self.outputs.shape, generator=generator).to(self.outputs)
        self.jvp(v)  # what is wrong only from the second product on is wrong too
        tangent, gradients = self.jvp(v), self.vjp(u)
        left = inner(u, tangent)
        right = torch.stack([inner(gradients[name], v[name]) for name in v]).sum()
        scale = (inner(u, u) * inner(tangent, tangent)).sqrt()
        tolerance = torch.finfo(self.outputs.dtype).eps ** 0.5
        if not (left - right).abs() <= tolerance * scale:
            raise RuntimeError(f"it gives a product that is not the adjoint of Jᵀu ({left:.6g} against {right:.6g})")


def _refuse_lost_writes(trace: GraphModule) -> None:
    """Raise RuntimeError for an in-place operation that takes effect by its write alone.

    A write to what nothing else reads does no harm (``num_batches_tracked`` of batch normalisation).
    """
    for node in trace.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or node.users:
            continue
        written = node.args[0]
        while _is_view(written):
            written = written.args[0]
        if len(written.users) > 1:
            raise RuntimeError(f"it writes in place ({node.target}), which its trace would lose")


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)


class _Chunked(Linearization):
    def __init__(
        self,
        function: nn.Module | Callable[..., Tensor],
        params: Parameters,
        args: tuple[Any, ...],
        backend: str | None,
        chunk_size: int,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
        if backend == "linearize":
            raise ValueError("chunks are linearised in every product, for which 'linearize' is too dear")
        name = coupling_layer(function) if isinstance(function, nn.Module) else None
        if name is not None:
            raise ValueError(
                f"{name} normalises over the batch: chunks would change the function; put it in eval mode, with "
                "running statistics, or leave chunk_size out"
            )
        self._function, self._params = function, params
        sizes = {a.shape[0] for a in args if isinstance(a, Tensor)}
        sizes = sizes or {t.shape[0] for t in tensors_in(args) if t.ndim}  # of dicts
        if len(sizes) != 1:
            raise ValueError(f"chunks need tensors with one common batch size among the arguments, got {sorted(sizes)}")
        (self._n,) = sizes
        self._rows = [slice(start, start + chunk_size) for start in range(0, self._n, chunk_size)]
        self._args = args
        self._random_state = random_state(*args)
        self._backend = backend
        outputs = []
        for _, chunk in self._draw():
            outputs.append(chunk.outputs)
            self.backend = self._backend = chunk.backend
        self.outputs = torch.cat(outputs)

    def _chunks(self) -> Iterator[tuple[slice, Linearization]]:
        with restored_random_state(self._random_state):
            yield from self._draw()

    def _draw(self) -> Iterator[tuple[slice, Linearization]]:
        """The chunks with the random numbers that come next."""
        for rows in self._rows:
            args = rows_of_arguments(self._args, rows, self._n)
            if self._backend is None:
                chain = _layer_chain(self._function, self._params, args)
                yield rows, chain or _DoubleBackward(self._function, self._params, args)
            else:
                yield rows, linearize(self._function, self._params, *args, backend=self._backend)

    def jvp(self, v: Parameters) -> Tensor:
        return torch.cat([chunk.jvp(v) for _, chunk in self._chunks()])

    def vjp(self, u: Tensor, out: Parameters | None = None) -> dict[str, Tensor]:
        return _written(_sum(chunk.vjp(u[rows]) for rows, chunk in self._chunks()), out)

    def squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        return _sum(chunk.squared_vjp(u[rows]) for rows, chunk in self._chunks())

    def squared_norms(self, u: Tensor) -> Tensor:
        return torch.cat([chunk.squared_norms(u[rows]) for rows, chunk in self._chunks()])


def rows_of_arguments(args: tuple[Any, ...], rows: slice, samples: int) -> tuple[Any, ...]:
    """Rows of a module's arguments: of tensors, also in dicts, that have a row for each of the samples.

    What else there is stays whole.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(entry) for name, entry in value.items()}
        return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (samples,) else value

    return tuple(cut(arg) for arg in args)


def _sum(vectors: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    total = {name: t.clone() for name, t in next(vectors).items()}  # which may be a view of what was given
    for vector in vectors:
        for name, t in vector.items():
            total[name] += t
    return total


def _written(vector: dict[str, Tensor], out: Parameters | None) -> dict[str, Tensor]:
    return vector if out is None else {name: out[name].copy_(t) for name, t in vector.items()}


def _call(module: nn.Module, params: Parameters, *args: Any) -> Tensor:
    return call_with(module, params, args)


@contextmanager
def _twice_differentiable(module: nn.Module | None) -> Iterator[None]:
    """Kernels that have forward and second derivatives: fused attention and the fused recurrent ones have none."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if module is not None and any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a note about TF32 on another vendor's devices
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
