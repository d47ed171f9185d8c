"""The sum behind the variance of section 4.3: squared norms of the gradients of single samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.per_sample.contributions import Contribution, Uncovered, squared_norms
from lightning_struct.functional.layers.probes import probe_layers
from lightning_struct.functional.layers.registry import called_layers, owned_parameters
from lightning_struct.functional.randomness import RandomState, restored_random_state
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.samples import Samples


def sum_of_squared_norms(
    module: nn.Module,
    names: Collection[str],
    samples: Samples,
    cotangent: Tensor,
    *,
    chunk_size: int | None,
    random_state: RandomState,
) -> Tensor:
    """Σᵢ‖Jᵢᵀuᵢ‖² over this process's samples, from what each layer reads and what comes back to it.

    Args:
        module: the network.
        names: names of its trained parameters.
        samples: the samples i.
        cotangent: u, row i of sample i; shaped like the outputs.
        chunk_size: samples that are evaluated at once; None for all.
        random_state: the state that random numbers start from, for the dropout masks of the linearisation.

    Returns:
        The sum, (), float64.

    Raises:
        Uncovered: some weight is used outside of the layer that owns it, or samples cannot be told apart.
    """
    parameters = {name: p for name, p in module.named_parameters() if name in names}
    name_of = {p: name for name, p in parameters.items()}
    layers = [layer for layer in called_layers(module) if owned_parameters(layer)]
    squares: list[Tensor] = []
    complete: list[Tensor] = []
    with restored_random_state(random_state):
        for args, _, rows in samples.chunks(chunk_size):
            probe = probe_layers(module, args, layers, parameters, lambda _, rows=rows: cotangent[rows])  # type: ignore[misc]
            shares: dict[str, list[Contribution]] = {name: [] for name in parameters}
            for layer, own_name, share in probe.uses:
                if (name := name_of.get(owned_parameters(layer)[own_name])) is not None:
                    shares[name].append(share)
            for name, of_parameter in shares.items():
                of_samples, is_complete = _sum_of_squares(of_parameter, probe.gradients[name])
                squares.append(of_samples)
                complete.append(is_complete)
    answers = torch.stack(complete).tolist()  # one look at the device for all
    if not all(answers):
        raise Uncovered(
            f"what the layers show of {list(parameters)[answers.index(False) % len(parameters)]} does not add up to "
            "its gradient, as where it is used outside of its layer"
        )
    return torch.stack(squares).sum()


def _sum_of_squares(shares: Sequence[Contribution], gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the squared norms of the samples' shares of one parameter's gradient, and whether these add up to it."""
    squares = squared_norms(shares).sum(dtype=torch.float64) if shares else gradient.new_zeros((), dtype=torch.float64)
    error = gradient.clone()
    for share in shares:
        error -= share.total().view_as(error)
    scale = torch.maximum(inner(gradient, gradient), 0.01 * squares)
    return squares, inner(error, error) <= torch.finfo(gradient.dtype).eps * scale
