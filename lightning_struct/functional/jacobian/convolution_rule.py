"""The rule of convolutions: a convolution of the tangents, and one by the tangents of the filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.rule_call import Rule, call_by_rule, may_have_rule


def call_convolution(layer: Any, input: Any) -> Any:
    """A call of ``nn.Conv1d`` to ``nn.Conv3d`` by the rule; by torch for other padding than by zeros, or no batch."""
    padding = _padding(layer)
    plain = type(layer)._conv_forward in (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)
    covered = plain and padding is not None and may_have_rule(input, layer.weight, layer.bias)
    if not covered or input.dim() != layer.weight.dim():
        return type(layer).forward(layer, input)
    options: dict[str, Any] = {"stride": layer.stride, "padding": padding, "dilation": layer.dilation}
    options |= {"transposed": False, "output_padding": (0,) * len(layer.stride), "groups": layer.groups}
    (output,) = call_by_rule(partial(_Filtered, options), input, layer.weight, layer.bias)
    return output


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Zeros on both sides of each dimension; None where there is something else, or more on one side."""
    if layer.padding_mode != "zeros":
        return None
    if layer.padding == "valid":
        return (0,) * len(layer.stride)
    if layer.padding == "same":
        both = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(zeros % 2 for zeros in both) else tuple(zeros // 2 for zeros in both)
    padding: tuple[int, ...] = layer.padding
    return padding


class _Filtered(Rule):
    """What a convolution returns for inputs (N, channels, ...), filters and a bias."""

    def __init__(self, options: dict[str, Any], inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._options, self._inputs, self._weight, self._bias = options, inputs, weight, bias

    def outputs(self) -> tuple[Tensor, ...]:
        return (self._convolved(self._inputs, self._weight, self._bias),)

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (of_outputs,) = cotangents
        found: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
            of_outputs, self._inputs, self._weight, [len(self._weight)], **self._options, output_mask=list(needed)
        )
        return found

    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        of_inputs, of_weight, of_bias = tangents
        if of_weight is not None:
            found = self._convolved(self._inputs, of_weight, of_bias)
            return (found if of_inputs is None else found.add_(self._convolved(of_inputs, self._weight, None)),)
        moved = torch.zeros_like(self._inputs) if of_inputs is None else of_inputs
        return (self._convolved(moved, self._weight, of_bias),)

    def _convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(inputs, weight, bias, **self._options)
