"""Jacobian products of a chain of layers by hand-written rules (Algorithms 4 and 5).

A chain is what one forward pass shows: every layer that was called read what the layer before it returned, the first
one the input, and nothing happened in between. The layers may be ``nn.Linear``, elementwise activations, and layers
that only reshape; the chain may stand in any ``forward``, and a layer may be used twice or share its weight with
another. Activations and their derivatives are kept, so a product costs its matrix products and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.linearization import Linearization, Parameters
from lightning_struct.functional.layers.per_sample.contributions import linear_squared_norms, sample_chunks
from lightning_struct.functional.torch_tools import call_with

_ELEMENTWISE = (
    nn.Sigmoid, nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Hardtanh, nn.ReLU6, nn.Hardsigmoid, nn.Hardswish,
)  # fmt: skip
_RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass
class _Linear:
    """z = a Wᵀ + b. ``weight_name`` and ``bias_name`` are None for what is not differentiated."""

    inputs: Tensor
    weight: Tensor
    weight_name: str | None
    bias_name: str | None


@dataclass
class _Elementwise:
    derivative: Tensor


@dataclass
class _Reshape:
    input_shape: torch.Size
    output_shape: torch.Size


class LayerChain(Linearization):
    """The recorded chain."""

    backend = "layer_rules"

    def __init__(self, steps: list[_Linear | _Elementwise | _Reshape], outputs: Tensor, params: Parameters) -> None:
        self._steps = steps
        self._point = dict(params)
        self.outputs = outputs

    def _jvp(self, v: Parameters) -> Tensor:
        tangent: Tensor | None = None  # None as long as it is zero
        for step in self._steps:
            if isinstance(step, _Linear):
                tangent = _linear_tangent(step, tangent, v)
            elif tangent is None:
                continue
            elif isinstance(step, _Elementwise):
                tangent = tangent.mul_(step.derivative)
            else:
                tangent = tangent.reshape(step.output_shape)
        return torch.zeros_like(self.outputs) if tangent is None else tangent.to(self.outputs.dtype)

    def _vjp(self, u: Tensor, out: Parameters | None) -> dict[str, Tensor]:
        gradients = {name: torch.empty_like(p) for name, p in self._point.items()} if out is None else dict(out)
        written: set[str] = set()

        def write(name: str, left: Tensor, right: Tensor) -> None:
            target = gradients[name]
            if name in written:
                target.add_((left @ right).view_as(target))
            elif target.dtype == left.dtype:
                torch.mm(left, right, out=target.view(left.shape[0], right.shape[1]))
            else:
                target.copy_((left @ right).view_as(target))
            written.add(name)

        for layer, cotangent in self._backward(u):
            rows = cotangent.reshape(-1, cotangent.shape[-1])
            if layer.weight_name is not None:
                write(layer.weight_name, rows.t(), layer.inputs.reshape(-1, layer.inputs.shape[-1]))
            if layer.bias_name is not None:
                write(layer.bias_name, rows.new_ones(1, len(rows)), rows)
        for name in gradients.keys() - written:
            gradients[name].zero_()
        return gradients

    def _squared_vjp(self, u: Tensor) -> dict[str, Tensor]:
        squares: dict[str, Tensor] = {}
        with torch.autocast(u.device.type, enabled=False):
            for name, uses in self._uses(u).items():
                (inputs, cotangent), *others = uses
                if others or cotangent.ndim > 2:
                    squares[name] = sum(g.square().sum(0) for g in _per_sample(uses))  # type: ignore[assignment]
                elif inputs is None:
                    squares[name] = cotangent.square().sum(0)
                else:
                    squares[name] = cotangent.square().t() @ inputs.square()
        return {  # in the order and dtype of the parameters, zero where the chain does not reach
            name: squares[name].to(p.dtype) if name in squares else torch.zeros_like(p)
            for name, p in self._point.items()
        }

    def _squared_norms(self, u: Tensor) -> Tensor:
        norms = torch.zeros(u.shape[0], dtype=u.dtype, device=u.device)
        with torch.autocast(u.device.type, enabled=False):
            for uses in self._uses(u).values():
                (inputs, cotangent), *others = uses
                if others:
                    norms += torch.cat([g.flatten(1).square().sum(1) for g in _per_sample(uses)])
                elif inputs is None:
                    norms += linear_squared_norms(cotangent, cotangent, weight=False)
                else:
                    norms += linear_squared_norms(inputs, cotangent, bias=False)
        return norms

    def _backward(self, u: Tensor) -> Iterator[tuple[_Linear, Tensor]]:
        """Each Linear of the chain, from the last, with the cotangent of its output."""
        first = next(i for i, step in enumerate(self._steps) if isinstance(step, _Linear))
        cotangent, owned = u.to(self._steps[first].weight.dtype), False  # type: ignore[union-attr]
        for i in range(len(self._steps) - 1, first - 1, -1):
            step = self._steps[i]
            if isinstance(step, _Elementwise):
                cotangent = cotangent.mul_(step.derivative) if owned else cotangent * step.derivative
                owned = True
            elif isinstance(step, _Reshape):
                cotangent = cotangent.reshape(step.input_shape)
            else:
                yield step, cotangent
                if i > first:
                    cotangent, owned = cotangent @ step.weight, True

    def _uses(self, u: Tensor) -> dict[str, list[tuple[Tensor | None, Tensor]]]:
        """Uses of each parameter: pairs (inputs, cotangents) as (n, ..., features); a bias has no inputs."""
        uses: dict[str, list[tuple[Tensor | None, Tensor]]] = {}
        for layer, cotangent in self._backward(u):
            if layer.weight_name is not None:
                uses.setdefault(layer.weight_name, []).append((layer.inputs.to(u.dtype), cotangent.to(u.dtype)))
            if layer.bias_name is not None:
                uses.setdefault(layer.bias_name, []).append((None, cotangent.to(u.dtype)))
        return uses


def _linear_tangent(layer: _Linear, tangent: Tensor | None, v: Parameters) -> Tensor | None:
    """F W + S̃ D, in the names of Algorithm 4; a new tensor."""
    dtype, inputs = layer.weight.dtype, layer.inputs
    shape = (*inputs.shape[:-1], layer.weight.shape[0])
    result: Tensor | None = None
    bias = None if layer.bias_name is None else v[layer.bias_name].to(dtype)
    if layer.weight_name is not None:
        rows, direction = inputs.reshape(-1, inputs.shape[-1]), v[layer.weight_name].to(dtype)
        result = rows @ direction.t() if bias is None else torch.addmm(bias, rows, direction.t())
    elif bias is not None:
        result = bias.expand(shape).reshape(-1, shape[-1]).clone()
    if tangent is not None:
        rows = tangent.reshape(-1, tangent.shape[-1])
        result = rows @ layer.weight.t() if result is None else result.addmm_(rows, layer.weight.t())
    return None if result is None else result.reshape(shape)


def _per_sample(uses: list[tuple[Tensor | None, Tensor]]) -> Iterator[Tensor]:
    """Per-sample gradients of one parameter, all its uses summed, a few samples at a time."""
    inputs, cotangent = uses[0]
    numbers = cotangent.shape[-1] * (1 if inputs is None else inputs.shape[-1])
    for rows in sample_chunks(cotangent.shape[0], numbers):
        yield sum(_per_sample_gradient(a, f, rows) for a, f in uses)  # type: ignore[misc]


def _per_sample_gradient(inputs: Tensor | None, cotangent: Tensor, rows: slice) -> Tensor:
    f = cotangent[rows]
    f = f.reshape(f.shape[0], -1, f.shape[-1])
    if inputs is None:
        return f.sum(1)
    a = inputs[rows]
    return f.mT @ a.reshape(a.shape[0], -1, a.shape[-1])


def record_layer_chain(module: nn.Module, params: Parameters, args: tuple[Any, ...]) -> LayerChain | None:
    """Run ``module`` once at ``params`` and return its chain, or None if it is not a chain of layers with rules.

    Under autocast the chain computes its products in the autocast dtype, as the module does.
    """
    if len(args) != 1 or not isinstance(args[0], Tensor) or not _may_be_chain(module, params):
        return None
    names = {id(p): name for name, p in module.named_parameters()}
    owned = {layer: (names[id(layer.weight)], names.get(id(layer.bias))) for layer in _linears(module)}
    calls: list[tuple[nn.Module, tuple[Any, ...], Any, int, Any]] = []
    cut_off = False  # some layer is called under torch.no_grad, where no derivative passes

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal cut_off
        cut_off = cut_off or not torch.is_grad_enabled()
        version = output._version if isinstance(output, Tensor) else 0
        calls.append((layer, inputs, output, version, layer.weight if type(layer) is nn.Linear else None))

    leaves = [layer for layer in module.modules() if next(layer.children(), None) is None]
    handles = [layer.register_forward_hook(hook) for layer in leaves]
    try:
        with torch.enable_grad():
            outputs = call_with(module, params, args)
    finally:
        for handle in handles:
            handle.remove()

    if cut_off:
        return None
    steps: list[_Linear | _Elementwise | _Reshape] = []
    value: Any = args[0]
    dtype = torch.get_autocast_dtype(value.device.type) if torch.is_autocast_enabled(value.device.type) else None
    for layer, inputs, output, version, weight in calls:
        if len(inputs) != 1 or inputs[0] is not value or not isinstance(output, Tensor) or output._version != version:
            return None
        if output.ndim < 2 or output.shape[0] != args[0].shape[0]:
            return None
        if type(layer) is nn.Linear:
            compute = dtype or weight.dtype
            weight_name, bias_name = (name if name in params else None for name in owned[layer])
            steps.append(_Linear(value.detach().to(compute), weight.detach().to(compute), weight_name, bias_name))
        elif type(layer) in _ELEMENTWISE and _has_rule(layer):
            steps.append(_Elementwise(_derivative(layer, value).to(dtype or output.dtype)))
        elif _has_rule(layer):
            steps.append(_Reshape(value.shape, output.shape))
        else:
            return None
        value = output
    if value is not outputs or not any(isinstance(step, _Linear) for step in steps):
        return None
    return LayerChain(steps, outputs.detach(), params)


def _may_be_chain(module: nn.Module, params: Parameters) -> bool:
    """Cheap signs that there is no chain, before a forward pass is spent on it."""
    linears = set(_linears(module))
    for layer in module.modules():
        if layer in linears:
            if layer._forward_hooks or layer._forward_pre_hooks:
                return False
        elif next(layer.parameters(recurse=False), None) is not None:
            return False
    reached = {name for name, _ in module.named_parameters()}
    return bool(linears) and set(params) <= reached


def _has_rule(layer: nn.Module) -> bool:
    if type(layer) in _ELEMENTWISE:
        return not getattr(layer, "inplace", False)
    if type(layer) in _DROPOUT:
        return not layer.training or getattr(layer, "p", None) == 0
    return type(layer) in _RESHAPING


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if type(layer) is nn.Linear]


def _derivative(layer: nn.Module, inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        z = inputs.detach().requires_grad_()
        y = layer(z)
        (derivative,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return derivative
