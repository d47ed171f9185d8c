"""Cost of one solver iteration, of SHF and of others, in gradient evaluations of the same model on the same batch.

    OMP_NUM_THREADS=1 python benchmarks/products.py [--network NETWORK] [--samples 2000] [--repeats 7]

The model is the MNIST autoencoder (784-1000-500-250-30 and back) on random images; or, with ``--network``, a layer of
64 units on sequences of 28 steps of 28 numbers (``lstm``, ``gru``), with ten outputs by a linear layer, and without
preconditioner. Numbers are float32. Each way
runs in a process of its own, in which solver iterations and gradient evaluations alternate, so that a machine whose
speed drifts does not change the ratio. An iteration is everything that a solver does per step, taken as the difference
of a solve of 12 and one of 2: for ours one product with the Jacobian, one with its transpose and LSMR's vector work,
preconditioner and damping included; for the rivals one product with the Gauss-Newton matrix and the vector work of
plain CG. Peak memory is the highest resident set of the process less what it held with model and data loaded. It takes
about ten minutes of one core. Rivals that are not installed are said to be so:

    curvlinops           pip install curvlinops-for-pytorch
    PyTorchHessianFree   github.com/ltatzel/PyTorchHessianFree, on PYTHONPATH, with backpack-for-pytorch
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor, nn

import harness
from defaults import LastState
from harness import Run
from lightning_struct.functional import SquaredError
from lightning_struct.functional.jacobian import gauss_newton
from lightning_struct.functional.solvers.least_squares import lsmr
from lightning_struct.optim import SHF
from lightning_struct.optim.shf.outputs.batch_model import BatchModel
from lightning_struct.optim.shf.outputs.preconditioner import diagonal_scaling

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
OURS = ("layer_rules", "double_backward")
WITHOUT_RULES = "double_backward without rules"
VARIANTS = (*OURS, WITHOUT_RULES, "PyTorchHessianFree", "curvlinops")
FEW, MANY = 2, 12


RECURRENT: dict[str, type[nn.LSTM | nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


def model_and_data(network: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, its inputs and their targets."""
    torch.manual_seed(0)
    if network in RECURRENT:
        return LastState(RECURRENT[network], 28, 64, 10), torch.rand(samples, 28, 28), torch.rand(samples, 10)
    layers = [layer for a, b in pairwise(SIZES) for layer in (nn.Linear(a, b), nn.Sigmoid())]
    images = torch.rand(samples, SIZES[0])
    return nn.Sequential(*layers), images, images


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = 0.5 * (model(x) - y).square().sum() / len(x)
    torch.autograd.grad(loss, list(model.parameters()))


def our_iterations(variant: str, model: nn.Module, x: Tensor, y: Tensor, scaled: bool) -> Callable[[int], None]:
    """LSMR as SHF calls it: warm start, damping, and where it is ``scaled`` a diagonal preconditioner."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rules = nullcontext() if variant in OURS else patch.object(gauss_newton, "layer_derivatives", nullcontext)
    with rules:
        backend = variant.partition(" ")[0]
        settings = SHF.paper(model, "mse", backend=backend).settings
        batch = BatchModel(model, SquaredError(), weights, x, y, settings, single_samples=scaled)
    scaling = diagonal_scaling("diagonal", batch, seed=0, damping=1.0) if scaled else None
    start = torch.zeros_like(batch.gradient)

    def run(iterations: int) -> None:
        result = lsmr(
            batch.forward,
            batch.backward,
            batch.right_hand_side,
            damp=0.01 * len(x) ** 0.5,
            x0=start,
            preconditioner=scaling,
            maxiter=iterations,
            atol=0.0,
            btol=0.0,
        )
        assert result.iterations == iterations

    return run


def curvlinops_iterations(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[int], None]:
    from curvlinops import GGNLinearOperator  # type: ignore[import-not-found]

    parameters = list(model.parameters())
    operator = GGNLinearOperator(
        model, nn.MSELoss(reduction="sum"), parameters, [(x, y)], check_deterministic=False, num_data=len(x)
    )
    return conjugate_gradient_steps(lambda v: operator @ v, sum(p.numel() for p in parameters))


def pytorch_hessian_free_iterations(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[int], None]:
    from hessianfree.optimizer import HessianFree  # type: ignore[import-not-found]

    parameters = list(model.parameters())
    outputs = model(x)
    loss = nn.functional.mse_loss(outputs, y, reduction="sum")
    product = HessianFree._Gv
    return conjugate_gradient_steps(lambda v: product(loss, outputs, parameters, v), sum(p.numel() for p in parameters))


def conjugate_gradient_steps(product: Callable[[Tensor], Tensor], size: int) -> Callable[[int], None]:
    """The vector work of plain CG around the rival's product; the same for both."""

    def run(iterations: int) -> None:
        x, r = torch.zeros(size), torch.randn(size)
        p, rr = r.clone(), r @ r
        for _ in range(iterations):
            q = product(p).detach() + p
            alpha = rr / (p @ q)
            x.add_(alpha * p)
            r.sub_(alpha * q)
            rr, previous = r @ r, rr
            p = r + (rr / previous) * p

    return run


def measure(variant: str, network: str, samples: int, repeats: int) -> Run:
    model, x, y = model_and_data(network, samples)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    if variant == "curvlinops":
        run = curvlinops_iterations(model, x, y)
    elif variant == "PyTorchHessianFree":
        run = pytorch_hessian_free_iterations(model, x, y)
    else:
        run = our_iterations(variant, model, x, y, scaled=network not in RECURRENT)
    set_up = time.perf_counter() - begin
    run(FEW)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradient(model, x, y)
    ratios, gradients = [], []
    for _ in range(repeats):
        times = [time.perf_counter()]
        run(FEW)
        times.append(time.perf_counter())
        run(MANY)
        times.append(time.perf_counter())
        for _ in range(3):
            gradient(model, x, y)
        times.append(time.perf_counter())
        few, many, three = (b - a for a, b in pairwise(times))
        gradients.append(three / 3)
        ratios.append((many - few) / (MANY - FEW) / gradients[-1])
    return {
        "variant": variant,
        "ratios": ratios,
        "gradient_ms": 1e3 * statistics.median(gradients),
        "set_up": set_up / statistics.median(gradients),
        "peak_mib": (peak - base) / 1024,
    }


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--network", choices=("autoencoder", *RECURRENT), default="autoencoder")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.variant:
        print(json.dumps(measure(options.variant, options.network, options.samples, options.repeats)))
        return
    print(harness.machine_line())
    print(f"{options.network}, n = {options.samples}, float32, seed 0")
    print(f"{options.repeats} pairs; medians (lowest to highest)")
    columns = ("iteration / gradient", "set-up / gradient", "peak memory, MiB", "gradient, ms")
    harness.print_header("products by", *columns)
    given = [f"--{name}={getattr(options, name)}" for name in ("network", "samples", "repeats")]
    for variant in VARIANTS[1 if options.network in RECURRENT else 0 :]:  # layer rules cover chains only
        try:
            found = harness.measure_apart("--variant", variant, *given)
        except ChildProcessError as error:
            harness.print_row(variant, f"not measured: {error}", "", "", "")
            continue
        harness.print_row(
            f"lightning_struct, {variant}" if variant in (*OURS, WITHOUT_RULES) else variant,
            harness.spread(found["ratios"]),
            f"{found['set_up']:.1f}",
            f"{found['peak_mib']:.0f}",
            f"{found['gradient_ms']:.0f}",
        )


if __name__ == "__main__":
    main()
