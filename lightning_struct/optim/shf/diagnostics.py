"""Warnings of SHF, and its refusals of modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import warn
from lightning_struct.functional.jacobian.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    SquaredError,
    derivative_error,
    transpose_error,
)
from lightning_struct.functional.layers.calls import tensors_in
from lightning_struct.functional.randomness import isolated_host_generators, restored_random_state
from lightning_struct.functional.torch_tools import call_with
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.requirements import (
    LOWER_PRECISION,
    hidden_parameters,
    refuse_distributed_tensors,
    refuse_lazy,
    warn_of_hidden,
)

if TYPE_CHECKING:
    from lightning_struct.optim.shf.outputs.batch_model import BatchModel

# S r of a loss differs by more than this share from the derivative of its value: a warning.
_LARGEST_DERIVATIVE_ERROR = 0.01
# The outputs of two calls differ by more than this share, or uᵀJ Jᵀu from ‖Jᵀu‖²: a warning. Autocast to bfloat16 stays
# below.
_LARGEST_CHANGE = 0.05
# Substitute for a zero denominator.
_TINY = 1e-300


class Diagnostics:
    """The warnings of one optimizer, each given once.

    Args:
        module: the network.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._warned: set[Any] = set()

    def once(self, about: Any, message: str) -> None:
        """Warn, unless a warning about the same has been given."""
        if self._is_first(about):
            warn(message)

    def _is_first(self, about: Any) -> bool:
        first = about not in self._warned
        self._warned.add(about)
        return first

    def check_loss(self, model: BatchModel) -> None:
        """Warn of a loss of the user's own whose parts do not belong together."""
        loss = model.loss
        if type(loss) in (SquaredError, CrossEntropy, BinaryCrossEntropy) or not self._is_first(id(loss)):
            return
        error = derivative_error(loss, model.outputs, model.targets)
        if error > _LARGEST_DERIVATIVE_ERROR:
            warn(
                f"SHF: sqrt_hessian of the residual, S r, differs by {error:.0%} from the derivative of the value of "
                f"{type(loss).__name__}. S r must be the derivative of each sample's loss in its outputs, and the "
                "value the mean over samples; else steps and their measure belong to different losses"
            )
        error = transpose_error(loss, model.outputs, model.targets)
        if error > _LARGEST_DERIVATIVE_ERROR:
            warn(
                f"SHF: sqrt_hessian_transpose of {type(loss).__name__} is not the transpose of its sqrt_hessian: "
                f"Sᵀv differs by {error:.0%} from autograd's derivative of S. The curvature of the model is then wrong"
            )

    def check_calls(self, model: BatchModel) -> None:
        """Warn of a module that has a state between calls, or is differentiated wrongly."""
        if model.linearization.backend == "layer_rules" or not self._is_first("calls"):  # the rules know these layers
            return
        change, error = change_by_repetition(model), product_error(model)
        if change > _LARGEST_CHANGE:
            warn(
                "SHF: a step calls the module several times, and its outputs change from call to call, with the same "
                f"weights, inputs and random numbers of torch, by {change:.0%}: the losses of a step cannot be "
                "compared. Keep the state of a forward for the next one, such as a hidden state, in a buffer "
                "(register_buffer), and draw random numbers from torch"
            )
        if error > _LARGEST_CHANGE:
            warn(
                "SHF: products with the Jacobian J of the outputs are wrong, for instance because the backward of a "
                "torch.autograd.Function has no derivative (once_differentiable, detach or numpy): uᵀJ Jᵀu "
                f"differs from ‖Jᵀu‖² by {error:.0%}. Write that backward in differentiable operations of torch"
            )

    def check_untrained(self, weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor], args: Any) -> None:
        """Warn of parameters with a gradient of zero whose layers are called with gradients turned off, and never else.

        So it is within re-entrant activation checkpointing, whose backward pass reaches the inputs that are asked for
        and no weights. The module is called once more if a gradient is zero.

        Args:
            weights: name -> the trained weights, detached.
            gradient: name -> the gradient of a batch in them.
            args: of the module.
        """
        self._check_hidden(weights, args)
        suspects = [name for name, part in gradient.items() if not part.any()]
        if not suspects:
            return
        owners = {name: self._module.get_submodule(name.rpartition(".")[0]) for name in suspects}
        modes: dict[nn.Module, set[bool]] = {layer: set() for layer in owners.values()}

        def note(layer: nn.Module, args: Any) -> None:
            modes[layer].add(torch.is_grad_enabled())

        handles = [layer.register_forward_pre_hook(note) for layer in modes]
        try:
            with torch.enable_grad(), isolated_host_generators():
                call_with(self._module, {name: w.detach().requires_grad_() for name, w in weights.items()}, args)
        finally:
            for handle in handles:
                handle.remove()
        names = [name for name, layer in owners.items() if modes[layer] == {False}]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            warn(
                f"SHF does not train {', '.join(names[:4])}{more}: no gradient comes back to these parameters, whose "
                "layers are called with gradients turned off. For activation checkpointing take checkpoint(..., "
                "use_reentrant=False); freeze layers that are not to be trained by requires_grad_(False)"
            )

    def _check_hidden(self, weights: Mapping[str, Tensor], args: Any) -> None:
        """Warn of tensors that the forward uses and that are not among the parameters of the module."""
        hidden = hidden_parameters(self._module)
        if not hidden:
            return
        with torch.enable_grad(), isolated_host_generators():
            outputs = [t for t in tensors_in(call_with(self._module, dict(weights), args)) if t.requires_grad]
            gradients = (
                torch.autograd.grad([t.sum() for t in outputs], list(hidden.values()), allow_unused=True)
                if outputs
                else [None] * len(hidden)
            )
        warn_of_hidden([name for name, g in zip(hidden, gradients, strict=True) if g is not None], "SHF")


