"""Decisions between ways of computing the same product: which one is the fastest.

A decision rests on sizes, the rank, the rows of the input and the kind of the device, never on entries: whether a
method is exact enough for the entries of the operators is asked first, in
:mod:`~lightning_struct.functional.structured.subdiagonal`. Sizes of blocks and chunks stand with their way.

The estimates were measured on one CPU thread in float32. On other devices nothing was measured; there, ways with many
small steps one after the other are avoided, since each step is a launch.
"""

import torch

from lightning_struct.functional.checks import checked

# Entries of the largest matrix that is formed without being asked for at each step of training: 16 MiB in float32. And
# of the largest that is prepared for weights that do not change: 64 MiB.
LARGEST_MATRIX = 2048 * 2048
LARGEST_PREPARED_MATRIX = 4096 * 4096
# Odd factors of the lengths of transforms, beside powers of two. Measured: larger ones take up to twice as long.
_ODD_FACTORS = (1, 3, 5, 7, 9, 15, 25, 49, 125)
# Transforms of at least this length take longer to plan than to compute, on a CPU; and rows times rank up to which
# complex ones of half the length are faster. Measured.
_LONG_PLAN, _ROWS_OF_HALF_LENGTH = 512, 64


def training_nanoseconds(method: str, m: int, n: int, rank: int, batch: int) -> float:
    """Estimated time of forward and backward by a method of LDR-SD, with gradients to all parameters and to the input.

    Args:
        method: ``"scaled"``, ``"scaled_float64"``, ``"dense"``, ``"tree"`` or ``"krylov"``.
        m, n: the sizes of the matrix.
        rank: r.
        batch: rows of the input.
    """
    if method == "dense":  # rows one after the other, forwards and backwards
        return 1_000_000 + 24_000 * min(m, n) + 28 * m * n
    if method == "krylov":
        multiplied, copied = rank * m * n * min(m, n), rank * (m + n) * min(m, n)
        doublings = (min(m, n) - 1).bit_length()
        return 300_000 + 90_000 * doublings + 0.075 * multiplied + 9 * copied + 0.05 * m * n * batch
    if method == "tree":
        return 6_000_000 + (m + n) * (2_000 * rank + 70 * (1 + rank) * batch)
    transformed = (2 + 2 * rank) * batch * (m + n)
    return 1_200_000 + (10 if method == "scaled_float64" else 5) * transformed


def fastest_training_method(m: int, n: int, rank: int, batch: int, device: torch.device, scaled: str | None) -> str:
    """The fastest method of LDR-SD in training.

    Args:
        m, n, rank, batch: as for :func:`training_nanoseconds`.
        device: that of the operators.
        scaled: ``"scaled"`` or ``"scaled_float64"``, the faster one that is exact enough for the operators, or None.
    """
    if device.type != "cpu":
        return scaled or "tree"  # dense rows are a launch each, one after the other
    makes = m * n <= LARGEST_MATRIX
    exact = [*([scaled] if scaled else []), *(["dense"] if makes else []), "tree"]
    if makes and scaled == "scaled":  # else powers of the operators may overflow
        exact.append("krylov")
    return min(exact, key=lambda method: training_nanoseconds(method, m, n, rank, batch))


def method_for_any_operators(m: int, n: int, *, prepared: bool = False) -> str:
    """``"dense"`` or ``"tree"``: the method of LDR-SD that divides by nothing, chosen by the memory of the matrix.

    Args:
        m, n: the sizes of the matrix.
        prepared: the matrix is made once, for weights that do not change, and not at each step.
    """
    return "dense" if m * n <= (LARGEST_PREPARED_MATRIX if prepared else LARGEST_MATRIX) else "tree"


def prepared_matrix_is_faster(m: int, n: int, rank: int, batch: int) -> bool:
    """Whether a matrix (m, n) that is prepared is multiplied faster as it is than by 2 + 2r prepared transforms.

    Transforms of a small batch cost their overhead, of a large one 200 times as much as products per number. Measured
    on one CPU thread at ranks 1 to 16, n = 512 to 3,072, with 1 to 64 rows.
    """
    at_least = max(900, (2 + 2 * rank) * min(200, 10 + 5 * batch))
    return min(m, n) <= at_least and m * n <= LARGEST_PREPARED_MATRIX


def prepared_circulant_is_faster(m: int, n: int, batch: int) -> bool:
    """Whether a circulant matrix (m, n) that is prepared is multiplied faster as it is than by two transforms.

    Measured on one CPU thread, n = 96 to 4,099: transforms of the longer side win from a shorter side of 250 on. Of few
    rows they cost their overhead, and of lengths with large factors up to twenty times as much.
    """
    longer = max(m, n)
    at_least = 250 if batch >= 16 and transform_length(longer) == longer else 900
    return min(m, n) <= at_least and m * n <= LARGEST_PREPARED_MATRIX


