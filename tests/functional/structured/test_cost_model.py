import pytest
import torch

from lightning_struct.functional.structured.cost_model import (
    made_matrix_is_faster,
    making_is_faster,
    prepared_matrix_is_faster,
)


@pytest.mark.parametrize(
    ("transforms", "rows", "largest"), [(4, 1, 512), (4, 64, 512), (34, 8, 1024), (10, 64, 1024), (34, 64, 4096)]
)
def test_the_matrix_is_prepared_up_to_larger_sizes_for_more_transforms_and_more_rows(transforms, rows, largest):
    sizes = (512, 1024, 2048, 4096, 8192)
    assert max(n for n in sizes if prepared_matrix_is_faster(n, n, transforms, rows)) == largest


@pytest.mark.parametrize(
    ("m", "n", "rank", "rows", "device", "is_made"),
    [
        (256, 256, 4, 16, "cpu", False),
        (256, 256, 4, 1024, "cpu", True),
        (10, 256, 1, 1, "cuda", True),
        (512, 512, 16, 4096, "cpu", True),
        (512, 512, 16, 4096, "cuda", False),  # each row would be a launch
        (1024, 1024, 1, 1024, "cpu", False),
    ],
)
def test_a_toeplitz_like_matrix_is_made_for_many_rows_or_a_short_side(m, n, rank, rows, device, is_made):
    assert made_matrix_is_faster(m, n, rank, rows, torch.device(device)) == is_made


def test_a_matrix_is_made_of_factors_for_more_rows_than_its_shorter_side_has():
    assert [making_is_faster(512, 10, rows, break_even=500) for rows in (10, 11)] == [False, True]
    assert not making_is_faster(512, 512, 10_000, break_even=500)
