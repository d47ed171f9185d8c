"""The arguments of GrowingBatchSize: what each takes, and which contradict each other."""

import math
from typing import Any

from lightning_struct.utilities.checks import check, is_count, is_number
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
        check(name, settings[name], any(settings[name] is c or settings[name] == c for c in choices), takes)
    for name in COUNTS:
        value, optional = settings[name], defaults[name] is None or name == "probes"
        holds = is_count(value) or (optional and value is None)
        check(name, value, holds, "a whole number >= 1" + ", or None" * optional)
    theta, overhead, growth = settings["theta"], settings["max_overhead"], settings["growth"]
    threshold, monitor = settings["validation_threshold"], settings["validation_monitor"]
    check("theta", theta, theta is None or (is_number(theta) and theta > 0), "a number > 0, or None")
    check("max_overhead", overhead, is_number(overhead) and 0 < overhead <= 1, "a share of the time, in (0, 1]")
    check("growth", growth, is_number(growth) and 1 <= growth < math.inf, "a finite number >= 1")
    check("validation_threshold", threshold, is_number(threshold), "a number")
    named = monitor is None or (isinstance(monitor, str) and monitor != "")
    check("validation_monitor", monitor, named, "the name of a metric, or None")
    shrinking = settings["allow_shrinking"]
    check("allow_shrinking", shrinking, isinstance(shrinking, bool), "True or False")
    _check_contradictions(settings, defaults)


def _check_contradictions(settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    device, schedule = settings["max_device_batch_size"], settings["schedule"]
    if settings["mode"] == "accumulate" and device is not None:
        raise MisconfigurationException(
            f"mode='accumulate' leaves the batches of the loaders as they are, and max_device_batch_size={device} lets "
            "them grow so far: leave one of them out"
        )
    if schedule is None:
        return
    of_rules = ["theta", "validation_monitor", "validation_threshold", "growth", "allow_shrinking"]
    for name in of_rules if settings["scale_lr"] == "adascale" else [*of_rules, "estimator"]:
        value = settings[name]
        if value != defaults[name] and not (name == "theta" and value == math.inf):
            raise MisconfigurationException(
                f"schedule={schedule!r} sets the sizes, and nothing is measured, but {name}={value!r} is of a rule "
                "that goes by measurements: leave one of them out"
            )
