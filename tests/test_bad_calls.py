"""Bad calls over the whole public API: each is refused by the package itself, with the name of the argument.

The calls are made from the signatures: of each function or class one call is right, and in turn each of its arguments
becomes something of another type, as the annotation has it. Calls that are wrong in other ways follow in a table.
"""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_struct
import lightning_struct.functional as F
import lightning_struct.nn as structured
from lightning_struct import callbacks, data, optim
from lightning_struct.utilities.namespaces import MisconfigurationException

PACKAGE = Path(lightning_struct.__file__).parent

vector, matrix, points = torch.ones(4), torch.eye(4), torch.rand(5, 2)
operator = F.ShiftOperator(4, 1.0)
tridiagonal = F.TridiagonalOperator(torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(2))
linear = nn.Linear(4, 4)
damping = F.ScaledDamping(1.0, 1.0)
subdiagonals = {"a_subdiagonal": vector[:3], "a_corner": vector[0], "b_subdiagonal": vector[:3], "b_corner": vector[0]}
generators = {"G": matrix[:, :1], "H": matrix[:, :1]}
low_rank = structured.LowRank
box = data.Box([0.0, 0.0], [1.0, 1.0])

# A right call of each, by the arguments without defaults; those with defaults are added from the signature.
CALLS: dict[Callable, dict[str, object]] = {
    F.CrossEntropy: {},
    F.FactoredLeastSquares: {"jacobian": matrix},
    F.GradientNormRecorder: {"module": linear},
    F.GramLeastSquares: {"jacobian": matrix},
    F.LeastSquares: {},
    F.ProjectedLeastSquares: {"matvec": torch.clone, "rmatvec": torch.clone, "b": vector, "steps": 2},
    F.ScaledDamping: {"scale": 1.0, "damping": 1.0},
    F.ShiftOperator: {"n": 4, "f": 1.0},
    F.SubdiagonalOperator: {"subdiagonal": vector[:3], "corner": vector[0]},
    F.TridiagonalOperator: {
        "subdiagonal": vector[:3], "diagonal": vector, "superdiagonal": vector[:3], "corners": vector[:2]
    },
    F.armijo: {"function": float, "value": 1.0, "slope": -1.0},
    F.cauchy_like_matmul: {"s": vector, "t": -vector, "x": vector, **generators},
    F.circulant_matmul: {"column": vector, "x": vector},
    F.conjugate_gradient: {"matvec": torch.clone, "b": vector},
    F.displacement_rank: {"M": matrix, "a": operator, "b": operator},
    F.fisher_scaling: {"diagonal": vector, "damping": 1.0},
    F.gradient_variance: {"squared_norms": vector, "mean_gradient_squared_norm": 1.0},
    F.hadamard_transform: {"x": vector},
    F.hankel_like_matmul: {"x": vector, **generators},
    F.jacobi_scaling: {"diagonal": vector},
    F.krylov_matrix: {"op": operator, "v": vector},
    F.laplacian: {"function": torch.sum, "points": points},
    F.ldr_matmul: {"a": operator, "b": operator, "x": vector, **generators},
    F.ldr_to_dense: {"a": operator, "b": operator, **generators},
    F.reduction_ratio_rule: {"damping": 1.0, "reduction_ratio": 1.0},
    F.linearize: {"function": linear, "params": {}},
    F.lsmr: {"matvec": torch.clone, "rmatvec": torch.clone, "b": vector},
    F.next_batch_rule: {"now": damping, "ratio": 1.0, "fitted": 1.0, "drop": None},
    F.norm_test_batch_size: {
        "squared_norms": vector, "mean_gradient_squared_norm": 1.0, "dataset_size": None, "theta": 1.0
    },
    F.partial_derivatives: {"function": torch.sum, "points": points},
    F.per_sample_gradient_norms: {"module": linear},
    F.required_batch_size: {
        "variance": 1.0, "mean_gradient_squared_norm": 1.0, "dataset_size": None, "theta": 1.0
    },
    F.subdiagonal_matmul: {"x": vector, **subdiagonals, **generators},
    F.subdiagonal_to_dense: {**subdiagonals, **generators},
    F.sylvester_displacement: {"M": matrix, "a": operator, "b": operator},
    F.toeplitz_like_matmul: {"x": vector, **generators},
    F.tridiagonal_matmul: {"a": tridiagonal, "b": tridiagonal, "x": vector, **generators},
    F.tridiagonal_to_dense: {"a": tridiagonal, "b": tridiagonal, **generators},
    F.vandermonde_like_matmul: {"nodes": vector, "x": vector, **generators},
    structured.AdaptedLinear: {"base": linear, "adapter": low_rank(4, 4)},
    structured.BlockStructured: {"in_channels": 2, "out_channels": 2, "size": 3, "factory": low_rank},
    structured.ChannelLinear: {"linear": linear, "stride": 1},
    structured.PrunedLinear: {"in_features": 4, "out_features": 4, "parameters": 9},
    structured.StructuredAttention: {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), linear), "embed_dim": 4, "num_heads": 2
    },
    structured.StructuredLSTM: {"input_size": 4, "hidden_size": 4, "factory": low_rank},
    **{
        getattr(structured, name): {"in_features": 4, "out_features": 4}
        for name in (
            "CauchyLike", "Circulant", "Fastfood", "HankelLike", "LDRSubdiagonal", "LDRTridiagonal",
            "LowRank", "Monarch", "RandomizedHadamard", "ToeplitzLike", "VandermondeLike",
        )
    },
    structured.adapter_parameter_groups: {"model": linear, "lr": 1.0},
    structured.adapter_state_dict: {"model": linear},
    structured.add_adapters: {"model": nn.Sequential(linear), "factory": low_rank},
    structured.apply_structure: {"model": linear, "structure": {}},
    structured.compress: {"model": nn.Sequential(linear), "data": matrix, "budget": 0.5},
    structured.disable_adapters: {"model": linear},
    structured.delete_adapter: {"model": linear, "name": "other"},
    structured.freeze: {"model": linear},
    structured.jacobian_norms: {"layer": linear},
    structured.layer_structure: {"model": linear},
    structured.load_adapter_state_dict: {"model": linear, "state_dict": {}},
    structured.load_adapters: {"model": linear, "folder": "adapters"},
    structured.merge_adapters: {"model": linear},
    structured.merged_adapters: {"model": linear},
    structured.reduced_hidden_units: {"in_features": 4, "out_features": 4, "parameters": 20},
    structured.replace_conv: {"model": nn.Sequential(linear), "factory": low_rank, "example": matrix},
    structured.replace_linear: {"model": nn.Sequential(linear), "factory": low_rank},
    structured.replacement_report: {"model": linear},
    structured.save_adapters: {"model": linear, "folder": "adapters"},
    structured.set_adapter: {"model": linear, "name": "other"},
    structured.sparse_normal_: {"weight": matrix, "connections": 2},
    structured.unload_adapters: {"model": linear},
    optim.CG: {}, optim.LSMR: {}, optim.LowRankP: {},
    optim.Kronecker: {}, optim.LevenbergMarquardt: {}, optim.NextBatch: {}, optim.WarmStart: {},
    optim.RLS: {"module": linear},
    optim.SHF: {"module": linear, "loss": "mse"},
    data.Box: {"low": [0.0], "high": [1.0]},
    data.AllenCahn: {}, data.Burgers: {}, data.Heat: {}, data.KortewegDeVries: {},
    data.Poisson: {},
    data.Faces: {"box": box},
    data.PointDraws: {"regions": {"interior": box}, "counts": {"interior": 4}, "draws_per_epoch": 2},
    callbacks.GrowingBatchSize: {}, callbacks.NoiseEstimator: {},
    callbacks.LevenbergMarquardtDamping: {}, callbacks.OperatorMonitor: {}, callbacks.PredictionWriter: {},
    callbacks.ReconstructionPlot: {}, callbacks.TrainingCurves: {}, callbacks.ValidationMeritStopping: {},
    callbacks.ValidationRule: {},
}  # fmt: skip

