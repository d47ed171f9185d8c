"""The rule of normalisations: y = w∘x̂ + b, whose derivative in the inputs is symmetric but for w."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.rule_call import Rule, call_by_rule, may_have_rule

_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
# Cotangents of the outputs, a weight or None, and what is needed -> cotangents of inputs, weight and bias.
_Backward = Callable[[Tensor, Tensor | None, Sequence[bool]], Sequence[Tensor | None]]


def call_layer_norm(layer: nn.LayerNorm, input: Any) -> Tensor:
    """A call of the layer by the rule; what is none for it by torch."""
    shape = list(layer.normalized_shape)
    covered = may_have_rule(input, layer.weight, layer.bias)
    if not covered or input.dim() <= len(shape) or list(input.shape[-len(shape) :]) != shape:
        return type(layer).forward(layer, input)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Rule:
        inputs = inputs.contiguous()
        normalised, mean, scale = torch.native_layer_norm(inputs, shape, None, None, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            # it takes the gradient of a bias only where there is one
            b = None if w is None else bias
            return torch.ops.aten.native_layer_norm_backward(u, inputs, shape, mean, scale, w, b, list(needed))

        return _Normalised(normalised, weight, bias, backward)

    return _called(make, input, layer)


def call_group_norm(layer: nn.GroupNorm, input: Any) -> Tensor:
    """A call of the layer by the rule; what is none for it by torch."""
    if not may_have_rule(input, layer.weight, layer.bias) or input.dim() < 2 or input.shape[1] != layer.num_channels:
        return type(layer).forward(layer, input)
    n, channels = input.shape[:2]
    sizes = (n, channels, input.numel() // (n * channels), layer.num_groups)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Rule:
        inputs = inputs.contiguous()
        normalised, mean, scale = torch.native_group_norm(inputs, None, None, *sizes, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            return torch.ops.aten.native_group_norm_backward(u, inputs, mean, scale, w, *sizes, list(needed))

        return _Normalised(normalised, weight, bias, backward, (-1, *(1,) * (inputs.dim() - 2)))

    return _called(make, input, layer)


def call_batch_norm(layer: _BatchNorm, input: Any) -> Tensor:
    """A call of the layer by the rule, which updates its statistics; what is none for it by torch."""
    covered = may_have_rule(input, layer.weight, layer.bias, layer.running_mean)
    if not covered or input.dim() < 2 or input.shape[1] != layer.num_features:
        return type(layer).forward(layer, input)
    with torch.no_grad():
        type(layer).forward(layer, input)  # for the statistics, and for the errors of torch
    of_batch = layer.training or layer.running_mean is None
    statistics = (None, None) if of_batch else (layer.running_mean, layer.running_var)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Rule:
        normalised, *saved = torch.native_batch_norm(inputs, None, None, *statistics, of_batch, 0.0, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            return torch.ops.aten.native_batch_norm_backward(
                u, inputs, w, *statistics, *saved, of_batch, layer.eps, list(needed)
            )

        return _Normalised(normalised, weight, bias, backward, (-1, *(1,) * (inputs.dim() - 2)))

    return _called(make, input, layer)


def _called(make: Callable[..., Rule], input: Tensor, layer: Any) -> Tensor:
    (output,) = call_by_rule(make, input, layer.weight, layer.bias)
    return output


class _Normalised(Rule):
    """w∘x̂ + b.

    Args:
        normalised: x̂.
        weight, bias: w and b; None for one and zero.
        backward: of the normalisation.
        shape: in which w and b stand beside x̂; None for their own.
    """

    def __init__(
        self,
        normalised: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        backward: _Backward,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self._normalised, self._weight, self._bias = normalised, weight, bias
        self._backward, self._shape = backward, shape

    def outputs(self) -> tuple[Tensor, ...]:
        return (self._scaled(self._normalised.clone(), self._weight, self._bias),)

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (of_outputs,) = cotangents
        return self._backward(of_outputs.contiguous(), self._weight, needed)

    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        of_inputs, of_weight, of_bias = tangents
        found: Tensor | None = None
        if of_inputs is not None:
            (found, *_) = self._backward(of_inputs.contiguous(), None, (True, False, False))
        found = torch.zeros_like(self._normalised) if found is None else self._scaled(found, self._weight, None)
        if of_weight is not None:
            found.addcmul_(self._normalised, self._beside(of_weight))
        return (found if of_bias is None else found.add_(self._beside(of_bias)),)

    def _scaled(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """weight∘x + bias, in place of x."""
        if weight is not None:
            x.mul_(self._beside(weight))
        return x if bias is None else x.add_(self._beside(bias))

    def _beside(self, tensor: Tensor) -> Tensor:
        return tensor if self._shape is None else tensor.view(self._shape)
