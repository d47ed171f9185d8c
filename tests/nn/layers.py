"""One small layer of every structured class, for tests of what all of them have in common."""

from functools import partial

from lightning_struct.nn import LowRank, PrunedLinear

# Each is called as factory(in_features, out_features, ...).
FACTORIES = {
    "low_rank": partial(LowRank, rank=2),
    "low_rank_padded": partial(LowRank, rank=2, pad="square"),
    "pruned": partial(PrunedLinear, parameters=30),
}
NAMES = list(FACTORIES)
