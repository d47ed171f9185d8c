"""Networks with structured matrices (Thomas et al., "Learning compressed transforms with low displacement rank")."""

from collections.abc import Callable
from pickle import UnpicklingError

from torch import nn

from lightning_struct.functional.checks import checked
from lightning_struct.models.classifier import Classifier
from lightning_struct.nn import BlockStructured, PrunedLinear
from lightning_struct.utilities.checks import check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException

LayerOfSizes = Callable[[int, int], nn.Module]
"""A function that makes a layer from its numbers of inputs and outputs: ``nn.Linear``, or a structured class in a
``functools.partial``."""

COLORS = 3
POOLING = 4  # the number by which the two poolings of LeNet divide height and width, together


@checked
def unbiased_linear(in_features: int, out_features: int) -> nn.Linear:
    """``nn.Linear`` without bias.

    Args:
        in_features: size of an input.
        out_features: size of an output.

    Example:
        >>> unbiased_linear(3, 2)
        Linear(in_features=3, out_features=2, bias=False)
    """
    check_positive(in_features=in_features, out_features=out_features)
    return nn.Linear(in_features, out_features, bias=False)


@checked
def single_hidden_layer(
    pixels: int = 784, num_classes: int = 10, layer: LayerOfSizes = unbiased_linear, hidden: int | None = None
) -> nn.Sequential:
    """A hidden layer, a ReLU and an output layer (appendix F.1, Tables 1, 6, 8, 13).

    Args:
        pixels: of an image; images are flattened.
        num_classes: outputs.
        layer: makes the hidden layer, ``layer(pixels, hidden)``. The paper's has no bias.
        hidden: its units; None takes as many as there are pixels.

    Returns:
        A network from (n, ...) to (n, num_classes): logits. Its layers are named ``hidden`` and ``output``.

    Raises:
        MisconfigurationException: if a size is not positive.

    Example:
        >>> from functools import partial
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> network = single_hidden_layer(784, 10, partial(LDRSubdiagonal, rank=1, bias=False))
        >>> sum(parameter.numel() for parameter in network.parameters())  # Table 1: 10,986
        10986
    """
    units = pixels if hidden is None else hidden
    check_positive(pixels=pixels, num_classes=num_classes, hidden=units)
    return _with_head(nn.Sequential(nn.Flatten()), layer(pixels, units), units, num_classes)


