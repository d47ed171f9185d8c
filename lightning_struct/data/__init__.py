"""Data sets as LightningDataModules, and samplers whose batches change size."""

from lightning_struct.data.cifar import CIFAR10DataModule
from lightning_struct.data.curves_datamodule import CurvesDataModule
from lightning_struct.data.digits import MNISTDataModule, USPSDataModule
from lightning_struct.data.imdb import IMDBDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, InMemoryDataModule
from lightning_struct.data.mnist_variants import MNISTVariantDataModule
from lightning_struct.data.norb import NORBDataModule
from lightning_struct.data.rectangles import RectanglesDataModule
from lightning_struct.data.sampling import DrawLoader, IndependentDraws
from lightning_struct.data.text_corpus import TextCorpusDataModule

__all__ = [
    "BatchedTensorDataset",
    "CIFAR10DataModule",
    "CurvesDataModule",
    "DrawLoader",
    "IMDBDataModule",
    "InMemoryDataModule",
    "IndependentDraws",
    "MNISTDataModule",
    "MNISTVariantDataModule",
    "NORBDataModule",
    "RectanglesDataModule",
    "TextCorpusDataModule",
    "USPSDataModule",
]
