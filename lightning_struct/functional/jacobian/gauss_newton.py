"""Jacobian products of a network, linearised once and used as often as wanted.

A Hessian-free step takes tens to hundreds of products with the same Jacobian J of the outputs in the weights. Running
the network again in each of them, as forward-over-reverse differentiation does, costs about twice as much as needed.
:func:`linearize` runs it once:

    v  ->  J v      ``Linearization.jvp``     (Algorithm 4)
    u  ->  Jᵀ u     ``Linearization.vjp``     (Algorithm 5)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import checked, first_line
from lightning_struct.functional.jacobian.autograd_linearization import DoubleBackward, Function, Linearize, written
from lightning_struct.functional.jacobian.layer_chain import LayerChain, record_layer_chain
from lightning_struct.functional.jacobian.linearization import Linearization, Parameters
from lightning_struct.functional.layers.calls import rows_of_arguments, tensors_in
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.functional.randomness import random_state, restored_random_state, set_random_state

_log = logging.getLogger(__name__)

BACKENDS = ("layer_rules", "double_backward", "linearize")


@checked
def linearize(
    function: Function, params: Parameters, *args: Any, backend: str | None = None, chunk_size: int | None = None
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
            everything that has a second derivative, with rules of its own for recurrent layers, convolutions and
            normalisations, but is wrong behind a ``torch.autograd.Function`` whose backward torch cannot differentiate;
            ``"linearize"``: a traced forward derivative as ``torch.func.linearize`` makes it, dear to set up. If not
            given, the first of these that covers the function; ``.backend`` says which.
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
        if unknown := [name for name in params if name not in names]:  # whose derivatives would be zero
            listed = ", ".join(unknown)
            raise ValueError(f"{type(function).__name__} has no {listed}: params are named as by named_parameters()")
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
    before, refusal = random_state(*args), None
    if backend != "linearize":
        try:
            return DoubleBackward(function, params, args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of an operation without a second derivative, or of the function itself
            if backend is not None:
                raise
            refusal = error
            _log.info("backend='double_backward' fails, 'linearize' is tried: %s", first_line(error))
            set_random_state(before)
    try:
        return Linearize(function, params, args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if refusal is not None:
            raise refusal from None
        raise ValueError(f"backend='linearize' does not cover this function: {error}") from error


def _layer_chain(function: Function, params: Parameters, args: tuple[Any, ...]) -> LayerChain | None:
    """The chain, if it is one. A chain draws no random numbers; after a failed trial the generators are set back."""
    if not isinstance(function, nn.Module):
        return None
    with restored_random_state(random_state(*args)):
        return record_layer_chain(function, params, args)


class _Chunked(Linearization):
    def __init__(
        self, function: Function, params: Parameters, args: tuple[Any, ...], backend: str | None, chunk_size: int
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
        if backend == "linearize":
            raise ValueError("chunks are linearised in every product, for which 'linearize' is too dear")
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
            if self._backend is None:
                chain = _layer_chain(self._function, self._point, args)
                yield rows, chain or DoubleBackward(self._function, self._point, args)
            else:
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
    total = {name: t.clone() for name, t in next(vectors).items()}  # which may be a view of what was given
    for vector in vectors:
        for name, t in vector.items():
            total[name] += t
    return total
