"""One small layer of every structured class, for tests of what all of them have in common."""

import re
from functools import partial

import torch
from torch import nn

from lightning_struct.nn import STRUCTURED_CLASSES
from lightning_struct.nn.classic import GeneratorLinear

_NAMES = {"LDRSubdiagonal": "ldr_sd", "LDRTridiagonal": "ldr_td", "PrunedLinear": "pruned"}
_ARGUMENTS = {"Monarch": {"blocks": 3}, "RandomizedHadamard": {"terms": 2}, "PrunedLinear": {"parameters": 30}}
_VARIANTS = {
    "ldr_sd_without_corners": ("LDRSubdiagonal", {"corner": "zero"}),
    "ldr_sd_padded": ("LDRSubdiagonal", {"pad": "square"}),
    "ldr_td_without_corners": ("LDRTridiagonal", {"corner": "zero"}),
    "toeplitz_like_padded": ("ToeplitzLike", {"pad": "square"}),
    "hankel_like_padded": ("HankelLike", {"pad": "square"}),
    "low_rank_padded": ("LowRank", {"pad": "square"}),
    "monarch_of_rank_2": ("Monarch", {"blocks": 2, "rank": 2}),
    "butterfly_of_rank_2": ("Butterfly", {"rank": 2, "order": "cosine"}),
}


def _factory(name, **arguments):
    layer_class = STRUCTURED_CLASSES[name]
    of_class = {"rank": 2} if issubclass(layer_class, GeneratorLinear) else _ARGUMENTS.get(name, {})
    return partial(layer_class, **of_class | arguments)


# Each is called as factory(in_features, out_features, ...).
FACTORIES = {_NAMES.get(n, re.sub("(?<=[a-z])([A-Z])", r"_\1", n).lower()): _factory(n) for n in STRUCTURED_CLASSES}
FACTORIES |= {variant: _factory(name, **arguments) for variant, (name, arguments) in _VARIANTS.items()}
NAMES = list(FACTORIES)


def linear_of(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear
