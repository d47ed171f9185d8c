"""Frozen models in ONNX: `pip install lightning-struct[onnx]`."""

import warnings

import pytest
import torch
from torch import nn

from lightning_struct.nn import Circulant, LDRSubdiagonal, freeze
from tests.nn.layers import FACTORIES, NAMES

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.slow,
    # Older exporters do not say that they export (torch.onnx.is_in_onnx_export).
    pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="needs torch 2.9"),
]


def outputs_of_file(frozen, x, path):
    """What onnxruntime computes from the exported model; exported with another number of rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            frozen, (x[:3],), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)
        )
        program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(outputs)


def test_transforms_are_exported_in_real_arithmetic(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(LDRSubdiagonal(45, 30, rank=2), nn.ReLU(), Circulant(30, 11))
    x = torch.randn(5, 45)
    outputs = outputs_of_file(freeze(model), x, tmp_path / "model.onnx")
    torch.testing.assert_close(outputs, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_layers_of_all_classes_are_exported(tmp_path):
    torch.manual_seed(0)
    names = [name for name in NAMES if not name.endswith(("_padded", "_without_corners"))]
    layers = [FACTORIES[name](12, 12) for name in names]
    dense = {"ldr_td", "vandermonde_like"}  # these are not exported otherwise
    frozen = [freeze(layer, dense=name in dense) for name, layer in zip(names, layers, strict=True)]
    x = torch.randn(5, 12)
    outputs = outputs_of_file(nn.Sequential(*frozen), x, tmp_path / "model.onnx")
    torch.testing.assert_close(outputs, nn.Sequential(*layers)(x).detach(), rtol=1e-3, atol=1e-4)
