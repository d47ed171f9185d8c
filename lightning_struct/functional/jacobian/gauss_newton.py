"""Jacobian products of a network, linearised once and used as often as wanted.

A Hessian-free step takes tens to hundreds of products with the same Jacobian J of the outputs in the weights. Running
the network again in each of them, as forward-over-reverse differentiation does, costs about twice as much as needed.
:func:`linearize` runs it once:

    v  ->  J v      ``Linearization.jvp``     (Algorithm 4)
    u  ->  Jᵀ u     ``Linearization.vjp``     (Algorithm 5)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from lightning_struct.functional.checks import Size, checked
from lightning_struct.functional.jacobian.layer_chain import record_layer_chain
from lightning_struct.functional.jacobian.layer_derivatives import layer_derivatives
from lightning_struct.functional.jacobian.linearization import Linearization, Parameters
from lightning_struct.functional.layers.calls import refuse_other_dtypes, rows_of_arguments, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import sample_chunks
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.functional.randomness import random_state, restored_random_state
from lightning_struct.functional.torch_tools import call_with, unfused_kernels

BACKENDS = ("layer_rules", "double_backward")

Function: TypeAlias = nn.Module | Callable[..., Tensor]


class DoubleBackward(Linearization):
    """Jᵀu by a kept graph of the outputs, J v as the derivative of u -> Jᵀu, and products per sample by vmap."""

    backend = "double_backward"

    def __init__(self, function: Function, params: Parameters, args: tuple[Any, ...]) -> None:
        self._module = function if isinstance(function, nn.Module) else None
        self._call: Callable[..., Tensor] = function
        if isinstance(function, nn.Module):
            self._call = lambda params, *inputs: call_with(function, params, inputs)
        self._args = args
        self._point = {name: p.clone().requires_grad_() for name, p in params.items()}
        self._random_state = random_state(*args)
        with layer_derivatives(self._module), torch.enable_grad(), unfused_kernels(self._module):
            self._graph = self._call(self._point, *args)
        if not isinstance(self._graph, Tensor):
            got = type(self._graph).__name__
            raise TypeError(f"the function must return one tensor, got {got}: wrap it in a module that picks it out")
        if not self._graph.requires_grad:
            raise ValueError(f"the outputs depend on none of the parameters {', '.join(params)}")
        self.outputs = self._graph.detach()
        self._is_mapped = not any(isinstance(a, dict) for a in args)  # vmap needs a row of each sample in all entries
        self._u = torch.zeros_like(self._graph, requires_grad=True)
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                self._graph, list(self._point.values()), self._u, create_graph=True, materialize_grads=True
            )
        dependent = {name: g for name, g in zip(self._point, gradients, strict=True) if g.requires_grad}
        self._dependent, self._vjp_graph = list(dependent), list(dependent.values())

    def _jvp(self, v: Parameters) -> Tensor:
        tangents = [v[name].to(g.dtype) for name, g in zip(self._dependent, self._vjp_graph, strict=True)]
        try:
            (tangent,) = torch.autograd.grad(self._vjp_graph, self._u, tangents, retain_graph=True)
        except NotImplementedError as error:
            remedy = "Compute the same by other operations, as nn.EmbeddingBag by nn.Embedding and a sum or mean"
            missing = "products with the Jacobian need a second derivative that torch does not have"
            raise ValueError(f"{missing}: {error} {remedy}") from error
        return tangent

    def _vjp(self, u: Tensor, out: Parameters | None) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(
            self._graph, list(self._point.values()), u.to(self._graph.dtype), retain_graph=True, materialize_grads=True
        )
        return written(dict(zip(self._point, gradients, strict=True)), out)

    def _squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._point.items()}
        for gradients in self._per_sample_vjps(u):
            for name, g in gradients.items():
                total[name] += g.square().sum(0)
        return total

    def _squared_norms(self, u: Tensor) -> Tensor:
        norms = []
        for gradients in self._per_sample_vjps(u):
            norms.append(torch.stack([g.square().reshape(len(g), -1).sum(1) for g in gradients.values()]).sum(0))
        return torch.cat(norms)

    def _per_sample_vjps(self, u: Tensor) -> Iterator[dict[str, Tensor]]:
        """Jᵢᵀuᵢ, a few samples at a time, stacked along a new first dimension."""
        name = None if self._module is None else coupling_layer(self._module)
        if name is not None:
            remedy = "put it in eval mode, with running statistics, or do without per-sample quantities"
            raise ValueError(f"{name} normalises over the batch, so a gradient per sample is not defined: {remedy}")
        point = {name: p.detach() for name, p in self._point.items()}
        u = u.to(self._graph.dtype)

        def one(u_i: Tensor, *args_i: Any) -> dict[str, Tensor]:
            batch_of_one = tuple(a[None] if isinstance(a, Tensor) else a for a in args_i)
            return vjp(lambda p: self._call(p, *batch_of_one), point)[1](u_i[None])[0]

        in_dims = (0, *(0 if isinstance(a, Tensor) else None for a in self._args))
        count = u.shape[0]
        for rows in sample_chunks(count, sum(p.numel() for p in point.values())):
            arguments = (u[rows], *rows_of_arguments(self._args, rows, count))
            with unfused_kernels(self._module), restored_random_state(self._random_state):
                gradients: dict[str, Tensor] | None = None
                if self._is_mapped:
                    try:
                        gradients = vmap(one, in_dims=in_dims, randomness="different")(*arguments)
                    except torch.OutOfMemoryError:
                        raise
                    except RuntimeError:  # a layer has no batching rule
                        self._is_mapped = False
                if gradients is None:  # one sample at a time
                    singles = []
                    for row in (slice(i, i + 1) for i in range(count)[rows]):
                        with torch.enable_grad():
                            outputs = self._call(self._point, *rows_of_arguments(self._args, row, count))
                        own = list(self._point.values())
                        singles.append(torch.autograd.grad(outputs, own, u[row], materialize_grads=True))
                    gradients = {name: torch.stack(g) for name, *g in zip(point, *singles, strict=True)}
            yield gradients


def written(vector: dict[str, Tensor], out: Parameters | None) -> dict[str, Tensor]:
    return vector if out is None else {name: out[name].copy_(t) for name, t in vector.items()}


@checked
def linearize(
    function: Function, params: Parameters, *args: Any, backend: str | None = None, chunk_size: Size | None = None
) -> Linearization:
    """Linearise ``function`` in ``params`` at ``args``.

    Args:
        function: a module, which is called as ``functional_call(function, params, args)``, or a function of
            ``(params, *args)``. It returns one tensor (n, ...) whose row i depends on row i of the tensors in ``args``.
            A module's buffers are left as they are, and its parameters outside ``params`` are constants.
        params: name -> tensor, float32 or float64: the variables, at the point of the derivative.
        *args: passed on; tensors among them, and those in dicts that have as many rows, have the batch as their first
            dimension.
        backend: ``"layer_rules"``: hand-written rules, for a module that is a chain of Linear and elementwise layers,
            the cheapest by far; ``"double_backward"``: a kept graph of the vector-Jacobian product, which covers
            everything that has a second derivative, with rules of its own for recurrent layers, but is wrong behind a
            ``torch.autograd.Function`` whose backward torch cannot differentiate. If not given, the rules if they cover
            the function; ``.backend`` says which.
        chunk_size: form each product over chunks of so many samples, each linearised again in every product: about half
            as much time again, for the memory of one chunk.

    Raises:
        ValueError: an unknown backend, a backend that does not cover the function, nothing to differentiate, or a name
            that the module does not have.
        TypeError: ``params`` is no dict, or the function did not return one tensor.

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
    if not isinstance(params, Mapping):
        expected = "a dict of tensors by name, as dict(model.named_parameters())"
        raise TypeError(f"params must be {expected}, got {type(params).__name__}")
    if not params:
        raise ValueError("params is empty: there is nothing to differentiate (are all parameters frozen?)")
    if isinstance(function, nn.Module):
        names = {name for name, _ in function.named_parameters(remove_duplicate=False)}
        names.update(name for name, _ in function.named_buffers(remove_duplicate=False))
        if unknown := [name for name in params if name not in names]:  # their derivatives would be zero
            listed = ", ".join(unknown)
            raise ValueError(f"{type(function).__name__} has no {listed}: params are named as by named_parameters()")
    params = {name: p.detach() for name, p in params.items()}
    try:
        return _linearized(function, params, args, backend, chunk_size)
    except RuntimeError as error:
        refuse_other_dtypes(args, params, error)
        raise


