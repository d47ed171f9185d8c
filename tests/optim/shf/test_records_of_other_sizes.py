"""Steps on residuals whose blocks change their numbers of points, against the same steps without records."""

import pytest
import torch
from torch import Tensor, nn

from lightning_struct import SHF
from lightning_struct.functional import partial_derivatives
from lightning_struct.models import TanhNetwork


class Derivatives(nn.Module):
    """A second derivative beside a condition: ``coupled`` conditions read all points of the interior."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.network, self.coupled = TanhNetwork(2, [4], periodic=(0,)), coupled

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        second = partial_derivatives(self.network, points["interior"], twice=[0]).second[0]
        first = self.network(points["initial"]) - points["initial"][:, 0].cos()
        mean = self.network(points["interior"]).mean() if self.coupled else 0.0
        return {"interior": second, "initial": first + mean}


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
def test_records_serve_the_numbers_of_points_that_they_were_made_for(coupled: bool) -> None:
    torch.manual_seed(0)
    module = Derivatives(coupled).double()
    plain = Derivatives(coupled).double()
    plain.load_state_dict(module.state_dict())
    optimizer = SHF(module, "least_squares")
    generator = torch.Generator().manual_seed(0)
    for count in (10, 10, 20, 20, 10):
        points = {
            name: torch.rand(size, 2, generator=generator, dtype=torch.float64)
            for name, size in (("interior", count), ("initial", count // 5))
        }
        plain.load_state_dict(module.state_dict())
        blocks = plain(points)
        report = optimizer.step(inputs=points)
        expected = sum(0.5 * block.square().mean().item() for block in blocks.values())
        assert report.loss_before == pytest.approx(expected)
        assert report.loss_after < report.loss_before
