"""Decisions between ways of computing the same product: which one is the fastest.

A decision rests on sizes, the rank, the rows of the input and the kind of the device, never on entries. Sizes of blocks
and chunks stand with their way.
"""

import torch

# Entries of the largest matrix that is formed without being asked for at each step of training: 16 MiB in float32. And
# of the largest that is prepared for weights that do not change: 64 MiB.
LARGEST_MATRIX = 2048 * 2048
LARGEST_PREPARED_MATRIX = 4096 * 4096
# Odd factors of the lengths of transforms, beside powers of two. Larger ones take up to twice as long.
_ODD_FACTORS = (1, 3, 5, 7, 9, 15, 25, 49, 125)
# Multiplications of a matrix product that take as long as one number of a transform or copy, and as all their calls.
_OF_COPIES, _OF_CALLS = 100, 20_000_000


def prepared_matrix_is_faster(m: int, n: int, transforms: int, rows: int, least: int = 900) -> bool:
    """Whether a prepared matrix (m, n) multiplies faster than prepared transforms.

    Transforms of a small batch cost their overhead, of a large one 200 times as much as products per number.

    Args:
        m, n: the sizes of the matrix.
        transforms: of each row.
        rows: of the input.
        least: the shorter side up to which the matrix is faster in any case.
    """
    return min(m, n) <= max(least, transforms * min(200, 10 + 5 * rows)) and m * n <= LARGEST_PREPARED_MATRIX


def made_matrix_is_faster(m: int, n: int, rank: int, rows: int, device: torch.device) -> bool:
    """Whether in training it is faster to make a Toeplitz-like matrix (m, n) each time than to transform all rows."""
    if m * n > LARGEST_MATRIX or (device.type != "cpu" and not krylov_product_is_faster(m, n, rank)):
        return False  # on other devices each row would be a launch
    columns = rank * min(m, n)  # of the Krylov matrices, which are copied
    made = m * n * (columns + rows) + _OF_COPIES * columns * (m + n)
    return made < _OF_CALLS + _OF_COPIES * (2 + 2 * rank) * rows * (m + n)


def krylov_product_is_faster(m: int, n: int, rank: int) -> bool:
    """Whether a Toeplitz-like matrix (m, n) is made faster by its Krylov matrices than one row after another."""
    return rank * min(m, n) < 1024


def making_is_faster(m: int, n: int, rows: int, break_even: int) -> bool:
    """Whether it is faster to make a matrix (m, n) each time, and multiply by it, than to multiply each row by factors.

    Args:
        m, n: the sizes of the matrix. Making it takes as long as multiplying as many rows as its shorter side has.
        rows: of the input.
        break_even: the shorter side at which products with the dense matrix take as long as those by factors.
    """
    shorter = min(m, n)
    return m * n <= LARGEST_MATRIX and rows * (break_even - shorter) > shorter * break_even


def factors_are_faster(k: int, m: int, n: int, rows: int) -> bool:
    """Whether multiplying by factors (n, k) and (k, m) in turn takes fewer multiplications than by their product."""
    return rows * k * (m + n) <= m * n * (k + rows)


def transform_length(least: int) -> int:
    """The smallest length of at least ``least`` (and 2) that transforms quickly: an even number with small factors."""
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD_FACTORS)
