"""Attention layers measured through the products that they compute inside."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_struct.functional import GradientNormRecorder, per_sample_gradient_norms

SEQUENCES, WIDTH = 5, 6
SAME = (WIDTH, WIDTH)


class Attention(nn.Module):
    """One attention layer; ``reads`` names which of three tensors are its query, key and value."""

    def __init__(self, reads="xxx", widths=SAME, **options):
        super().__init__()
        torch.manual_seed(0)
        kdim, vdim = widths
        self.layer = nn.MultiheadAttention(WIDTH, 2, kdim=kdim, vdim=vdim, dtype=torch.float64, **options)
        self.reads, self.batch_first, self.need_weights = reads, options.get("batch_first", False), False
        self.attn_mask = None

    def forward(self, padding=None, **tensors):
        parts = [tensors[name] if self.batch_first else tensors[name].transpose(0, 1) for name in self.reads]
        distinct = {name: part for name, part in zip(self.reads, parts, strict=True)}
        masks = {"key_padding_mask": padding, "attn_mask": self.attn_mask}
        output, weights = self.layer(*(distinct[name] for name in self.reads), need_weights=self.need_weights, **masks)
        output = output if self.batch_first else output.transpose(0, 1)
        flat = output.tanh().flatten(1).sum(1)
        return flat if weights is None else flat + weights.square().flatten(1).sum(1)


def tensors(widths=SAME):
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (4, WIDTH), "k": (3, widths[0]), "v": (3, widths[1])}
    return {
        name: torch.randn(SEQUENCES, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def of_autograd(model, inputs):
    norms = []
    for i in range(SEQUENCES):
        loss = model(**{name: tensor[i : i + 1] for name, tensor in inputs.items()}).sum()
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        norms.append(sum(gradient.square().sum() for gradient in gradients))
    return torch.stack(norms)


def of_recorder(model, inputs):
    with per_sample_gradient_norms(model) as norms:
        model(**inputs).sum().backward()
    return norms.squared_norms


@pytest.mark.covering(2)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("reads", "widths"), [("xxx", SAME), ("xkk", SAME), ("xkv", SAME), ("kxx", SAME), ("xkv", (3, 7))]
)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}])
def test_norms_are_those_of_per_sample_autograd(reads, widths, bias, batch_first, need_weights, options):
    model, inputs = Attention(reads, widths, bias=bias, batch_first=batch_first, **options), tensors(widths)
    model.need_weights = need_weights
    torch.testing.assert_close(of_recorder(model, inputs), of_autograd(model, inputs), rtol=1e-10, atol=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("attn_mask", [None, "causal", "biases"])
def test_masks_may_hide_keys(attn_mask, padded, need_weights):
    model, inputs = Attention("xkv"), tensors()
    model.need_weights = need_weights
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model.attn_mask = {None: None, "causal": torch.ones(4, 3, dtype=torch.bool).triu(1), "biases": scores}[attn_mask]
    if padded:
        hidden = torch.arange(3)[None] >= torch.tensor([3, 2, 1, 3, 2])[:, None]
        biases = torch.zeros(SEQUENCES, 3, dtype=torch.float64).masked_fill(hidden, -torch.inf)
        inputs["padding"] = biases if attn_mask == "biases" else hidden
    torch.testing.assert_close(of_recorder(model, inputs), of_autograd(model, inputs), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_frozen_parameters_do_not_count(name):
    model, inputs = Attention("xkv"), tensors()
    model.layer.get_parameter(name).requires_grad_(False)
    torch.testing.assert_close(of_recorder(model, inputs), of_autograd(model, inputs), rtol=1e-10, atol=0)


def test_learned_rows_behind_keys_and_values_are_not_covered():
    model = Attention(add_bias_kv=True)
    with GradientNormRecorder(model, uncovered="skip") as recorder:
        model(**tensors()).sum().backward()
    assert recorder.uncovered.keys() == {"layer.bias_k", "layer.bias_v"} and len(recorder.results()) == 4


def test_dropout_needs_no_second_run():
    model, inputs = Attention(dropout=0.5), tensors()
    with GradientNormRecorder(model, check=True) as recorder:
        model(**inputs).sum().backward()
        recorder.verify()
    assert recorder.uncovered == {} and len(recorder.results()) == 4


def test_a_layer_that_is_called_twice_has_its_cross_terms():
    class Twice(Attention):
        def forward(self, **tensors):
            return super().forward(**tensors) + super().forward(**{n: t.flip(1) for n, t in tensors.items()})

    model, inputs = Twice(), tensors()
    torch.testing.assert_close(of_recorder(model, inputs), of_autograd(model, inputs), rtol=1e-10, atol=0)


def test_several_sequences_may_be_one_sample():
    model, inputs = Attention(batch_first=True), tensors()
    inputs = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in inputs.items()}
    with GradientNormRecorder(model, samples=3) as recorder:
        model(**inputs).sum().backward()
    measured = sum(norms.squared_norms[0] for norms in recorder.results())
    expected = []
    for i in range(3):
        loss = model(**{name: tensor[2 * i : 2 * i + 2] for name, tensor in inputs.items()}).sum()
        expected.append(sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(measured, torch.stack(expected), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 2, WIDTH), "4 sequences, which is no multiple of 3 samples"), ((4, WIDTH), "without a batch dimension")],
)
def test_sequences_that_are_not_samples_are_not_covered(shape, message):
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with GradientNormRecorder(layer, samples=3, uncovered="skip") as recorder:
        layer(*3 * [torch.randn(shape)])[0].sum().backward()
    assert message in recorder.uncovered["in_proj_weight"]


def test_torch_is_as_it_was_after_a_call_that_failed():
    linear, layer = F.linear, nn.MultiheadAttention(WIDTH, 2)
    with GradientNormRecorder(layer), pytest.raises(AssertionError):
        layer(*3 * [torch.randn(2, 3, WIDTH + 1)])
    assert F.linear is linear


def test_threads_do_not_see_each_others_calls():
    models = [Attention(), copy.deepcopy(Attention("xkv"))]
    expected, measured = [of_autograd(model, tensors()) for model in models], {}
    gate = threading.Barrier(2)

    def run(i):
        gate.wait()
        for _ in range(20):
            models[i].zero_grad()
            measured.setdefault(i, []).append(of_recorder(models[i], tensors()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    linear = F.linear
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.linear is linear
    for i in range(2):
        for norms in measured[i]:
            torch.testing.assert_close(norms, expected[i], rtol=1e-10, atol=0)
