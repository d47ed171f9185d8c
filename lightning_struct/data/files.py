"""Reading data sets from files, with one clear error when they cannot be had."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightning.pytorch.utilities.exceptions import MisconfigurationException

T = TypeVar("T")


def read_or_explain(
    name: str,
    read: Callable[[], T],
    *,
    data_dir: str,
    files: str,
    download: bool | None = None,
    generate: bool = False,
) -> T:
    """``read()``, with any failure of files or network turned into one error that names the remedies.

    Args:
        name: of the data set.
        read: reads, and downloads if it may.
        data_dir: directory that ``read`` looks at.
        files: what is expected there.
        download: whether ``read`` may download; None if it never does.
        generate: whether a generator of ours can make the data set anew.

    Raises:
        MisconfigurationException: if the files are missing, damaged, or cannot be downloaded.
    """
    try:
        return read()
    except (OSError, RuntimeError, EOFError, ValueError, IndexError, AssertionError) as error:
        tried = "could not be downloaded to" if download else "is not in"
        remedies = [f"put {files} there, or name the directory that has them (--data.data_dir)"]
        if download is False:
            remedies.append("allow the download (--data.download=true)")
        if generate:
            remedies.append("make the data set anew by our own generator (--data.generate=true)")
        remedies.append("train on procedurally made data of the same shapes (--data.synthetic=true)")
        raise MisconfigurationException(
            f"{name} {tried} {Path(data_dir).absolute()}, or is damaged there ({type(error).__name__}: {error}).\n"
            + "Remedies:\n"
            + "\n".join(f"  - {remedy}" for remedy in remedies)
        ) from error
