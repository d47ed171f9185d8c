"""Batches drawn at random, each independently of the last, whose size may change between any two of them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from lightning_struct.collective import rank as current_rank
from lightning_struct.collective import world_size
from lightning_struct.functional.checks import is_integer
from lightning_struct.utilities.checks import check, check_counts, check_positive, is_count
from lightning_struct.utilities.namespaces import MisconfigurationException


class IndependentDraws(DistributedSampler):
    """Lists of indices: each is ``batch_size`` samples without replacement, drawn independently of the others.

    So Algorithm 1 of Emirahmetoglu & Stewart draws its batches. Every process draws the same indices and takes its
    block of them, so that the blocks in the order of ranks are the draw of one process. A draw depends on the seed and
    on its number alone, and numbers go on from epoch to epoch. An iterator that is left in the middle of an epoch is
    continued by the next one, unless another epoch was named by ``set_epoch``: then the rest of the epoch is passed
    over.

    It derives from torch's ``DistributedSampler`` so that Lightning leaves it in its place under DDP.

    Args:
        dataset: the samples are ``range(len(dataset))``.
        batch_size: samples of a draw, over all processes together; it can be set at any time and holds from the next
            draw on.
        draws_per_epoch: draws that are called an epoch: Lightning validates after so many.
        seed: of the draws, not negative.
        num_replicas: processes that share a draw; None takes those of torch.distributed when the draw is made.
        rank: of this process; None likewise.

    Raises:
        MisconfigurationException: for a batch size that is not in [1, len(dataset)] or smaller than the number of
            processes, for ``draws_per_epoch`` < 1, or a negative seed.

    Example:
        >>> dataset = TensorDataset(torch.arange(100))
        >>> draws = IndependentDraws(dataset, batch_size=25, draws_per_epoch=4)
        >>> [len(batch) for (batch,) in DrawLoader(dataset, draws)]
        [25, 25, 25, 25]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        draws_per_epoch: int,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_counts(draws_per_epoch=draws_per_epoch)
        check_positive(num_replicas=num_replicas)
        check("dataset", dataset, hasattr(dataset, "__len__"), "a data set with a length")
        check("rank", rank, rank is None or is_count(rank, 0), "a whole number >= 0, or None")
        check_counts(0, seed=seed)
        # the base would set the processes once and for all
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self._num_replicas, self._rank = num_replicas, rank
        self.draws_per_epoch = draws_per_epoch
        self._first_draw, self._draws_done, self._begun = 0, 0, False
        self.batch_size = batch_size

    @property
    def samples(self) -> int | None:
        """Samples that there are to draw from; None if there is no end to them."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int:
        """Samples of the next draw, over all processes together."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        if not is_integer(batch_size):
            raise TypeError(f"batch_size must be a whole number, but is {batch_size!r:.80}")
        samples = self.samples
        if samples is not None and not 1 <= batch_size <= samples:
            raise MisconfigurationException(
                f"batch_size must be from 1 to the {samples} samples of the data set: a draw takes none "
                f"twice, but is {batch_size}"
            )
        if batch_size < self.num_replicas:
            raise MisconfigurationException(
                f"batch_size={batch_size} leaves some of the {self.num_replicas} processes without a sample: "
                "it counts the samples over all of them"
            )
        self._batch_size = batch_size

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Processes that share a draw."""
        return world_size() if self._num_replicas is None else self._num_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Number of the block of a draw that is yielded."""
        return current_rank() if self._rank is None else self._rank

    def draw(self, number: int) -> Any:
        """The draw of this number over all processes: (batch_size,), int64, in random order."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        return torch.randperm(samples, generator=seeded_generator(self.seed, number))[: self.batch_size]

    def share(self, draw: Any) -> Any:
        """This process's block of a draw, as it is yielded."""
        return draw.tensor_split(self.num_replicas)[self.rank].tolist()

    def __iter__(self) -> Iterator[Any]:
        if self._draws_done >= self.draws_per_epoch:
            self._begin_next_epoch()
        while self._draws_done < self.draws_per_epoch:
            self.batch_size = self.batch_size  # processes may have joined since it was set
            number = self._first_draw + self._draws_done
            self._draws_done, self._begun = self._draws_done + 1, True
            yield self.share(self.draw(number))

    def __len__(self) -> int:
        return self.draws_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, if it is another than the last one named here.

        Before the first draw it is the epoch of that number, with which Lightning resumes after a whole epoch without
        loading the state. Later it is the next one, whatever its number: Lightning can name two epochs at a resume.
        """
        if epoch == self.epoch:
            return
        self.epoch = epoch
        if not self._begun:
            self._first_draw = epoch * self.draws_per_epoch
        elif self._draws_done:
            self._begin_next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """State from which the very next draw follows."""
        return {
            "epoch": self.epoch,
            "first_draw": self._first_draw,
            "draws_done": self._draws_done,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self._begun = state_dict["epoch"], True
        self._first_draw, self._draws_done = state_dict["first_draw"], state_dict["draws_done"]
        self.batch_size = state_dict["batch_size"]

    def _begin_next_epoch(self) -> None:
        self._first_draw, self._draws_done = self._first_draw + self.draws_per_epoch, 0


def seeded_generator(*seeds: int) -> torch.Generator:
    """A generator of its own for each sequence of seeds of one length, none of them negative."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))


