"""Burgers' equation by a physics-informed network (Raissi, Perdikaris & Karniadakis).

Run it by ``python -m lightning_struct.recipes.burgers_pinn fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import PointsDataModule
from lightning_struct.models import PhysicsInformedNetwork
from lightning_struct.recipes.cli import PINN_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe(
        "burgers_pinn",
        PhysicsInformedNetwork,
        PointsDataModule,
        PINN_RESULTS,
        args,
        links={"data.equation": "model.init_args.equation"},
    )


if __name__ == "__main__":
    run_command(main)
