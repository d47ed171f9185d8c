"""Records of the checks: what is kept of each, and of how many."""

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics

MOST_RECORDS = 4096


def record_of_check(
    statistics: GradientStatistics, samples: int, predicted: int, validation_value: float | None
) -> dict[str, float]:
    """The record of a check, without what is not defined.

    Args:
        statistics: of its step.
        samples: seen in training so far.
        predicted: n̂.
        validation_value: f_val, if there is one.

    Example:
        >>> statistics = GradientStatistics(8, variance=2.0, gradient_squared_norm=0.5, validation_value=None)
        >>> record_of_check(statistics, samples=80, predicted=16, validation_value=None)
        {'samples': 80, 'batch_size': 8, 'batch_size_predicted': 16, 'variance_ratio': 0.5}
    """
    size, variance, squared_norm = statistics.batch_size, statistics.variance, statistics.gradient_squared_norm
    record: dict[str, float] = {"samples": samples, "batch_size": size, "batch_size_predicted": predicted}
    if variance is not None and squared_norm > 0:
        record["variance_ratio"] = variance / (size * squared_norm)
    if validation_value is not None:
        record["validation_value"] = validation_value
    return record


def keep(record: dict[str, float], records: list[dict[str, float]]) -> None:
    """Append a record; where there are too many, drop every other one of the older half."""
    records.append(record)
    if len(records) > MOST_RECORDS:
        del records[: MOST_RECORDS // 2 : 2]