def change_by_repetition(model: BatchModel) -> float:
    """Share by which another forward at w, with the same random numbers, differs from the outputs of the model."""
    args, _, rows = next(model.rows.chunks(model.settings.chunk_size))
    outputs = model.outputs[rows]
    with restored_random_state(model.random_state):
        change = call_with(model.module, model.weights.by_name, args).to(outputs) - outputs
    return math.sqrt(inner(change, change).item() / max(inner(outputs, outputs).item(), _TINY))


def product_error(model: BatchModel) -> float:
    """Share of ‖Jᵀu‖² by which uᵀJ Jᵀu differs from it, for random signs u; on this process.

    If the second derivative is lost behind a layer, it is the share of the parameters before it.
    """
    signs = model.random_signs(0)
    product = model.linearization.vjp(signs)
    squares = sum(inner(part, part).item() for part in product.values())
    error = abs(inner(signs, model.linearization.jvp(product).to(signs.dtype)).item() - squares)
    return error / max(squares, _TINY)


def check_parameters(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for a module, or trained parameters, that SHF cannot train."""
    scripted = [
        name or "the module" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    if scripted:
        raise ValueError(
            f"SHF calls the module with other weights, which TorchScript does not allow: {scripted[0]} is scripted or "
            "traced. Give SHF the module as it is in Python; script it once it is trained"
        )
    refuse_lazy(named, "SHF")
    if not named:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient: give SHF the module that it is to "
            "train, or unfreeze the weights by requires_grad_()"
        )
    sparse = [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]
    if sparse:
        raise ValueError(
            f"SHF needs dense gradients, and those of {', '.join(sparse)} are sparse: make it with sparse=False, or "
            "freeze it"
        )
    rescaled = [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and part.weight.requires_grad
    ]
    if rescaled:
        raise ValueError(
            f"SHF compares losses of the same weights, and the forward of {', '.join(rescaled)} rescales its own: make "
            "it without max_norm, and rescale the weight between steps, as by torch.renorm; or freeze it"
        )
    refuse_distributed_tensors(named, "the factors and the Jacobian products need")
    if numbers := [name for name, p in named.items() if p.is_complex()]:
        raise ValueError(
            f"SHF needs real weights, and these are complex: {', '.join(numbers[:3])}. Hold real and "
            "imaginary parts in a real parameter (..., 2), and make the complex one of it by torch.view_as_complex"
        )
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"SHF needs all weights in float32 or all in float64, got {', '.join(sorted(map(str, dtypes)))}; "
            f"{LOWER_PRECISION}"
        )
    if len({p.device for p in named.values()}) > 1:
        places = ", ".join(f"{name} -> {p.device}" for name, p in named.items())
        raise ValueError(f"SHF needs all weights on one device, got {places}; move the module by module.to(device)")
