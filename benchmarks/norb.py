"""Toys on cluttered grounds in the layout of NORB, made by our own generator.

Of the recipe, in the directory of a checkout: ``lightning-struct structured_image fit
--data=benchmarks.norb.NORBDataModule --data.generate=true ...`` (docs/recipes/structured_image.md).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from lightning_struct.data.flat_images import FlatImagesDataModule
from lightning_struct.data.in_memory import LabelledSamples
from lightning_struct.data.larochelle import picture_patches

SIZE = 32
TRAIN_INSTANCES, TEST_INSTANCES = (4, 6, 7, 8, 9), (0, 1, 2, 3, 5)  # as in NORB

# Parts of a toy: the middle and half the axes of an ellipsoid, with x to the front, y to the left and z up.
_TOYS: tuple[tuple[tuple[float, ...], ...], ...] = (
    (  # animal: body, head, four legs, tail
        (0.0, 0.0, 0.1, 0.6, 0.22, 0.22),
        (0.7, 0.0, 0.35, 0.22, 0.15, 0.18),
        *((x, y, -0.3, 0.09, 0.09, 0.3) for x in (-0.4, 0.4) for y in (-0.14, 0.14)),
        (-0.72, 0.0, 0.2, 0.2, 0.05, 0.06),
    ),
    (  # human: torso, head, arms, legs
        (0.0, 0.0, 0.15, 0.14, 0.24, 0.36),
        (0.0, 0.0, 0.68, 0.16, 0.15, 0.18),
        *((0.0, y, 0.12, 0.08, 0.08, 0.36) for y in (-0.32, 0.32)),
        *((0.0, y, -0.5, 0.1, 0.1, 0.4) for y in (-0.12, 0.12)),
    ),
    (  # plane: fuselage, wings, tailplane, fin
        (0.0, 0.0, 0.0, 0.8, 0.13, 0.13),
        (0.05, 0.0, 0.0, 0.17, 0.85, 0.04),
        (-0.68, 0.0, 0.05, 0.1, 0.32, 0.03),
        (-0.68, 0.0, 0.2, 0.12, 0.03, 0.2),
    ),
    (  # truck: load, cabin, four wheels
        (-0.2, 0.0, 0.18, 0.55, 0.3, 0.36),
        (0.5, 0.0, 0.02, 0.22, 0.26, 0.24),
        *((x, y, -0.26, 0.15, 0.07, 0.15) for x in (-0.45, 0.45) for y in (-0.27, 0.27)),
    ),
    (  # car: body, cabin, four wheels
        (0.0, 0.0, -0.05, 0.72, 0.3, 0.17),
        (-0.06, 0.0, 0.15, 0.35, 0.25, 0.2),
        *((x, y, -0.18, 0.14, 0.06, 0.14) for x in (-0.42, 0.42) for y in (-0.28, 0.28)),
    ),
)
TOYS = len(_TOYS)
INSTANCES = 10
_MOST_PARTS = max(map(len, _TOYS))
_NO_PART = (99.0, 99.0, 99.0, 1.0, 1.0, 1.0)  # which no ray meets: toys have as many parts as the largest

# The sides, lamps and changes of NORB; its images of 108 pixels are moved by up to 6.
_ELEVATIONS, _AZIMUTHS, _LAMPS = 9, 18, 6
_SHIFT, _LEAST_SCALE, _TURN = 2 * 6 / 108, 0.78, math.radians(5)
_BRIGHTNESS, _CONTRAST = 20 / 255, (0.8, 1.3)

_SPAN = 1.3  # half the width of an image
_RAYS = 2  # of a pixel, along each side
_CHUNK = 64  # images


class NORBDataModule(FlatImagesDataModule):
    """Toys as in NORB (LeCun et al., 2004): 10,200 / 1,800 / 10,000 images of 32 x 32.

    Sizes are of training, validation and test. Samples are (pixels, label): (1024,) float32, standardised
    (:class:`FlatImagesDataModule`), and int64, 0 to 5: animal, human, plane, truck, car, none.

    For example::

        model = Classifier(single_hidden_layer(1024, 6), num_classes=6)
        Trainer().fit(model, datamodule=NORBDataModule(generate=True))

    The images are made by :func:`make_toys` in the layout of NORB: five kinds of toys, ten of each, of which five are
    trained on and the other five tested with. They are not the official ones, which are not read, and accuracies on
    them are to be compared with each other alone. With ``generate`` they are always the same; ``synthetic`` makes
    others for each ``seed``.

    Args:
        data_dir: is not read.
        train_size: training images, those kept for validation included.
        test_size: test images.
        **options: ``generate``, ``synthetic`` and further options, see :class:`FlatImagesDataModule` and
            :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: without ``generate`` and ``synthetic``; for a number out of its range.

    Example:
        >>> data = NORBDataModule(synthetic=True, batch_size=10, train_size=20, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 1024]), torch.int64)
    """

    title = "NORB"
    files = "NORB's own files, for which there is no reader,"

    def __init__(
        self, data_dir: str = "data", *, train_size: int = 12_000, test_size: int = 10_000, **options: Any
    ) -> None:
        super().__init__(data_dir, train_size, test_size, **options)

    def make(self) -> tuple[LabelledSamples, LabelledSamples]:
        generator = torch.Generator().manual_seed(self.seed if self.synthetic else 0)
        train = make_toys(self.train_size, SIZE, instances=TRAIN_INSTANCES, generator=generator)
        return train, make_toys(self.test_size, SIZE, instances=TEST_INSTANCES, generator=generator)

    def read(self) -> tuple[LabelledSamples, LabelledSamples]:
        raise FileNotFoundError("there is no reader of NORB's files")


def make_toys(count: int, size: int, *, instances: Sequence[int], generator: Generator) -> tuple[Tensor, Tensor]:
    """Images of toys and their labels: 0 to 4 for animal, human, plane, truck and car, and 5 for none of them.

    There are ten toys of a kind, each of its own proportions, which are always the same. A toy is seen from one of 9
    heights and 18 sides, under one of 6 lamps. On its ground, a piece of a picture, it is moved, turned, made smaller,
    and changed in brightness and contrast; a smaller toy stands near the border, and a sixth of the images show that
    alone. So LeCun, Huang & Bottou describe NORB in "Learning methods for generic object recognition with invariance to
    pose and lighting" (2004); the toys are our own.

    Args:
        count: number of images.
        size: height and width in pixels, 28 or more.
        instances: the toys of each kind that are shown, 0 to 9.
        generator: source of the random numbers.

    Returns:
        Images (count, size * size), float32, values in [0, 1]; labels (count,), int64.
    """
    labels = torch.randint(TOYS + 1, (count,), generator=generator)
    images = picture_patches(count, size, generator=generator)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    beside = _SPAN * 0.8 * torch.stack([angle.cos(), angle.sin()], 1)
    others = torch.randint(TOYS, (count,), generator=generator)
    images = _with_toys(images, others, instances, 0.45, beside, generator)
    shift = _SPAN * _uniform(-_SHIFT, _SHIFT, (count, 2), generator)
    scale = _uniform(_LEAST_SCALE, 1.0, (count,), generator)
    shown = labels < TOYS
    images[shown] = _with_toys(images[shown], labels[shown], instances, scale[shown], shift[shown], generator)
    contrast = _uniform(*_CONTRAST, (count, 1), generator)
    brightness = _uniform(-_BRIGHTNESS, _BRIGHTNESS, (count, 1), generator)
    return (0.5 + contrast * (images - 0.5) + brightness).clamp_(0, 1), labels


def _with_toys(
    images: Tensor, kinds: Tensor, instances: Sequence[int], scale: Tensor | float, shift: Tensor, generator: Generator
) -> Tensor:
    """The images with a toy in front of each."""
    count = len(images)
    chosen = torch.tensor(instances)[torch.randint(len(instances), (count,), generator=generator)]
    parts = _all_toys()[kinds, chosen] * torch.as_tensor(scale).expand(count)[:, None, None]
    heights = torch.randint(_ELEVATIONS, (count,), generator=generator)
    sides = torch.randint(_AZIMUTHS, (count,), generator=generator)
    lamps = torch.randint(_LAMPS, (count,), generator=generator)
    turns = _uniform(-_TURN, _TURN, (count,), generator)
    views = _views(torch.deg2rad(30.0 + 5 * heights), 2 * math.pi * sides / _AZIMUTHS, turns)
    at = 2 * math.pi * lamps / _LAMPS
    # from above, and from the side of the eye
    to_lamp = F.normalize(torch.stack([0.7 * at.cos(), 0.7 * at.sin(), torch.ones(count)], 1) + views[:, 2], dim=1)
    chunks = zip(*(tensor.split(_CHUNK) for tensor in (images, parts, views, to_lamp, shift)), strict=True)
    return torch.cat([_seen(*chunk) for chunk in chunks])


def _all_toys() -> Tensor:
    """Parts of each toy, (kinds, instances, parts, 6)."""
    toys = torch.tensor(_NO_PART).repeat(TOYS, INSTANCES, _MOST_PARTS, 1)
    generator = Generator().manual_seed(0)
    for kind, parts in enumerate(_TOYS):
        stretch = (0.15 * torch.randn(INSTANCES, 1, 3, generator=generator)).exp()
        swell = (0.15 * torch.randn(INSTANCES, len(parts), 3, generator=generator)).exp()
        middle, axes = torch.tensor(parts).split(3, dim=-1)
        toys[kind, :, : len(parts)] = torch.cat([middle * stretch, axes * stretch * swell], dim=-1)
    return toys


def _views(elevation: Tensor, azimuth: Tensor, turn: Tensor) -> Tensor:
    """The directions to the right, above and towards the eye, as rows of (count, 3, 3), in the toy's own axes."""
    up, out = elevation.sin(), elevation.cos()
    cos, sin = azimuth.cos(), azimuth.sin()
    right = torch.stack([-sin, cos, torch.zeros_like(cos)], 1)
    above = torch.stack([-up * cos, -up * sin, out], 1)
    towards = torch.stack([out * cos, out * sin, up], 1)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    return torch.stack([cos * right + sin * above, cos * above - sin * right, towards], 1)


