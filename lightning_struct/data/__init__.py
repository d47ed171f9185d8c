"""Data sets as LightningDataModules, samplers whose batches change size, differential equations with their points."""

from lightning_struct.data.cifar import CIFAR10DataModule
from lightning_struct.data.curves import CurvesDataModule
from lightning_struct.data.digits import MNISTDataModule, USPSDataModule
from lightning_struct.data.equations import Burgers, DifferentialEquation, Heat, Poisson
from lightning_struct.data.evolutions import AllenCahn, KortewegDeVries
from lightning_struct.data.imdb import IMDBDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, InMemoryDataModule
from lightning_struct.data.larochelle import MNISTVariantDataModule
from lightning_struct.data.points import PointDraws, PointsDataModule
from lightning_struct.data.regions import Ball, Box, Faces, Product, Region, Segment, Sphere, Table, Union, Without
from lightning_struct.data.sampling import DrawLoader, IndependentDraws, keep_batch
from lightning_struct.data.text_corpus import TextCorpusDataModule

__all__ = [
    "AllenCahn", "Ball", "BatchedTensorDataset", "Box", "Burgers", "CIFAR10DataModule", "CurvesDataModule",
    "DifferentialEquation", "DrawLoader", "Faces", "Heat", "IMDBDataModule", "InMemoryDataModule", "IndependentDraws",
    "KortewegDeVries", "MNISTDataModule", "MNISTVariantDataModule", "PointDraws", "PointsDataModule", "Poisson",
    "Product", "Region", "Segment", "Sphere", "Table", "TextCorpusDataModule", "USPSDataModule", "Union", "Without",
    "keep_batch",
]  # fmt: skip
