"""Compression: accuracy of a trained perceptron at equal numbers of parameters, before and after training on.

    python benchmarks/compress.py --data-dir data

The perceptron of adapters.py learns MNIST at 16 x 16 pixels. It is then made smaller by ``compress``, which measures on 512
images, by low rank with one rank for all hidden layers, and by magnitude pruning of them (the places of the weights that are
left are not counted); rounding of all weights to 8 bits, with a scale for each row, is beside them at a quarter of the size.
Training on: 200 steps of Adam with 32 images each, rate 0.001.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from adapters import accuracy, digits, fit, small, trained_on_mnist
from harness import RESULTS, machine_line, make_directory, make_parser, print_header, print_row, spread
from lightning_struct.nn import LowRank, PrunedLinear, compress, replace_linear

BUDGETS = (0.5, 0.25, 0.125)


def count(network: nn.Module) -> int:
    """Trained numbers."""
    return sum(parameter.numel() for parameter in network.parameters())


def with_one_rank(network: nn.Module, allowed: int) -> nn.Module:
    """All hidden layers of the largest rank that is allowed."""
    others = count(network) - 4 * 256**2
    return replace_linear(
        network, partial(LowRank.from_linear, rank=(allowed - others) // (4 * 512), refine=0), include="hidden"
    )


def pruned(network: nn.Module, allowed: int) -> nn.Module:
    """All hidden layers with their largest weights."""
    kept = (allowed - (count(network) - 4 * 256**2)) // 4
    return replace_linear(network, partial(PrunedLinear.from_linear, parameters=kept, refine=0), include="hidden")


@torch.no_grad()
def in_8_bits(network: nn.Module) -> nn.Module:
    """Weights rounded to -127, ..., 127 times a scale of their row."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return network


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the files of MNIST are")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the images that it is trained on with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = trained_on_mnist("perceptron", arguments.data_dir, make_directory(RESULTS / "adapters"))
    (images, labels), (test_images, test_labels) = (digits(arguments.data_dir, train) for train in (True, False))
    sample, test = (small(images), labels), (small(test_images), test_labels)
    parameters = count(network)
    print(f"{parameters:,} parameters, {accuracy(network, test):.2f} %")
    print_header("way", "parameters", "accuracy", "after training on")
    for budget in BUDGETS:
        ways = {
            "compress": lambda model, b=budget: compress(model, sample[0][:512].split(256), budget=b),
            "low rank": lambda model, b=budget: with_one_rank(model, int(b * parameters)),
            "pruning": lambda model, b=budget: pruned(model, int(b * parameters)),
        }
        for way, make in ways.items():
            smaller = make(copy.deepcopy(network))
            after = []
            for seed in range(arguments.seeds):
                trained = copy.deepcopy(smaller)
                fit(trained, [{"params": list(trained.parameters()), "lr": 1e-3}], sample, 200, seed)
                after.append(accuracy(trained, test))
            print_row(way, f"{count(smaller):,}", f"{accuracy(smaller, test):.2f}", spread(after))
    print_row("8 bits", f"{parameters:,} bytes", f"{accuracy(in_8_bits(copy.deepcopy(network)), test):.2f}", "")
    print(f"\n{machine_line()}")


if __name__ == "__main__":
    main()
