"""Bad calls over the whole public API: each gives the right result, or an error of the package that names the argument.

The names are those that the packages export, and the arguments those of their signatures: of each callable one call is
right, and in turn each of its arguments becomes something else. A call is at fault if it ends in a raw error, one that
the package has not raised itself, or if it accepts NaN, a complex number, a truth value or another type silently.
"""

import inspect
import math
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_struct
import lightning_struct.functional as F
import lightning_struct.nn as structured
from lightning_struct import data, optim
from lightning_struct.utilities.namespaces import MisconfigurationException

PACKAGE = Path(lightning_struct.__file__).parent
PACKAGES = ("", ".functional", ".optim", ".nn", ".callbacks", ".models", ".data")
MODULES = [import_module(f"lightning_struct{name}") for name in PACKAGES]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}
OWN_ERRORS = (
    TypeError, ValueError, FloatingPointError, FileNotFoundError, ZeroDivisionError, MisconfigurationException
)  # fmt: skip
# What the package returns or calls, and nobody makes.
MADE_HERE = {
    "ConjugateGradientResult", "CurveFit", "Derivatives", "GaussNewtonLoss", "GradientStatistics", "LayerCall",
    "LeastSquaresResult", "LineSearchResult", "Linearization", "ParameterNorms", "RightPreconditioner", "StepReport",
}  # fmt: skip

vector, matrix, points = torch.ones(4), torch.eye(4), torch.rand(5, 2)
subdiagonals = {"a_subdiagonal": vector[:3], "a_corner": vector[0], "b_subdiagonal": vector[:3], "b_corner": vector[0]}
generators = {"G": matrix[:, :1], "H": matrix[:, :1]}
operator = F.ShiftOperator(4, 1.0)
tridiagonal = F.TridiagonalOperator(torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(2))
box = data.Box([0.0, 0.0], [1.0, 1.0])
low_rank = structured.LowRank
sized = {"in_features": 4, "out_features": 4}
outputs = {"outputs": torch.rand(4, 3), "targets": torch.rand(4, 3)}


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def network() -> nn.Sequential:
    return nn.Sequential(linear())


def adapted() -> nn.Module:
    return structured.add_adapters(network(), low_rank)


def saved() -> str:
    structured.save_adapters(adapted(), "adapters")
    return "adapters"


def registered() -> type[nn.Module]:
    layer_type = type("Own", (nn.Linear,), {})
    F.register_layer(layer_type, F.Matrix("weight"))
    return layer_type


def optimizer(name: str) -> Any:
    return optim.RLS(linear()) if name == "RLS" else optim.SHF(linear(), "mse")


class Ones(data.InMemoryDataModule):
    def load_splits(self) -> Any:
        raise AssertionError


def linearized() -> F.Linearization:
    layer = linear()
    return F.linearize(layer, dict(layer.named_parameters()), matrix)


def made(name: str) -> Any:
    """An object of a class, by its right call."""
    return PUBLIC[name](**CALLS[name]())


REGIONS: dict[str, Callable[[], data.Region]] = {
    "Box": lambda: box,
    "Faces": lambda: data.Faces(box),
    "Ball": lambda: data.Ball([0.0, 0.0], 1.0),
    "Segment": lambda: data.Segment([0.0, 0.0], [1.0, 1.0]),
    "Union": lambda: data.Union(box, box),
    "Without": lambda: data.Without(box, data.Ball([0.5, 0.5], 0.1)),
    "Table": lambda: data.Table(points),
}
# Methods that people call, with their objects.
OBJECTS: dict[str, Callable[[], Any]] = {
    **{f"{name}.sample": region for name, region in REGIONS.items()},
    **{f"{name}.contains": REGIONS[name] for name in ("Box", "Ball", "Union", "Without")},
    **{f"{name}.residual": partial(made, name) for name in ("AllenCahn", "Heat", "KortewegDeVries", "Poisson")},
    **{f"{name}.solution": partial(made, name) for name in ("Burgers", "Heat", "Poisson")},
    **{f"ShiftOperator.{method}": partial(made, "ShiftOperator") for method in ("matvec", "rmatvec")},
    **{f"RecursiveLinear.{method}": partial(made, "RecursiveLinear")
       for method in ("update", "predictive_variance", "add_inputs", "add_outputs")},
    **{f"{name}.forward": partial(made, name) for name in ("AdaptedLinear", "StructuredLSTM", "BlockStructured",
                                                           "TanhNetwork")},
    "SHF.fit": lambda: optim.SHF(linear(), "least_squares"),
}  # fmt: skip

