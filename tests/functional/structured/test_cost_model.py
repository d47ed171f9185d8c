import torch

from lightning_struct.functional.structured.cost_model import (
    LARGEST_MATRIX,
    LARGEST_PREPARED_MATRIX,
    fastest_training_method,
    krylov_product_is_faster,
    made_matrix_is_faster,
    making_is_faster,
    method_for_any_operators,
    prepared_circulant_is_faster,
    prepared_hadamard_matrix_is_faster,
    prepared_matrix_is_faster,
    training_nanoseconds,
)


def largest_kept(rank, batch):
    return max(n for n in (512, 1024, 2048, 4096, 8192) if prepared_matrix_is_faster(n, n, rank, batch))


def test_the_matrix_is_kept_up_to_larger_sizes_for_higher_ranks_and_more_rows():
    assert [largest_kept(rank, batch) for rank, batch in ((1, 4), (16, 8), (16, 64))] == [512, 1024, 4096]


def test_the_matrix_of_rank_one_is_kept_below_a_thousand_units():
    assert [largest_kept(1, batch) for batch in (1, 4, 64)] == [512, 512, 512]


def test_no_matrix_is_kept_that_takes_too_much_memory():
    assert not prepared_matrix_is_faster(LARGEST_PREPARED_MATRIX + 1, 1, rank=16, batch=64)


def test_transforms_are_the_fastest_in_training_but_for_small_matrices_and_huge_batches():
    def fastest(m, n, rank, batch):
        return fastest_training_method(m, n, rank, batch, torch.device("cpu"), scaled="scaled")

    measured = [(n, n, rank, batch) for n in (256, 512, 1024, 2048) for rank in (1, 4, 16) for batch in (1, 64)]
    assert {fastest(*case) for case in measured} == {"scaled"}
    assert fastest(256, 256, 16, 1024) == "dense"
    assert fastest(32, 32, 1, 64) == fastest(10, 784, 1, 64) == "krylov"


def test_the_krylov_matrices_are_not_taken_where_powers_of_the_operators_may_overflow():
    for scaled in ("scaled_float64", None):
        assert fastest_training_method(10, 784, 1, 64, torch.device("cpu"), scaled) == "dense"


def test_without_transforms_the_tree_is_faster_at_small_ranks_only():
    def tree_is_faster(n, rank):
        return training_nanoseconds("tree", n, n, rank, 64) < training_nanoseconds("dense", n, n, rank, 64)

    assert tree_is_faster(1024, 1)
    assert not tree_is_faster(1024, 16)


def test_a_circulant_matrix_is_kept_where_transforms_take_longer():
    assert [prepared_circulant_is_faster(512, 512, batch) for batch in (1, 64)] == [True, False]
    assert not prepared_circulant_is_faster(768, 3072, 64)
    assert prepared_circulant_is_faster(128, 128, 64) and prepared_circulant_is_faster(509, 509, 64)  # a prime
    assert not prepared_circulant_is_faster(LARGEST_PREPARED_MATRIX + 1, 1, 1)


def test_a_matrix_of_hadamard_transforms_is_kept_longer_for_single_vectors():
    assert [prepared_hadamard_matrix_is_faster(1024, 1024, 1, batch) for batch in (1, 64)] == [True, False]
    assert not prepared_hadamard_matrix_is_faster(2048, 2048, 4, 1)
    assert not prepared_hadamard_matrix_is_faster(1, LARGEST_PREPARED_MATRIX + 1, 1, 1)


def test_a_toeplitz_like_matrix_is_made_for_many_rows_or_a_short_side():
    cpu = torch.device("cpu")
    assert [made_matrix_is_faster(256, 256, 4, batch, cpu) for batch in (16, 1024)] == [False, True]
    assert made_matrix_is_faster(256, 10, 1, 1, cpu)
    assert not made_matrix_is_faster(LARGEST_MATRIX + 1, 1, 1, 1024, cpu)


def test_no_toeplitz_like_matrix_is_made_row_after_row_on_other_devices():
    assert not krylov_product_is_faster(512, 512, 16)
    made = [made_matrix_is_faster(512, 512, 16, 4096, torch.device(device)) for device in ("cpu", "cuda")]
    assert made == [True, False]
    assert made_matrix_is_faster(256, 10, 1, 1, torch.device("cuda"))


def test_a_matrix_is_made_of_factors_for_more_rows_than_its_shorter_side_has():
    assert [making_is_faster(512, 10, batch, break_even=500) for batch in (10, 11)] == [False, True]
    assert not making_is_faster(512, 512, 10_000, break_even=500)
    assert not making_is_faster(LARGEST_MATRIX + 1, 1, 1024, break_even=500)


def test_no_method_with_a_launch_for_each_row_is_taken_on_other_devices():
    cuda = torch.device("cuda")
    assert fastest_training_method(20, 20, 1, 1, cuda, scaled="scaled") == "scaled"
    assert fastest_training_method(20, 20, 1, 1, cuda, scaled=None) == "tree"


def test_operators_of_any_entries_take_the_matrix_as_far_as_memory_goes():
    assert [method_for_any_operators(n, n) for n in (2048, 2049)] == ["dense", "tree"]
    assert [method_for_any_operators(n, n, prepared=True) for n in (4096, 4097)] == ["dense", "tree"]
