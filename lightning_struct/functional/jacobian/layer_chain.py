"""Jacobian products of a chain of layers by hand-written rules (Algorithms 4 and 5).

One forward pass shows a chain: every layer that was called read the output of the layer before it, the first
one the input, and nothing happened in between. The layers may be ``nn.Linear``, elementwise activations, and layers
that only reshape; the chain may stand in any ``forward``, and a layer may be used twice or share its weight with
another. Activations and their derivatives are kept, so a product costs its matrix products and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.linearization import Linearization, Parameters
from lightning_struct.functional.layers.per_sample.contributions import Dense, Outer, at_least_float32, sample_chunks
from lightning_struct.functional.torch_tools import call_with

_ELEMENTWISE = (
    nn.Sigmoid, nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Hardtanh, nn.ReLU6, nn.Hardsigmoid, nn.Hardswish,
)  # fmt: skip
_RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass
class _Linear:
    """z = a Wᵀ + b. ``weight_name`` and ``bias_name`` are None if they are not differentiated."""

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
        self._steps, self._point, self.outputs = steps, dict(params), outputs
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}  # (1, rows), made once

    def _jvp(self, v: Parameters) -> Tensor:
        """Algorithm 4, in its names: J v is the last F. Weights are stored as (out, in), the paper's are Wᵀ."""
        F: Tensor | None = None  # None as long as it is zero
        for step in self._steps:
            if isinstance(step, _Linear):
                W, S, dtype = step.weight.t(), step.inputs, step.weight.dtype
                D = None if step.weight_name is None else v[step.weight_name].to(dtype).t()
                d = None if step.bias_name is None else v[step.bias_name].to(dtype)
                rows, total = S.reshape(-1, S.shape[-1]), None
                if D is not None:
                    total = rows @ D if d is None else torch.addmm(d, rows, D)  # S̃_{l-1} D_l, (15)
                elif d is not None:
                    total = d.expand(len(rows), -1).clone()
                if F is not None:
                    F = F.reshape(-1, F.shape[-1])
                    total = F @ W if total is None else total.addmm_(F, W)  # + F_{l-1} W_l, (15)
                F = None if total is None else total.reshape(*S.shape[:-1], W.shape[1])
            elif isinstance(step, _Elementwise):
                F = None if F is None else F.mul_(step.derivative)  # S'_l ∘, (15)
            else:
                F = None if F is None else F.reshape(step.output_shape)
        return torch.zeros_like(self.outputs) if F is None else F.to(self.outputs.dtype)

    def _vjp(self, u: Tensor, out: Parameters | None) -> dict[str, Tensor]:
        """Algorithm 5, in its names: Jᵀu is D of all layers."""
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

        for layer, F in self._backwards(u):
            F, S = F.reshape(-1, F.shape[-1]), layer.inputs
            if layer.weight_name is not None:
                write(layer.weight_name, F.t(), S.reshape(-1, S.shape[-1]))  # D_l = S̃_{l-1}ᵀ F_l
            if layer.bias_name is not None:
                key = len(F), F.dtype
                if key not in self._ones:
                    self._ones[key] = F.new_ones(1, len(F))
                write(layer.bias_name, self._ones[key], F)
        for name in gradients.keys() - written:
            gradients[name].zero_()
        return gradients

    def _backwards(self, u: Tensor) -> Iterator[tuple[_Linear, Tensor]]:
        """Each Linear of the chain, from the last, with F_l, the cotangent of its output (Algorithm 5)."""
        first = next(i for i, step in enumerate(self._steps) if isinstance(step, _Linear))
        F, owned = u.to(self._steps[first].weight.dtype), False  # type: ignore[union-attr]
        for i in range(len(self._steps) - 1, first - 1, -1):
            step = self._steps[i]
            if isinstance(step, _Elementwise):
                F = F.mul_(step.derivative) if owned else F * step.derivative  # F_l = (F_{l+1} W_{l+1}ᵀ) ∘ S'_l
                owned = True
            elif isinstance(step, _Reshape):
                F = F.reshape(step.input_shape)
            else:
                yield step, F
                if i > first:
                    F, owned = F @ step.weight, True  # F_{l+1} W_{l+1}ᵀ

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
                    squares[name] = cotangent.square().t() @ inputs.square()  # (S̃²)ᵀ (F²), Algorithm 3
        return {  # in the order and dtype of the parameters, zero if the chain does not reach them
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
                    norms += Dense(at_least_float32(_by_position(cotangent)).sum(1)).squared_norms()
                else:
                    norms += Outer(_by_position(inputs), _by_position(cotangent)).squared_norms()
        return norms

    def _uses(self, u: Tensor) -> dict[str, list[tuple[Tensor | None, Tensor]]]:
        """Uses of each parameter: pairs (inputs, cotangents) as (n, ..., features); a bias has no inputs."""
        uses: dict[str, list[tuple[Tensor | None, Tensor]]] = {}
        for layer, cotangent in self._backwards(u):
            if layer.weight_name is not None:
                uses.setdefault(layer.weight_name, []).append((layer.inputs.to(u.dtype), cotangent.to(u.dtype)))
            if layer.bias_name is not None:
                uses.setdefault(layer.bias_name, []).append((None, cotangent.to(u.dtype)))
        return uses


def _per_sample(uses: list[tuple[Tensor | None, Tensor]]) -> Iterator[Tensor]:
    """Per-sample gradients of one parameter, all its uses summed, a few samples at a time."""
    inputs, cotangent = uses[0]
    numbers = cotangent.shape[-1] * (1 if inputs is None else inputs.shape[-1])
    for rows in sample_chunks(cotangent.shape[0], numbers):
        gradients = [
            _by_position(f[rows]).sum(1) if a is None else _by_position(f[rows]).mT @ _by_position(a[rows])
            for a, f in uses
        ]
        yield sum(gradients[1:], gradients[0])


def _by_position(tensor: Tensor) -> Tensor:
    """(n, positions, features) of (n, ..., features)."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def record_layer_chain(module: nn.Module, params: Parameters, args: tuple[Any, ...]) -> LayerChain | None:
    """Run ``module`` once at ``params`` and return its chain, or None if it is not a chain of layers with rules.

    Under autocast the chain computes its products in the autocast dtype, as the module does.
    """
    if len(args) != 1 or not isinstance(args[0], Tensor) or not _may_be_chain(module, params):
        return None
    names = {id(p): name for name, p in module.named_parameters()}
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
            own = (names.get(id(layer.weight)), names.get(id(layer.bias)))
            weight_name, bias_name = (name if name in params else None for name in own)
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
    layers = list(module.modules())
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    others = [layer for layer in layers if type(layer) is not nn.Linear]
    return (
        bool(linears)
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in linears)
        and not any(list(layer.parameters(recurse=False)) for layer in others)
        and set(params) <= {name for name, _ in module.named_parameters()}
    )


def _has_rule(layer: nn.Module) -> bool:
    if type(layer) in _ELEMENTWISE:
        return not getattr(layer, "inplace", False)
    if type(layer) in _DROPOUT:
        return not layer.training or getattr(layer, "p", None) == 0
    return type(layer) in _RESHAPING


def _derivative(layer: nn.Module, inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        z = inputs.detach().requires_grad_()
        y = layer(z)
        (derivative,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return derivative
