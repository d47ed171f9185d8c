"""Checks of values at a boundary, the errors that they raise, and warnings."""

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial, wraps
from inspect import signature, unwrap
from itertools import chain
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

Checked = TypeVar("Checked", bound=Callable[..., Any])
Measured = Annotated[float, "it may be NaN or infinite"]
Extended = Annotated[float, "it may be infinite"]
Positive = Annotated[float, "> 0"]
NotNegative = Annotated[float, ">= 0"]
Size = Annotated[int, ">= 1"]
Count = Annotated[int, ">= 0"]
Points = Annotated[Tensor, "(n, d), real"]
Tests = list[tuple[Callable[[Any], bool], str]]  # of a value, one of which must hold, with words for right values

# A warning points at the first caller outside of these.
_PACKAGES = ("lightning_struct", "torch", "lightning", "pytorch_lightning", "contextlib")


class NotFinite(ValueError, FloatingPointError):
    """NaN or infinity in data, weights, outputs or a loss: training has diverged, or something is damaged.

    It is a ``ValueError``, as other refusals of a step are, and a ``FloatingPointError``, as errors that solvers find
    amidst their products is: by that the command line of the recipes tells it from a defect.
    """


def is_integer(value: object) -> bool:
    """Whether a value is an integer of 64 bits, also one of NumPy; True and False are none.

    Example:
        >>> [is_integer(value) for value in (3, -1, 2**64, 2.0, True, "3", None)]
        [True, True, False, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**63


def is_real(value: object) -> bool:
    """Whether a value is a finite real number, an integer one of 64 bits; True and False are none.

    Example:
        >>> [is_real(value) for value in (3, 0.5, float("inf"), float("nan"), True, "3", None)]
        [True, True, False, False, False, False, False]
    """
    if not isinstance(value, Real) or isinstance(value, Integral):
        return is_integer(value)
    return bool(abs(value) <= sys.float_info.max)  # type: ignore[operator]


def is_extended(value: object) -> bool:
    """Whether a value is a real number or infinite; NaN, True and False are none.

    Example:
        >>> [is_extended(value) for value in (0.5, float("-inf"), float("nan"))]
        [True, True, False]
    """
    return is_real(value) or (isinstance(value, float) and math.isinf(value))


def positive_size(name: str, value: object) -> int:
    """``value`` as an int, if it is a positive integer: also one of NumPy, as the number of actions in an environment.

    Raises:
        ValueError: it is none, or too large for a dimension.
    """
    if not is_integer(value) or not 1 <= value < 2**31:  # type: ignore[operator]
        too_large = " below 2³¹" if is_integer(value) and value > 0 else ""  # type: ignore[operator]
        raise ValueError(f"{name} must be a positive integer{too_large}, but is {_described(value)}")
    return int(value)  # type: ignore[call-overload]


def _is_instance(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_quantized or value.is_nested:
        return False
    return value.layout == torch.strided and not (value.is_floating_point() and value.dtype.itemsize == 1)


def _is_device(value: object) -> bool:
    try:
        return isinstance(value, torch.device | str) and torch.empty(0, device=value) is not None
    except (RuntimeError, AssertionError):  # an unknown name, or a device that is not there
        return False


def _are(any_of: Tests, kind: type, values: object) -> bool:
    """Whether a value is of a kind that has elements, and these are right; strings are not taken for their letters."""
    if not isinstance(values, kind) or isinstance(values, str | bytes):
        return False
    return all(any(holds(value) for holds, _ in any_of) for value in values)  # type: ignore[attr-defined]


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
        TypeError: it is none of them, or is complex or boolean, sparse, quantised or on the meta device.

    Example:
        >>> as_tensor("x", [1, 2.5])
        tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    try:
        if isinstance(value, (int, float, list, tuple)):
            value = torch.tensor(value, dtype=None if torch.tensor(value).dtype == torch.bool else torch.float64)
        elif not isinstance(value, Tensor) and hasattr(value, "__array__"):
            value = torch.tensor(value.__array__())
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} must hold numbers in one rectangular array: {first_line(error)}") from None
    check_dense(what, value, has_numbers=True)
    if value.is_complex() or value.dtype == torch.bool:  # type: ignore[attr-defined]
        raise TypeError(f"{what} must hold real floating-point numbers, but is {value.dtype}")  # type: ignore[attr-defined]
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
    Tensor: (lambda value: _is_dense(value) and value.dtype != torch.bool, "a dense tensor"),
    float: (is_real, "a finite real number"),
    Extended: (is_extended, "a real number"),
    Measured: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a real number"),
    int: (lambda value: is_integer(value) or isinstance(value, torch.SymInt), "a whole number"),
    Positive: (lambda value: is_real(value) and value > 0, "a finite number > 0"),
    NotNegative: (lambda value: is_real(value) and value >= 0, "a finite number >= 0"),
    Size: (lambda value: is_integer(value) and value >= 1, "a whole number >= 1"),
    Count: (lambda value: is_integer(value) and value >= 0, "a whole number >= 0"),
    Points: (lambda v: _is_dense(v) and v.is_floating_point() and v.ndim == 2 and not v.is_meta, "real points (n, d)"),
    torch.device: (_is_device, "a device that is there"),
    type(None): (lambda value: value is None, "None"),
}


def checked(function: Checked) -> Checked:
    """Refuse arguments of other types than the annotations of a function or class say.

    An argument is compared if all of its types are classes: numbers, which must be finite, and the elements of
    sequences and tuples, too. Nothing is compared while a graph is compiled. The words of a ``Literal`` are left to
    the function, and ranges other than those of the names above.

    Raises:
        TypeError: in a call; the message names the argument.
        ValueError: a number out of range; likewise.
        NotFinite: NaN or infinity for a number that is not ``Measured`` or ``Extended``; likewise.

    Example:
        >>> checked(lambda length: 2 * length)(2)  # without annotations all is right
        4
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    parameters = signature(function).parameters.items()
    places = [name for name, of in parameters if of.kind is of.POSITIONAL_OR_KEYWORD]
    rest = [name for name, of in parameters if of.kind is of.VAR_POSITIONAL]

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            names = places if len(args) <= len(places) else places + rest * (len(args) - len(places))
            _check_types(function, chain(zip(names, args, strict=False), kwargs.items()))
        return function(*args, **kwargs)

    return checking  # type: ignore[return-value]


