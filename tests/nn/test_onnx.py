"""Frozen models in ONNX: `pip install lightning-struct[onnx]`."""

import warnings

import pytest
import torch
from torch import nn

from lightning_struct.nn import freeze
from tests.nn.layers import CLASSES, FACTORIES

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
            frozen,
            (x[:3],),
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("rows", min=2)},),
            optimize=False,  # which takes a quarter of the time
        )
        program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(outputs)


# Their frozen forms compute with the operations of others.
ALIKE = ("toeplitz_like", "vandermonde_like", "cauchy_like")


def test_layers_of_all_classes_are_exported(tmp_path):
    torch.manual_seed(0)
    other_forms = {"hankel_like": "hankel_like_padded", "low_rank": "low_rank_padded"}
    names = [other_forms.get(name, name) for name in CLASSES if name not in ALIKE]
    sizes = [(7, 6) if index % 2 == 0 else (6, 7) for index in range(len(names))]
    layers = [FACTORIES[name](*of) for name, of in zip(names, sizes, strict=True)]
    frozen = [freeze(layer, dense=name == "ldr_td") for name, layer in zip(names, layers, strict=True)]
    x = torch.randn(5, 7)
    outputs = outputs_of_file(nn.Sequential(*frozen), x, tmp_path / "model.onnx")
    torch.testing.assert_close(outputs, nn.Sequential(*layers)(x).detach(), rtol=1e-3, atol=1e-4)
