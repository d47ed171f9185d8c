import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import Ball, Box, Faces, PointDraws, Product, Segment, Sphere, Table, Union, Without


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_box_is_filled_evenly(generator):
    assert (Box([-1.0, 0.5], [1.0, 0.5]).sample(10, generator)[:, 1] == 0.5).all()
    points = Box([-1.0, 0.0], [1.0, 4.0]).sample(20_000, generator)
    assert points.dtype == torch.float64
    quarters = torch.histogramdd(points, bins=[2, 2], range=[-1.0, 1.0, 0.0, 4.0]).hist / len(points)
    torch.testing.assert_close(quarters, torch.full((2, 2), 0.25, dtype=torch.float64), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("dimension", "count", "points"), [(1, 7, 7), (2, 10_000, 10_000), (2, 11, 9), (5, 10_000, 6**5)]
)
def test_grid_has_equal_numbers_along_all_coordinates(dimension, count, points):
    grid = Box([0.0] * dimension, [1.0] * dimension).grid(count)
    assert grid.shape == (points, dimension) and grid.unique(dim=0).shape == grid.shape
    assert grid.amin() == 0 and grid.amax() == 1


@pytest.mark.parametrize(
    ("high", "count", "least"),
    [
        ([1.0], 2, [1, 1]),
        ([1.0], 7, [3, 3]),
        ([1.0, 1.0], 4, [1, 1, 1, 1]),
        ([1.0, 1.0], 6, [1, 1, 1, 1]),
        ([1.0, 3.0], 8, [3, 3, 1, 1]),
        ([1.0, 1000.0], 4, [1, 1, 1, 1]),  # the short faces' shares are less than a point
        ([1.0, 1000.0], 9, [3, 3, 1, 1]),
    ],
)
def test_every_face_has_its_share_of_the_points(high, count, least):
    for seed in range(20):
        points = Faces(Box([0.0] * len(high), high)).sample(count, torch.Generator().manual_seed(seed))
        on_faces = [(points[:, i] == end).sum().item() for i, size in enumerate(high) for end in (0.0, size)]
        assert sum(on_faces) == count and all(
            low <= found <= low + 1 for low, found in zip(least, on_faces, strict=True)
        )


def test_rounded_shares_are_right_on_average():
    faces = Faces(Box([0.0, 0.0], [1.0, 3.0]))
    points = torch.cat([faces.sample(5, torch.Generator().manual_seed(seed)) for seed in range(400)])
    shares = torch.stack([(points[:, i] == end).double().mean() for i, end in ((0, 0), (0, 1), (1, 0), (1, 3))])
    # a short face has one point for sure, the others share the rest
    torch.testing.assert_close(shares, torch.tensor([1.5, 1.5, 1, 1]).double() / 5, atol=0.03, rtol=0)
    assert 0.2 < (points[::5, 0] == 0).double().mean() < 0.4  # in random order
    chosen = Faces(Box([0.0, 0.0], [1.0, 1.0]), coordinates=[0]).sample(50, torch.Generator())
    assert set(chosen[:, 0].tolist()) == {0.0, 1.0} and chosen[:, 1].unique().numel() == 50
    few = Faces(Box([0.0] * 20, [1e-3] * 20)).sample(30, torch.Generator())  # fewer points than faces
    at_ends = torch.cat([few == 0, few == 1e-3], dim=1)
    assert at_ends.sum(dim=1).eq(1).all() and at_ends.sum(dim=0).max() == 1


def drawn(region, count=2000):
    return region.sample(count, torch.Generator().manual_seed(0))


def test_points_of_a_ball_fill_it_uniformly():
    distances = (drawn(Ball([1.0, 2.0, 3.0], 2.0)) - torch.tensor([1.0, 2.0, 3.0])).norm(dim=1)
    shares = [(distances <= 2.0 * share ** (1 / 3)).double().mean().item() for share in (0.25, 0.5, 0.75, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.04)
    boundary = drawn(Ball([1.0, 2.0], 0.5).boundary) - torch.tensor([1.0, 2.0])
    torch.testing.assert_close(boundary.norm(dim=1), torch.full((2000,), 0.5).double())
    assert boundary.mean(0).abs().max() < 0.03


def test_a_box_with_holes_has_no_points_in_them():
    holes = [Ball([x, 0.0], 0.2) for x in (-0.5, 0.5)]
    region = Without(Box([-1.0, -1.0], [1.0, 1.0]), *holes)
    points = drawn(region)
    assert len(points) == 2000 and region.contains(points).all()
    assert not Union(*holes).contains(points).any() and Union(*holes).contains(drawn(holes[0])).all()


def test_regions_become_one_in_shares_and_products():
    union = drawn(Union(Segment([0.0, 0.0], [1.0, 1.0]), Sphere([5.0, 5.0], 1.0), shares=[3.0, 1.0]))
    assert (union[:, 0] < 2).sum() == 1500 and len(union) == 2000
    segment = union[union[:, 0] < 2]
    torch.testing.assert_close(segment[:, 0], segment[:, 1])
    product = drawn(Product(Sphere([0.0, 0.0], 1.0), Box([3.0], [4.0])))
    assert product.shape == (2000, 3) and product[:, 2].min() >= 3
    torch.testing.assert_close(product[:, :2].norm(dim=1), torch.ones(2000).double())


def test_rows_of_a_table_are_neither_multiplied_nor_drawn_twice():
    table = torch.arange(12.0).reshape(6, 2)
    draws = PointDraws(
        {"interior": Box([0.0], [1.0]), "data": Table(table)}, {"interior": 10, "data": 50},
        draws_per_epoch=4, redraw_every_n_steps=1, residual_share=0.5, max_points=100,
        residuals=lambda points: {block: at[:, 0] for block, at in points.items()},
    )  # fmt: skip
    draws.batch_size = 40
    for number in range(3):
        points = draws.draw(number)
        assert sorted(points["data"][:, 0].tolist()) == table[:, 0].tolist() and len(points["interior"]) == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box([0.0], [1.0, 1.0]), "for each coordinate"),
        (lambda: Box([2.0], [1.0]), "for each coordinate"),
        (lambda: Box([0.0], [float("inf")]), "finite"),
        (lambda: Box([0.0] * 3, [1.0] * 3).grid(7), "8 corners"),
        *((lambda at=at: Faces(Box([0.0, 0.0], [1.0, 1.0]), at), "0 to 1") for at in ([], [2], [-1])),
        (lambda: Faces(Box([0.0, 0.0], [1.0, 0.0]), coordinates=[0]), r"coordinates \[0\] have no area"),
        (lambda: Ball([0.0], 0.0), "A Ball has a finite center and radius > 0"),
        (lambda: Sphere([], 1.0), "A Sphere has a finite center and radius > 0"),
        (lambda: Segment([0.0], [1.0, 2.0]), "two finite ends"),
        (lambda: Union(), "regions and a share > 0 for each"),
        (lambda: Table(torch.zeros(0, 2)), "rows .n, columns. of finite numbers"),
        (lambda: drawn(Without(Ball([0.0], 1.0), Ball([0.0], 2.0)), 3), "leave 0 of 3000 points"),
        (lambda: drawn(Without(Ball([0.0], 1.0), Sphere([0.0], 2.0)), 3), "Sphere has no contains"),
    ],
)
def test_regions_without_points_are_refused(make, message):
    with pytest.raises((MisconfigurationException, ValueError, NotImplementedError), match=message):
        make()
