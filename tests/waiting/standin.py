"""A device that is none: tensors that live on it compute on the CPU, refuse to meet the CPU's, and count waiting.

A GPU works behind its host. The host waits for it when it asks for a number (``item``, ``bool``, ``float``, ``tolist``,
``numpy``), compares whole tensors (``torch.equal``), or selects by values (``nonzero``, masks). Code that does so in a
loop is slow there, and code that mixes tensors of two devices fails there. Both can be seen without one, and how many
operations the host starts, which takes the time of small steps::

    with StandInDevice() as device:
        module, inputs = device.move(module), device.tensor(inputs)
        module(inputs).sum().backward()
    device.synchronisations  # Counter({"aten._local_scalar_dense": 1}), say
    device.operations.total()  # those that compute or copy numbers
"""

import sys
from collections import Counter
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self


class _Module(backend_registration._DummyBackendModule):
    """What ``torch.cuda`` is to a GPU. Its random numbers are the CPU's."""

    device = staticmethod(nullcontext)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))


backend_registration._setup_privateuseone_for_python_backend("standin", _Module())
DEVICE = torch.device("standin", 0)

# Operations that compute nothing, beside the views that their schemas show.
_COMPUTES_NOTHING = ("empty", "new_empty", "_unsafe_view", "squeeze_", "unsqueeze_")

# Operations whose result, or its size, the host needs before it goes on.
_WAITS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"),
    *("unique_consecutive", "repeat_interleave.Tensor", "bincount", "_linalg_check_errors"),
}


class _Generator(torch.Generator):
    """A generator of the CPU, also if one of the device is asked for."""

    def __new__(cls, device: torch.device | str = "cpu") -> Self:
        return super().__new__(cls, "cpu" if torch.device(device).type == DEVICE.type else device)


class OnDevice(Tensor):
    """A tensor of the stand-in device; ``inner`` is the CPU's tensor that holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} was called outside of `with StandInDevice()`")


class StandInDevice:
    """Context manager within which tensors on :data:`DEVICE` work.

    Attributes:
        synchronisations: how often the host waited for the device, by the name of the operation.
        places: how often it did at each line of lightning_struct.
        operations: how often each operation on the device was started, views and allocations apart.
    """

    def __init__(self) -> None:
        self.synchronisations: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self._modes = (_Functions(self), _Operations(self))
        self._generator = torch.Generator

    def __enter__(self) -> Self:
        torch.Generator = _Generator  # type: ignore[misc]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        torch.Generator = self._generator  # type: ignore[misc]

    @property
    def total(self) -> int:
        """How often the host waited."""
        return sum(self.synchronisations.values())

    def reset(self) -> None:
        """Count from zero."""
        self.synchronisations.clear()
        self.places.clear()
        self.operations.clear()

    def found(self) -> dict[str, Any]:
        """What was counted."""
        return {"waits": self.total, "places": dict(self.places), "operations": self.operations.total()}

    def tensor(self, value: Tensor) -> Tensor:
        """A tensor of the CPU as one of the device."""
        return OnDevice(value.detach().clone())

    def move(self, module: nn.Module) -> nn.Module:
        """The module, with its parameters and buffers on the device."""
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(self.tensor(parameter), parameter.requires_grad)
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    layer._buffers[name] = self.tensor(buffer)
            if isinstance(layer, nn.RNNBase):
                layer._init_flat_weights()
        return module

    def waited(self, operation: str) -> None:
        """Count one wait of the host."""
        self.synchronisations[operation] += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and "/lightning_struct/" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.places[f"{frame.f_code.co_filename.rpartition('/lightning_struct/')[2]}:{frame.f_lineno}"] += 1


class _Functions(TorchFunctionMode):
    """Counts what reads a tensor past the dispatcher."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and isinstance(args[0], OnDevice):
            self._device.waited(func.__name__)
            return func(args[0].inner.detach(), *args[1:], **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor and isinstance(args[0], OnDevice):
            return OnDevice(args[0].inner.new_tensor(*args[1:], **kwargs))
        asked = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and asked is not None and torch.device(asked).type == DEVICE.type:
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Runs operations on the CPU, and says on which device their results are."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        here = [t for t in tensors if isinstance(t, OnDevice)]
        asked = kwargs.get("device")
        if asked is None and not here:
            return func(*args, **kwargs)
        name = func.__name__.removesuffix(".default")
        self._check(func, name, tensors, here)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and not name.startswith(_COMPUTES_NOTHING):
            self._device.operations[name] += 1
        on_device = bool(here)
        if asked is not None:
            on_device = torch.device(asked).type == DEVICE.type
            kwargs["device"] = torch.device("cpu") if on_device else asked
        leaves_device = bool(here) and not on_device or (name == "copy_" and not isinstance(args[0], OnDevice))
        masks = name.startswith(("index", "_index_put")) and any(t.dtype in (torch.bool, torch.uint8) for t in here)
        if name in _WAITS or name.partition(".")[0] in _WAITS or leaves_device or masks:
            self._device.waited("to the CPU" if leaves_device else name)
        generator = kwargs.get("generator")
        assert generator is None or generator.device.type == "cpu"
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        results = func(*inner_args, **inner_kwargs)
        given = {id(t.inner): t for t in here}
        return tree_map(lambda r: _outer(r, given, on_device), results)

    def _check(self, func: Any, name: str, tensors: list[Tensor], here: list[OnDevice]) -> None:
        """Raise for an operation on tensors of both devices; a number without dimensions may be the CPU's."""
        if not here or name.startswith(("copy_", "_to_copy", "index", "_index_put")):
            return
        others = [t for t in tensors if not isinstance(t, OnDevice) and t.ndim > 0]
        if others:
            raise RuntimeError(
                f"{func} got tensors on two devices: one of shape {tuple(others[0].shape)} is on {others[0].device}, "
                f"one of shape {tuple(here[0].shape)} on {DEVICE}"
            )


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _outer(value: Any, given: dict[int, OnDevice], on_device: bool) -> Any:
    if not isinstance(value, Tensor) or not on_device:
        return value
    known = given.get(id(value))
    return known if known is not None else OnDevice(value)