def prepared_hadamard_matrix_is_faster(m: int, n: int, terms: int, batch: int) -> bool:
    """Whether a prepared matrix (m, n) is multiplied faster as it is than by two Hadamard transforms for each term.

    Measured on one CPU thread: with single vectors the transforms take five times as long at 1,024, and less at 2,048.
    """
    at_least = 1500 if batch < 4 else max(900, 2 * terms * min(200, 40 + 12 * batch))
    return min(m, n) <= at_least and m * n <= LARGEST_PREPARED_MATRIX


def made_matrix_is_faster(m: int, n: int, rank: int, batch: int, device: torch.device) -> bool:
    """Whether in training it is faster to make a Toeplitz-like matrix (m, n) each time than to transform all rows."""
    by_krylov_matrices = krylov_product_is_faster(m, n, rank)
    if m * n > LARGEST_MATRIX or (device.type != "cpu" and not by_krylov_matrices):  # each row would be a launch
        return False
    dense = training_nanoseconds("dense", m, n, rank, batch)
    making = min(_krylov_product_nanoseconds(m, n, rank), dense)
    return making + 0.05 * m * n * batch < training_nanoseconds("scaled", m, n, rank, batch)


def krylov_product_is_faster(m: int, n: int, rank: int) -> bool:
    """Whether a Toeplitz-like matrix (m, n) is made faster by its Krylov matrices than one row after another."""
    return _krylov_product_nanoseconds(m, n, rank) < training_nanoseconds("dense", m, n, rank, 0)


def _krylov_product_nanoseconds(m: int, n: int, rank: int) -> float:
    """Estimated time of making a Toeplitz-like matrix of two Krylov matrices, and of its derivatives."""
    multiplied, copied = rank * m * n * min(m, n), rank * (m + n) * min(m, n)
    return 220_000 + 0.05 * multiplied + 5 * copied


def making_is_faster(m: int, n: int, batch: int, break_even: int) -> bool:
    """Whether it is faster to make a matrix (m, n) each time, and multiply by it, than to multiply each row by factors.

    Measured on one CPU thread, forward and backward: with 10 outputs, 512 or 4,096 inputs and 2,048 rows making takes
    .05 to .25 of the time (``benchmarks/structured_layers.py --classes --outputs 10``).

    Args:
        m, n: the sizes of the matrix. Making it takes as long as multiplying as many rows as its shorter side has.
        batch: rows of the input.
        break_even: the shorter side at which products with the dense matrix take as long as those by factors.
    """
    shorter = min(m, n)
    return m * n <= LARGEST_MATRIX and batch * (break_even - shorter) > shorter * break_even


def half_length_pays(m: int, n: int, device: torch.device) -> bool:
    """Whether products of few rows by complex transforms of half the length are faster than by real ones.

    That takes a square matrix of a size that transforms quickly, and a device that plans each transform anew. Measured
    on one CPU thread, n = 512 to 8,192: a third to a half of the time with single vectors, two thirds with 16.
    """
    return m == n == transform_length(2 * m) // 2 and 2 * m >= _LONG_PLAN and device.type == "cpu"


def are_few_rows(rows: int, rank: int) -> bool:
    """Whether so many rows are few enough for transforms of half the length."""
    return rows * rank <= _ROWS_OF_HALF_LENGTH


def factors_are_faster(k: int, m: int, n: int, batch: int) -> bool:
    """Whether multiplying by factors (n, k) and (k, m) in turn takes fewer multiplications than by their product."""
    return batch * k * (m + n) <= m * n * (k + batch)


def prepared_low_rank_matrix_is_faster(m: int, n: int, batch: int) -> bool:
    """Whether a matrix (m, n) of low rank that is prepared is multiplied faster as it is than by its two thin factors.

    Measured on one CPU thread at ranks 1 to 32: the two small products cost their overhead, up to 320 units with single
    vectors, and up to 64 with 256.
    """
    return m * n * batch**0.6 <= 110_000


def monarch_factors_are_faster(m: int, n: int, parameters: int, batch: int) -> bool:
    """Whether a Monarch matrix is multiplied faster by its two factors than as it is prepared.

    Small ones are multiplied faster as they are: the factors are many small products. Measured on one CPU thread, n =
    256 to 4,096 with 1 to 256 rows.

    Args:
        m, n: the sizes of the matrix.
        parameters: the entries of both factors.
        batch: rows of the input.
    """
    at_least = 512 if batch >= 8 else 700
    return m * n > LARGEST_PREPARED_MATRIX or (min(m, n) >= at_least and 2 * parameters <= m * n)


@checked
def choose_tridiagonal_method(device: torch.device) -> str:
    """The method of LDR-TD for a device: ``"recurrence"`` on a CPU, elsewhere ``"giant_steps"``.

    On a CPU both take about as long at small ranks, giant steps longer at large ones, the recurrence keeps more digits.

    Args:
        device: of the operators.

    Example:
        >>> choose_tridiagonal_method(torch.device("cpu"))
        'recurrence'
    """
    return "recurrence" if device.type == "cpu" else "giant_steps"


def transform_length(least: int) -> int:
    """The smallest length of at least ``least`` (and 2) that transforms quickly: an even number with small factors."""
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD_FACTORS)
