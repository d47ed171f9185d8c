"""Checks of numbers that a user gives."""

from lightning_struct.utilities.namespaces import MisconfigurationException


def check_positive(**numbers: int | None) -> None:
    """Check numbers that are to be at least 1, by their names; None is right.

    Raises:
        MisconfigurationException: names the first that is not.

    Example:
        >>> check_positive(batch_size=8, train_size=None)
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise MisconfigurationException(f"{name} must be at least 1, but is {number}")
