"""Layers and their initialisation, on torch alone."""

from lightning_struct.nn.blocks import BlockStructured
from lightning_struct.nn.classic import (
    CauchyLike,
    Circulant,
    Fastfood,
    HankelLike,
    LowRank,
    PrunedLinear,
    ToeplitzLike,
    VandermondeLike,
    reduced_hidden_units,
)
from lightning_struct.nn.init import sparse_normal_
from lightning_struct.nn.jacobian import jacobian_norms
from lightning_struct.nn.ldr import LDRSubdiagonal, LDRTridiagonal
from lightning_struct.nn.recurrent import StructuredLSTM
from lightning_struct.nn.replace import replace_linear, replacement_report
from lightning_struct.nn.structured import FrozenLinear, StructuredLinear

__all__ = [
    "BlockStructured",
    "CauchyLike",
    "Circulant",
    "Fastfood",
    "FrozenLinear",
    "HankelLike",
    "LDRSubdiagonal",
    "LDRTridiagonal",
    "LowRank",
    "PrunedLinear",
    "StructuredLSTM",
    "StructuredLinear",
    "ToeplitzLike",
    "VandermondeLike",
    "jacobian_norms",
    "reduced_hidden_units",
    "replace_linear",
    "replacement_report",
    "sparse_normal_",
]
