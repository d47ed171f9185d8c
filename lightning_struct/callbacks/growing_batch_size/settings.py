"""The arguments of GrowingBatchSize: what each takes, and which contradict each other."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from lightning_struct.utilities.namespaces import MisconfigurationException

CHOICES = {
    "estimator": ("auto", "layers", "ranks", "steps"),
    "scale_lr": (None, "sqrt", "linear", "adascale"),
    "mode": ("auto", "batch", "accumulate"),
}
COUNTS = ("max_batch_size", "max_device_batch_size", "every_n_steps", "probes", "window")


def check_settings(settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise for an argument of GrowingBatchSize that is out of range, or that contradicts another.

    Args:
        settings: the arguments by name.
        defaults: their defaults.

    Raises:
        MisconfigurationException: names the argument, its value, and what it takes.
    """
    for name, choices in CHOICES.items():
        takes = f"one of {', '.join(map(repr, choices))}"
        _check(name, settings[name], any(settings[name] is c or settings[name] == c for c in choices), takes)
    for name in COUNTS:
        value, optional = settings[name], defaults[name] is None or name == "probes"
        is_count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
        _check(name, value, is_count or (optional and value is None), "a whole number >= 1" + ", or None" * optional)
    theta, overhead, growth = settings["theta"], settings["max_overhead"], settings["growth"]
    threshold, monitor = settings["validation_threshold"], settings["validation_monitor"]
    _check("theta", theta, theta is None or (_is_number(theta) and theta > 0), "a number > 0, or None")
    _check("max_overhead", overhead, _is_number(overhead) and 0 < overhead <= 1, "a share of the time, in (0, 1]")
    _check("growth", growth, _is_number(growth) and 1 <= growth < math.inf, "a finite number >= 1")
    _check("validation_threshold", threshold, _is_number(threshold), "a number")
    _check("validation_monitor", monitor, monitor is None or isinstance(monitor, str), "the name of a metric, or None")
    _check_contradictions(settings, defaults)


def _check_contradictions(settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    device, most, schedule = settings["max_device_batch_size"], settings["max_batch_size"], settings["schedule"]
    given = {name for name, value in settings.items() if value != defaults[name]}
    if settings["mode"] == "accumulate" and device is not None:
        raise MisconfigurationException(
            f"mode='accumulate' leaves the batches of the loaders as they are, and max_device_batch_size={device} lets "
            f"them grow so far: leave one of them out"
        )
    if device is not None and most is not None and device > most:
        raise MisconfigurationException(
            f"max_device_batch_size={device} lets the batches of one device grow beyond max_batch_size={most}, which "
            f"is of all together: leave one of them out, or raise max_batch_size"
        )
    if {"every_n_steps", "max_overhead"} <= given:
        raise MisconfigurationException(
            f"every_n_steps={settings['every_n_steps']} says how often is measured, which max_overhead="
            f"{settings['max_overhead']} would choose: leave one of them out"
        )
    of_measuring = {"estimator", "every_n_steps", "max_overhead", "probes"}
    measures = settings["scale_lr"] == "adascale"
    if schedule is not None:
        of_rules = {"validation_monitor", "validation_threshold", "growth", "allow_shrinking", "window"}
        theta = set() if settings["theta"] == math.inf else {"theta"}
        _refuse(
            f"schedule={schedule!r} sets the sizes, and nothing is measured, but ",
            settings,
            given & (of_rules | theta | (set() if measures else of_measuring)),
        )
    elif settings["theta"] == math.inf and not measures:
        _refuse("theta=inf asks for no norm test, and nothing is measured, but ", settings, given & {"estimator"})


def _refuse(why: str, settings: dict[str, Any], names: Collection[str]) -> None:
    for name in sorted(names):
        raise MisconfigurationException(
            f"{why}{name}={settings[name]!r} is of a rule that goes by measurements: leave one of them out"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _check(name: str, value: object, holds: bool, takes: str) -> None:
    if not holds:
        raise MisconfigurationException(f"{name} must be {takes}, but is {value!r}")