def check_calls(of: type, *names: str) -> None:
    """Have methods that a class defines refuse arguments as :func:`checked` does.

    Args:
        of: the class.
        *names: of the methods; those that the class does not define, or takes from a base, are passed over.
    """
    for name in {*names} & vars(of).keys():
        if all(getattr(base, name, None) is not vars(of)[name] for base in of.__mro__[1:]):
            setattr(of, name, checked(vars(of)[name]))


def check_types(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Refuse arguments as :func:`checked` does, in a function that cannot be wrapped, because it reads its caller.

    Args:
        function: it.
        arguments: by name, as by ``locals()`` in its first line.
    """
    _check_types(function, arguments.items())


def _check_types(function: Callable[..., Any], arguments: Iterable[tuple[str, Any]]) -> None:
    tests, on_meta = _tests_of(function), dict[bool, str]()
    for name, value in arguments:
        if isinstance(value, Tensor) and on_meta.setdefault(value.is_meta, name) and len(on_meta) == 2:
            raise TypeError(f"{on_meta[True]} is on the meta device, without numbers, and {on_meta[False]} is not")
        if (any_of := tests.get(name)) and not any(holds(value) for holds, _ in any_of):
            takes = " or ".join(takes for _, takes in any_of)
            error: type[Exception] = ValueError if is_real(value) and ">" in takes else TypeError  # out of range
            error = NotFinite if isinstance(value, float) and not math.isfinite(value) else error
            raise error(f"{name} must be {takes}, got {_described(value)}")


@cache
def _tests_of(function: Callable[..., Any]) -> dict[str, Tests]:
    """Tests of each annotated argument."""
    scope, annotations = unwrap(function).__globals__, function.__annotations__
    return {name: _tests(annotations[name], scope) for name in signature(function).parameters if name in annotations}


def _tests(annotation: Any, scope: dict[str, Any]) -> Tests:
    """Tests of a value, one of which must hold; none if a type in the annotation is no class."""
    try:
        given = eval(annotation, scope) if isinstance(annotation, str) else annotation
    except (NameError, TypeError):  # names that are imported for type checkers alone
        return []
    tests: Tests = []
    parts = get_args(given) if get_origin(given) in (Union, UnionType) else [given]
    for part in parts:
        kind = getattr(part, "__bound__", get_origin(part) or part)
        if kind is str and torch.device in parts:
            continue
        if part in _TESTS or kind in _TESTS:
            tests.append(_TESTS.get(part) or _TESTS[kind])
        elif kind in (Sequence, Collection, tuple) and (elements := _tests_of_elements(part, scope)):
            tests.append((partial(_are, elements, kind), f"a {kind.__name__} of which each is {elements[0][1]}"))
        elif isinstance(kind, type) and kind is not Any and getattr(kind, "_is_runtime_protocol", True):
            tests.append((partial(_is_instance, kind), f"a {kind.__name__}"))
        else:
            return []
    return tests


def _tests_of_elements(annotation: Any, scope: dict[str, Any]) -> Tests:
    kinds = {*get_args(annotation)} - {...}
    return _tests(Measured if kinds == {float} else kinds.pop(), scope) if len(kinds) == 1 else []


def first_line(error: Exception) -> str:
    """Type and message of an error, which may go on for pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
