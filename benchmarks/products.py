"""What one solver iteration costs, in gradient evaluations of the same model on the same batch.

    python benchmarks/products.py [--samples 2000] [--threads 1] [--repeats 15]

The MNIST autoencoder (784-1000-500-250-30 and back), float32. Each rival runs in a process of its own, in which solver
iterations and gradient evaluations alternate, so that a machine whose speed drifts does not change the ratio. An
iteration is everything that a solver does per step, taken as the difference of a solve of 12 and one of 2: for ours one
product with the Jacobian, one with its transpose and LSMR's vector work, diagonal preconditioner and damping included;
for the rivals one product with the Gauss-Newton matrix and the vector work of plain CG. Peak memory is the highest resident set of the process less
what it held with model and data loaded. Rivals that are not installed are said to be so:

    curvlinops           pip install curvlinops-for-pytorch
    PyTorchHessianFree   github.com/ltatzel/PyTorchHessianFree, on PYTHONPATH, with backpack-for-pytorch
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_struct.functional import SquaredError
from lightning_struct.functional.least_squares import lsmr
from lightning_struct.optim.shf.batch_model import BatchModel

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
VARIANTS = ("layer_rules", "linearize", "double_backward", "PyTorchHessianFree", "curvlinops")
FEW, MANY = 2, 12


def model_and_data(samples: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(SIZES) for layer in (nn.Linear(a, b), nn.Sigmoid())]
    return nn.Sequential(*layers), torch.rand(samples, SIZES[0])


def gradient(model: nn.Module, x: Tensor) -> None:
    loss = 0.5 * (model(x) - x).square().sum() / len(x)
    torch.autograd.grad(loss, list(model.parameters()))


def our_iterations(backend: str, model: nn.Module, x: Tensor) -> Callable[[int], None]:
    """LSMR as SHF calls it: warm start, diagonal preconditioner, damping."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    batch = BatchModel(model, SquaredError(), weights, x, x, backend=backend)
    scaling = batch.scaling("diagonal", 1.0, seed=0)
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


def curvlinops_iterations(model: nn.Module, x: Tensor) -> Callable[[int], None]:
    from curvlinops import GGNLinearOperator

    parameters = list(model.parameters())
    operator = GGNLinearOperator(
        model, nn.MSELoss(reduction="sum"), parameters, [(x, x)], check_deterministic=False, num_data=len(x)
    )
    return conjugate_gradient_steps(lambda v: operator @ v, sum(p.numel() for p in parameters))


def pytorch_hessian_free_iterations(model: nn.Module, x: Tensor) -> Callable[[int], None]:
    from hessianfree.optimizer import HessianFree

    parameters = list(model.parameters())
    outputs = model(x)
    loss = nn.functional.mse_loss(outputs, x, reduction="sum")
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


def measure(variant: str, samples: int, threads: int, repeats: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    model, x = model_and_data(samples)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    if variant == "curvlinops":
        run = curvlinops_iterations(model, x)
    elif variant == "PyTorchHessianFree":
        run = pytorch_hessian_free_iterations(model, x)
    else:
        run = our_iterations(variant, model, x)
    set_up = time.perf_counter() - begin
    run(FEW)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradient(model, x)
    ratios, gradients = [], []
    for _ in range(repeats):
        times = [time.perf_counter()]
        run(FEW)
        times.append(time.perf_counter())
        run(MANY)
        times.append(time.perf_counter())
        for _ in range(3):
            gradient(model, x)
        times.append(time.perf_counter())
        few, many, three = (b - a for a, b in pairwise(times))
        gradients.append(three / 3)
        ratios.append((many - few) / (MANY - FEW) / gradients[-1])
    return {
        "variant": variant,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "gradient_ms": 1e3 * statistics.median(gradients),
        "set_up": set_up / statistics.median(gradients),
        "peak_mib": (peak - base) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.samples, options.threads, options.repeats)))
        return
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} thread(s), ",
        end="",
    )
    print(f"n = {options.samples}, float32, seed 0, {options.repeats} pairs; medians (lowest to highest)\n")
    print("| products by | iteration / gradient | set-up / gradient | peak memory, MiB | gradient, ms |")
    print("|---|---|---|---|---|")
    for variant in VARIANTS:
        command = [sys.executable, "-W", "ignore", __file__, "--variant", variant]
        for name in ("samples", "threads", "repeats"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"| {variant} | {done.stderr.strip().splitlines()[-1]} | | | |", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        ours = f"lightning_struct, {variant}" if variant in VARIANTS[:3] else variant
        print(
            f"| {ours} | {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}) | {row['set_up']:.1f} "
            f"| {row['peak_mib']:.0f} | {row['gradient_ms']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
