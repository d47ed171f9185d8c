"""One small layer of every structured class, for tests of what all of them have in common."""

from functools import partial

import torch
from torch import nn

from lightning_struct.nn import (
    Butterfly,
    CauchyLike,
    Circulant,
    Fastfood,
    HankelLike,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    Monarch,
    PrunedLinear,
    RandomizedHadamard,
    ToeplitzLike,
    VandermondeLike,
)

# Each is called as factory(in_features, out_features, ...).
FACTORIES = {
    "ldr_sd": partial(LDRSubdiagonal, rank=2),
    "ldr_sd_without_corners": partial(LDRSubdiagonal, rank=2, corner="zero"),
    "ldr_sd_padded": partial(LDRSubdiagonal, rank=2, pad="square"),
    "ldr_td": partial(LDRTridiagonal, rank=2),
    "ldr_td_without_corners": partial(LDRTridiagonal, rank=2, corner="zero"),
    "toeplitz_like": partial(ToeplitzLike, rank=2),
    "toeplitz_like_padded": partial(ToeplitzLike, rank=2, pad="square"),
    "hankel_like": partial(HankelLike, rank=2),
    "hankel_like_padded": partial(HankelLike, rank=2, pad="square"),
    "vandermonde_like": partial(VandermondeLike, rank=2),
    "cauchy_like": partial(CauchyLike, rank=2),
    "circulant": partial(Circulant),
    "fastfood": partial(Fastfood),
    "randomized_hadamard": partial(RandomizedHadamard, terms=2),
    "low_rank": partial(LowRank, rank=2),
    "low_rank_padded": partial(LowRank, rank=2, pad="square"),
    "monarch": partial(Monarch, blocks=3),
    "monarch_of_rank_2": partial(Monarch, blocks=2, rank=2),
    "butterfly": partial(Butterfly),
    "butterfly_of_rank_2": partial(Butterfly, rank=2, order="cosine"),
    "pruned": partial(PrunedLinear, parameters=30),
}
NAMES = list(FACTORIES)


def linear_of(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear
