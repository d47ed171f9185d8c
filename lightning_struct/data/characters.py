"""A text as windows of characters, each with the character that follows it."""

from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_struct.data.files import NAME_DIRECTORY, NAME_TEXT_FILE, DamagedFileError, naming_file, read_or_explain
from lightning_struct.data.in_memory import BatchedTensorDataset, InMemoryDataModule, Splits
from lightning_struct.data.text_corpus import synthetic_text
from lightning_struct.utilities.checks import check_counts, check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException

CHARACTERS = 128
"""Numbers of characters: those of ASCII, and the last one for all others."""
SHARES = (0.9, 0.05)
FILE = "tinyshakespeare.txt"
SYNTHETIC_SIZE = 200_000


class CharactersDataModule(InMemoryDataModule):
    """Windows of a text, and the characters that follow, for a classifier of the next character.

    Samples are (characters, next characters), both (steps,), int64 from 0 to 127. The windows follow each other in the
    text without overlap: the first 90 % of the text are for training, the next 5 % for validation, the rest for test.

    For example::

        data = CharactersDataModule(text_file="some.txt")
        Trainer().fit(Classifier(CharacterTransformer(), num_classes=128), datamodule=data)

    Args:
        data_dir: directory with ``tinyshakespeare.txt``.
        text_file: any text that is read instead.
        steps: characters of a window.
        batch_size: windows in a step, over all processes together.
        draws: shuffled passes by ``"epoch"`` or ``"independent"`` draws.
        eval_batch_size: windows of validation, test and prediction at a time, per process.
        train_size: windows of training that are kept, from the beginning; None keeps all.
        val_size: likewise of validation.
        test_size: likewise of test.
        synthetic: a random text instead of a file; nothing is read. After each character there are eight that may
            follow it.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the file cannot be had, or has fewer windows than are asked for.

    Example:
        >>> data = CharactersDataModule(synthetic=True, steps=6, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> characters, following = next(iter(data.train_dataloader()))
        >>> characters.shape, torch.equal(characters[:, 1:], following[:, :-1])
        (torch.Size([10, 6]), True)
    """

    def __init__(
        self,
        data_dir: str = "data",
        text_file: str | None = None,
        steps: int = 64,
        batch_size: int = 64,
        draws: Literal["independent", "epoch"] = "epoch",
        *,
        eval_batch_size: int = 256,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        synthetic: bool = False,
        **loader: Any,
    ) -> None:
        super().__init__(batch_size, draws, eval_batch_size=eval_batch_size, **loader)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        check_positive(train_size=train_size, val_size=val_size, test_size=test_size)
        check_counts(steps=steps)
        self.text_file, self.steps, self.synthetic = text_file, steps, synthetic
        self.path = (Path(data_dir, FILE) if text_file is None else Path(text_file)).expanduser()

    def load_splits(self) -> Splits:
        if self.synthetic:
            rank_zero_info("Text: a random one, in which each character has eight that may follow it, stands in.")
            text = synthetic_text(SYNTHETIC_SIZE, CHARACTERS, seed=self.seed)
        else:
            text = read_or_explain(
                "The text",
                lambda: read_characters(self.path),
                data_dir=str(self.path.parent),
                files=self.path.name,
                elsewhere=NAME_TEXT_FILE if self.text_file else f"{NAME_DIRECTORY}, or any text (--data.text_file)",
            )
        windows = text[: len(text) // (self.steps + 1) * (self.steps + 1)].view(-1, self.steps + 1)
        first, second = round(SHARES[0] * len(windows)), round(sum(SHARES) * len(windows))
        parts = {"train": windows[:first], "val": windows[first:second], "test": windows[second:]}
        for name, part in parts.items():
            if len(part) < (self.sizes[name] or 1):
                size = self.sizes[name]
                asked = f"the {name} set needs a window" if size is None else f"{name}_size is {size}"
                raise MisconfigurationException(
                    f"{asked}, but the text has {len(part)} windows of {self.steps} characters for it: take more text"
                )
        kept = (part[: self.sizes[name]] for name, part in parts.items())
        return Splits(*(BatchedTensorDataset(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in kept))


def read_characters(path: Path) -> Tensor:
    """The characters of a file as numbers, (characters,), int64; those that are not ASCII are 127.

    Raises:
        OSError: if the file cannot be opened.
        DamagedFileError: if it is not UTF-8.
    """
    with naming_file(path):
        text = path.read_text(encoding="utf-8")
    if not text:
        raise DamagedFileError(path, "is empty")
    return torch.tensor([min(ord(character), CHARACTERS - 1) for character in text])
