"""LightningModules, one family per kind of benchmark task."""

from lightning_struct.models.autoencoder import Autoencoder, SHFAutoencoder
from lightning_struct.models.classifier import Classifier, fully_connected, mini_vgg

__all__ = ["Autoencoder", "Classifier", "SHFAutoencoder", "fully_connected", "mini_vgg"]
