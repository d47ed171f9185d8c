"""Reading data sets from files: checks of the content, and one clear error if a data set is missing."""

import os
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from lightning_struct.utilities.checks import require
from lightning_struct.utilities.namespaces import MisconfigurationException

NAME_DIRECTORY = "name the directory that has them (--data.data_dir)"
NAME_TEXT_FILE = "name another file (--data.text_file)"
SYNTHETIC_REMEDY = "train on procedurally made data of the same shapes (--data.synthetic=true)"

# errors of the readers of text, archives and images about content
READING_ERRORS = (
    *(OSError, EOFError, ValueError, IndexError, SyntaxError, AssertionError, RuntimeError),
    *(struct.error, zlib.error, tarfile.TarError),
)

T = TypeVar("T")


class DamagedFileError(ValueError):
    """A file that is there, but has other content than it should.

    Args:
        path: the file.
        problem: the fault; continues a sentence that begins with the path.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path


@contextmanager
def naming_file(path: Path, place: str = "") -> Iterator[None]:
    """Turn errors about the content of an existing file into a :class:`DamagedFileError` that names it.

    Args:
        path: the file.
        place: begins the problem of a member of an archive, and names it.
    """
    try:
        yield
    except (DamagedFileError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
        raise
    except UnicodeDecodeError as error:
        raise DamagedFileError(
            path, f"{place}is not UTF-8, to which a text in another encoding is to be converted ({error})"
        ) from error
    except READING_ERRORS as error:
        raise DamagedFileError(path, f"{place}cannot be read ({type(error).__name__}: {error})") from error


class Content(NamedTuple):
    """A file that was read, of a directory or of an archive.

    Attributes:
        match: that of its path.
        data: its bytes.
        path: the file itself, or the archive.
        place: begins a sentence about a fault of a member of an archive; empty for a file.
    """

    match: re.Match[str]
    data: bytes
    path: Path
    place: str


def read_files(source: Path, files: str, pattern: str) -> Iterator[Content]:
    """Read the files of a directory, or of a tar archive of it from its beginning to its end.

    Args:
        source: the directory or the archive.
        files: pattern of the paths in a directory, as of ``Path.glob``.
        pattern: regular expression of the whole path of a file; others are passed over.

    Raises:
        DamagedFileError: if the archive is not whole.
    """
    expression = re.compile(pattern)
    if source.is_dir():
        for path in source.glob(files):
            match = expression.fullmatch(path.relative_to(source).as_posix())
            if match and path.is_file():
                yield Content(match, path.read_bytes(), path, "")
        return
    with naming_file(source), tarfile.open(source) as members:
        for member in members:
            match = expression.fullmatch(str(PurePosixPath(member.name)))
            opened = members.extractfile(member) if match and member.isfile() else None
            if match and opened:
                yield Content(match, opened.read(), source, f"has {match[0]}, which ")


def check_vocabulary(saved: Sequence[str], here: Sequence[str], source: str, options: str) -> None:
    """Check that the words of a checkpoint are those of the data, in the same order.

    Args:
        saved: words of the checkpoint by their numbers.
        here: those of the data.
        source: the data that have them, for the error.
        options: names of the options that they depend on.

    Raises:
        MisconfigurationException: if they differ.
    """
    if saved != here:
        raise MisconfigurationException(
            f"The checkpoint was trained on another vocabulary ({len(saved)} words) than that of the {source} here "
            f"({len(here)} words): give the {options} of its run"
        )


def require_torchvision(needed_by: str) -> None:
    """Import torchvision, or raise the error that names the extra; called just before each import from it."""
    require("torchvision", needed_by, [SYNTHETIC_REMEDY])


def read_or_explain(
    name: str,
    read: Callable[[], T],
    *,
    data_dir: str,
    files: str,
    download: bool | None = None,
    prepares: bool = False,
    generate: bool = False,
    elsewhere: str = NAME_DIRECTORY,
) -> T:
    """``read()``, with any failure of files or network turned into one error that names the remedies.

    Args:
        name: name of the data set.
        read: reads, and downloads if it may.
        data_dir: directory that ``read`` looks at.
        files: the expected files.
        download: whether ``read`` may download; None if files like those that are there are never downloaded.
        prepares: whether ``prepare_data`` downloads missing files.
        generate: whether a generator of this package can make the data set anew.
        elsewhere: how other files are named.

    Raises:
        MisconfigurationException: if the files are missing, damaged, or cannot be downloaded.
    """
    directory = Path(data_dir).absolute()
    is_new = not directory.exists()
    try:
        return read()
    except (OSError, RuntimeError, EOFError, ValueError, IndexError, AssertionError) as error:
        if is_new:  # a failed download leaves no empty folders
            for folder, _, _ in os.walk(directory, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)
        if isinstance(error, DamagedFileError):
            problem = f"{name} is damaged: {error}"
            path = error.path.absolute()
            remedies = [
                f"put a whole copy in place of {path}, or {elsewhere}"
                if download is None
                else f"delete {path}, so that it is downloaded again (--data.download=true), or put a whole copy there"
            ]
        else:
            tried = "could not be downloaded to" if download else "is not in"
            problem = f"{name} {tried} {directory}, or is damaged there ({type(error).__name__}: {error})"
            remedies = [f"put {files} there, or {elsewhere}"]
            if download is False:
                remedies.append(
                    "call prepare_data(), which downloads it, before setup(), as a Trainer does"
                    if prepares
                    else "allow the download (--data.download=true)"
                )
        if generate:
            remedies.append("make the data set anew by our own generator (--data.generate=true)")
        remedies.append(SYNTHETIC_REMEDY)
        raise MisconfigurationException(
            f"{problem}.\nRemedies:\n" + "\n".join(f"  - {remedy}" for remedy in remedies)
        ) from error
