"""A call of a layer whose derivative is given by a rule, as a node of a graph that can be differentiated twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Rule(ABC):
    """A layer at one call: what it returns for some tensors (inputs, weights, biases), and its derivative there."""

    @abstractmethod
    def outputs(self) -> tuple[Tensor, ...]:
        """What is returned; new tensors, which may be changed in place."""

    @abstractmethod
    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The cotangents of the tensors by those of the outputs; None for those that are not needed."""

    @abstractmethod
    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The tangents of the outputs by those of the tensors, of which None stands for zero; new tensors."""


def call_by_rule(rule: Callable[..., Rule], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """What ``rule(*tensors)`` returns, with its derivative.

    The graph may be differentiated once, and what that gives once more in the cotangents, of which it is a linear
    function; not in the tensors, which are constants of it.
    """
    return _Call.apply(rule, *tensors)


def may_have_rule(input: Any, *weights: Tensor | None) -> bool:
    """Whether a layer is called on a tensor with entries, in the dtype of its weights and without autocast."""
    if not isinstance(input, Tensor) or input.numel() == 0 or torch.is_autocast_enabled(input.device.type):
        return False
    return all(w is None or (w.dtype == input.dtype and w.device == input.device) for w in weights)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Callable[..., Rule], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)  # so that torch sees what changes them in place
        ctx.rule = made = rule(*tensors)
        return made.outputs()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        return None, *_Transposed.apply(ctx.rule, ctx.needs_input_grad[1:], *cotangents)


class _Transposed(torch.autograd.Function):
    """The cotangents of the tensors by those of the outputs."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, needed: tuple[bool, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        return tuple(rule.pull_back(needed, cotangents))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.rule.push_forward(tangents)
