"""The networks of the recipe compress_network: a small ResNet and a small transformer of characters."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_struct.utilities.checks import check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norms, beside an identity, or a 1 x 1 convolution if the shape changes.

    Args:
        in_channels, out_channels: of the images.
        stride: of the first convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


def residual_network(channels: int = 16, blocks: int = 1, num_classes: int = 10) -> nn.Sequential:
    """A ResNet for images of 32 x 32 (He et al., section 4.2), three stages: 8 layers with one block in each.

    Args:
        channels: of the first stage; the others have two and four times as many.
        blocks: of each stage.
        num_classes: outputs.

    Returns:
        A network from (n, 3, height, width) to (n, num_classes): logits. Its last layer is named ``output``.

    Raises:
        MisconfigurationException: if a size is not positive.

    Example:
        >>> residual_network(channels=4)(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """
    check_positive(channels=channels, blocks=blocks, num_classes=num_classes)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    widths = [channels, *(channels * 2**stage for stage in range(3) for _ in range(blocks))]
    layers += [ResidualBlock(before, after, 1 if before == after else 2) for before, after in pairwise(widths)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.add_module("output", nn.Linear(widths[-1], num_classes))
    return network


class CharacterTransformer(nn.Module):
    """A transformer that predicts the next character of a text after each character.

    Args:
        characters: number of different ones; inputs are from 0 to ``characters - 1``.
        steps: characters that it can look back on, the present one included.
        width: features of a character.
        heads: of attention, a divisor of ``width``.
        blocks: layers of attention and of ``4 * width`` units.

    Raises:
        MisconfigurationException: if a size is not positive, or ``heads`` does not divide ``width``; in a batch, if the
            texts are longer than ``steps``.

    Example:
        >>> CharacterTransformer(steps=16, width=8)(torch.zeros(5, 16, dtype=torch.int64)).shape
        torch.Size([5, 128, 16])
    """

    causal: Tensor

    def __init__(
        self, characters: int = 128, steps: int = 64, width: int = 128, heads: int = 4, blocks: int = 2
    ) -> None:
        super().__init__()
        check_positive(characters=characters, steps=steps, width=width, heads=heads, blocks=blocks)
        if width % heads:
            raise MisconfigurationException(f"heads must divide width = {width}, but is {heads}")
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, characters)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(steps), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next characters, (n, characters, steps), for (n, steps), int64."""
        steps = characters.shape[1]
        if steps > len(self.places):
            raise MisconfigurationException(
                f"The texts have {steps} characters, the network takes steps={len(self.places)}: give both the same"
            )
        x = self.embedding(characters) + self.places[:steps]
        for block in self.blocks:
            x = block(x, self.causal[:steps, :steps], is_causal=True)
        return self.output(self.norm(x)).mT
