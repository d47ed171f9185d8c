"""A text for language models: words in columns that are read side by side, a few steps at a time."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_struct.data import files
from lightning_struct.data.in_memory import EvaluatedDataModule
from lightning_struct.functional.checks import check_types
from lightning_struct.utilities.checks import check_counts, check_positive
from lightning_struct.utilities.distributed import data_parallel_replicas
from lightning_struct.utilities.namespaces import MisconfigurationException

TITLES = {"train": "training", "val": "validation", "test": "test"}
PARTS = tuple(TITLES)
LAYOUTS = (
    {"train": "wiki.train.tokens", "val": "wiki.valid.tokens", "test": "wiki.test.tokens"},
    {"train": "train.txt", "val": "valid.txt", "test": "test.txt"},
)
DIRECTORY = "wikitext-2"
SITE = "https://www.salesforce.com/blog/the-wikitext-long-term-dependency-language-modeling-dataset/"
END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
SHARES = {"train": 0.9, "val": 0.05, "test": 0.05}
WIKITEXT_2_SIZES = {"train": 2_088_628, "val": 217_646, "test": 245_569}
SUCCESSORS = 8  # of each word of a synthetic text
CHAINS = 64

Batch = tuple[Tensor, Tensor]


class Corpus(NamedTuple):
    """The words by their numbers, and the three parts of the text as numbers, (words,), int64."""

    vocabulary: list[str]
    train: Tensor
    val: Tensor
    test: Tensor


class ColumnLoader:
    """Reads a text in columns: batches follow each other in the text.

    The text is cut into as many columns as fit side by side; the rest at its end is dropped. A batch has the
    next words of all columns, and for each word the one that follows it. With several processes each reads its share of
    the columns. An epoch that is left is begun anew, but one that is resumed from a state goes on with the next batch:
    Lightning saves the state in its checkpoints.

    Args:
        words: the text, (words,), int64.
        columns: over all processes together.
        steps: words of a column in a batch, the last batch excepted.
        processes: number of processes that share the columns.
        rank: rank of this process.
        title: names the text in errors.

    Raises:
        MisconfigurationException: if the columns cannot be shared, or have less than two words.
    """

    def __init__(
        self, words: Tensor, columns: int, steps: int, processes: int = 1, rank: int = 0, title: str = "The text"
    ) -> None:
        if columns % processes:
            raise MisconfigurationException(
                f"{columns} columns cannot be shared by {processes} processes: make the batch size a multiple of them."
            )
        length = len(words) // columns
        if length < 2:
            raise MisconfigurationException(
                f"{title} has {len(words)} words, too few for {columns} columns of two: lower the batch size."
            )
        table = words[: length * columns].view(columns, length).T
        self.table = table[:, rank * (columns // processes) : (rank + 1) * (columns // processes)].contiguous()
        self.steps = steps
        self._first, self._done = 0, 0

    def __len__(self) -> int:
        return math.ceil((len(self.table) - 1) / self.steps)

    def __iter__(self) -> Iterator[Batch]:
        """Words and the words that follow them, both (steps, columns), int64."""
        self._done, self._first = self._first, 0
        while self._done < len(self):
            begin = self._done * self.steps
            end = min(begin + self.steps, len(self.table) - 1)
            self._done += 1
            yield self.table[begin:end], self.table[begin + 1 : end + 1]

    def state_dict(self) -> dict[str, int]:
        """Batches of this epoch that have been read."""
        return {"done": self._done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._done = state_dict["done"]
        self._first = self._done % len(self)  # a whole epoch is followed by the next one


class TextCorpusDataModule(EvaluatedDataModule):
    """WikiText-2, or any other text: 2,088,628 / 217,646 / 245,569 words for training, validation and test.

    Batches are (words, next words), both (steps, columns), int64, as in torch's example ``word_language_model``, whose
    settings the paper takes: each column goes on where it ended in the batch before. Words stand between
    spaces, and ``<eos>`` at the end of each line. They are numbered in the order in which the training text has them; a
    word that it does not have is ``<unk>``.

    For example::

        data = TextCorpusDataModule(data_dir="data")
        Trainer().fit(LanguageModel(data.vocabulary_size), datamodule=data)

    A checkpoint has the vocabulary, and is refused if the data have another.

    Args:
        data_dir: directory with ``wiki.train.tokens``, ``wiki.valid.tokens`` and ``wiki.test.tokens``, or with
            ``train.txt``, ``valid.txt`` and ``test.txt``; or with a directory ``wikitext-2`` of them.
        text_file: a plain text that is read instead: its first 90 % of words are for training, the next 5 % for
            validation and the rest for test.
        least_count: of that text; words that its training part has less often are ``<unk>``, by default as in WikiText.
        batch_size: columns in training, over all processes together.
        eval_batch_size: columns in validation, test and prediction, over all processes together.
        steps: words of a column in a batch.
        train_size: words of training that are kept, from the beginning; None keeps all.
        val_size: likewise of validation.
        test_size: likewise of test.
        synthetic: a random text of as many words instead of the files; nothing is read. After each word there are eight
            that may follow it.
        synthetic_vocabulary: words of that text.
        seed: seed of synthetic texts, not negative.

    Raises:
        MisconfigurationException: if the files are missing; for a size that is not positive or larger than the text;
            for a checkpoint of another vocabulary.

    Example:
        >>> sizes = {"train_size": 200, "val_size": 50, "test_size": 50}
        >>> data = TextCorpusDataModule(synthetic=True, steps=5, batch_size=4, **sizes)
        >>> data.setup("fit")
        >>> words, following = next(iter(data.train_dataloader()))
        >>> words.shape, torch.equal(words[1:], following[:-1])
        (torch.Size([5, 4]), True)
    """

    def __init__(
        self,
        data_dir: str = "data",
        text_file: str | None = None,
        batch_size: int = 20,
        *,
        eval_batch_size: int = 10,
        steps: int = 35,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        synthetic: bool = False,
        synthetic_vocabulary: int = 33_278,
        seed: int = 0,
        least_count: int = 3,
    ) -> None:
        super().__init__()
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        check_positive(train_size=train_size, val_size=val_size, test_size=test_size)
        check_counts(batch_size=batch_size, eval_batch_size=eval_batch_size, steps=steps, least_count=least_count)
        check_counts(0, seed=seed)
        check_counts(SUCCESSORS + 1, synthetic_vocabulary=synthetic_vocabulary)
        check_types(TextCorpusDataModule.__init__, locals())
        self.data_dir = os.path.expanduser(data_dir)
        self.text_file = None if text_file is None else os.path.expanduser(text_file)
        self.batch_size, self.eval_batch_size, self.steps = batch_size, eval_batch_size, steps
        self.synthetic, self.synthetic_vocabulary, self.seed = synthetic, synthetic_vocabulary, seed
        self.least_count = least_count
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The text, which is read when it is first asked for."""
        if self._corpus is None:
            self._corpus = self._cut(self._load())
        return self._corpus

    @property
    def vocabulary_size(self) -> int:
        """Words that have a number."""
        return len(self.corpus.vocabulary)

    def setup(self, stage: str) -> None:
        self._corpus = self.corpus

    def train_dataloader(self) -> ColumnLoader:
        return self._loader("train", self.batch_size)

    def evaluation_dataloader(self, part: Literal["train", "val", "test"]) -> ColumnLoader:
        """All of one of the parts, in the columns of validation."""
        return self._loader(part, self.eval_batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.corpus.vocabulary}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = "data_dir, text_file, train_size and synthetic"
        files.check_vocabulary(state_dict["vocabulary"], self.corpus.vocabulary, "text", options)

    def __str__(self) -> str:
        """The words of each part, if the text has been read; Lightning's own asks for the data sets of loaders."""
        if self._corpus is None:
            return f"{type(self).__name__}: not read yet"
        sizes = (f"{part} {len(getattr(self._corpus, part)):,}" for part in PARTS)
        return f"{type(self).__name__}: words {', '.join(sizes)}; vocabulary {self.vocabulary_size:,}"

    def _loader(self, part: Literal["train", "val", "test"], columns: int) -> ColumnLoader:
        replicas = data_parallel_replicas(self.trainer)
        processes, rank = replicas.get("num_replicas", 1), replicas.get("rank", 0)
        source = "the synthetic text" if self.synthetic else self.text_file or f"the text in {self.data_dir}"
        title = f"The {TITLES[part]} part of {source}"
        return ColumnLoader(getattr(self.corpus, part), columns, self.steps, processes, rank, title)

    def _load(self) -> Corpus:
        if self.synthetic:
            rank_zero_info("Text: a random one stands in for the real one; eight words may follow each word.")
            sizes = [self.sizes[part] or WIKITEXT_2_SIZES[part] for part in PARTS]
            words = synthetic_text(sum(sizes), self.synthetic_vocabulary, seed=self.seed)
            return Corpus([f"word{number}" for number in range(self.synthetic_vocabulary)], *words.split(sizes))
        if self.text_file is not None:
            path = Path(self.text_file)
            place, expected, elsewhere = path.parent, path.name, files.NAME_TEXT_FILE
        else:
            path, place = None, Path(self.data_dir)
            names = " or ".join(", ".join(layout.values()) for layout in LAYOUTS)
            expected = f"{names} of WikiText-2 ({SITE}), or those of another text,"
            elsewhere = f"{files.NAME_DIRECTORY}, or any text (--data.text_file)"

        def read() -> Corpus:
            parts = read_parts(place) if path is None else cut_text(read_words(path), self.least_count)
            return build_vocabulary(*parts)

        return files.read_or_explain("The text", read, data_dir=str(place), files=expected, elsewhere=elsewhere)

    def _cut(self, corpus: Corpus) -> Corpus:
        for part, size in self.sizes.items():
            available = len(getattr(corpus, part))
            if size is not None and size > available:
                raise MisconfigurationException(f"{part}_size is {size}, but there are {available} words")
        return corpus._replace(**{part: getattr(corpus, part)[:size] for part, size in self.sizes.items()})


