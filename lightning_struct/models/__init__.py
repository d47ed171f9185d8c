"""LightningModules, one family per kind of benchmark task."""

from lightning_struct.models.autoencoder import Autoencoder, SHFAutoencoder
from lightning_struct.models.classifier import Classifier, RLSClassifier, fully_connected, mini_vgg
from lightning_struct.models.text import RecurrentNetwork

__all__ = [
    "Autoencoder",
    "Classifier",
    "RLSClassifier",
    "RecurrentNetwork",
    "SHFAutoencoder",
    "fully_connected",
    "mini_vgg",
]
