"""Poisson's equation in two dimensions by a physics-informed network (Dangel, Müller & Zeinhofer).

Run it by ``python -m lightning_struct.recipes.poisson_pinn fit``.

Other dimensions and networks are options::

    --config five_dimensions                      Σ cos πx_i in five dimensions
    --model.hidden_sizes=[64,64,48,48]            a deeper network
    --data.redraw_every_n_steps=null              points that stay
"""

from collections.abc import Sequence

from lightning_struct.data import PointsDataModule
from lightning_struct.models import PhysicsInformedNetwork
from lightning_struct.recipes.cli import PINN_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe(
        "poisson_pinn",
        PhysicsInformedNetwork,
        PointsDataModule,
        PINN_RESULTS,
        args,
        links={"data.equation": "model.init_args.equation"},
    )


if __name__ == "__main__":
    run_command(main)
