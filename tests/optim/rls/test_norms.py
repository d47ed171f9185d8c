"""The norms that a step takes together, against those of each tensor by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_struct.optim import RLS
from lightning_struct.optim.rls.all_weights import step_norms


def test_norms_are_those_of_each_tensor_whatever_its_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    optimizer = RLS(module)
    module(torch.randn(5, 3)).square().sum().backward()
    module[2].weight.grad = None
    module[2].double().weight.grad = torch.randn(2, 4, dtype=torch.float64)
    means = {weight: weight.statistics.mean() for weight in optimizer._weights}
    norms = step_norms(module.parameters(), means)
    assert list(norms.gradients) == list(module.parameters())
    for parameter, norm in norms.gradients.items():
        assert parameter.grad is not None
        assert norm == pytest.approx(parameter.grad.norm().item())
    first, last = optimizer._weights
    assert norms.thetas[first] == pytest.approx(math.hypot(*(p.detach().norm() for p in module[0].parameters())))
    assert norms.thetas[last] == pytest.approx(module[2].weight.norm().item())
    assert norms.means[first] == pytest.approx(means[first].norm().item())
    assert norms.gradient_of(last) == pytest.approx(norms.gradients[module[2].weight])


def test_of_a_bias_that_is_part_of_a_parameter_only_the_part_counts() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)
    nn.init.normal_(module.in_proj_bias)
    optimizer = RLS(module)
    module(torch.randn(2, 3, 4), torch.randn(2, 3, 3), torch.randn(2, 3, 5))[0].square().sum().backward()
    means = {weight: weight.statistics.mean() for weight in optimizer._weights}
    norms = step_norms(module.parameters(), means)
    (query,) = (weight for weight in means if weight.name == "q_proj_weight")
    parts = module.q_proj_weight.detach(), module.in_proj_bias.detach()[:4]
    assert norms.thetas[query] == pytest.approx(math.hypot(*(part.norm() for part in parts)))


def test_sparse_gradients_of_the_auxiliary_optimizer_are_taken() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1, 2, 2])).sum().backward()
    norms = step_norms(embedding.parameters(), {})
    assert list(norms.gradients.values()) == pytest.approx([math.sqrt(3 + 3 * 4)])
    assert norms.is_finite()
