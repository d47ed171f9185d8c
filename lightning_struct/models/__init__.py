"""LightningModules, one family per kind of benchmark task."""

from lightning_struct.models.autoencoder import Autoencoder, SHFAutoencoder
from lightning_struct.models.classifier import Classifier, RLSClassifier, SHFClassifier, fully_connected, mini_vgg
from lightning_struct.models.language import LanguageModel, RecurrentNetwork
from lightning_struct.models.pinn import IntervalNetwork, PhysicsInformedNetwork, SHFPhysicsInformedNetwork, TanhNetwork
from lightning_struct.models.structured import (
    convolution_and_layer,
    lenet,
    pruned,
    single_hidden_layer,
    structured_in_place_of_convolution,
    unbiased_linear,
)

__all__ = [
    "Autoencoder", "Classifier", "IntervalNetwork",
    "LanguageModel", "PhysicsInformedNetwork", "RLSClassifier", "RecurrentNetwork", "SHFAutoencoder", "SHFClassifier",
    "SHFPhysicsInformedNetwork", "TanhNetwork", "convolution_and_layer", "fully_connected", "lenet", "mini_vgg",
    "pruned", "single_hidden_layer", "structured_in_place_of_convolution", "unbiased_linear",
]  # fmt: skip
