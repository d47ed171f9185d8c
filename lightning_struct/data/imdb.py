"""IMDB: film reviews as numbered words, and whether they praise."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_struct.data.files import SYNTHETIC_REMEDY, check_vocabulary, naming_file, read_files, require_torchvision
from lightning_struct.data.in_memory import DownloadedDataModule, Draws, LabelledSamples, official_parts
from lightning_struct.utilities.checks import check_counts, install_command, require
from lightning_struct.utilities.namespaces import MisconfigurationException

DIRECTORY = "aclImdb"
ARCHIVE = "aclImdb_v1.tar.gz"
URL = f"https://ai.stanford.edu/~amaas/data/sentiment/{ARCHIVE}"
MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
PARTS, CLASSES = ("train", "test"), ("neg", "pos")
SPECIAL_WORDS = ("<pad>", "<unk>")
PADDING, UNKNOWN = 0, 1
FEWEST_WORDS = 10
OPINIONS = 20  # words of praise in synthetic reviews, and as many of blame

Split = Callable[[str], list[str]]


class Reviews(NamedTuple):
    """Texts, and for each of them 0 or 1 as in :data:`CLASSES`."""

    texts: list[str]
    labels: list[int]


class IMDBDataModule(DownloadedDataModule):
    """IMDB: 20,000 / 5,000 / 25,000 film reviews for training, validation and test (Maas et al., 2011).

    Training and validation reviews are parts of the official training set, cut by a fixed seed; the test reviews are
    the official ones. Samples are (words, label): (max_length,) int64, and 0 or 1, int64, for a review that blames or
    praises. Words are numbered as in :attr:`vocabulary`, by their frequency in the training reviews; 1 is any other
    word, and 0 fills up behind the end of short reviews. Of a long review the last words are kept, which often give the
    verdict.

    For example::

        model = Classifier(RecurrentNetwork(), num_classes=2)
        Trainer().fit(model, datamodule=IMDBDataModule(data_dir="data"))

    The split into words and their numbering are torchtext's: ``pip install 'lightning-struct[text]'``. A checkpoint has
    the vocabulary, and is refused if the data have another.

    Args:
        data_dir: directory with ``aclImdb``, or with the archive of it: ``aclImdb_v1.tar.gz``, else the first of
            ``aclImdb*.tar.gz``.
        batch_size: training samples in a step, over all processes together; None takes 128.
        draws: shuffled passes by ``"epoch"``, as for None, or ``"independent"`` draws.
        train_size: training reviews; None takes 20,000.
        val_size: validation reviews; None takes 5,000.
        test_size: test reviews; None takes 25,000.
        vocabulary_size: number of words at most, 0 and 1 included.
        max_length: words of a sample.
        **options: ``download`` (84 MB; not if there is an archive), ``synthetic``, which does not need torchtext, and
            further options of the loaders, see :class:`InMemoryDataModule`.

    Attributes:
        vocabulary: the words by their numbers, after ``setup``.

    Raises:
        MisconfigurationException: if the files are missing or are damaged, or have fewer reviews than asked for; if
            torchtext is missing; if a set or the samples would be empty, or the vocabulary has less than 10 numbers;
            for a checkpoint of another vocabulary.

    Example:
        >>> data = IMDBDataModule(synthetic=True, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> words, labels = next(iter(data.train_dataloader()))
        >>> words.shape, labels.shape
        (torch.Size([10, 200]), torch.Size([10]))
    """

    title = "IMDB"
    files = f"{DIRECTORY}/{{train,test}}/{{neg,pos}}/*.txt or {ARCHIVE}"

    usual_sizes = (20_000, 5_000, 25_000)

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int | None = None,
        draws: Draws | None = None,
        *,
        vocabulary_size: int = 20_000,
        max_length: int = 200,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, batch_size, draws, **options)
        check_counts(max_length=max_length)
        check_counts(FEWEST_WORDS, vocabulary_size=vocabulary_size)
        self.vocabulary_size, self.max_length = vocabulary_size, max_length
        self.vocabulary: list[str] = []

    @property
    def has_own_files(self) -> bool:
        return (Path(self.data_dir) / DIRECTORY).is_dir()

    @property
    def has_files(self) -> bool:
        import_torchtext()  # before anything is downloaded in vain
        return find_files(self.data_dir) is not None

    def read(self, download: bool) -> dict[str, Reviews]:
        if download:
            require_torchvision("The download of IMDB")
            from torchvision.datasets.utils import download_url

            unfinished = f"{ARCHIVE}.part"  # it gets its name when it is complete
            download_url(URL, self.data_dir, filename=unfinished, md5=MD5)
            (Path(self.data_dir) / unfinished).rename(Path(self.data_dir) / ARCHIVE)
        return read_reviews(self.data_dir)

    def make_synthetic(self, count: int) -> LabelledSamples:
        self.vocabulary = [*SPECIAL_WORDS, *(f"word{n}" for n in range(len(SPECIAL_WORDS), self.vocabulary_size))]
        return synthetic_reviews(count, self.max_length, self.vocabulary_size, seed=self.seed)

    def cut(self, official: dict[str, Reviews]) -> list[LabelledSamples]:
        split, make_vocabulary = import_torchtext()
        available, available_test = (len(official[part].texts) for part in ("train", "test"))
        train, val, test = official_parts("IMDB", available, available_test, self.sizes)
        chosen = [(official["train"], train), (official["train"], val), (official["test"], test)]
        texts = [[split(reviews.texts[number]) for number in numbers.tolist()] for reviews, numbers in chosen]
        self.vocabulary = make_vocabulary(Counter(word for text in texts[0] for word in text), self.vocabulary_size)
        number_of = {word: number for number, word in enumerate(self.vocabulary)}
        encoded = (encode(part, number_of, self.max_length) for part in texts)
        praised = (torch.tensor(reviews.labels)[numbers] for reviews, numbers in chosen)
        return list(zip(encoded, praised, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = "data_dir, train_size, val_size, vocabulary_size and synthetic"
        check_vocabulary(state_dict["vocabulary"], self.vocabulary, "reviews", options)


def import_torchtext() -> tuple[Split, Callable[[Counter[str], int], list[str]]]:
    """Import torchtext 0.6: its split of an English text into words, and its numbering of the most frequent words.

    Raises:
        MisconfigurationException: if there is no torchtext 0.6.
    """
    require("torchtext", "IMDB", [SYNTHETIC_REMEDY])
    import torchtext

    if not torchtext.__version__.startswith("0.6."):
        raise MisconfigurationException(
            f"IMDB needs torchtext 0.6 for words and their numbers (found is {torchtext.__version__}).\nRemedies:\n"
            f"  - {install_command('torchtext')}\n  - {SYNTHETIC_REMEDY}"
        )
    from torchtext.data import get_tokenizer
    from torchtext.vocab import Vocab

    def make_vocabulary(counts: Counter[str], size: int) -> list[str]:
        return Vocab(counts, max_size=size - len(SPECIAL_WORDS), specials=list(SPECIAL_WORDS)).itos

    return get_tokenizer("basic_english"), make_vocabulary


def encode(texts: Sequence[Sequence[str]], number_of: Mapping[str, int], length: int) -> Tensor:
    """Encode the last words of each text as numbers, (n, length), int64, filled up with 0 at the end.

    A text without words is one unknown word, so that there is something to read.
    """
    encoded = torch.full((len(texts), length), PADDING)
    for row, text in zip(encoded, texts, strict=True):
        # max: whoever writes "<pad>" has written a word
        numbers = [max(number_of.get(word, UNKNOWN), UNKNOWN) for word in text[-length:]] or [UNKNOWN]
        row[: len(numbers)] = torch.tensor(numbers)
    return encoded


def find_files(data_dir: str) -> Path | None:
    """The directory of reviews, or else an archive of it, the official one first; None if there is neither."""
    directory, archive = Path(data_dir) / DIRECTORY, Path(data_dir) / ARCHIVE
    others = sorted(Path(data_dir).glob(f"{DIRECTORY}*.tar.gz"))
    return next((path for path in (directory, archive, *others) if path.exists()), None)


def read_reviews(data_dir: str) -> dict[str, Reviews]:
    """Read the official sets ``"train"`` and ``"test"``, in the order of classes and names of files.

    Raises:
        OSError: if there are no files, or a class has no reviews.
        DamagedFileError: if the archive is not whole, or a review is not UTF-8.
    """
    path = find_files(data_dir)
    if path is None:
        raise FileNotFoundError(f"neither {DIRECTORY} nor {DIRECTORY}*.tar.gz is there")
    found: dict[tuple[str, str], dict[str, str]] = {(part, name): {} for part in PARTS for name in CLASSES}
    source = path.parent if path.is_dir() else path
    pattern = rf"{DIRECTORY}/({'|'.join(PARTS)})/({'|'.join(CLASSES)})/([^/]+\.txt)"
    for content in read_files(source, f"{DIRECTORY}/*/*/*.txt", pattern):
        part, name, file = content.match.groups()
        with naming_file(content.path, content.place):
            found[part, name][file] = content.data.decode("utf-8")
    reviews = {part: Reviews([], []) for part in PARTS}
    for (part, name), texts in found.items():
        if not texts:
            raise FileNotFoundError(f"{path} has no reviews in {part}/{name}")
        reviews[part].texts.extend(text for _, text in sorted(texts.items()))
        reviews[part].labels.extend([CLASSES.index(name)] * len(texts))
    return reviews


def synthetic_reviews(count: int, length: int, vocabulary_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random words, one in ten an opinion; four of five opinions are those of the label.

    Words of blame have the first numbers after the special ones, words of praise the next.

    Args:
        count: number of reviews.
        length: words of the longest; the shortest have a quarter of them.
        vocabulary_size: number of words, at least 10.
        seed: the same seed gives the same reviews and labels.

    Returns:
        Words (count, length), int64, 0 behind the end; labels (count,), int64, 0 or 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def choose(probability: float) -> Tensor:
        return torch.rand(count, length, generator=generator) < probability

    opinions = min(OPINIONS, (vocabulary_size - len(SPECIAL_WORDS)) // 4)
    first = len(SPECIAL_WORDS)
    labels = draw(0, len(CLASSES), count)
    praises = choose(0.8) == labels.bool().unsqueeze(1)
    opinion = first + draw(0, opinions, count, length) + opinions * praises
    words = torch.where(choose(0.1), opinion, draw(first + 2 * opinions, vocabulary_size, count, length))
    lengths = draw(max(1, length // 4), length + 1, count, 1)
    return words.where(torch.arange(length) < lengths, PADDING), labels