def _linearized(
    function: Function, params: Parameters, args: tuple[Any, ...], backend: str | None, chunk_size: int | None
) -> Linearization:
    if chunk_size is not None:
        return _Chunked(function, params, args, backend, chunk_size)
    if backend in (None, "layer_rules"):
        if isinstance(function, nn.Module):
            # a chain draws no random numbers; after a failed trial the generators are set back
            with restored_random_state(random_state(*args)):
                chain = record_layer_chain(function, params, args)
            if chain is not None:
                return chain
        if backend == "layer_rules":
            raise ValueError(
                "backend='layer_rules' needs a module that is a chain of Linear, elementwise and reshaping layers, "
                "called on one tensor; leave backend out for another module"
            )
    return DoubleBackward(function, params, args)


class _Chunked(Linearization):
    def __init__(
        self, function: Function, params: Parameters, args: tuple[Any, ...], backend: str | None, chunk_size: int
    ) -> None:
        name = coupling_layer(function) if isinstance(function, nn.Module) else None
        if name is not None:
            remedy = "put it in eval mode, with running statistics, or leave chunk_size out"
            raise ValueError(f"{name} normalises over the batch: chunks would change the function; {remedy}")
        self._function, self._point = function, params
        sizes = {a.shape[0] for a in args if isinstance(a, Tensor)}
        sizes = sizes or {t.shape[0] for t in tensors_in(args) if t.ndim}  # of dicts
        if len(sizes) != 1:
            raise ValueError(f"chunks need tensors with one common batch size among the arguments, got {sorted(sizes)}")
        (self._n,) = sizes
        self._rows = [slice(start, start + chunk_size) for start in range(0, self._n, chunk_size)]
        self._args, self._random_state, self._backend = args, random_state(*args), backend
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
            yield rows, linearize(self._function, self._point, *args, backend=self._backend)

    def _jvp(self, v: Parameters) -> Tensor:
        return torch.cat([chunk.jvp(v) for _, chunk in self._chunks()])

    def _vjp(self, u: Tensor, out: Parameters | None) -> dict[str, Tensor]:
        return written(_sum(chunk.vjp(u[rows]) for rows, chunk in self._chunks()), out)

    def _squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        return _sum(chunk.squared_vjp(u[rows]) for rows, chunk in self._chunks())

    def _squared_norms(self, u: Tensor) -> Tensor:
        return torch.cat([chunk.squared_norms(u[rows]) for rows, chunk in self._chunks()])


def _sum(vectors: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    total = {name: t.clone() for name, t in next(vectors).items()}  # t may be a view of an argument
    for vector in vectors:
        for name, t in vector.items():
            total[name] += t
    return total