# By a type in an annotation: values of another type.
WRONG = {
    "Tensor": {"sparse": matrix.to_sparse(), "list": [[1.0]]},
    "float": {"complex": 1j, "text": "a"},
    "int": {"fraction": 2.5, "text": "a"},
    "bool": {"text": "no"},
    "Literal": {"unknown": "unknown"},
    "nn.Module": {"class": nn.Linear},
    "Mapping": {"list": [1]},
}
# Arguments that may be anything, or that only a call can tell to be wrong.
FREE = {"all_reduce", "all_gather", "args", "callback", "check", "options", "device", "dtype", "kind"}


class Something:
    def __repr__(self) -> str:
        return "something else"


def wrong_arguments(function: Callable) -> dict[str, tuple[str, object]]:
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = str(parameter.annotation)
        if name in FREE or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        wrong = {"something": Something()}
        wrong |= {} if "None" in annotation or parameter.default is None else {"None": None}
        for kind, values in WRONG.items():
            if kind in annotation.split("[")[0]:
                wrong |= values
        found |= {f"{name}={value}": (name, value) for value in wrong.values()}
    return found


def fault_of(call: Callable[[], object], name: str) -> str | None:
    """What is wrong with the refusal of a call; None if the package itself refuses it and names the argument."""
    try:
        call()
    except (TypeError, ValueError, MisconfigurationException) as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        return None if last.is_relative_to(PACKAGE) and name in str(error) else f"{error} (in {last.name})"
    return "it is not refused"


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_arguments_of_other_types_are_refused_by_name(function: Callable) -> None:
    right, wrong = CALLS[function], wrong_arguments(function)
    faults = {case: fault_of(lambda: function(**right | {name: value}), name) for case, (name, value) in wrong.items()}  # noqa: B023
    assert {case: fault for case, fault in faults.items() if fault is not None} == {}


