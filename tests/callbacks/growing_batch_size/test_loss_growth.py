import pytest
import torch

from lightning_struct.callbacks.growing_batch_size.stationarity import AVERAGED, LossGrowth


def after_growth(before, after, *, sizes=(8, 16), summed=False, seed=0):
    """The verdict on the losses of batches, before and after a change of size, of samples with losses about a value."""
    noise = torch.Generator().manual_seed(seed)
    growth = LossGrowth()
    for value, size, count in ((before, sizes[0], 3 * AVERAGED), (after, sizes[1], AVERAGED)):
        for _ in range(count):
            losses = value + torch.randn(size, generator=noise)
            growth.update(losses.sum() if summed else losses.mean())
        if size == sizes[0]:
            growth.restart(*sizes)
    return growth


@pytest.mark.parametrize(("before", "after"), [(2.0, 2.0), (2.0, 1.5), (-2.0, -2.0), (-0.5, -1.0)])
def test_a_summed_loss_is_found_by_its_growth(before, after):
    for seed in range(3):
        growth = after_growth(before, after, summed=True, seed=seed)
        assert growth.size_before_loss_grew() == 8
        assert growth.size_before_loss_grew() is None  # it is looked at once


@pytest.mark.parametrize(
    ("before", "after"),
    [(2.0, 2.0), (2.0, 1.0), (-2.0, -2.0), (1.0, -2.0), (0.0, 1.0), (-0.02, -0.2), (-1.0, -1.5), (0.01, 0.05)],
)
def test_other_losses_are_not(before, after):
    assert all(after_growth(before, after, seed=seed).size_before_loss_grew() is None for seed in range(4))


def test_a_small_growth_tells_nothing():
    assert after_growth(2.0, 2.0, sizes=(8, 9), summed=True).size_before_loss_grew() is None


@pytest.mark.parametrize("counts", [(AVERAGED - 1, AVERAGED), (AVERAGED, AVERAGED - 1)], ids=["before", "after"])
def test_few_losses_tell_nothing(counts):
    growth = LossGrowth()
    for value, count in zip((2.0, 4.0), counts, strict=True):
        if value == 4.0:
            growth.restart(8, 16)
        for _ in range(count):
            growth.update(torch.tensor(value))
    assert growth.size_before_loss_grew() is None


@pytest.mark.parametrize(("after", "verdict"), [(2.0 * 1.25, None), (2.0 * 1.27, 8)])
def test_the_limit_of_growth_is_the_cube_root_of_that_of_the_batch(after, verdict):
    growth = LossGrowth()
    for _ in range(AVERAGED):
        growth.update(torch.tensor(2.0))
    growth.restart(8, 16)
    for _ in range(AVERAGED):
        growth.update(torch.tensor(after))
    assert growth.size_before_loss_grew() == verdict


@pytest.mark.parametrize("unit", [1e-3, 1.0])
@pytest.mark.parametrize("rise", [1.01, 1.03])
def test_losses_that_were_rising_before_are_those_of_a_training_that_diverges(unit, rise):
    growth = LossGrowth()
    for step in range(2 * AVERAGED):
        growth.update(torch.tensor(unit * rise**step))
        if step == AVERAGED - 1:
            growth.restart(8, 16)
    assert growth.size_before_loss_grew() is None


def test_losses_that_were_falling_before_need_not_go_on_falling():
    growth = LossGrowth()
    for step in range(AVERAGED):
        growth.update(torch.tensor(12.0 - 4.0 * step / AVERAGED))
    growth.restart(8, 16)
    for step in range(AVERAGED):
        growth.update(torch.tensor(11.5 + step % 2))
    assert growth.size_before_loss_grew() is None


def test_a_state_goes_on_to_the_same_verdict():
    growth, resumed = after_growth(2.0, 2.0, summed=True), LossGrowth()
    resumed.load_state_dict(growth.state_dict())
    assert resumed.state_dict() == growth.state_dict() and resumed.size_before_loss_grew() == 8
