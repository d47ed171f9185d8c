"""Structured layers, their place in models, and initial values: on torch alone."""

from lightning_struct.nn.adapter_files import load_adapters, save_adapters
from lightning_struct.nn.adapters import (
    adapter_parameter_groups,
    adapter_state_dict,
    add_adapters,
    delete_adapter,
    disable_adapters,
    load_adapter_state_dict,
    merge_adapters,
    merged_adapters,
    set_adapter,
    unload_adapters,
)
from lightning_struct.nn.attention import StructuredAttention
from lightning_struct.nn.baselines import Circulant, PrunedLinear, reduced_hidden_units, sparse_normal_
from lightning_struct.nn.channels import ChannelLinear, PatchLinear
from lightning_struct.nn.classic import CauchyLike, HankelLike, LowRank, ToeplitzLike, VandermondeLike
from lightning_struct.nn.compress import compress
from lightning_struct.nn.convolutions import BlockStructured, replace_conv
from lightning_struct.nn.hadamard import Fastfood, RandomizedHadamard
from lightning_struct.nn.layer_structure import apply_structure, freeze, layer_structure
from lightning_struct.nn.ldr import LDRSubdiagonal, LDRTridiagonal
from lightning_struct.nn.monarch import Monarch
from lightning_struct.nn.recurrent import StructuredLSTM
from lightning_struct.nn.recursive import RecursiveLinear
from lightning_struct.nn.replace import replace_linear
from lightning_struct.nn.report import jacobian_norms, replacement_report
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.updates import AdaptedLinear

__all__ = [
    "AdaptedLinear", "BlockStructured", "CauchyLike", "ChannelLinear", "Circulant", "Fastfood", "HankelLike",
    "LDRSubdiagonal", "LDRTridiagonal", "LowRank", "Monarch", "PatchLinear", "PrunedLinear", "RandomizedHadamard",
    "RecursiveLinear", "StructuredAttention", "StructuredLSTM", "StructuredLinear", "ToeplitzLike", "VandermondeLike",
    "adapter_parameter_groups", "adapter_state_dict", "add_adapters", "apply_structure", "compress",
    "delete_adapter", "disable_adapters", "freeze", "jacobian_norms", "layer_structure", "load_adapter_state_dict",
    "load_adapters", "merge_adapters", "merged_adapters", "reduced_hidden_units", "replace_conv", "replace_linear",
    "replacement_report", "save_adapters", "set_adapter", "sparse_normal_", "unload_adapters",
]  # fmt: skip

STRUCTURED_CLASSES: dict[str, type[StructuredLinear]] = {
    layer_class.__name__: layer_class
    for layer_class in (
        *(LDRSubdiagonal, LDRTridiagonal, ToeplitzLike, HankelLike, VandermondeLike, CauchyLike, LowRank),
        *(Monarch, Circulant, Fastfood, RandomizedHadamard, PrunedLinear),
    )
}
"""All structured classes of this package by their names; each takes the place of ``nn.Linear`` by replace_linear."""
