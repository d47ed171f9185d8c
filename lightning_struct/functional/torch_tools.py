"""Helpers on torch: calls of modules, operators for compilers, and the names of torch that are not public.

The private names are used here alone and were checked with torch 2.6 to 2.15. Fields of modules and tensors that all of
torch's ecosystem reads (``_parameters``, ``_buffers``, ``_version``) are read wherever they are needed.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensor", "TorchDispatchMode", "add_to_each", "average_each", "call_with", "captured", "copy_each",
    "current_backward", "damaged_part", "denormals_flushed", "in_eval_mode", "is_functorch_wrapped_tensor",
    "is_recorded", "joined", "norms_of_each", "opaque_operator", "tree_flatten", "tree_leaves", "tree_map",
    "tree_unflatten", "triangular_factor", "unfused_kernels", "writes_in_place",
]  # fmt: skip
from torch import _foreach_add_ as add_to_each
from torch import _foreach_copy_ as copy_each
from torch import _foreach_lerp_ as average_each
from torch.func import functional_call


def current_backward() -> int:
    """A number for the backward pass that is going on, rising from one to the next; -1 outside of one."""
    return torch._C._current_graph_task_id()


def writes_in_place(operation: Any) -> bool:
    """Whether a node of a recorded graph calls an operation of torch that changes a tensor."""
    return isinstance(operation, OpOverload) and operation._schema.is_mutable


def is_recorded() -> bool:
    """Whether operations on tensors are written into a graph now, by ``make_fx`` or by SHF."""
    return _get_current_dispatch_mode() is not None


def norms_of_each(tensors: Sequence[Tensor], dtype: torch.dtype | None = None, order: float = 2) -> tuple[Tensor, ...]:
    """The Euclidean norm of each tensor, or that of another order, all at once; in ``dtype`` if one is given."""
    return torch._foreach_norm(list(tensors), order, dtype) if tensors else ()


def captured(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any] | None:
    """Capture a function of tensors that stay where they are as one CUDA graph.

    Returns:
        The function that runs it again, and its results, into whose memory it writes each time; None on other devices
        than a GPU of CUDA, or if it cannot be captured.
    """
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph):
            results = function()
    except RuntimeError:
        return None
    return graph.replay, results


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The concatenation of tensors; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def triangular_factor(matrix: Tensor) -> Tensor:
    """R of the QR decomposition of a matrix (..., m, n): upper triangular, (..., min(m, n), n).

    ``torch.linalg.qr(mode="r")`` and ``Tensor.triu`` share the smallest matrix among all threads, which takes
    milliseconds if other programs run (torch 2.14).
    """
    columns = torch.arange(matrix.shape[-1], device=matrix.device)
    rows = columns[: matrix.shape[-2], None]
    return torch.geqrf(matrix)[0][..., : len(rows), :].where(rows <= columns, 0.0)


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``, which leaves the module as it was.

    The call works on copies of the buffers that are not given. And every layer has its own tensors again afterwards:
    torch's leaves others in a layer that is registered in two places (seen from 2.6 to 2.15). What ``torch.compile``
    has compiled runs as it is in Python: compiled graphs have no second derivatives.

    Args:
        module: it is called.
        tensors: name -> the tensor in place of the parameter or buffer of that name.
        args: of the call.
    """
    own = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in module.modules()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in tensors}
    try:
        with torch.compiler.set_stance("force_eager"):
            return functional_call(module, {**buffers, **tensors}, args)
    finally:
        for layer, parameters, buffers_of_layer in own:
            layer._parameters.update(parameters)
            layer._buffers.update(buffers_of_layer)


@contextmanager
def unfused_kernels(module: nn.Module | None) -> Iterator[None]:
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


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """A context in which a module and all below it are in eval mode; afterwards each is in the mode that it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Context in which numbers below the normal range become zero, in this thread and in those that it starts.

    The arithmetic of a CPU takes up to ten times as long on such numbers. torch does not tell its mode, but Python's
    own floats are computed in it: it is put back in the end.
    """
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


class TensorFunction(Protocol):
    """A differentiable function of tensors that computes by the method."""

    def __call__(self, *tensors: Tensor, method: str) -> Tensor: ...


def opaque_operator(
    name: str, function: TensorFunction, empty_result: Callable[[Sequence[Tensor]], Tensor]
) -> TensorFunction:
    """The same function, which in compiled graphs is the operator ``lightning_struct::name`` with first derivatives.

    There it runs when the compiled graph runs. So it may read values, such as those by which it chooses between
    methods. For its gradients it is computed again: nothing but its arguments is saved. Compiled graphs have no second
    derivatives, nor has the operator.

    Args:
        name: of the operator.
        function: of tensors, none of them a part of the result.
        empty_result: makes a tensor of the shape, the dtype and the device of the result.
    """
    qualified = f"lightning_struct::{name}"

    def compute(tensors: list[Tensor], method: str) -> Tensor:
        return function(*tensors, method=method).contiguous()

    def differentiate(cotangent: Tensor, tensors: list[Tensor], method: str) -> list[Tensor]:
        # torch.func works within operators, where there is no autograd.
        pull_back = torch.func.vjp(lambda *arguments: function(*arguments, method=method), *tensors)[1]
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in pull_back(cotangent)]

    def empty_gradients(cotangent: Tensor, tensors: list[Tensor], method: str) -> list[Tensor]:
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]

    custom, schema = torch.library.custom_op, "Tensor[] tensors, str method"
    operator = custom(qualified, compute, mutates_args=(), schema=f"({schema}) -> Tensor")
    of_gradients = f"(Tensor cotangent, {schema}) -> Tensor[]"
    gradients = custom(f"{qualified}_backward", differentiate, mutates_args=(), schema=of_gradients)

    def setup_context(ctx: Any, inputs: tuple[list[Tensor], str], output: Tensor) -> None:
        tensors, ctx.method = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, cotangent: Tensor) -> tuple[list[Tensor], None]:
        return gradients(cotangent, list(ctx.saved_tensors), ctx.method), None

    operator.register_fake(lambda tensors, method: empty_result(tensors))
    operator.register_autograd(backward, setup_context=setup_context)
    gradients.register_fake(empty_gradients)

    def call(*tensors: Tensor, method: str) -> Tensor:
        if torch.compiler.is_compiling():
            return operator(list(tensors), method)
        return function(*tensors, method=method)

    return call


def damaged_part(file: str | Path) -> str | None:
    """Find damage in a file of ``torch.save`` by its checksums, which ``torch.load`` does not always compare.

    Args:
        file: its path.

    Returns:
        The name of the part, or why the file cannot be read; None if all is as it was written.
    """
    try:
        with ZipFile(file) as archive:
            return archive.testzip()
    except BadZipFile as error:
        return str(error)
