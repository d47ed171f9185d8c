"""Figures of the papers that stand beside ours: of Thomas et al., but where another paper is named.

A way is a class of matrices with its rank, ``None`` for a class that has no rank.
"""

from __future__ import annotations

from collections.abc import Sequence

Way = tuple[str, int | None]
DATA = ("background_rotation", "noise", "cifar", "norb", "rectangles")

# Test accuracies in per cent, in the order of DATA.
TABLES_1_6_13: dict[Way, tuple[float, ...]] = {
    ("unstructured", None): (44.08, 65.15, 46.03, 59.83, 91.94),
    ("ldr_td", 1): (45.81, 78.45, 45.33, 62.75, 98.53),
    ("toeplitz_like", 4): (42.67, 75.75, 41.78, 59.38, 99.29),
    ("hankel_like", 4): (42.23, 73.65, 41.40, 60.09, 97.77),
    ("vandermonde_like", 4): (37.14, 59.80, 33.93, 48.98, 94.11),
    ("low_rank", 4): (35.67, 52.25, 32.28, 43.66, 92.80),
    ("ldr_sd", 1): (44.74, 78.80, 43.29, 63.78, 98.39),
    ("toeplitz_like", 2): (42.07, 74.25, 40.68, 57.27),
    ("hankel_like", 2): (41.01, 71.20, 40.46, 57.95),
    ("vandermonde_like", 2): (33.56, 50.85, 28.99, 43.21),
    ("low_rank", 2): (32.64, 38.85, 24.93, 37.03),
    ("fastfood", None): (38.13, 63.55, 39.64, 59.02, 92.20),
    ("circulant", None): (34.46, 65.35, 34.28, 46.45, 95.58),
    ("toeplitz_like", 1): (41.12, 73.95),  # Table 10
    ("low_rank", 1): (25.06, 26.40),
}
TABLE_7: dict[Way, tuple[float, ...]] = {
    ("unstructured", None): (67.94, 90.30, 68.09, 75.16),
    ("ldr_td", 1): (68.79, 92.55, 66.63, 74.23),
    ("toeplitz_like", 4): (63.23, 91.60, 67.10, 72.25),
    ("hankel_like", 4): (64.21, 90.80, 68.10, 71.23),
    ("vandermonde_like", 4): (61.76, 90.40, 63.63, 72.11),
    ("low_rank", 4): (60.35, 87.30, 60.90, 71.47),
    ("ldr_sd", 1): (67.40, 92.20, 65.48, 73.63),
    ("toeplitz_like", 2): (63.63, 91.45, 67.15, 71.64),
    ("hankel_like", 2): (64.08, 90.65, 67.49, 71.21),
    ("vandermonde_like", 2): (51.38, 86.50, 58.00, 68.08),
    ("low_rank", 2): (41.91, 71.15, 48.48, 65.34),
    ("toeplitz_like", 1): (63.00, 90.95),  # Table 11
    ("low_rank", 1): (29.63, 44.55),
}
# Networks of Table 3 by their config of recipes/structured_conv, and their test accuracies on CIFAR-10 in per cent.
TABLE_3 = {
    "convolution": ("3 convolutional channels", 54.59),
    "convolution_pool": ("3 convolutional channels, max pooling", 55.14),
    "convolution_pool_4": ("4 convolutional channels, max pooling", 60.05),
    "toeplitz_like_channels": ("Toeplitz-like channels, r = 16", 57.29),
    "ldr_sd_channels": ("LDR-SD channels, r = 16", 59.36),
    "toeplitz_like": ("Toeplitz-like matrix, r = 48", 55.29),
    "ldr_sd": ("LDR-SD matrix, r = 48", 59.00),
}
# Test accuracies of background_rotation and noise in per cent, at the budgets of LDR-SD of these ranks.
BUDGET_RANKS = (1, 2, 4, 8, 12, 16)
TABLE_8 = {
    "ldr_sd": ((44.74, 44.46, 47.72, 48.76, 48.90, 49.51), (78.80, 77.95, 78.32, 78.63, 78.33, 78.08)),
    "pruned": ((40.41, 41.18, 42.45, 43.52, 43.19, 43.58), (67.75, 69.35, 68.25, 67.25, 67.30, 66.95)),
    "reduced": ((37.18, 37.60, 37.98, 39.77, 40.56, 40.70), (62.85, 62.55, 63.40, 64.45, 63.85, 66.10)),
}
TABLE_9 = {
    "ldr_sd": ((67.40, 67.53, 67.96, 67.21, 68.54, 67.00), (92.20, 92.75, 91.30, 91.95, 92.10, 93.20)),
    "pruned": ((64.25, 64.05, 65.50, 64.12, 65.65, 65.59), (90.80, 91.65, 90.60, 91.05, 90.00, 90.55)),
    "reduced": ((64.03, 64.67, 66.37, 64.70, 65.99, 66.47), (90.95, 91.00, 91.25, 90.65, 90.85, 90.40)),
}
# Test accuracies in per cent with 25, 50, 75 and 100 % of the samples of background_rotation and noise; rank one.
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
TABLE_10: dict[Way, tuple[Sequence[float], Sequence[float]]] = {
    ("unstructured", None): ((34.46, 38.80, 43.35, 44.08), (59.30, 61.85, 65.35, 65.15)),
    ("ldr_td", 1): ((34.01, 39.59, 44.35, 45.81), (65.45, 74.60, 77.45, 78.45)),
    ("ldr_sd", 1): ((35.64, 39.78, 42.72, 44.74), (67.90, 71.15, 76.95, 78.80)),
    ("toeplitz_like", 1): ((33.71, 36.44, 39.32, 41.12), (56.15, 67.75, 72.30, 73.95)),
    ("low_rank", 1): ((21.44, 23.46, 23.48, 25.06), (24.25, 26.20, 26.85, 26.40)),
}
TABLE_11: dict[Way, tuple[Sequence[float], Sequence[float]]] = {
    ("unstructured", None): ((54.12, 62.53, 67.52, 67.94), (81.85, 88.25, 89.75, 90.30)),
    ("ldr_td", 1): ((53.66, 62.15, 67.25, 68.79), (86.45, 91.35, 93.00, 92.55)),
    ("ldr_sd", 1): ((50.72, 61.92, 65.93, 67.40), (86.95, 90.90, 91.55, 92.20)),
    ("toeplitz_like", 1): ((49.10, 57.20, 61.53, 63.00), (81.65, 88.15, 90.90, 90.95)),
    ("low_rank", 1): ((26.98, 27.97, 28.97, 29.63), (33.15, 38.40, 42.55, 44.55)),
}
# Training less test accuracy in per cent, in the order of DATA.
TABLE_12: dict[Way, tuple[float, ...]] = {
    ("unstructured", None): (55.78, 21.63, 34.32, 40.03),
    ("ldr_td", 1): (13.52, 11.36, 7.10, 9.51),
    ("ldr_sd", 1): (12.87, 12.65, 6.29, 8.68),
    ("toeplitz_like", 1): (7.98, 15.80, 5.59, 7.87),
    ("low_rank", 1): (8.40, 0.31, 0.09, 2.59),
}
# Test perplexities at the budgets of LDR-SD of these ranks.
LANGUAGE_RANKS = (1, 2, 4, 8, 16, 24)
TABLE_2 = {
    "ldr_sd": (166.97, 154.51, 141.91, 143.60, 132.43, 129.46),
    "toeplitz_like": (186.91, 177.60, 178.07, 186.52, 162.58, 155.73),
    "low_rank": (205.72, 179.46, 172.38, 144.41, 135.65, 133.37),
}
UNSTRUCTURED_PERPLEXITY = 117.74
# Table 2 of Emirahmetoglu and Stewart: training and test errors ½‖x̂ - x‖² of Martens' method and of SHF.
SHF_TABLE_2 = {
    "curves": {"hf": (0.051, 0.098), "shf": (0.160, 0.214)},
    "mnist": {"hf": (0.910, 1.436), "shf": (0.959, 1.435)},
    "usps": {"hf": (1.007, 1.961), "shf": (0.999, 1.947)},
}
# Table 14: how many times faster than a dense layer LDR-SD of rank 1 multiplies one vector, by its size.
TABLE_14 = {4096: 3.34, 8192: 9.71, 16384: 21.2, 32768: 46.1}


def paper_accuracy(way: Way, data: str, network: str) -> float | None:
    """The paper's test accuracy in per cent, if it names one."""
    by_budget, by_class = (TABLE_8, TABLES_1_6_13) if network == "shl" else (TABLE_9, TABLE_7)
    name, rank = way
    column = DATA.index(data)
    if name in by_budget and rank in BUDGET_RANKS and column < 2:
        return by_budget[name][column][BUDGET_RANKS.index(rank)]
    row = by_class.get(way, ())
    return row[column] if column < len(row) else None


def paper_perplexity(way: Way) -> str:
    """The paper's test perplexity, empty if it names none."""
    name, rank = way
    if rank is None:
        return f"{UNSTRUCTURED_PERPLEXITY}"
    of_ldr_sd = rank if name == "ldr_sd" else rank - 1
    return f"{TABLE_2[name][LANGUAGE_RANKS.index(of_ldr_sd)]}" if of_ldr_sd in LANGUAGE_RANKS else ""