class ShuffledPasses(DistributedSampler):
    """A ``DistributedSampler`` that keeps its place: a pass goes on at the sample after those before a checkpoint.

    A pass that is left is begun anew; so is one that was resumed, if another epoch is named by ``set_epoch``.
    """

    _first = _done = 0  # samples of this process in a pass: those that the next one leaves out, and those handed out

    def __iter__(self) -> Iterator[Any]:
        self._done, self._first = self._first, 0
        for index in islice(super().__iter__(), self._done, None):
            self._done += 1
            yield index

    def begin_anew(self) -> None:
        """Begin the next pass at its first sample, whatever state was loaded."""
        self._first = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._first = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self._done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self._first = state_dict["epoch"], state_dict["done"]


class ResumedLoader(DataLoader):
    """A ``DataLoader`` whose sampler has the state that Lightning saves in its checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler; empty if it has none, as that of ``Trainer(overfit_batches=...)``."""
        return self.sampler.state_dict() if hasattr(self.sampler, "state_dict") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.sampler, "load_state_dict") and state_dict:
            self.sampler.load_state_dict(state_dict)


class DrawLoader(ResumedLoader):
    """A ``DataLoader`` over :class:`IndependentDraws` that resumes in the middle of an epoch.

    A ``TensorDataset`` is indexed once per batch; the samples of any other map-style data set are fetched (by
    ``__getitems__`` if there is one) and collated as a ``DataLoader`` does. Lightning saves the state of the draws
    in its checkpoints, and a run that is resumed from within an epoch goes on with the very next draw.

    For example::

        Trainer().fit(model, DrawLoader(dataset, IndependentDraws(dataset, batch_size=250, draws_per_epoch=10)))

    Args:
        dataset: map-style.
        sampler: the draws.
        collate_fn: makes a batch of the samples of a draw; None takes torch's default,
            and the indexed tensors of a ``TensorDataset`` as they are.
        num_workers: only 0.
        **options: others of ``DataLoader``, such as ``pin_memory``.

    Raises:
        MisconfigurationException: for another sampler, one of another data set, a ``batch_size``, as Lightning gives
            it in ``predict``, and for worker processes: batches that they fetched ahead would have the size of the
            past, and a resumed run would lose them.

    Example:
        >>> dataset = TensorDataset(torch.rand(100, 3), torch.arange(100) % 2)
        >>> loader = DrawLoader(dataset, IndependentDraws(dataset, batch_size=25, draws_per_epoch=4))
        >>> inputs, targets = next(iter(loader))
        >>> inputs.shape, targets.shape
        (torch.Size([25, 3]), torch.Size([25]))
    """

    instead_of_overfitting: ClassVar[str] = (
        "use an ordinary DataLoader with it; data modules with the option draws have one with draws='epoch' "
        "(--data.draws=epoch)"
    )

    def __init__(
        self,
        dataset: Dataset,
        sampler: IndependentDraws,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(sampler, IndependentDraws):
            raise MisconfigurationException(
                f"DrawLoader needs IndependentDraws, but got {type(sampler).__name__}. If Trainer(overfit_batches=...) "
                f"put it there, {self.instead_of_overfitting}"
            )
        if "batch_size" in options:
            raise MisconfigurationException(
                "DrawLoader takes no batch_size: it is that of the draws, IndependentDraws(batch_size=...). If "
                "Trainer.predict put it there, predict with an ordinary DataLoader: draws repeat some samples and "
                "leave out others"
            )
        check("dataset", dataset, hasattr(dataset, "__len__"), "a data set with a length")
        check("collate_fn", collate_fn, collate_fn is None or callable(collate_fn), "a function, or None")
        if len(sampler.dataset) != len(dataset):  # type: ignore[arg-type]
            raise MisconfigurationException(
                f"The draws are from {len(sampler.dataset)} samples, but the data set has {len(dataset)}: "  # type: ignore[arg-type]
                "give both the same data set"
            )
        if not is_integer(num_workers) or num_workers != 0:
            raise MisconfigurationException(
                f"DrawLoader needs num_workers=0, but got {num_workers}: batches fetched ahead by workers would keep "
                "the old size after a change, and be lost at a resume"
            )
        if collate_fn is not None or not isinstance(dataset, TensorDataset):
            dataset = _IndexedByLists(dataset, collate_fn or default_collate)
        super().__init__(dataset, batch_size=None, sampler=sampler, collate_fn=keep_batch, **options)

    def __iter__(self) -> Any:
        # A DataLoader draws a seed for workers each time: here not from the global generator, since a resumed run
        # begins fewer epochs. It is made for the moment only: torch cannot send a generator to a spawned process.
        given, self.generator = self.generator, torch.Generator()
        try:
            return super().__iter__()
        finally:
            self.generator = given


class CollatedBatch(Sequence[tuple[Tensor, ...]]):
    """The samples of a batch that is there as a whole already, one row of each tensor a sample.

    To any ``collate_fn`` it is the list of samples that a ``DataLoader`` fetches; :func:`keep_batch` takes the tensors.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> Any:
        rows = tuple(tensor[index] for tensor in self.tensors)
        return CollatedBatch(rows) if isinstance(index, slice) else rows

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(tensor.unbind() for tensor in self.tensors), strict=True)


def keep_batch(batch: Any) -> Any:
    """The ``collate_fn`` for batches that come whole from the data set, as those of :class:`BatchedTensorDataset` do.

    Args:
        batch: a :class:`CollatedBatch`, tensors (n, ...) of one batch; anything else is returned as it is.

    Returns:
        The same batch as a tuple of plain tensors (n, ...).

    Example:
        >>> samples = CollatedBatch((torch.arange(3), torch.zeros(3)))
        >>> samples[2]
        (tensor(2), tensor(0.))
        >>> keep_batch(samples)
        (tensor([0, 1, 2]), tensor([0., 0., 0.]))
    """
    return batch.tensors if isinstance(batch, CollatedBatch) else batch


class _IndexedByLists(Dataset):
    """A data set whose items are batches of another data set's samples."""

    def __init__(self, dataset: Dataset, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __getitem__(self, indices: Sequence[int]) -> Any:
        getitems = getattr(self.dataset, "__getitems__", None)
        return self.collate_fn(getitems(indices) if getitems else [self.dataset[index] for index in indices])

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]
