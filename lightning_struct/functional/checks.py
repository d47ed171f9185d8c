"""Checks of values at a boundary, the errors that they raise, and warnings."""

import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature, unwrap
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

Checked = TypeVar("Checked", bound=Callable[..., Any])

# A warning points at the first caller outside of these.
_PACKAGES = ("lightning_struct", "torch", "lightning", "pytorch_lightning", "contextlib")


class NotFinite(ValueError, FloatingPointError):
    """NaN or infinity in data, weights, outputs or a loss: training has diverged, or something is damaged.

    It is a ``ValueError``, as other refusals of a step are, and a ``FloatingPointError``, as errors that solvers find
    amidst their products is: by that the command line of the recipes tells it from a defect.
    """


def is_integer(value: object) -> bool:
    """Whether a value is an integer, also one of NumPy; True and False are none.

    Example:
        >>> [is_integer(value) for value in (3, -1, 2.0, True, "3", None)]
        [True, True, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number, NaN and infinity among them; True and False are none.

    Example:
        >>> [is_real(value) for value in (3, 0.5, float("nan"), True, "3", None)]
        [True, True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_instance(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_nested)


def check_dense(what: str, value: object, *, has_numbers: bool = False) -> None:
    """Raise TypeError unless a value is a dense tensor, neither sparse nor quantised.

    Args:
        what: the subject of the message.
        value: it.
        has_numbers: whether it must not be on the meta device.
    """
    if not _is_dense(value) or (has_numbers and value.is_meta):  # type: ignore[attr-defined]
        numbers = " that holds numbers" if has_numbers else ""
        raise TypeError(f"{what} must be a dense tensor{numbers}, got {_described(value)}")


def as_tensor(what: str, value: object) -> Tensor:
    """The tensor of a tensor, an array of NumPy or pandas, or a list of numbers (float64), which holds numbers.

    Args:
        what: the subject of the message.
        value: it.

    Raises:
        TypeError: it is none of them, or is sparse, quantised or on the meta device.

    Example:
        >>> as_tensor("x", [1, 2.5])
        tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    try:
        if isinstance(value, (int, float, list, tuple)):
            value = torch.tensor(value, dtype=torch.float64)
        elif not isinstance(value, Tensor) and hasattr(value, "__array__"):
            value = torch.tensor(value.__array__())
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} must hold numbers in one rectangular array: {first_line(error)}") from None
    check_dense(what, value, has_numbers=True)
    return value  # type: ignore[return-value]


def require_real(dimensions: int | None = None, /, **tensors: Tensor) -> None:
    """Refuse other dtypes than real floating-point numbers, and other numbers of dimensions.

    Raises:
        TypeError: a tensor has another dtype; it is named by its keyword.
        ValueError: a tensor has more or fewer dimensions.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must hold real floating-point numbers, not {tensor.dtype}: use {name}.float().")
        if dimensions not in (None, tensor.ndim):
            raise ValueError(f"{name} must have {dimensions} dimensions, got the shape {tuple(tensor.shape)}")


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    kind = (
        "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    )
    return f"a {kind} tensor of {value.dtype} on {value.device}"


# What arguments take that are not instances of the class that annotates them, with a test and its name.
_TESTS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    Tensor: (_is_dense, "a dense tensor"),
    float: (is_real, "a real number"),
    int: (lambda value: is_integer(value) or isinstance(value, torch.SymInt), "a whole number"),
    type(None): (lambda value: value is None, "None"),
}


def checked(function: Checked) -> Checked:
    """Refuse arguments of other types than the annotations of a function or class say.

    Compared are arguments all of whose types are classes, and not while a graph is compiled. The range of a number and
    the words of a ``Literal`` are left to the function.

    Raises:
        TypeError: in a call; the message names the argument.

    Example:
        >>> checked(lambda length: 2 * length)(2)  # without annotations all is right
        4
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    parameters, annotations = signature(function).parameters, function.__annotations__
    scope = unwrap(function).__globals__
    places = [name for name, of in parameters.items() if of.kind is of.POSITIONAL_OR_KEYWORD]
    tests = {name: _tests_of(annotations[name], scope) for name in parameters if name in annotations}

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for name, value in (*zip(places, args, strict=False), *kwargs.items()):
                if (any_of := tests.get(name)) and not any(holds(value) for holds, _ in any_of):
                    takes = " or ".join(takes for _, takes in any_of)
                    raise TypeError(f"{name} must be {takes}, got {_described(value)}")
        return function(*args, **kwargs)

    return checking  # type: ignore[return-value]


def _tests_of(annotation: Any, scope: dict[str, Any]) -> list[tuple[Callable[[Any], bool], str]]:
    """Tests of a value, one of which must hold; none if a type in the annotation is no class."""
    try:
        given = eval(annotation, scope) if isinstance(annotation, str) else annotation
    except (NameError, TypeError):  # names that are imported for type checkers alone
        return []
    tests = []
    for part in get_args(given) if get_origin(given) in (Union, UnionType) else [given]:
        kind = getattr(part, "__bound__", get_origin(part) or part)
        if kind in _TESTS:
            tests.append(_TESTS[kind])
        elif isinstance(kind, type) and kind is not Any and getattr(kind, "_is_runtime_protocol", True):
            tests.append((partial(_is_instance, kind), f"a {kind.__name__}"))
        else:
            return []
    return tests


def first_line(error: Exception) -> str:
    """Type and message of an error, which may go on for pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
