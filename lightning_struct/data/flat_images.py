"""Image sets of the experiments on structured layers: flat grey images, standardised, cut as the paper cuts them."""

import os
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_struct.data import in_memory
from lightning_struct.data.files import read_or_explain
from lightning_struct.functional.checks import check_types, is_real
from lightning_struct.utilities.checks import check, check_counts


class FlatImagesDataModule(in_memory.InMemoryDataModule):
    """Base of the image sets of Thomas et al., "Learning compressed transforms with low displacement rank".

    A share of the training images is kept for validation (Appendix F.1), always the same one. The rest, or less of it
    (Appendix E.2), is trained on. Each pixel is standardised by its mean and standard deviation over the images that
    are trained on; a pixel that is the same in all of them is only centred. The paper does not say so, its authors'
    code does.

    Args:
        data_dir: directory with the official files.
        train_size: training images, those kept for validation included.
        test_size: test images.
        generate: make the images instead of reading the official files, always the same ones.
        synthetic: likewise, others for each ``seed``; nothing is read or downloaded.
        batch_size: training samples in a step, over all processes together.
        draws: shuffled passes by ``"epoch"`` or ``"independent"`` draws.
        val_fraction: share of the training images that is kept for validation.
        train_fraction: share of all training images that is trained on, drawn by ``seed``; at most the part that
            validation leaves.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: for a fraction out of its range, and if one of the sets would be empty.
    """

    title: ClassVar[str]
    files: str
    """The contents that ``data_dir`` must have, for errors."""

    def __init__(
        self,
        data_dir: str,
        train_size: int,
        test_size: int,
        *,
        generate: bool = False,
        synthetic: bool = False,
        batch_size: int = 50,
        draws: Literal["independent", "epoch"] = "epoch",
        val_fraction: float = 0.15,
        train_fraction: float = 1.0,
        **loader: Any,
    ) -> None:
        super().__init__(batch_size, draws, **loader)
        check("val_fraction", val_fraction, is_real(val_fraction) and 0 < val_fraction < 1, "between 0 and 1")
        is_share = is_real(train_fraction) and 0 < train_fraction <= 1
        check("train_fraction", train_fraction, is_share, "above 0 and at most 1")
        check_counts(train_size=train_size, test_size=test_size)
        check_types(FlatImagesDataModule.__init__, locals())
        self.data_dir = os.path.expanduser(data_dir)
        self.generate, self.synthetic = generate, synthetic
        self.train_size, self.test_size = train_size, test_size
        self.val_fraction, self.train_fraction = val_fraction, train_fraction

    @abstractmethod
    def read(self) -> tuple[in_memory.LabelledSamples, in_memory.LabelledSamples]:
        """Training and test part of the official files: images (n, pixels), uint8 or float32 in [0, 1], and labels.

        Labels are (n,), int64.
        """

    @abstractmethod
    def make(self) -> tuple[in_memory.LabelledSamples, in_memory.LabelledSamples]:
        """Training and test part that are made, likewise, by ``seed`` if ``synthetic``, else always the same."""

    def load_parts(self) -> tuple[in_memory.LabelledSamples, in_memory.LabelledSamples]:
        """Training and test part, read or made.

        Raises:
            MisconfigurationException: if the files are missing or are damaged.
        """
        if self.generate or self.synthetic:
            rank_zero_info(f"{self.title}: made by our own generator; these are not the official images.")
            return self.make()
        return read_or_explain(self.title, self.read, data_dir=self.data_dir, files=self.files, generate=True)

    def load_splits(self) -> in_memory.Splits:
        official, of_test = self.load_parts()
        (test,) = in_memory.split_at_random(
            len(of_test[0]), {"test_size": self.test_size}, of=f"the test part of {self.title}"
        )
        chosen = [*((official, rows) for rows in self._cut(len(official[0]))), (of_test, test)]
        images = [
            as_float(f"{self.title} ({key})", images[rows])
            for key, ((images, _), rows) in zip(in_memory.Splits._fields, chosen, strict=True)
        ]
        mean, std = mean_and_std(images[0])
        labels = [labels[rows] for (_, labels), rows in chosen]
        return in_memory.Splits(
            *(in_memory.BatchedTensorDataset(x.sub_(mean).div_(std), y) for x, y in zip(images, labels, strict=True))
        )

    def _cut(self, available: int) -> tuple[Tensor, Tensor]:
        """Numbers of the training and of the validation images."""
        (chosen,) = in_memory.split_at_random(
            available, {"train_size": self.train_size}, of=f"the training part of {self.title}"
        )
        val_size = round(self.val_fraction * self.train_size)
        val, rest = chosen[:val_size], chosen[val_size:]
        # The fraction is of all training images, those for validation included, as in the paper and its authors' code.
        kept = min(round(self.train_fraction * self.train_size), len(rest))
        (subset,) = in_memory.split_at_random(len(rest), {"train_fraction": kept}, of=self.title, seed=self.seed)
        return rest[subset], val


def as_float(name: str, images: Tensor) -> Tensor:
    """A new tensor of the same images, (n, pixels), float32 in [0, 1]; uint8 goes to 255.

    Raises:
        MisconfigurationException: for an empty set, and for pixels that are NaN or outside [0, 1].
    """
    scaled = images.float().div_(255) if images.dtype == torch.uint8 else images.float().clone()
    in_memory.check_pixels(name, scaled)
    return scaled


def mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each pixel over the images (n, pixels): two tensors (pixels,).

    The deviation of a constant pixel is given as 1.
    """
    std = images.std(dim=0, correction=0)
    return images.mean(dim=0), std.masked_fill(std == 0, 1.0)