def read_words(path: Path) -> list[str]:
    """Read the words between spaces, and ``<eos>`` behind each line.

    Raises:
        OSError: if the file cannot be opened.
        DamagedFileError: if it is not UTF-8.
    """
    with files.naming_file(path), path.open(encoding="utf-8") as lines:
        return [word for line in lines for word in (*line.split(), END_OF_LINE)]


def read_parts(data_dir: Path) -> list[list[str]]:
    """Read the words of training, validation and test, in the first of the layouts that is there.

    Raises:
        OSError: if none is.
        DamagedFileError: if a file is not UTF-8.
    """
    places = [(directory, layout) for directory in (data_dir, data_dir / DIRECTORY) for layout in LAYOUTS]
    for directory, layout in places:
        if (directory / layout["train"]).is_file():
            return [read_words(directory / layout[part]) for part in PARTS]
    raise FileNotFoundError(f"neither {' nor '.join(layout['train'] for layout in LAYOUTS)} is there")


def cut_text(words: Sequence[str], least_count: int) -> list[list[str]]:
    """The three parts of a text; words that are in the first less often than ``least_count`` become ``<unk>``."""
    first, second = (round(len(words) * share) for share in (SHARES["train"], SHARES["train"] + SHARES["val"]))
    counts = Counter(words[:first])
    known = [word if counts[word] >= least_count else UNKNOWN for word in words]
    return [known[:first], known[first:second], known[second:]]


