"""Data sets that fit into memory: whole batches by one indexing, and the loaders of a LightningDataModule over them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.data.files import read_or_explain
from lightning_struct.data.sampling import (
    CollatedBatch,
    DrawLoader,
    IndependentDraws,
    ResumedLoader,
    ShuffledPasses,
    keep_batch,
)
from lightning_struct.functional.checks import check_dense, check_types
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.distributed import data_parallel_replicas
from lightning_struct.utilities.namespaces import LightningDataModule, MisconfigurationException

Batch = tuple[Tensor, ...]
LabelledSamples = tuple[Tensor, Tensor]  # samples (n, ...), as images of uint8 or a floating dtype; labels (n,), int64
Draws = Literal["independent", "epoch"]


class BatchedTensorDataset(TensorDataset):
    """A ``TensorDataset`` whose batches are one indexing of each tensor, not a stack of single samples.

    A ``DataLoader`` finds ``__getitems__`` by itself. With ``collate_fn=keep_batch``, which the data modules take, the
    batch stays as it is; any other ``collate_fn`` gets the samples of it, as of a ``TensorDataset``. Any sampler works,
    Lightning's own under DDP too, and so do ``Subset`` and ``random_split``.

    Example:
        >>> dataset = BatchedTensorDataset(torch.arange(10), torch.arange(10) % 2)
        >>> next(iter(DataLoader(dataset, batch_size=4, collate_fn=keep_batch)))
        (tensor([0, 1, 2, 3]), tensor([0, 1, 0, 1]))
        >>> next(iter(DataLoader(dataset, batch_size=4)))
        [tensor([0, 1, 2, 3]), tensor([0, 1, 0, 1])]
    """

    def __init__(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            check_dense("a tensor of samples", tensor)
        if len({tensor.shape[:1] for tensor in tensors if tensor.ndim}) != 1 or not all(t.ndim for t in tensors):
            raise ValueError(f"tensors must have a row for each sample, got {[tuple(t.shape) for t in tensors]}")
        super().__init__(*tensors)

    def __getitems__(self, indices: list[int]) -> CollatedBatch:
        return CollatedBatch(self[indices])


class Splits(NamedTuple):
    """The training, validation and test set of a data set."""

    train: BatchedTensorDataset
    val: BatchedTensorDataset
    test: BatchedTensorDataset


def image_dataset(name: str, images: Tensor, *labels: Tensor) -> BatchedTensorDataset:
    """Samples of grey images, checked by :func:`check_pixels`, which raises for wrong ones.

    Args:
        name: name of the data set, for the error.
        images: (n, pixels), floating dtype, values in [0, 1].
        *labels: (n,), int64, if there are any.
    """
    check_pixels(name, images)
    return BatchedTensorDataset(images, *labels)


def check_pixels(name: str, images: Tensor) -> None:
    """Check pixels of images of any shape.

    Raises:
        MisconfigurationException: for an empty set, and for pixels that are NaN or outside [0, 1].
    """
    if len(images) == 0:
        raise MisconfigurationException(
            f"{name} has no images: ask for at least one training, validation and test image."
        )
    low, high = images.aminmax()
    if not (low >= 0 and high <= 1):
        raise MisconfigurationException(
            f"Pixels of {name} must lie in [0, 1], but go from {low.item()} to {high.item()}: "
            "the files are damaged or in another format; remove them, so that they are downloaded again."
        )


class EvaluatedDataModule(LightningDataModule, ABC):
    """Base of data modules whose sets can be evaluated one by one, in order; predicted is the test set."""

    @abstractmethod
    def evaluation_dataloader(self, part: Literal["train", "val", "test"]) -> Any:
        """All samples of one of the sets, in order."""

    def val_dataloader(self) -> Any:
        return self.evaluation_dataloader("val")

    def test_dataloader(self) -> Any:
        return self.evaluation_dataloader("test")

    def predict_dataloader(self) -> Any:
        return self.evaluation_dataloader("test")


class InMemoryDataModule(EvaluatedDataModule):
    """Loaders of three in-memory sets; a subclass implements :meth:`load_splits`, which gets the sets.

    Every data set of this package takes the options below, all but ``batch_size`` as keywords. Some have other
    defaults. In a loop without a Trainer, call ``loader.sampler.set_epoch(epoch)`` before each shuffled pass: else all
    have the order of the first one.

    Args:
        batch_size: training samples in a step, over all processes together.
        draws: ``"independent"``: every batch is a new draw without replacement, independent of the last
            (Emirahmetoglu & Stewart, Algorithm 1); ``"epoch"``: shuffled passes through the training set.
        draws_per_epoch: independent draws that Lightning counts as one epoch: the steps between two validations.
        eval_batch_size: validation, test and prediction samples at a time, per process.
        seed: seed of draws, shuffles and training fractions, and of data that ``synthetic`` makes instead of files, not
            negative; the cut of files into training, validation and test set does not depend on it.
        drop_last: leave the samples out of each shuffled pass that do not fill a batch.

    Raises:
        MisconfigurationException: for an unknown ``draws``, and for a number out of its range; of the training loader,
            for a batch size larger than the training set if ``drop_last`` would leave no batch.

    Example:
        >>> class Numbers(InMemoryDataModule):
        ...     def load_splits(self):
        ...         return Splits(*(BatchedTensorDataset(torch.rand(count)) for count in (100, 20, 20)))
        >>> data = Numbers(batch_size=25)
        >>> data.setup("fit")
        >>> [len(batch) for (batch,) in data.train_dataloader()][:3]  # of ten independent draws
        [25, 25, 25]
    """

    def __init__(
        self,
        batch_size: int,
        draws: Draws = "independent",
        draws_per_epoch: int = 10,
        eval_batch_size: int = 1000,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if draws not in ("independent", "epoch"):
            raise MisconfigurationException(f"draws must be 'independent' or 'epoch', but is {draws!r}")
        check_counts(batch_size=batch_size, eval_batch_size=eval_batch_size, draws_per_epoch=draws_per_epoch)
        check_counts(0, seed=seed)
        check_types(InMemoryDataModule.__init__, locals())
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.draws, self.draws_per_epoch, self.seed, self.drop_last = draws, draws_per_epoch, seed, drop_last
        self.splits: Splits | None = None

    @abstractmethod
    def load_splits(self) -> Splits:
        """Read or make the three sets."""

    def setup(self, stage: str) -> None:
        if self.splits is None:
            self.splits = self.load_splits()

    def train_dataloader(self) -> DataLoader:
        train = self._loaded.train
        replicas = data_parallel_replicas(self.trainer)
        if self.draws == "independent":
            draws = IndependentDraws(train, self.batch_size, self.draws_per_epoch, seed=self.seed, **replicas)
            return DrawLoader(train, sampler=draws)  # by keyword: see evaluation_dataloader
        processes, rank = replicas.get("num_replicas", 1), replicas.get("rank", 0)
        if self.batch_size % processes:
            raise MisconfigurationException(
                f"batch_size={self.batch_size} cannot be shared by {processes} processes: make it a multiple of them."
            )
        if self.drop_last and len(train) < self.batch_size:
            raise MisconfigurationException(
                f"drop_last leaves nothing of {len(train)} training samples for batch_size={self.batch_size}: lower it"
            )
        shuffle = ShuffledPasses(train, num_replicas=processes, rank=rank, shuffle=True, seed=self.seed)
        options: dict[str, Any] = {"batch_size": self.batch_size // processes, "drop_last": self.drop_last}
        return ResumedLoader(train, sampler=shuffle, collate_fn=keep_batch, **options)

    def evaluation_dataloader(self, part: Literal["train", "val", "test"]) -> DataLoader:
        """All samples of one of the sets, in order."""
        # by keyword: Lightning cannot make a loader anew whose batch_size came by position
        return DataLoader(getattr(self._loaded, part), batch_size=self.eval_batch_size, collate_fn=keep_batch)

    @property
    def _loaded(self) -> Splits:
        if self.splits is None:
            raise MisconfigurationException(f"Call setup() of {type(self).__name__} before asking for its loaders.")
        return self.splits


class DownloadedDataModule(InMemoryDataModule):
    """Base of data sets that are downloaded, or made procedurally: an official training and test part, cut into three.

    Args:
        data_dir: directory with the files.
        batch_size: training samples in a step, over all processes together; None takes that of the data set.
        draws: shuffled passes by ``"epoch"`` or ``"independent"`` draws; None takes the usual way of the data set.
        eval_batch_size: validation, test and prediction samples at a time, per process; None likewise.
        train_size: training samples; None takes the size that the data set is described with.
        val_size: validation samples; None likewise.
        test_size: test samples; None likewise.
        download: whether missing files may be downloaded.
        synthetic: procedurally made samples of the same shapes instead of the files; nothing is read or downloaded.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if one of the sets would be empty.
    """

    title: ClassVar[str]
    """Name of the data set in messages."""
    files: ClassVar[str]
    """The contents that ``data_dir`` must have, for errors."""
    usual_sizes: ClassVar[tuple[int, int, int]]
    """Samples of training, validation and test."""
    usual_loaders: ClassVar[tuple[int, Draws, int]] = (128, "epoch", 500)
    """``batch_size``, ``draws`` and ``eval_batch_size``."""

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int | None = None,
        draws: Draws | None = None,
        *,
        eval_batch_size: int | None = None,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        download: bool = True,
        synthetic: bool = False,
        **loader: Any,
    ) -> None:
        batch_size, draws, eval_batch_size = _given_or((batch_size, draws, eval_batch_size), self.usual_loaders)
        super().__init__(batch_size, draws, eval_batch_size=eval_batch_size, **loader)
        given = _given_or((train_size, val_size, test_size), self.usual_sizes)
        self.sizes = dict(zip(Splits._fields, given, strict=True))
        check_counts(**{f"{part}_size": size for part, size in self.sizes.items()})
        check_types(DownloadedDataModule.__init__, locals())
        self.data_dir = str(Path(data_dir).expanduser())
        self.download, self.synthetic = download, synthetic

    @property
    def has_own_files(self) -> bool:
        """Whether the samples are in files that nobody can download: none of them is ever to be deleted."""
        return False

    @property
    @abstractmethod
    def has_files(self) -> bool:
        """Whether nothing needs to be downloaded."""

    @abstractmethod
    def read(self, download: bool) -> Any:
        """The official training and test part, from files that are downloaded if that is allowed."""

    @abstractmethod
    def make_synthetic(self, count: int) -> LabelledSamples:
        """Samples that are made procedurally from ``seed``, and their labels."""

    def cut(self, official: Any) -> list[LabelledSamples]:
        """Training, validation and test samples from the two official parts."""
        train, test = official
        numbers = official_parts(self.title, len(train[1]), len(test[1]), self.sizes)
        chosen = zip((train, train, test), numbers, strict=True)
        return [(samples[rows], labels[rows]) for (samples, labels), rows in chosen]

    def make_datasets(self, parts: list[LabelledSamples]) -> list[BatchedTensorDataset]:
        """The training, validation and test set of these samples."""
        return [BatchedTensorDataset(*part) for part in parts]

    def prepare_data(self) -> None:
        if self.download and not self.synthetic and not self.has_files:
            self.read_or_explain(download=True)

    def load_splits(self) -> Splits:
        if not self.synthetic:
            return Splits(*self.make_datasets(self.cut(self.read_or_explain(download=False))))
        rank_zero_info(f"{self.title}: procedurally made samples of the same shapes stand in for the real ones.")
        sizes = list(self.sizes.values())
        return Splits(*self.make_datasets(split_in_order(self.make_synthetic(sum(sizes)), sizes)))

    def read_or_explain(self, download: bool) -> Any:
        """Both official parts, or the error that names the remedies."""
        return read_or_explain(
            self.title,
            lambda: self.read(download),
            data_dir=self.data_dir,
            files=self.files,
            download=None if self.has_own_files else download,
            prepares=self.download,
        )


def _given_or(given: Sequence[Any], usual: Sequence[Any]) -> list[Any]:
    """The values that are given, and the usual ones in place of None."""
    return [default if value is None else value for value, default in zip(given, usual, strict=True)]


def split_in_order(samples: LabelledSamples, sizes: Sequence[int]) -> list[LabelledSamples]:
    """Consecutive parts of samples and labels, of sizes that sum to the number of samples."""
    inputs, labels = (tensor.split(list(sizes)) for tensor in samples)
    return list(zip(inputs, labels, strict=True))


def official_parts(title: str, train_count: int, test_count: int, sizes: Mapping[str, int]) -> list[Tensor]:
    """Numbers of the training, validation and test samples: the first two of the official training set.

    Args:
        title: names the data set in errors.
        train_count: samples of the official training set.
        test_count: samples of the official test set.
        sizes: of ``"train"``, ``"val"`` and ``"test"``.

    Raises:
        MisconfigurationException: as of :func:`split_at_random`.
    """
    first = {"train_size": sizes["train"], "val_size": sizes["val"]}
    return [
        *split_at_random(train_count, first, of=f"the training part of {title}"),
        *split_at_random(test_count, {"test_size": sizes["test"]}, of=f"the test part of {title}"),
    ]


def split_at_random(count: int, sizes: Mapping[str, int], *, of: str, seed: int = 0) -> list[Tensor]:
    """Disjoint random parts of ``range(count)``, int64, in the order of one seeded permutation.

    Args:
        count: samples that there are.
        sizes: of the parts, by the names of the arguments that set them.
        of: the data that have the samples, for the error.
        seed: of the permutation.

    Raises:
        MisconfigurationException: if the sizes ask for more than there is, or one is negative.

    Example:
        >>> [part.tolist() for part in split_at_random(5, {"train_size": 3, "val_size": 2}, of="some digits")]
        [[4, 0, 1], [3, 2]]
    """
    if sum(sizes.values()) > count or min(sizes.values()) < 0:
        asked = " and ".join(f"{name}={size}" for name, size in sizes.items())
        options = ", ".join(f"--data.{name}" for name in sizes)
        raise MisconfigurationException(
            f"Cannot take {asked} from the {count} samples of {of}: choose smaller sizes ({options})."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(order[: sum(sizes.values())].split(list(sizes.values())))
