"""Recursive least squares as a layer-wise optimizer (Zhang et al., Algorithms 1 and 2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_struct.collective import world_size
from lightning_struct.functional.layers.registry import excluded_modules
from lightning_struct.optim.memory import bytes_as_text, table
from lightning_struct.optim.requirements import (
    WEIGHTS_ALONE,
    check_module,
    check_optimizer_state,
    hidden_parameters,
    refuse_distributed_tensors,
    warn_of_hidden,
)
from lightning_struct.optim.rls.all_weights import (
    check_finite,
    check_inverses_fit,
    gains_to_limit,
    mark_as_stepped,
    mean_inputs,
    reduce_statistics,
    step_norms,
)
from lightning_struct.optim.rls.gain_limit import SINGLE
from lightning_struct.optim.rls.groups import AuxiliaryFactory, OptimizerWithAuxiliary, is_own
from lightning_struct.optim.rls.layers import layers_to_train
from lightning_struct.optim.rls.recorder import InputRecorder, without_autocast
from lightning_struct.optim.rls.settings import (
    LARGEST_FULL,
    FormName,
    LowRankP,
    Settings,
    check_decay,
)
from lightning_struct.optim.rls.weights import StepBounds, TrainedWeight

_log = logging.getLogger(__name__)


class RLS(OptimizerWithAuxiliary):
    """Recursive least squares: multiplies each layer's gradient by P, the inverse autocorrelation of its inputs so far.

    For each weight θ, with x̄ the mean of the rows that it was multiplied by since the last step, and T the rows of a
    sample (the mean length of sequences in recurrent layers, else 1, times the uses of the weight before one backward
    pass)::

        u = P x̄        h = λ + kT x̄·u        ω ← αω - (η/h) P ∇        θ ← θ + ω
        P ← P/λ - kT/(λh) u uᵀ               θ ← θ - γ P sgn(θ)

    Unlike Adam, it depends on the scale of the loss. If RLS trains all layers, the loss must be ½‖outputs - targets‖²,
    averaged over samples; this is not ``nn.MSELoss``. With the cross-entropy, leave the output layer to Adam::

        RLS(model, exclude=[model.head], auxiliary=functools.partial(torch.optim.Adam, lr=1e-3))

    It is an ordinary optimizer: in Lightning, return ``RLS(self, auxiliary=...)`` from ``configure_optimizers``. Hooks
    record the inputs of the layers in forward passes that are differentiated. Gradients and inputs add up until the
    next step; clearing the gradients clears the inputs, too. Make the optimizer before a compiled module is first
    called. Under torch.distributed all processes take one step, by the mean over all inputs and the gradients; these
    must be averaged already, as DDP does.

    Each group of ``param_groups`` that RLS trains has ``gradient_scale`` η and ``lr``, which multiplies its steps and
    which schedulers change. The groups of the auxiliary optimizer follow, each with its own rate. Layers that are
    unfrozen later are trained from their next call on, and may be added as groups. ``state["rls"]`` has P, the velocity
    and the number of steps of each weight by its name.

    Args:
        module: the module to train. Below it, RLS trains ``nn.Linear``, ``nn.Conv1d`` to ``3d``,
            ``nn.ConvTranspose1d`` to ``3d``, ``nn.RNN``, ``nn.LSTM``, ``nn.GRU``, and layers that
            :func:`~lightning_struct.functional.register_layer` declares to be like one of them.
        ratio: k > 0.
        forgetting: λ in (0, 1]. Below 1 the growth of P is bounded, see
            :class:`~lightning_struct.functional.curvature.recursive_least_squares.SquareRootInverse`.
        gradient_scale: η > 0; or a dict of values by the names of modules, for all layers below them, or of weights.
            The longest matching name counts; without a match η is 1.
        momentum: α in [0, 1).
        l1: γ >= 0; each step takes about twice as long with it.
        max_grad_norm: bound on the norm of all gradients together, with the auxiliary optimizer's. For
            layers that RLS trains, only the step is scaled; their gradients stay as they are.
        form: form of P. ``"full"``: d² numbers for d inputs, as in the paper; ``"low_rank"``: 2rd numbers, with r = 32;
            ``"rank1"``: d numbers. :class:`LowRankP` sets r. None: full up to 512 inputs (and with ``forgetting`` < 1),
            else low-rank.
        exclude: modules, or their full names, that ``auxiliary`` trains, with everything below them.
        auxiliary: function that makes the optimizer of all other parameters from a list of them, such as
            ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        max_gain: c > 0. The step of each weight is scaled so that in no direction it changes the weight's outputs for
            the inputs of the batch by more than about c times the gradient in them; 2 is the limit of stability of a
            layer that steps alone. If several weights step together, their steps are then three times as long. A
            step changes each weight by at most a twentieth of its norm, except in a module that is a single layer;
            half of c counts there. See :mod:`~lightning_struct.optim.rls.gain_limit`.
            None: the paper's steps, which are not bounded and need inputs in [0, 1], or clipping.
        weight_decay: δ >= 0, decoupled: each step begins with θ ← (1 - lr·δ) θ, with lr·δ < 1.
        lr: factor of the step, which schedulers change. With a value above 1, steps may exceed the bounds by that
            factor.

    Raises:
        ValueError: an argument is out of range or of another type; ``exclude`` or ``gradient_scale`` has a name that
            is not in the module; parameters are trained by neither RLS nor ``auxiliary``, or ``auxiliary`` takes others
            than those it is given; weights are neither float32 nor float64, not initialised yet, or spread over
            processes (FSDP2); there is nothing to train.
        TypeError: ``module`` is not a module (for instance a list of parameters); ``exclude`` has something else than
            modules and names; ``auxiliary`` is no function, or makes no optimizer or an ``LBFGS``.
        MemoryError: the matrices P do not fit into the free memory.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = RLS(model, momentum=0.5)
        >>> inputs, targets = torch.randn(8, 3), torch.randn(8, 2)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     loss = (model(inputs) - targets).square().sum() / (2 * len(inputs))
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        ratio: float = 0.1,
        forgetting: float = 1.0,
        gradient_scale: float | Mapping[str, float] = 1.0,
        momentum: float = 0.0,
        l1: float = 0.0,
        max_grad_norm: float | None = None,
        form: FormName | LowRankP | None = None,
        exclude: Sequence[str | nn.Module] = (),
        auxiliary: AuxiliaryFactory | None = None,
        max_gain: float | None = 2.0,
        weight_decay: float = 0.0,
        lr: float = 1.0,
    ) -> None:
        check_module(module, "RLS", "whose layers it watches")
        settings = Settings(
            ratio=ratio, forgetting=forgetting, gradient_scale=gradient_scale, momentum=momentum, l1=l1,
            max_grad_norm=max_grad_norm, form=form, max_gain=max_gain, weight_decay=weight_decay, lr=lr,
        )  # fmt: skip
        settings.check_names(module)
        excluded = excluded_modules(module, exclude)
        refuse_distributed_tensors(dict(module.named_parameters()), "P needs")
        recorder = InputRecorder(layers_to_train(module, excluded), settings)
        left_alone = {parameter for below in excluded for parameter in below.parameters(recurse=False)}
        super().__init__(module, left_alone, recorder, settings, auxiliary)
        text = f"RLS takes {self._memory()} for P; weights that it trains: {len(self._weights)}"
        if form is None and (low_rank := [weight.blank.form for weight in self._weights].count("low_rank")):
            text += (
                f"; {low_rank} with more than {LARGEST_FULL:,} inputs have the low-rank form (form='full' for the "
                "exact one)"
            )
        _log.info(text)

    def summary(self) -> str:
        """Table of the trained weights, with the form and size of P and the memory that it takes."""
        rows = [("weight", "form", "P", "memory")]
        for weight in self._weights:
            shape = weight.blank.main[1].shape
            size = " x ".join(map(str, shape[shape[0] == 1 :]))
            rows.append((weight.name, weight.blank.form, size, bytes_as_text(weight.memory)))
        return table([*rows, ("total", "", "", self._memory())])

    def remove_hooks(self) -> None:
        """Take the hooks of the layers away, when the training is done. They go too when the optimizer is deleted.

        ``torch.jit.script`` cannot compile a module with these hooks.
        """
        self._recorder.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the inputs of the layers that belong to them."""
        super().zero_grad(set_to_none)
        self._recorder.forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every layer that has a gradient, and of the auxiliary optimizer.

        Args:
            closure: called once before, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            ValueError: NaN or infinity in gradients or inputs, or a layer with a gradient whose inputs were not seen:
                the message names the step and the weights. Or ``lr`` was raised to 1/``weight_decay`` or above. No
                weight and no state has changed; the gradients have if others clipped them.
        """
        if torch.compiler.is_compiling():  # a compiler cannot trace how a step writes to the weights
            return torch.compiler.disable(self.step)(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        try:
            # A state that is made in inference mode could never be changed outside of it.
            device = self._weights[0].parameter.device.type
            with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
                clip = self._step_weights()
        except ValueError:
            self._recorder.forget()
            raise
        if self.auxiliary is not None:
            if self.settings.max_grad_norm is not None:
                for parameter in _parameters(self.auxiliary.param_groups):
                    if parameter.grad is not None:
                        parameter.grad.mul_(clip)
            self.auxiliary.step()
        return result

    def _step_weights(self) -> float:
        """Step the weights that RLS trains; returned is the coefficient of clipping."""
        self._take_in_rest()
        group_of = self._share_groups()
        for group in group_of.values():
            check_decay(group["lr"], group["weight_decay"])  # schedulers may have raised the rate since
        if world_size() > 1:
            reduce_statistics(self._weights)
        states = self.state.get("rls", {})  # type: ignore[call-overload]
        number = 1 + max((state["steps"] for state in states.values()), default=0)
        means = mean_inputs(group_of, number)
        if not means:
            self._check_parameters()
        norms = step_norms(_parameters(self.param_groups), means)
        check_finite(self.module, norms, means, number)
        if number == 1:
            hidden = hidden_parameters(self.module).items()
            warn_of_hidden([name for name, parameter in hidden if parameter.grad is not None], "RLS")
        of_weights = {weight: self._state_of(weight) for weight in means}
        clip, max_gain = norms.clip_coefficient(self.settings.max_grad_norm), self.settings.max_gain
        # A module that is one layer, and has read one row of each sample, takes the steps of a regression.
        is_regression = len(means) == 1 and all(
            not w.statistics.positions and {*self.module.parameters()} <= {*w.parameters} for w in means
        )
        if max_gain is not None:
            max_gain *= SINGLE if is_regression else 1.0
        gains = {} if max_gain is None else gains_to_limit(of_weights, max_gain)
        for weight, mean in means.items():
            bounds = StepBounds(clip, max_gain, len(means), gains.get(weight))
            if max_gain is not None and not is_regression:
                bounds = bounds._replace(norms=(norms.thetas[weight], norms.gradient_of(weight)))
            weight.step_(of_weights[weight], mean, group_of[weight], bounds)
            for parameter in weight.parameters:
                if parameter.grad is not None:
                    mark_as_stepped(parameter.grad)
        self._recorder.end_step()
        return clip

    @property
    def _weights(self) -> list[TrainedWeight]:
        return self._recorder.weights

    def _memory(self) -> str:
        return bytes_as_text(sum(weight.memory for weight in self._weights))

    # --- state -------------------------------------------------------------------------------------------------------

    def _state_of(self, weight: TrainedWeight) -> dict[str, Any]:
        """P, velocity and steps of a weight. Under a string key: torch casts what is stored under a parameter."""
        states = self.state.setdefault("rls", {})  # type: ignore[call-overload]
        if not states:
            check_inverses_fit(self._weights)  # the module may have moved to another device since
        if weight.name not in states:
            states[weight.name] = weight.initial_state()
        elif not weight.holds(states[weight.name]):  # the module was moved or converted since
            states[weight.name] = weight.converted(states[weight.name])
        return states[weight.name]

    def state_dict(self) -> dict[str, Any]:
        """The state, as of any optimizer, with the auxiliary optimizer's under ``"auxiliary"``."""
        state = super().state_dict()
        if self.auxiliary is not None:
            state["auxiliary"] = self.auxiliary.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, exactly, counters as integers; in weights of another precision P takes theirs.

        Raises:
            ValueError: it is of another optimizer, or of other layers, forms of P or parameter groups. Nothing has
                changed.
        """
        self._share_groups()
        check_optimizer_state(state_dict)
        saved = state_dict["state"].get("rls", {})
        weights = {weight.name: weight for weight in self._weights}
        for name, state in saved.items():
            if name in weights and state:
                weights[name].check_state(state)
        if unknown := ", ".join(sorted(saved.keys() - weights.keys())):
            raise ValueError(
                f"the state is of an RLS that trains {unknown}, which this one does not: make it with the same layers "
                "excluded, and unfreeze the same layers before (attention and cells are trained by auxiliary alone)"
            )
        if list(map(is_own, state_dict["param_groups"])) != list(map(is_own, self.param_groups)):
            raise ValueError(
                "the state is of another optimizer than RLS, or of one with other groups: load it into an RLS that is "
                f"made as the one that was saved, with the groups that were added since. {WEIGHTS_ALONE}"
            )
        if ("auxiliary" in state_dict) != (self.auxiliary is not None):
            raise ValueError(
                "the state is of an RLS with an auxiliary optimizer, and this one has none, or the reverse"
            )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "auxiliary"})
        if self.auxiliary is not None:
            self.auxiliary.load_state_dict(state_dict["auxiliary"])
        self._share_groups()
        # Torch takes over the tensors under a string key as they are: they are the caller's.
        if saved:
            self.state["rls"] = {name: weights[name].converted(state) for name, state in saved.items()}  # type: ignore[index]


def _parameters(groups: list[dict[str, Any]]) -> Iterator[nn.Parameter]:
    return (parameter for group in groups for parameter in group["params"])