LOSSES = [
    f"{loss}.{method}"
    for loss in ("SquaredError", "CrossEntropy", "BinaryCrossEntropy")
    for method in ("value", "residual")
]

# A right call of each, by the arguments without defaults; those with defaults are added from the signature.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(
        ("CrossEntropy", "LeastSquares", "CG", "LSMR", "LowRankP", "Kronecker", "LevenbergMarquardt", "NextBatch",
         "WarmStart", "AllenCahn", "Burgers", "Heat", "KortewegDeVries", "Poisson", "GrowingBatchSize",
         "NoiseEstimator", "LevenbergMarquardtDamping", "OperatorMonitor", "PredictionWriter", "ReconstructionPlot",
         "TrainingCurves", "ValidationMeritStopping", "ValidationRule", "CIFAR10DataModule", "CurvesDataModule",
         "IMDBDataModule", "MNISTDataModule", "MNISTVariantDataModule", "TextCorpusDataModule", "USPSDataModule",
         "fully_connected", "lenet", "mini_vgg", "single_hidden_layer", "convolution_and_layer", "RecurrentNetwork"),
        dict,
    ),
    **dict.fromkeys(("CauchyLike", "Circulant", "Fastfood", "HankelLike", "LDRSubdiagonal", "LDRTridiagonal",
                     "LowRank", "Monarch", "RandomizedHadamard", "RecursiveLinear", "StructuredLinear", "ToeplitzLike",
                     "VandermondeLike", "unbiased_linear"), lambda: sized),
    **dict.fromkeys(("Autoencoder", "SHFAutoencoder"), lambda: {"layer_sizes": [4, 2]}),
    **dict.fromkeys(("Classifier", "SHFClassifier", "RLSClassifier"), lambda: {"network": linear()}),
    **dict.fromkeys(("PhysicsInformedNetwork", "SHFPhysicsInformedNetwork", "IntervalNetwork"),
                    lambda: {"equation": data.AllenCahn(), "hidden_sizes": [4]}),
    **dict.fromkeys(("add_adapters", "replace_linear"), lambda: {"model": network(), "factory": low_rank}),
    **dict.fromkeys(("adapter_state_dict", "disable_adapters", "unload_adapters", "freeze", "layer_structure",
                     "merge_adapters", "merged_adapters", "replacement_report"), lambda: {"model": adapted()}),
    **dict.fromkeys(("Ball", "Sphere"), lambda: {"center": [0.0], "radius": 1.0}),
    "GramLeastSquares": lambda: {"jacobian": matrix},
    **dict.fromkeys(("GradientNormRecorder", "per_sample_gradient_norms", "RLS"), lambda: {"module": linear()}),
    **dict.fromkeys(("hankel_like_matmul", "toeplitz_like_matmul"), lambda: {"x": vector, **generators}),
    **dict.fromkeys(("laplacian", "partial_derivatives"),
                    lambda: {"function": lambda at: at.square().sum(1), "points": points}),
    **dict.fromkeys(("displacement_rank", "sylvester_displacement"),
                    lambda: {"M": matrix, "a": operator, "b": operator}),
    **dict.fromkeys(("empirical_fisher_diagonal", "randomized_gauss_newton_diagonal"),
                    lambda: {"linearization": linearized(), "loss": F.SquaredError(), "targets": matrix}),
    "AdaptedLinear": lambda: {"base": linear(), "adapter": low_rank(4, 4, bias=False)},
    "BatchedTensorDataset": lambda: {"*tensors": (matrix,)},
    "BlockStructured": lambda: {"in_channels": 2, "out_channels": 2, "size": 3, "factory": low_rank},
    "Box": lambda: {"low": [0.0], "high": [1.0]},
    "ChannelLinear": lambda: {"linear": linear(), "stride": (1,)},
    "DenseJacobian": lambda: {"matrix": matrix},
    "DrawLoader": lambda: {"dataset": range(4), "sampler": data.IndependentDraws(range(4), 2, 2)},
    "Faces": lambda: {"box": box},
    "InMemoryDataModule": lambda: {"batch_size": 4},
    "IndependentDraws": lambda: {"dataset": range(4), "batch_size": 2, "draws_per_epoch": 2},
    "LanguageModel": lambda: {"vocabulary_size": 5},
    "Matrix": lambda: {"weight": "weight"},
    "PatchLinear": lambda: {"linear": linear(), "kernel_size": (2, 2), "stride": (1, 1), "padding": (0, 0),
                            "dilation": (1, 1)},
    "PointDraws": lambda: {"regions": {"interior": box}, "counts": {"interior": 4}, "draws_per_epoch": 2},
    "PointsDataModule": lambda: {"equation": data.Burgers(), "counts": {"interior": 4, "initial": 2, "boundary": 2}},
    "Product": lambda: {"first": box, "last": box},
    "ProjectedLeastSquares": lambda: {"matvec": torch.clone, "rmatvec": torch.clone, "b": vector, "steps": 2},
    "PrunedLinear": lambda: {**sized, "parameters": 9},
    "ScaledDamping": lambda: {"scale": 1.0, "damping": 1.0},
    "Segment": lambda: {"start": [0.0], "end": [1.0]},
    "SHF": lambda: {"module": linear(), "loss": "mse"},
    "ShiftOperator": lambda: {"n": 4, "f": 1.0},
    "StructuredAttention": lambda: {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), linear()), "embed_dim": 4, "num_heads": 2
    },
    "StructuredLSTM": lambda: {"input_size": 4, "hidden_size": 4, "factory": low_rank},
    "SubdiagonalOperator": lambda: {"subdiagonal": vector[:3], "corner": vector[0]},
    "Table": lambda: {"rows": matrix},
    "TanhNetwork": lambda: {"dimension": 2, "hidden_sizes": [4]},
    "TridiagonalOperator": lambda: {
        "subdiagonal": vector[:3], "diagonal": vector, "superdiagonal": vector[:3], "corners": vector[:2]
    },
    "Union": lambda: {"*regions": (box,)},
    "Without": lambda: {"region": box, "*holes": (data.Ball([0.0, 0.0], 0.1),)},
    "adapter_parameter_groups": lambda: {"model": adapted(), "lr": 1.0},
    "apply_structure": lambda: {"model": network(), "structure": {}},
    "armijo": lambda: {"function": lambda length: 1.0 - length, "value": 1.0, "slope": -1.0},
    "cauchy_like_matmul": lambda: {"s": torch.arange(4.0), "t": torch.arange(4.0) + 0.5, "x": vector, **generators},
    "circulant_matmul": lambda: {"column": vector, "x": vector},
    "compress": lambda: {"model": nn.Sequential(nn.Linear(32, 32)), "data": torch.rand(4, 32), "budget": 0.5},
    "conjugate_gradient": lambda: {"matvec": torch.clone, "b": vector},
    "curve_fit": lambda: {"f": lambda x, p: p * x, "x": vector, "y": vector, "p0": [0.5]},
    "fisher_scaling": lambda: {"diagonal": vector, "damping": 1.0},
    "gradient_variance": lambda: {"squared_norms": vector, "mean_gradient_squared_norm": 0.5},
    "hadamard_transform": lambda: {"x": vector},
    "jacobi_scaling": lambda: {"diagonal": vector},
    "jacobian_norms": lambda: {"layer": low_rank(4, 4)},
    "keep_batch": lambda: {"batch": vector},
    "krylov_matrix": lambda: {"op": operator, "v": vector},
    "ldr_matmul": lambda: {"a": operator, "b": operator, "x": vector, **generators},
    "ldr_to_dense": lambda: {"a": operator, "b": operator, **generators},
    "levenberg_marquardt": lambda: {"residuals": lambda p: p - 1, "parameters": vector},
    "linearize": lambda: {"function": linear(), "params": dict(linear().named_parameters()), "*args": (matrix,)},
    "load_adapter_state_dict": lambda: {
        "model": adapted(), "state_dict": structured.adapter_state_dict(adapted())
    },
    "load_adapters": lambda: {"model": network(), "folder": saved()},
    "lsmr": lambda: {"matvec": torch.clone, "rmatvec": torch.clone, "b": vector},
    "next_batch_rule": lambda: {"now": F.ScaledDamping(1.0, 1.0), "ratio": 1.0, "fitted": 1.0, "drop": None},
    "norm_test_batch_size": lambda: {
        "squared_norms": vector, "mean_gradient_squared_norm": 0.5, "dataset_size": None, "theta": 1.0
    },
    "pruned": lambda: {"checkpoint": "pruned.ckpt", "parameters": 9},
    "reduced_hidden_units": lambda: {**sized, "parameters": 20},
    "reduction_ratio_rule": lambda: {"damping": 1.0, "reduction_ratio": 1.0},
    "register_layer": lambda: {"layer_type": type("Own", (nn.Linear,), {}), "matrix": F.Matrix("weight")},
    "replace_conv": lambda: {
        "model": nn.Sequential(nn.Conv2d(2, 2, 3)), "factory": low_rank, "example": torch.rand(1, 2, 5, 5)
    },
    "required_batch_size": lambda: {
        "variance": 1.0, "mean_gradient_squared_norm": 1.0, "dataset_size": None, "theta": 1.0
    },
    "save_adapters": lambda: {"model": adapted(), "folder": "adapters"},
    "delete_adapter": lambda: {"model": adapted(), "name": "default"},
    "set_adapter": lambda: {"model": adapted(), "name": "default"},
    "sparse_normal_": lambda: {"weight": matrix.clone(), "connections": 2},
    "structured_in_place_of_convolution": lambda: {"first": low_rank, "layer": low_rank},
    "subdiagonal_matmul": lambda: {"x": vector, **subdiagonals, **generators},
    "subdiagonal_to_dense": lambda: {**subdiagonals, **generators},
    "tridiagonal_matmul": lambda: {"a": tridiagonal, "b": tridiagonal, "x": vector, **generators},
    "tridiagonal_to_dense": lambda: {"a": tridiagonal, "b": tridiagonal, **generators},
    "unregister_layer": lambda: {"layer_type": registered()},
    **dict.fromkeys(LOSSES, lambda: outputs),
    **dict.fromkeys([f"{name}.from_linear" for name in structured.STRUCTURED_CLASSES], lambda: {"linear": linear()}),
    **dict.fromkeys([f"{name}.forward" for name in structured.STRUCTURED_CLASSES], lambda: {"input": matrix}),
    "PrunedLinear.from_linear": lambda: {"linear": linear(), "parameters": 9},
    "SHF.step": lambda: {"inputs": matrix, "targets": matrix},
    "RLS.step": lambda: {"closure": lambda: matrix.sum()},
    **dict.fromkeys([f"{name}.sample" for name in REGIONS],
                    lambda: {"count": 4, "generator": torch.Generator().manual_seed(0)}),
    **dict.fromkeys([f"{name}.contains" for name in ("Box", "Ball", "Union", "Without")], lambda: {"points": points}),
    **dict.fromkeys([name for name in OBJECTS if name.endswith(".residual")],
                    lambda: {"block": "interior", "u": lambda at: at.square().sum(1), "points": points}),
    **dict.fromkeys([name for name in OBJECTS if name.endswith(".solution")], lambda: {"points": points}),
    **dict.fromkeys([name for name in OBJECTS if name.endswith("matvec")], lambda: {"v": vector}),
    **dict.fromkeys(("RecursiveLinear.add_inputs", "RecursiveLinear.add_outputs"), lambda: {"number": 2}),
    "RecursiveLinear.update": lambda: {"x": matrix, "y": matrix},
    "RecursiveLinear.predictive_variance": lambda: {"x": matrix},
    "AdaptedLinear.forward": lambda: {"input": matrix},
    "StructuredLSTM.forward": lambda: {"x": torch.rand(5, 2, 4)},
    "BlockStructured.forward": lambda: {"input": torch.rand(2, 2, 3)},
    "TanhNetwork.forward": lambda: {"points": points},
    "SHF.fit": lambda: {"inputs": matrix, "max_steps": 2},
    "vandermonde_like_matmul": lambda: {"nodes": vector, "x": vector, **generators},
}  # fmt: skip

