"""Functions as operators of torch's library: compilers take them as they are, where they could not trace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class TensorFunction(Protocol):
    """A differentiable function of tensors that computes by the method."""

    def __call__(self, *tensors: Tensor, method: str) -> Tensor: ...


def opaque_operator(
    name: str, function: TensorFunction, empty_result: Callable[[Sequence[Tensor]], Tensor]
) -> TensorFunction:
    """The function as the operator ``lightning_struct::name``, with its first derivatives and a rule for shapes.

    The function runs when the compiled graph runs. So it may read values, such as those by which it chooses between
    methods. For its gradients it is computed again: nothing but its arguments is saved. Compiled graphs have no second
    derivatives, nor has the operator.

    Args:
        name: of the operator.
        function: of tensors, of which none is a part of the result.
        empty_result: makes a tensor of the shape, the dtype and the device of the result.
    """
    qualified = f"lightning_struct::{name}"

    def compute(tensors: list[Tensor], method: str) -> Tensor:
        return function(*tensors, method=method).contiguous()

    def differentiate(cotangent: Tensor, tensors: list[Tensor], method: str) -> list[Tensor]:
        # torch.func works within operators, where there is no autograd.
        pull_back = torch.func.vjp(lambda *arguments: function(*arguments, method=method), *tensors)[1]
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in pull_back(cotangent)]

    operator = torch.library.custom_op(
        qualified, compute, mutates_args=(), schema="(Tensor[] tensors, str method) -> Tensor"
    )
    gradients = torch.library.custom_op(
        f"{qualified}_backward",
        differentiate,
        mutates_args=(),
        schema="(Tensor cotangent, Tensor[] tensors, str method) -> Tensor[]",
    )

    def empty_gradients(cotangent: Tensor, tensors: list[Tensor], method: str) -> list[Tensor]:
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]

    def setup_context(ctx: Any, inputs: tuple[list[Tensor], str], output: Tensor) -> None:
        tensors, ctx.method = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, cotangent: Tensor) -> tuple[list[Tensor], None]:
        return gradients(cotangent, list(ctx.saved_tensors), ctx.method), None

    operator.register_fake(lambda tensors, method: empty_result(tensors))
    operator.register_autograd(backward, setup_context=setup_context)
    gradients.register_fake(empty_gradients)

    def call(*tensors: Tensor, method: str) -> Tensor:
        return operator(list(tensors), method)

    return call
