"""RLS written down plainly: every row of every input, P as a dense matrix, one sum after the other."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence


@dataclass
class Rows:
    """What one weight multiplied: for each group (r, n); T by its denominator; and the bias that was added."""

    weight: nn.Parameter
    groups: list[Tensor]
    bias: nn.Parameter | None = None
    sequences: int | None = None


def linear_rows(layer, inputs):
    return [Rows(layer.weight, [inputs.reshape(-1, layer.in_features)], layer.bias)]


def convolution_rows(layer, inputs):
    """Every patch, by a convolution of the padded images with each place of the kernel alone."""
    dimensions = len(layer.kernel_size)
    inputs = inputs if inputs.ndim == dimensions + 2 else inputs[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if layer.padding == "same":
        totals = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        padding = [(total // 2, total - total // 2) for total in totals]
    else:
        padding = [(0, 0)] * dimensions if layer.padding == "valid" else [(p, p) for p in layer.padding]
    padded = F.pad(inputs, [p for pair in reversed(padding) for p in pair], mode)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dimensions - 1]
    n = layer.weight[0].numel()
    places = torch.eye(n, dtype=inputs.dtype).view(n, *layer.weight.shape[1:])
    groups = []
    for images in padded.chunk(layer.groups, 1):
        patches = convolve(images, places, stride=layer.stride, dilation=layer.dilation)
        groups.append(patches.flatten(2).transpose(1, 2).reshape(-1, n))
    return [Rows(layer.weight, groups, layer.bias)]


def recurrent_rows(layer, inputs, hx=None):
    """An unrolled loop over samples, levels, directions and steps."""
    if isinstance(inputs, PackedSequence):
        padded, lengths = pad_packed_sequence(inputs, batch_first=True)
        sequences = [sequence[:length] for sequence, length in zip(padded, lengths, strict=True)]
    elif inputs.ndim == 2:
        sequences = [inputs]
    else:
        sequences = list(inputs if layer.batch_first else inputs.transpose(0, 1))
    states = None if hx is None else (hx if isinstance(hx, tuple) else (hx,))
    read = {}
    directions = 2 if layer.bidirectional else 1
    for i, sequence in enumerate(sequences):
        for level in range(layer.num_layers):
            outputs = []
            for direction in range(directions):
                place = f"l{level}{'_reverse' if direction else ''}"
                number = level * directions + direction
                if states is None:
                    state = [sequence.new_zeros(layer.hidden_size) for _ in range(2)]
                else:
                    state = [s[number] if s.ndim == 2 else s[number, i] for s in states]
                steps = []
                for x in sequence.flip(0) if direction else sequence:
                    read.setdefault(f"ih_{place}", []).append(x)
                    read.setdefault(f"hh_{place}", []).append(state[0])
                    state = cell(layer, place, x, state)
                    steps.append(state[0])
                outputs.append(torch.stack(steps[::-1] if direction else steps))
            sequence = torch.cat(outputs, 1)
    return [
        Rows(
            getattr(layer, f"weight_{name}"),
            [torch.stack(rows)],
            getattr(layer, f"bias_{name}") if layer.bias else None,
            sequences=len(sequences),
        )
        for name, rows in read.items()
    ]


def cell(layer, place, x, state):
    """One step of one direction: h, and for an LSTM c."""
    h = state[0]
    biases = [getattr(layer, f"bias_{kind}_{place}") if layer.bias else 0 for kind in ("ih", "hh")]
    of_input = getattr(layer, f"weight_ih_{place}") @ x + biases[0]
    of_state = getattr(layer, f"weight_hh_{place}") @ h + biases[1]
    if layer.mode == "LSTM":
        i, f, g, o = (of_input + of_state).chunk(4)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if layer.mode == "GRU":
        (r, z, n), (r_h, z_h, n_h) = of_input.chunk(3), of_state.chunk(3)
        r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
        return [(1 - z) * (n + r * n_h).tanh() + z * h]
    return [(of_input + of_state).relu() if layer.mode == "RNN_RELU" else (of_input + of_state).tanh()]


ROWS = [
    (nn.RNNBase, recurrent_rows),
    (nn.Linear, linear_rows),
    (nn.Module, convolution_rows),
]


@contextmanager
def recorded_rows(module):
    """What all layers read while the context is open."""
    rows = []

    def hook(layer, args, kwargs, outputs):
        function = next(function for kind, function in ROWS if isinstance(layer, kind))
        with torch.no_grad():
            rows.extend(function(layer, *args, **kwargs))

    layers = (nn.RNNBase, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in module.modules() if isinstance(m, layers)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Reference:
    """The optimizer in its plainest form; all weights are trained."""

    ratio: float = 0.1
    forgetting: float = 1.0
    gradient_scale: float = 1.0
    momentum: float = 0.0
    l1: float = 0.0
    matrices: dict[tuple[nn.Parameter, int], Tensor] = field(default_factory=dict)
    velocities: dict[tuple[nn.Parameter, int], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, *passes):
        """By what was read before each backward pass since the last step."""
        uses = {}
        samples = {}
        for read in passes:
            largest = {}
            for rows in read:
                uses.setdefault(rows.weight, []).append(rows)
                sequences = len(rows.groups[0]) if rows.sequences is None else rows.sequences
                largest[rows.weight] = max(sequences, largest.get(rows.weight, 0))
            for weight, number in largest.items():
                samples[weight] = samples.get(weight, 0) + number
        old = {}
        for weight, of_weight in uses.items():
            biases = list(dict.fromkeys(use.bias for use in of_weight if use.bias is not None))
            groups = len(of_weight[0].groups)
            for g in range(groups):
                old[(weight, g)] = self._group(weight, g, groups, of_weight, biases, samples[weight])
        for write in old.values():
            write()

    def _group(self, weight, g, groups, uses, biases, samples):
        rows = []
        for use in uses:
            ones = torch.zeros(len(use.groups[g]), len(biases), dtype=weight.dtype)
            if use.bias is not None:
                ones[:, [bias is use.bias for bias in biases].index(True)] = 1
            rows.append(torch.cat([use.groups[g], ones], 1))
        X = torch.cat(rows)
        T = sum(len(use.groups[0]) for use in uses) / samples
        outputs = len(weight) // groups
        mine = slice(g * outputs, (g + 1) * outputs)

        def joined(get):
            return torch.cat([get(weight)[mine].reshape(outputs, -1), *(get(b)[mine][:, None] for b in biases)], 1)

        theta, gradient = joined(lambda p: p.detach()), joined(lambda p: p.grad)
        P = self.matrices.setdefault((weight, g), torch.eye(X.shape[1], dtype=X.dtype))
        xbar = X.mean(0)
        u = P @ xbar
        h = self.forgetting + self.ratio * T * xbar @ u
        omega = self.velocities.get((weight, g), torch.zeros_like(theta))
        omega = self.momentum * omega - self.gradient_scale / h * gradient @ P
        theta = theta + omega
        P = P / self.forgetting - self.ratio * T / (self.forgetting * h) * torch.outer(u, u)
        theta = theta - self.l1 * theta.sign() @ P
        self.matrices[(weight, g)], self.velocities[(weight, g)] = P, omega

        def write():
            n = theta.shape[1] - len(biases)
            weight.data[mine] = theta[:, :n].reshape(outputs, *weight.shape[1:])
            for j, bias in enumerate(biases):
                bias.data[mine] = theta[:, n + j]

        return write