# Arguments that may be anything: what is given for them is the caller's, or is not read.
FREE = {
    "Matrix": "its fields are checked by register_layer",
    "keep_batch": "it returns its argument",
    "linearize args": "the function decides about them",
    "randomized_gauss_newton_diagonal targets": "the curvature of the squared error does not depend on them",
}
# Values that are accepted, and right, where the annotation does not show it.
RIGHT = {
    "nan": {"armijo first_value", "reduction_ratio_rule reduction_ratio"},
    "lists": {"IndependentDraws dataset"},
    "text": {"IndependentDraws dataset"},
    "array": {"IndependentDraws dataset"},
    "set": {"GradientNormRecorder samples"},
    "one NaN": {
        "replace_conv example",
        "sparse_normal_ weight",
        "laplacian points",
        *(f"{name}.contains points" for name in REGIONS),
    },  # such a point is in no region
    "sparse": {"TanhNetwork.forward points"},
    "fraction": {"SubdiagonalOperator corner"},
    "inf": {
        "theta",
        "upper",
        "max_damping",
        "maximum",
        "half_life",
        "armijo first_value",
        "curve_fit sigma",
        "next_batch_rule fitted",
        "reduction_ratio_rule reduction_ratio",
    },
    "true": {"BinaryCrossEntropy.value targets", "BinaryCrossEntropy.residual targets", "BatchedTensorDataset tensors"},
    "imaginary": {"BatchedTensorDataset tensors", "displacement_rank M"},
    "not finite": {
        "replace_conv example",
        "sparse_normal_ weight",
        "laplacian points",
        *(f"{name}.contains points" for name in REGIONS),
    },
}
# Words of an annotation that has a meaning for values of another type.
MEANT = {
    **dict.fromkeys(("something", "nan", "inf", "complex", "set", "bytes", "lists"), ()),
    "None": ("None",), "bool": ("bool",), "text": ("str",),
    "texts": ("Sequence[str", "Iterable[str"), "list": ("Sequence", "Iterable", "Dataset"),
    "dict": ("Mapping", "Iterable", "Sequence[str | nn.Module]", "Dataset"), "class": ("Callable", "type[", "Factory"),
}  # fmt: skip