def _seen(images: Tensor, parts: Tensor, views: Tensor, to_lamp: Tensor, shift: Tensor) -> Tensor:
    """The images (count, pixels) with the nearest part in front, by parallel rays: some for each pixel, averaged."""
    middle, axes = parts.split(3, dim=-1)
    size = math.isqrt(images.shape[1])
    line = _SPAN * ((torch.arange(size * _RAYS) + 0.5) / (size * _RAYS) * 2 - 1)
    y, x = torch.cartesian_prod(-line, line).unbind(1)  # from the top, row by row
    # In units of the half axes each part is a unit sphere, met where |x e₁ + y e₂ - c + depth * towards|² = 1.
    right, above, towards = (view[:, None] / axes for view in views.unbind(1))
    center = middle / axes + shift[:, :1, None] * right + shift[:, 1:, None] * above
    one = torch.ones_like(x)
    along = _products([(right, towards), (above, towards), (-center, towards)]) @ torch.stack([x, y, one])
    pairs = [(right, right), (2 * right, above), (above, above), (-2 * right, center), (-2 * above, center)]
    start = _products([*pairs, (center, center)]) @ torch.stack([x * x, x * y, y * y, x, y, one])
    square = towards.square().sum(-1, keepdim=True)
    discriminant = along.square() - square * (start - 1)
    depth = torch.where(discriminant > 0, (discriminant.clamp(min=0).sqrt() - along) / square, -math.inf)
    depth, nearest = depth.max(dim=1)
    # the normal of a sphere, in the directions of the toy
    right, above, towards, center, axes = (
        of_parts.gather(1, nearest[..., None].expand(-1, -1, 3)) for of_parts in (right, above, towards, center, axes)
    )
    reached = x[:, None] * right + y[:, None] * above - center + depth.nan_to_num(neginf=0.0)[..., None] * towards
    normal = F.normalize(reached / axes, dim=-1)
    light = 0.2 + 0.7 * (normal @ to_lamp[..., None])[..., 0].clamp(min=0)
    wide = images.view(len(images), 1, size, size).repeat_interleave(_RAYS, -1).repeat_interleave(_RAYS, -2)
    seen = torch.where(depth > -math.inf, light, wide.flatten(1)).view_as(wide)
    return F.avg_pool2d(seen, _RAYS).flatten(1)


def _products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The scalar products of pairs of vectors (count, parts, 3), side by side."""
    return torch.stack([(one * other).sum(-1) for one, other in pairs], dim=-1)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
