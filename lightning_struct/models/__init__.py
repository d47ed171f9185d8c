"""LightningModules, one family per kind of benchmark task."""

from lightning_struct.models.autoencoder import Autoencoder, SHFAutoencoder

__all__ = ["Autoencoder", "SHFAutoencoder"]