# Values of other types, and numbers without meaning, for any argument.
OTHERS: dict[str, Any] = {
    "None": None, "text": "foo", "something": object(), "list": [], "dict": {}, "nan": math.nan, "inf": math.inf,
    "negative": -1, "0": 0, "huge": 2**62, "fraction": 2.5, "complex": 1j, "bool": True,
    "whole tensor": torch.ones(2, dtype=torch.long), "class": int, "texts": ["a"], "lists": [[1.0], [2.0, 3.0]],
    "nans": [math.nan], "set": {1}, "bytes": b"x", "array": np.ones(3), "2**70": 2**70,
}  # fmt: skip
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "empty": lambda tensor: tensor.new_empty(0),
    "0 rows": lambda tensor: tensor[:0] if tensor.ndim else tensor.new_empty(0, 2),
    "more dimensions": lambda tensor: tensor.expand(2, 2, 2, *tensor.shape),
    "no dimensions": lambda tensor: tensor.new_tensor(1.0),
    "longer": lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor.expand(3),
    "wider": lambda tensor: torch.cat([tensor, tensor], -1) if tensor.ndim else tensor.expand(3),
    "whole": lambda tensor: tensor.long(),
    "true": lambda tensor: tensor.bool(),
    "imaginary": lambda tensor: tensor.to(torch.complex64),
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor.reshape(-1)]),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8),
    "not finite": lambda tensor: tensor * math.nan,
    "infinite": lambda tensor: tensor * math.inf,
    "one NaN": lambda tensor: torch.cat([tensor.new_tensor([math.nan]), tensor.reshape(-1)[1:]]).view(tensor.shape),
    "8 bits": lambda tensor: tensor.to(torch.float8_e4m3fn),
}
LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "of no layers": lambda module: nn.Identity(),
    "of meta": lambda module: module.to("meta"),
    "of half": lambda module: module.half(),
    "of a convolution": lambda module: nn.Conv2d(2, 2, 3),
}


