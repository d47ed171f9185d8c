"""Which way of multiplying by a structured matrix is the fastest: estimates, as measured on one CPU thread in float32."""

from __future__ import annotations

# Entries of the largest matrix that is formed without being asked for at each step of training: 16 MiB in float32. And of the
# largest that is kept while weights do not change: 64 MiB.
LARGEST_MATRIX = 2048 * 2048
LARGEST_KEPT_MATRIX = 4096 * 4096


def kept_matrix_is_faster(m: int, n: int, rank: int, batch: int) -> bool:
    """Whether a matrix (m, n) that is kept is multiplied faster as it is than by 2 + 2r kept transforms.

    Transforms of a small batch cost their overhead, of a large one 200 times as much as products per number.
    """
    at_least = max(900, (2 + 2 * rank) * min(200, 40 + 12 * batch))
    return min(m, n) <= at_least and m * n <= LARGEST_KEPT_MATRIX


def made_matrix_is_faster(m: int, n: int, rank: int, batch: int) -> bool:
    """Whether in training it is faster to make a Toeplitz-like matrix (m, n) each time than to transform all rows."""
    if m * n > LARGEST_MATRIX:
        return False
    return training_nanoseconds("dense", m, n, rank, batch) < training_nanoseconds("scaled", m, n, rank, batch)


def training_nanoseconds(method: str, m: int, n: int, rank: int, batch: int) -> float:
    """About how long forward and backward take by a method of LDR-SD, to all parameters and to the input.

    Args:
        method: ``"scaled"``, ``"scaled_float64"``, ``"dense"`` or ``"tree"``.
        m, n: of the matrix.
        rank: r.
        batch: rows of the input.
    """
    if method == "dense":  # rows one after the other, forwards and backwards
        return 28_000 * min(m, n) + 32 * m * n
    if method == "tree":
        return 6_000_000 + (m + n) * (2_000 * rank + 70 * (1 + rank) * batch)
    transformed = (2 + 2 * rank) * batch * (m + n)
    return 1_200_000 + (10 if method == "scaled_float64" else 5) * transformed