WRONG_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex numbers": lambda tensor: tensor.to(torch.complex64),
    "whole numbers": lambda tensor: tensor.long(),
    "more dimensions": lambda tensor: tensor.expand(2, 2, 2, *tensor.shape),
    "no entries": lambda tensor: tensor.new_empty(0),
}
OF_DTYPE, OF_SHAPE = ("complex numbers", "whole numbers"), ("more dimensions", "no entries")
REFUSED = {
    **dict.fromkeys([F.laplacian, F.partial_derivatives], OF_DTYPE + OF_SHAPE),
    **dict.fromkeys([F.subdiagonal_matmul, F.toeplitz_like_matmul, F.hankel_like_matmul], OF_DTYPE + OF_SHAPE),
    **dict.fromkeys([F.FactoredLeastSquares, F.GramLeastSquares, F.ProjectedLeastSquares], (*OF_DTYPE, OF_SHAPE[0])),
    **dict.fromkeys([F.conjugate_gradient, F.lsmr, F.fisher_scaling, F.jacobi_scaling], OF_DTYPE),
    **dict.fromkeys([F.gradient_variance, F.norm_test_batch_size], OF_DTYPE),
    **dict.fromkeys([F.TridiagonalOperator], ("whole numbers", *OF_SHAPE)),
    **dict.fromkeys([F.krylov_matrix, F.sylvester_displacement, F.tridiagonal_matmul, F.ldr_matmul], OF_SHAPE),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_numbers_and_shapes_without_meaning_are_refused_by_name(function: Callable) -> None:
    right = CALLS[function]
    faults = {
        f"{name}: {kind}": fault_of(lambda: function(**right | {name: WRONG_NUMBERS[kind](value)}), name)  # noqa: B023
        for name, value in right.items()
        if isinstance(value, torch.Tensor)
        for kind in REFUSED[function]
        if name not in ("x", "v") or kind != "more dimensions"  # which are those of a batch
    }
    assert faults and {case: fault for case, fault in faults.items() if fault is not None} == {}