@checked
def lenet(
    size: int = 28, channels: int = 1, num_classes: int = 10, layer: LayerOfSizes = nn.Linear, hidden: int | None = None
) -> nn.Sequential:
    """Two convolutions with poolings, a fully connected layer and an output layer (appendix F.1, Tables 7, 9).

    The paper names 6 and 16 channels, and 784 or 1024 features. Those come out of convolutions 5 x 5 that keep the size
    and poolings that halve it, as in the authors' code: 16 x 7 x 7 and 16 x 8 x 8. Its counts include a bias of the
    layer.

    Args:
        size: height and width of an image, a multiple of 4.
        channels: of an image; images may be flat.
        num_classes: outputs.
        layer: makes the fully connected layer, ``layer(features, hidden)``, with bias as ``nn.Linear`` has it.
        hidden: its units; None takes as many as there are features.

    Returns:
        A network from (n, ...) to (n, num_classes): logits. Its last layers are named ``hidden`` and ``output``.

    Raises:
        MisconfigurationException: if a size is not positive, or ``size`` is not a multiple of 4.

    Example:
        >>> import torch
        >>> lenet(size=8)(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """
    check_positive(size=size, channels=channels, num_classes=num_classes)
    if size % POOLING:
        raise MisconfigurationException(f"size must be a multiple of 4, which two poolings can halve, but is {size}")
    features = 16 * (size // POOLING) ** 2
    units = features if hidden is None else hidden
    check_positive(hidden=units)
    stages = (
        nn.Flatten(),
        nn.Unflatten(1, (int(channels), int(size), int(size))),
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
    )
    return _with_head(nn.Sequential(*stages), layer(features, units), units, num_classes)


@checked
def convolution_and_layer(
    channels: int = 3, pool: bool = False, hidden: int = 512, num_classes: int = 10, size: int = 32
) -> nn.Sequential:
    """One convolution of colour images and one hidden layer: the first rows of Table 3.

    The convolution is 5 x 5 and keeps the size. The paper writes "stride 5", but counts as many outputs as inputs and
    3 x 3 x 25 weights. Its counts are those of hidden layers without bias.

    Args:
        channels: outputs of the convolution.
        pool: halve height and width after it.
        hidden: units of the hidden layer.
        num_classes: outputs.
        size: height and width of an image, even if there is a pooling.

    Returns:
        A network from (n, 3, size, size) to (n, num_classes): logits. The hidden layers are named ``first`` and
        ``hidden``.

    Raises:
        MisconfigurationException: if a size is not positive, or odd with ``pool``.

    Example:
        >>> import torch
        >>> convolution_and_layer(hidden=16, pool=True, size=8)(torch.zeros(5, 3, 8, 8)).shape
        torch.Size([5, 10])
    """
    check_positive(channels=channels, hidden=hidden, num_classes=num_classes, size=size)
    if pool and size % 2:
        raise MisconfigurationException(f"size must be even to be halved by the pooling, but is {size}")
    side = size // 2 if pool else size
    layers = nn.Sequential()
    layers.add_module("first", nn.Conv2d(COLORS, channels, 5, padding=2, bias=False))
    layers.append(nn.ReLU())
    if pool:
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    return _with_head(layers, unbiased_linear(channels * side**2, hidden), hidden, num_classes)


@checked
def structured_in_place_of_convolution(
    first: LayerOfSizes,
    layer: LayerOfSizes,
    channels: bool = False,
    hidden: int = 512,
    num_classes: int = 10,
    size: int = 32,
) -> nn.Sequential:
    """Two structured layers on colour images: the last rows of Table 3.

    The paper's counts are those of layers without bias, with the hidden layer 3072 → 512 a part of a square one.

    Args:
        first: makes the layer in place of the convolution.
        layer: makes the hidden layer, ``layer(3 * size ** 2, hidden)``.
        channels: nine square matrices between three channels, ``first(size ** 2, size ** 2)`` each
            (:class:`BlockStructured`), instead of one matrix ``first(3 * size ** 2, 3 * size ** 2)``.
        hidden: units of the hidden layer.
        num_classes: outputs.
        size: height and width of an image.

    Returns:
        A network from (n, 3, size, size) to (n, num_classes): logits. The hidden layers are named ``first`` and
        ``hidden``.

    Raises:
        MisconfigurationException: if a size is not positive.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from lightning_struct.nn import LowRank
        >>> layer = partial(LowRank, rank=1, bias=False)
        >>> structured_in_place_of_convolution(layer, layer, size=4)(torch.zeros(5, 3, 4, 4)).shape
        torch.Size([5, 10])
    """
    check_positive(hidden=hidden, num_classes=num_classes, size=size)
    entries = size**2
    layers = nn.Sequential(nn.Flatten())
    if channels:

        def block(in_features: int, out_features: int, *, bias: bool) -> nn.Module:
            return first(in_features, out_features)  # bias: as the caller has made ``first``

        layers.append(nn.Unflatten(1, (COLORS, entries)))
        layers.add_module("first", BlockStructured(COLORS, COLORS, entries, block, bias=False))
        layers.append(nn.Flatten())
    else:
        layers.add_module("first", first(COLORS * entries, COLORS * entries))
    layers.append(nn.ReLU())
    return _with_head(layers, layer(COLORS * entries, hidden), hidden, num_classes)


@checked
def pruned(checkpoint: str, parameters: int) -> nn.Sequential:
    """A trained network whose hidden layer keeps only its largest weights, to be trained further (Tables 8 and 9).

    Args:
        checkpoint: of a run of :class:`Classifier` from the command line, whose network has an ``nn.Linear`` named
            ``hidden``, such as :func:`single_hidden_layer` and :func:`lenet`.
        parameters: number of weights that are kept, those of largest magnitude.

    Returns:
        The network with a :class:`PrunedLinear` in place of that layer.

    Raises:
        MisconfigurationException: if there is no such checkpoint, the file is none, or has no such layer.
    """
    try:
        network = Classifier.load_from_checkpoint(checkpoint, map_location="cpu").network
    except (OSError, EOFError, KeyError, RuntimeError, UnpicklingError) as error:  # a file of anything
        raise MisconfigurationException(
            f"{checkpoint} cannot be read ({error}): train the network that is to be pruned first, and name its "
            "checkpoint (on the command line of a recipe: --model.network.checkpoint)"
        ) from error
    hidden = getattr(network, "hidden", None)
    if not isinstance(network, nn.Sequential) or not isinstance(hidden, nn.Linear):
        raise MisconfigurationException(
            f"The network of {checkpoint} has no nn.Linear named hidden to be pruned: train an unstructured one first"
        )
    network.hidden = PrunedLinear.from_linear(hidden, parameters=parameters)
    return network


def _with_head(layers: nn.Sequential, hidden: nn.Module, units: int, num_classes: int) -> nn.Sequential:
    """The layers, a hidden layer named ``hidden``, a ReLU, and an output layer named ``output``."""
    layers.add_module("hidden", hidden)
    layers.append(nn.ReLU())
    layers.add_module("output", nn.Linear(units, num_classes))
    return layers
