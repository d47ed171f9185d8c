"""LDR matrices in place of a convolution of CIFAR-10: Table 3 of Thomas et al., by the recipe that users run.

    OMP_NUM_THREADS=1 python benchmarks/structured_convolution.py --data-dir DIRECTORY --epochs 5 --seeds 0
    OMP_NUM_THREADS=1 python benchmarks/structured_convolution.py --data-dir DIRECTORY --networks convolution ldr_sd

Each network is a config of ``recipes/structured_conv``, trained as that says but for ``--epochs`` epochs; the test
accuracy is that of the weights that were best in validation. An epoch takes ten seconds of one core with the pooled
convolution, fifteen with the plain one, and about three minutes with structured matrices. Runs are kept in
``--output``: a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path

from torch import nn

import harness
from harness import Run
from paper_tables import TABLE_3


class Clock(harness.TrainingClock):
    """CPU seconds of training; the validations are not counted."""

    def __init__(self) -> None:
        super().__init__(count_validation=False)


def hidden_parameters(network: nn.Module) -> int:
    """Number of parameters that the paper counts: of the hidden layers, without biases."""
    counted = (
        p.numel() for name, p in network.named_parameters() if "output" not in name and not name.endswith("bias")
    )
    return sum(counted)


def train(network: str, seed: int, options: argparse.Namespace) -> Run:
    """One run of the recipe."""
    arguments = [
        f"--config={network}",
        f"--seed_everything={seed}",
        f"--data.data_dir={Path(options.data_dir).resolve()}",
        f"--data.synthetic={str(options.synthetic).lower()}",
        f"--trainer.max_epochs={options.epochs}",
        "--trainer.accelerator=cpu",
    ]
    with harness.fitted_recipe("structured_conv", arguments, "structured_convolution.Clock") as (cli, clock):
        (tested,) = cli.trainer.test(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
        return {
            "network": network,
            "epochs": options.epochs,
            "seed": seed,
            "seconds": clock.seconds,
            "parameters": hidden_parameters(cli.model.network),
            "val_accuracy": cli.trainer.checkpoint_callback.best_model_score.item(),
            "test_accuracy": tested["test_accuracy"],
        }


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=TABLE_3, default=list(TABLE_3), help="configs of the recipe")
    parser.add_argument("--epochs", type=int, default=50)
    harness.add_data_options(parser)
    harness.add_run_options(parser, "structured_convolution", seeds=[0])
    options = parser.parse_args()
    output = options.output.resolve() / f"{options.epochs}_epochs{'_synthetic' if options.synthetic else ''}"
    wanted = product(options.seeds, options.networks)
    jobs = {harness.run_name(network, seed): partial(train, network, seed, options) for seed, network in wanted}
    runs = harness.run_all(output, jobs, options.report)
    harness.print_machines(runs)
    harness.print_header("network", "seed", "parameters", "test %", "the paper, 50 epochs", "seconds")
    for run in sorted(runs, key=lambda run: (list(TABLE_3).index(run["network"]), run["seed"])):
        title, paper = TABLE_3[run["network"]]
        accuracy = f"{100 * run['test_accuracy']:.2f}"
        harness.print_row(title, run["seed"], f"{run['parameters']:,}", accuracy, paper, f"{run['seconds']:.0f}")


if __name__ == "__main__":
    main()