def made_by(name: str) -> Callable[..., Any]:
    """The function, the class, or the method of an object of the class."""
    of_class, _, method = name.partition(".")
    if name in OBJECTS:
        return getattr(OBJECTS[name](), method)
    if name == "InMemoryDataModule":
        return Ones
    if not method or method == "from_linear":
        return getattr(PUBLIC[of_class], method) if method else PUBLIC[of_class]
    if method == "step":
        return optim.RLS(linear()).step if of_class == "RLS" else optim.SHF(linear(), "mse").step
    sizes = (4, 4, *([9] if of_class == "PrunedLinear" else [])) if method == "forward" else ()
    return getattr(PUBLIC[of_class](*sizes), method)


def call(name: str, change: Mapping[str, Any]) -> Any:
    function, arguments = made_by(name), {**CALLS[name](), **change}
    rest = next((key for key in arguments if key.startswith("*")), None)
    if rest is None:
        return function(**arguments)
    places = [key for key in inspect.signature(function).parameters if key in arguments]
    several = arguments.pop(rest)
    before = [arguments.pop(key) for key in places[: places.index(rest[1:]) if rest[1:] in places else None]]
    return function(*before, *several, **arguments)


def cases(name: str) -> Iterator[tuple[str, str, Any]]:
    """Arguments of a callable, and other values by what they are."""
    right = CALLS[name]()
    for key, parameter in inspect.signature(made_by(name)).parameters.items():
        several = parameter.kind is parameter.VAR_POSITIONAL
        argument = f"*{key}" if several else key
        if parameter.kind is parameter.VAR_KEYWORD or (several and argument not in right):
            continue
        value = right.get(argument, parameter.default)
        value = value[0] if several else value
        changes = TENSORS if isinstance(value, Tensor) else LAYERS if isinstance(value, nn.Module) else {}
        for kind, change in changes.items():
            fresh = CALLS[name]()[argument] if isinstance(value, nn.Module) and not several else value
            yield argument, kind, (change(fresh),) if several else change(fresh)
        for kind, other in OTHERS.items():
            if kind == "huge" and key in ("refine", "iterations", "intervals", "count"):
                continue  # it would only take long, or more memory than there is
            if other is not value and not (kind == "class" and callable(value)):
                yield argument, kind, (other,) if several else other


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    value = getattr(value, "outputs", value)  # of a linearization
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [torch.tensor(value)] if isinstance(value, float) else [value] if isinstance(value, Tensor) else []


