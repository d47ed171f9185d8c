"""Packages that come with an extra of this one: where they are missing, the error names the extra."""

from collections.abc import Sequence
from importlib import import_module

from lightning_struct.utilities.namespaces import MisconfigurationException

EXTRA_OF = {
    "jsonargparse": "recipes",
    "matplotlib": "recipes",
    "rich": "recipes",
    "torchvision": "recipes",
    "torchtext": "text",
}


def install_command(package: str) -> str:
    """How one of ``EXTRA_OF`` is installed, in the version that is needed.

    Example:
        >>> install_command("rich")
        "pip install 'lightning-struct[recipes]' (in a checkout: pip install '.[recipes]')"
    """
    extra = EXTRA_OF[package]
    return f"pip install 'lightning-struct[{extra}]' (in a checkout: pip install '.[{extra}]')"


def require(package: str, needed_by: str, remedies: Sequence[str] = ()) -> None:
    """Import an optional package, or raise an error that says how to get it.

    Call it where the need is first known, which may be long before the package is used, and just before each import
    statement::

        require("matplotlib", "TrainingCurves")
        from matplotlib.figure import Figure

    Args:
        package: one of ``EXTRA_OF``.
        needed_by: subject of the error message, as the user knows it.
        remedies: other ways out than installing the extra.

    Raises:
        MisconfigurationException: the package is missing, or breaks while it is imported.

    Example:
        >>> require("matplotlib", "TrainingCurves")
    """
    try:
        import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # the last two: built for another version of torch
        ways = [install_command(package), *remedies]
        raise MisconfigurationException(
            f"{needed_by} needs {package}, which cannot be imported ({type(error).__name__}: {error}). "
            + (f"Remedy: {ways[0]}" if len(ways) == 1 else "\n  - ".join(["Remedies:", *ways]))
        ) from error