def build_vocabulary(train: Sequence[str], val: Sequence[str], test: Sequence[str]) -> Corpus:
    """Number the words in the order of the training text; others are ``<unk>``, which has the last number if it is new.

    Raises:
        ValueError: if there are no words.
    """
    if not train:
        raise ValueError("there is no word in it")
    vocabulary = list(dict.fromkeys(train))
    if UNKNOWN not in vocabulary:
        vocabulary.append(UNKNOWN)
    number_of = {word: number for number, word in enumerate(vocabulary)}
    unknown = number_of[UNKNOWN]
    parts = (torch.tensor([number_of.get(word, unknown) for word in part]) for part in (train, val, test))
    return Corpus(vocabulary, *parts)


def synthetic_text(count: int, vocabulary_size: int, *, seed: int = 0) -> Tensor:
    """A Markov chain of words: eight may follow each word, the first of them half of the time, and so on.

    Args:
        count: number of words.
        vocabulary_size: number of words that there are, above eight.
        seed: the same seed gives the same text; which words follow which does not depend on it.

    Returns:
        (count,), int64.
    """
    fixed, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    followers = torch.randint(vocabulary_size, (vocabulary_size, SUCCESSORS), generator=fixed)
    length = math.ceil(count / CHAINS)  # chains side by side, then one after another
    chances = 0.5 ** torch.arange(1.0, SUCCESSORS + 1)
    choices = torch.multinomial(chances, CHAINS * length, replacement=True, generator=generator).view(length, CHAINS)
    words = torch.empty(length, CHAINS, dtype=torch.int64)
    current = torch.randint(vocabulary_size, (CHAINS,), generator=generator)
    for step in range(length):
        current = followers[current, choices[step]]
        words[step] = current
    return words.T.flatten()[:count]
