"""An LSTM with structured matrices."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_struct.functional.checks import check_dense, checked, is_real, positive_size
from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.nn.replace import LayerFactory, check_makes_layers, is_from_linear
from lightning_struct.nn.structured import Device, Dtype
from lightning_struct.nn.torch_modules import is_traced, whole_call

Gates = Literal["separate", "joint"]
State = tuple[Tensor, Tensor]


class StructuredLSTM(nn.Module):
    """An LSTM whose input-hidden matrices, and if asked for the hidden-hidden ones, are made by a factory.

    It is called as ``nn.LSTM``, with outputs and states as of that one, and computes the same if its matrices are the
    same: the equations of Thomas et al., Appendix F.2, with one bias in each gate where ``nn.LSTM`` has the sum of two.
    The input-hidden products of all steps are taken at once.

    Args:
        input_size: features of the inputs.
        hidden_size: h.
        factory: called as ``factory(in_features, out_features, bias=bias)`` for the input-hidden matrices, such as
            ``nn.Linear``.
        num_layers: levels; each reads the outputs of the one before.
        bias: add a vector to each gate. It belongs to the input-hidden layers.
        batch_first: inputs and outputs are (batch, steps, ...) where else they are (steps, batch, ...).
        dropout: probability for the outputs of every level but the last.
        bidirectional: a second LSTM reads the sequence backwards.
        gates: ``"separate"``: each of the four gates has a matrix (h, features), as in the paper; ``"joint"``: one
            matrix (4h, features) for all. The authors' code has ``"joint"`` with ``pad="square"``.
        hidden_factory: likewise for the hidden-hidden matrices; None: ``nn.Linear``.
        device, dtype: of the parameters.

    Raises:
        TypeError: a factory is a layer, or cannot be called so.
        ValueError: a size is not positive, ``dropout`` is no probability, ``gates`` is unknown, or a factory is a
            ``from_linear``.

    Example:
        >>> from functools import partial
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> lstm = StructuredLSTM(16, 32, partial(LDRSubdiagonal, rank=2))
        >>> outputs, (h, c) = lstm(torch.randn(7, 3, 16))
        >>> outputs.shape, h.shape
        (torch.Size([7, 3, 32]), torch.Size([1, 3, 32]))
    """

    @checked
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        factory: LayerFactory,
        *,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        gates: Gates = "separate",
        hidden_factory: LayerFactory | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        require_one_of("gates", gates, get_args(Gates))
        if not is_real(dropout) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, but is {dropout!r}")
        for given in (factory, hidden_factory or nn.Linear):
            check_makes_layers(given)
            if is_from_linear(given):
                raise ValueError("StructuredLSTM draws its matrices: give the class instead of its from_linear")
        self.input_size = positive_size("input_size", input_size)
        self.hidden_size = positive_size("hidden_size", hidden_size)
        self.num_layers = positive_size("num_layers", num_layers)
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.gates = gates
        directions = 2 if bidirectional else 1
        count, rows = (4, hidden_size) if gates == "separate" else (1, 4 * hidden_size)
        features = [input_size, *[directions * hidden_size] * (num_layers - 1)]
        self.directions = nn.ModuleList(
            _Direction(
                [factory(size, rows, bias=bias) for _ in range(count)],
                [(hidden_factory or nn.Linear)(hidden_size, rows, bias=False) for _ in range(count)],
            )
            for size in features
            for _ in range(directions)
        )
        self.to(device=device, dtype=dtype)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The outputs of all steps and the last states, as ``nn.LSTM`` gives them.

        Args:
            x: (steps, batch, input_size), or (batch, steps, input_size) if ``batch_first``, or (steps, input_size).
            state: h and c, each (levels * directions, batch, h), without the batch if x has none; None: zeros.

        Returns:
            outputs: (steps, batch, directions * h), the batch as in x; and the last h and c, shaped as ``state``.

        Raises:
            TypeError: x is a packed sequence, or ``state`` is no pair.
            ValueError: x or a state has another shape, or x has no steps.
        """
        if is_traced(x):
            return whole_call(self, x, state)
        if isinstance(x, PackedSequence):
            raise TypeError("StructuredLSTM takes no packed sequences: pad them, and mask the outputs")
        check_dense("the input x of StructuredLSTM", x)
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            taken = f"(steps, batch, {self.input_size}) or (steps, {self.input_size})"
            raise ValueError(f"StructuredLSTM takes {taken}, but the input has shape {tuple(x.shape)}")
        batched = x.dim() == 3
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        steps, batch, _ = x.shape
        if steps == 0:
            raise ValueError("StructuredLSTM needs at least one step, but the input has none")
        if state is None:
            zeros = x.new_zeros(len(self.directions), batch, self.hidden_size)
            state = zeros, zeros
        else:
            if isinstance(state, Tensor) or [isinstance(part, Tensor) for part in state] != [True, True]:
                raise TypeError("the state of StructuredLSTM is a pair (h, c), as it returns it")
            expected = (len(self.directions), *((batch,) if batched else ()), self.hidden_size)
            for name, part in zip("hc", state, strict=True):
                if part.shape != expected:
                    raise ValueError(
                        f"StructuredLSTM takes states {expected}, which are (levels * directions, batch, hidden_size) "
                        f"and without the batch if the input has none, but {name} has shape {tuple(part.shape)}"
                    )
            if not batched:
                state = state[0].unsqueeze(1), state[1].unsqueeze(1)
        width = 2 if self.bidirectional else 1
        hidden, cells = [], []
        for level in range(self.num_layers):
            outputs = []
            for index in range(level * width, (level + 1) * width):
                output, (h, c) = self.directions[index](x, (state[0][index], state[1][index]), index % width == 1)
                outputs.append(output)
                hidden.append(h)
                cells.append(c)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if level < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        last = torch.stack(hidden), torch.stack(cells)
        if not batched:
            return x.squeeze(1), (last[0].squeeze(1), last[1].squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), last

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, gates={self.gates!r}"


class _Direction(nn.Module):
    """One level of an LSTM in one direction. The gates are in the order of ``nn.LSTM``: i, f, g, o."""

    def __init__(self, input_hidden: list[nn.Module], hidden_hidden: list[nn.Module]) -> None:
        super().__init__()
        self.input_hidden = nn.ModuleList(input_hidden)
        self.hidden_hidden = nn.ModuleList(hidden_hidden)

    def forward(self, x: Tensor, state: State, backwards: bool) -> tuple[Tensor, State]:
        """The outputs (steps, batch, h) for x (steps, batch, features), and the last h and c."""
        h, c = state
        from_inputs = _side_by_side(self.input_hidden, x)
        from_hidden: Callable[[Tensor], Tensor] = partial(_side_by_side, self.hidden_hidden)
        if len(self.hidden_hidden) > 1 and all(map(_is_plain, self.hidden_hidden)):  # one product in place of four
            weights: list[Any] = [layer.weight for layer in self.hidden_hidden]
            from_hidden = partial(nn.functional.linear, weight=torch.cat(weights))
        outputs = []
        for from_input in reversed(from_inputs.unbind()) if backwards else from_inputs.unbind():
            # Appendix F.2: i, f, g, o; then c' = f * c + i * g and h' = o * tanh(c').
            i, f, g, o = (from_input + from_hidden(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs[::-1] if backwards else outputs), (h, c)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is an ``nn.Linear`` without a bias that nobody watches."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and layer.bias is None and not any(hooks)


def _side_by_side(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The outputs of all layers for x, along the last dimension."""
    return layers[0](x) if len(layers) == 1 else torch.cat([layer(x) for layer in layers], -1)
