"""Frozen models in ONNX: `pip install lightning-struct[onnx]`."""

import warnings

import pytest
import torch
from torch import nn

from lightning_struct.nn import Circulant, LDRSubdiagonal, freeze

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.slow,
    # Older exporters do not say that they export (torch.onnx.is_in_onnx_export).
    pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="needs torch 2.9"),
]


def test_transforms_are_exported_in_real_arithmetic(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(LDRSubdiagonal(45, 30, rank=2), nn.ReLU(), Circulant(30, 11))
    path, x = tmp_path / "model.onnx", torch.randn(5, 45)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            freeze(model), (x[:3],), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)
        )
        program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), model(x).detach(), rtol=1e-4, atol=1e-5)