def has_nan(value: Any) -> bool:
    held = [tensor for tensor in tensors_in(value) if tensor.layout == torch.strided and not tensor.is_meta]
    return any(bool(tensor.isnan().any()) for tensor in held)


def fault_of(name: str, argument: str, kind: str, value: Any) -> str | None:
    """What is wrong with the outcome of a call; None: it has the right result, or an error of the package."""
    key = argument.strip("*")
    try:
        result = call(name, {argument: value})
    except Exception as error:  # noqa: BLE001
        frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        if frames[-1].is_relative_to(PACKAGE) and isinstance(error, OWN_ERRORS):
            return None
        last = max((i for i, frame in enumerate(frames) if frame.is_relative_to(PACKAGE)), default=0)
        if any("torch/nn/modules/module.py" in str(frame) for frame in frames[last + 1 :]):
            return None  # the given module refuses what it is given
        return f"raw: {type(error).__name__}: {str(error)[:80]} ({frames[last].name})"
    if {name, f"{name} {key}"} & FREE.keys() or {key, f"{name} {key}"} & RIGHT.get(kind, set()):
        return None
    parameter = inspect.signature(made_by(name)).parameters[key]
    if kind in MEANT:
        is_default = kind == "None" and parameter.default is None
        return None if is_default or any(word in str(parameter.annotation) for word in MEANT[kind]) else "accepted"
    if kind in ("true", "nested", "sparse", "quantized", "8 bits"):
        return "accepted"
    is_function = not inspect.isclass(made_by(name))
    if kind == "imaginary" and is_function and not any(tensor.is_complex() for tensor in tensors_in(result)):
        return "the imaginary part is dropped"
    if kind in ("nans", "not finite", "one NaN") and is_function:
        is_said = getattr(result, "reason", None) == ["not_finite"]  # of a fit
        return None if is_said or has_nan(result) else "NaN is not noticed"
    if kind not in ("not finite", "one NaN", "infinite", "inf") and has_nan(result):
        return "NaN from finite numbers"
    return None


def public_calls() -> list[str]:
    """All public names that somebody may call with arguments, and the methods that have calls."""
    found = [name for name, value in PUBLIC.items() if callable(value) and name not in MADE_HERE]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    with_arguments = [
        name
        for name in found
        if any(p.kind not in variadic for p in inspect.signature(PUBLIC[name]).parameters.values()) or name in CALLS
    ]
    return sorted({*with_arguments, *(name for name in CALLS if "." in name)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", public_calls())
def test_other_values_give_the_right_result_or_an_error_of_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    every = list(cases(name))
    chosen = every if request.config.getoption("--all-cases") else every[zlib.crc32(name.encode()) % 8 :: 8]
    found = {f"{argument}: {kind}": fault_of(name, argument, kind, value) for argument, kind, value in chosen}
    assert {case: fault for case, fault in found.items() if fault is not None} == {}
