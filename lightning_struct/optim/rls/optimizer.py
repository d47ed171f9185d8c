"""Recursive least squares as a layer-wise optimizer (Zhang et al., Algorithms 1 and 2)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_struct.collective import world_size
from lightning_struct.functional.layers import excluded_modules, plain_name, plain_named_modules
from lightning_struct.optim.memory import as_text
from lightning_struct.optim.pickling import state_without_hooks
from lightning_struct.optim.rls.all_weights import gain_limits, not_finite
from lightning_struct.optim.rls.gain_limit import LARGEST_CHANGE
from lightning_struct.optim.rls.memory import check_memory, summary_table
from lightning_struct.optim.rls.recorder import InputRecorder, without_autocast
from lightning_struct.optim.rls.selection import (
    WeightTable,
    affine_layers,
    layers_to_train,
    only_linear_layer,
    refuse_distributed_tensors,
)
from lightning_struct.optim.rls.settings import GradientScales, InverseSettings, check_options
from lightning_struct.optim.rls.state import check_states, on_device, reduce_statistics, refuse_rows_of_processes
from lightning_struct.optim.rls.weights import InverseForm, TrainedWeight

AuxiliaryFactory = Callable[[list[Any]], torch.optim.Optimizer]

_log = logging.getLogger(__name__)


class RLS(torch.optim.Optimizer):
    """Recursive least squares: P, the inverse autocorrelation of a layer's inputs so far, multiplies its gradient.

    For each weight, with x̄ the mean of what it was multiplied by since the last step and T the mean length of sequences (1
    but for recurrent layers)::

        u = P x̄        h = λ + kT x̄·u        ω ← αω - (η/h) P ∇        θ ← θ + ω
        P ← P/λ - kT/(λh) u uᵀ               θ ← θ - γ P sgn(θ)

    Unlike Adam it depends on the scale of the loss: with all layers trained by RLS that is ½‖outputs - targets‖² averaged
    over samples, which is not ``nn.MSELoss``. With cross-entropy leave the output layer to Adam::

        RLS(model, exclude=[model.head], auxiliary=functools.partial(torch.optim.Adam, lr=1e-3))

    It is an ordinary optimizer: in Lightning ``return RLS(self, auxiliary=...)`` from ``configure_optimizers``. What the
    layers read is seen by hooks, in forward passes through which gradients come back; gradients and inputs add up until the
    next step; whoever clears the gradients clears what was read with them. Make it before a compiled module is first called. Under torch.distributed all processes take one step, by the
    mean over all inputs and the gradients, which must be averaged already, as DDP does.

    Each group of ``param_groups`` that RLS trains has ``gradient_scale`` η and ``lr``, by which its steps are multiplied: schedulers of
    the learning rate act on that. The groups of the auxiliary optimizer follow, each with a level of its own. Layers that are
    unfrozen later are trained from their next call on, and may be added as groups. ``state["rls"]`` has P, the velocity and
    the number of steps of each weight by its name.

    Args:
        module: below it, ``nn.Linear``, ``nn.Conv1d`` to ``3d``, ``nn.ConvTranspose1d`` to ``3d``, ``nn.RNN``, ``nn.LSTM``,
            ``nn.GRU``, their cells and the projections of ``nn.MultiheadAttention`` are trained by RLS, and layers that
            :func:`~lightning_struct.functional.register_layer` declares to be like one of them.
        lr: the factor of the step that schedulers change. Above 1 a step may exceed the bounds by as much.
        ratio: k > 0.
        forgetting: λ in (0, 1]. Below 1 the growth of P is bounded, see
            :class:`~lightning_struct.functional.recursive_least_squares.SquareRootInverse`.
        gradient_scale: η > 0, or a dict of it by the names of modules, for all layers below them, or of weights (the longest
            name counts, 1 where there is none).
        momentum: α in [0, 1).
        l1: γ >= 0; each step takes about twice as long with it.
        weight_decay: δ >= 0, decoupled: each step begins with θ ← (1 - lr·δ) θ.
        max_grad_norm: all gradients, those of the auxiliary optimizer too, are scaled to this norm together if it is larger.
            The gradients of layers that RLS trains stay as they are, only their step is scaled.
        max_gain: c > 0. The step of each weight is scaled so that along no direction it changes the weight's outputs for the
            inputs of the batch by more than about c times the gradient in them; 2 is the limit of stability of a layer that
            steps alone. Where several step together, each changes by a twentieth of its norm at most, besides. See
            :mod:`~lightning_struct.optim.rls.gain_limit`. None: the paper's steps, which have no bound at all and need inputs
            in [0, 1], or clipping.
        interval: P is updated in one of so many steps, by as much as in all of them.
        form: of P: ``"full"``, d² numbers for d inputs, the paper's; ``"low_rank"``, 2rd of them, see
            :class:`~lightning_struct.functional.recursive_least_squares.LowRankInverse`; ``"rank1"``, d of them. None: full
            up to 512 inputs (and with ``forgetting`` < 1), else of low rank.
        rank: r of the low-rank form.
        block_size: the full form is block-diagonal where there are more inputs than this, in blocks of this size.
        max_size: P of layers with more inputs than this has the rank-1 form.
        sequence_layers: linear layers, or their names, that read sequences, (batch, T, inputs), and whose loss is a sum over
            their positions: T counts as in recurrent layers, as in the paper's output layers (equations (80) to (86)).
        exclude: modules, or their names, that are left to ``auxiliary`` with all that is below them.
        auxiliary: makes the optimizer of all other parameters from their list.

    Raises:
        ValueError: an argument out of range; a name in ``exclude`` or ``gradient_scale`` that is none; parameters that
            neither RLS nor ``auxiliary`` trains; weights that are neither float32 nor float64, not initialised yet, or
            spread over processes (FSDP2); nothing to train.
        TypeError: ``module`` is none, as where its parameters are given.
        MemoryError: the matrices P do not fit into the memory that is free.

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
        lr: float = 1.0,
        ratio: float = 0.1,
        forgetting: float = 1.0,
        gradient_scale: float | Mapping[str, float] = 1.0,
        momentum: float = 0.0,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        max_gain: float | None = 2.0,
        interval: int = 1,
        form: InverseForm | None = None,
        rank: int = 32,
        block_size: int | None = None,
        max_size: int | None = None,
        sequence_layers: Sequence[str | nn.Module] = (),
        exclude: Sequence[str | nn.Module] = (),
        auxiliary: AuxiliaryFactory | None = None,
    ) -> None:
        _check_module(module)
        check_options(
            lr=lr, ratio=ratio, forgetting=forgetting, gradient_scale=gradient_scale, momentum=momentum, l1=l1,
            weight_decay=weight_decay, max_grad_norm=max_grad_norm, max_gain=max_gain, interval=interval, rank=rank,
            block_size=block_size, max_size=max_size,
        )  # fmt: skip
        if form not in (None, "full", "low_rank", "rank1"):
            raise ValueError(f"form must be 'full', 'low_rank', 'rank1' or None, got {form!r}")
        if form == "low_rank" and forgetting < 1:
            raise ValueError("form='low_rank' does not forget: use forgetting=1, or form='full' or 'rank1'")

        self.module = module
        self.max_grad_norm, self.max_gain = max_grad_norm, max_gain
        self._inverses = InverseSettings(form, rank, block_size, max_size, interval, max_gain is not None)
        self._gradient_scale = GradientScales(
            gradient_scale,
            {name for name, _ in plain_named_modules(module)}
            | {plain_name(name) for name, _ in module.named_parameters()},
        )
        self._auxiliary_factory = auxiliary
        self._auxiliary: torch.optim.Optimizer | None = None
        refuse_distributed_tensors(module)
        excluded = excluded_modules(module, exclude)
        self._left_alone = {parameter for below in excluded for parameter in below.parameters(recurse=False)}
        layers = layers_to_train(module, excluded)
        self._table = WeightTable(layers, forgetting)
        self._sequence_layers = affine_layers(module, sequence_layers, self._table.of_layers, "sequence_layers")
        self._weights = self._table.extend(lambda p: p.requires_grad and p not in self._left_alone)
        if not self._weights:
            raise ValueError(
                f"{type(module).__name__} has no trainable Linear, convolution, RNN, LSTM, GRU or attention for RLS to "
                "train; lightning_struct.functional.register_layer declares layers of other types"
            )
        self._set_up(self._weights)

        groups: dict[float, dict[str, Any]] = {}
        seen: set[nn.Parameter] = set()
        for weight in self._weights:
            scale = self._gradient_scale.of(weight)
            group = groups.setdefault(scale, {"params": [], "gradient_scale": scale})
            group["params"] += [p for p in weight.parameters if p not in seen]
            seen.update(weight.parameters)
        rest = {n: p for n, p in module.named_parameters() if p.requires_grad and p not in seen}
        if rest and auxiliary is None:
            raise ValueError(_without_an_optimizer(rest))
        super().__init__(
            list(groups.values()),
            {
                "lr": lr, "gradient_scale": 1.0, "ratio": ratio, "momentum": momentum, "l1": l1,
                "weight_decay": weight_decay,
            },
        )  # fmt: skip
        self._give_to_auxiliary(list(rest.values()))
        if auxiliary is not None and self._auxiliary is None and not all(p.requires_grad for p in module.parameters()):
            # What may be unfrozen later joins a group that schedulers know by then.
            self._auxiliary = auxiliary([{"params": []}])
            self.param_groups += self._auxiliary.param_groups
        self._recorder = InputRecorder({layer: reader for _, layer, reader in layers}, self._table)
        self._recorder.found_unfrozen = weakref.WeakMethod(self._take_in_unfrozen)
        self._share_groups()
        _log.info(
            "RLS takes %s for P; weights that it trains: %d%s",
            as_text(sum(weight.memory for weight in self._weights)),
            len(self._weights),
            self._inverses.chosen(self._weights),
        )

    @classmethod
    def exact(
        cls,
        module: nn.Module,
        layer: str | nn.Module | None = None,
        *,
        forgetting: float = 1.0,
        regularization: float = 1.0,
        auxiliary: AuxiliaryFactory | None = None,
    ) -> RLS:
        """Recursive least squares itself, for one linear layer: after each step the weights are the minimum over all data.

        With the loss ½‖outputs - targets‖² averaged over a batch, and outputs Θx of the layer with x the input and a one for
        the bias, the weights after batches 1 to s are, to rounding, where the P below stays under its bound::

            argmin_Θ  Σᵢ λˢ⁻ⁱ Σ_{x, y in batch i} ‖Θx - y‖² + δ λˢ ‖Θ - Θ₀‖²

        P = δ (Σᵢ λˢ⁻ⁱ Σ xxᵀ + δ λˢ I)⁻¹ is updated by every row, which takes d² multiply-adds for d inputs; batches of any
        size. Where λ < 1 its diagonal is bounded by 2: of an input that has not come for long, half of δ stays. In float32
        the rounding of P adds up over long streams: take ``module.double()``.

        Args:
            module: the layer, or a network with it.
            layer: that layer or its name; None: the only layer below ``module`` that RLS could train.
            forgetting: λ in (0, 1], for each step. 1/(1 - λ) steps are remembered.
            regularization: δ > 0.
            auxiliary: makes the optimizer of all other parameters from their list. The layer follows features that change
                if λ < 1.

        Raises:
            ValueError: no linear layer, or several and ``layer`` names none; several processes; as of :class:`RLS`.
            TypeError: ``module`` is none.

        Example:
            >>> import torch
            >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
            >>> _ = torch.nn.init.zeros_(layer.weight)
            >>> optimizer = RLS.exact(layer, regularization=1e-3)
            >>> for x in torch.randn(50, 1, 2, dtype=torch.float64):
            ...     optimizer.zero_grad()
            ...     (0.5 * (layer(x) - x @ torch.tensor([[3.0], [-1.0]], dtype=torch.float64)).square().sum()).backward()
            ...     optimizer.step()
            >>> torch.allclose(layer.weight, torch.tensor([[3.0, -1.0]], dtype=torch.float64), atol=1e-3)
            True
        """
        _check_module(module)
        check_options(regularization=regularization, gradient_scale={})
        if layer is None:
            chosen = only_linear_layer(module)
        else:
            trained = [known for _, known, _ in layers_to_train(module, set())]
            (chosen,) = affine_layers(module, [layer], trained, "layer")
        others = [other for other in module.modules() if chosen not in other.modules()]
        optimizer = cls(
            module, ratio=1 / regularization, gradient_scale=1 / regularization, forgetting=forgetting, max_gain=None,
            form="full", exclude=others, auxiliary=auxiliary,
        )  # fmt: skip
        for weight in optimizer._weights:
            weight.by_rows = True
        refuse_rows_of_processes(optimizer._weights)
        return optimizer

    def summary(self) -> str:
        """Table of the trained weights, with the form and size of P and the memory that it takes."""
        return summary_table(self._weights)

    def remove_hooks(self) -> None:
        """Take the hooks of the layers away, when the training is done. They go too when the optimizer is deleted."""
        self._recorder.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the layers read on their way."""
        super().zero_grad(set_to_none)
        for weight in self._weights:
            weight.statistics.reset()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every layer that has a gradient, and of the auxiliary optimizer.

        Args:
            closure: called once before, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            ValueError: NaN or infinity in gradients or inputs, or a layer with a gradient whose inputs were not seen; named
                are the step and the weights. No weight and no state has changed; the gradients have if others clipped them.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with without_autocast(self._weights[0].parameter.device.type):
            coefficient = self._step_weights()
        if self._auxiliary is not None:
            if self.max_grad_norm is not None:
                for gradient in self._gradients(self._auxiliary.param_groups):
                    gradient.mul_(coefficient)
            self._auxiliary.step()
        return result

    def _step_weights(self) -> Tensor | float:
        """Step what RLS trains; returned is the coefficient of clipping."""
        self._take_in_rest()
        self._share_groups()
        if world_size() > 1:
            reduce_statistics(self._weights)
        means = {weight: weight.statistics.mean() for weight in self._group_of if self._takes_part(weight)}
        if not means:
            self._check_parameters()
        coefficient = self._checked_clip_coefficient(means)
        limits = {} if self.max_gain is None else gain_limits({w: self._state_of(w) for w in means}, self.max_gain)
        changes_at_most = LARGEST_CHANGE if self.max_gain is not None and len(means) > 1 else None
        for weight, mean in means.items():
            group = self._group_of[weight]
            weight.step_(
                self._state_of(weight),
                mean,
                ratio=group["ratio"],
                scale=group["gradient_scale"],
                lr=group["lr"],
                clip=coefficient,
                momentum=group["momentum"],
                l1=group["l1"],
                decay=group["lr"] * group["weight_decay"],
                limit=limits.get(weight),
                changes_at_most=changes_at_most,
            )
        self._forget_statistics()
        return coefficient

    # --- what is trained ---------------------------------------------------------------------------------------------

    def _known(self) -> set[nn.Parameter]:
        return {parameter for group in self.param_groups for parameter in group["params"]}

    def _take_in_unfrozen(self) -> None:
        """Train the weights of layers that require gradients by now, in the groups of their η."""
        known = self._known() | self._left_alone
        new = self._table.extend(lambda parameter: parameter.requires_grad and parameter not in known)
        for weight in self._take_in(new):
            scale = self._gradient_scale.of(weight)
            group = next((g for g in self._own_groups() if g["gradient_scale"] == scale), None)
            if group is None:
                super().add_param_group({"params": weight.parameters, "gradient_scale": scale})
            else:
                group["params"] += weight.parameters

    def _take_in(self, new: list[TrainedWeight]) -> list[TrainedWeight]:
        self._set_up(new)
        self._weights += new
        for weight in new:
            self._recorder.watch_gradients(weight)
        return new

    def _set_up(self, new: list[TrainedWeight]) -> None:
        self._inverses.apply(new)
        for layer in self._sequence_layers:
            for weight in self._table.of_layers[layer].values():
                weight.reads_sequences = True

    def _take_in_rest(self) -> None:
        """Give what has got a gradient and is in no group to whom it belongs."""
        known = self._known()
        rest = {n: p for n, p in self.module.named_parameters() if p.grad is not None and p not in known}
        if not rest:
            return
        self._take_in_unfrozen()
        known = self._known()
        rest = {name: p for name, p in rest.items() if p.requires_grad and p not in known}
        if rest and self._auxiliary_factory is None:
            self._forget_statistics()
            raise ValueError(_without_an_optimizer(rest))
        self._give_to_auxiliary(list(rest.values()))

    def _give_to_auxiliary(self, parameters: list[nn.Parameter]) -> None:
        """Train these by the auxiliary optimizer, in its first group if there is one."""
        if not parameters:
            return
        if self._auxiliary is not None:
            self._auxiliary.param_groups[0]["params"] += parameters
            return
        assert self._auxiliary_factory is not None
        self._auxiliary = self._auxiliary_factory(parameters)
        self.param_groups += self._auxiliary.param_groups

    def _check_parameters(self) -> None:
        present = set(self.module.parameters())
        if replaced := [weight.name for weight in self._weights if weight.parameter not in present]:
            raise ValueError(
                f"the parameters of the module are others than when RLS was made: {', '.join(replaced[:3])}, ... Make RLS after "
                "what replaces them"
            )

    # --- the parts of a step -----------------------------------------------------------------------------------------

    def _takes_part(self, weight: TrainedWeight) -> bool:
        """Whether the step changes a weight: its layers were called, and a gradient came back."""
        gradients = [parameter.grad for parameter in weight.parameters if parameter.grad is not None]
        if not gradients or weight.statistics.total is not None:
            return bool(gradients)
        if not any(gradient.any() for gradient in gradients):  # filled with zeros, and nobody called it
            return False
        step = self._steps(weight) + 1
        self._forget_statistics()
        raise ValueError(
            f"RLS step {step}: {weight.name} has a gradient, but its layer was not seen to read anything since the last step. "
            "Either its weight is used without calling the layer, or a compiled module was called before RLS was made, or "
            "the hooks were removed: call the layer, make RLS first, or exclude the layer"
        )

    def _checked_clip_coefficient(self, means: Mapping[TrainedWeight, Tensor]) -> Tensor | float:
        """The factor of the gradients, after a look at whether all is finite: the step's only wait for the device."""
        gradients = list(self._gradients(self.param_groups))
        if not gradients:
            return 1.0
        norm = get_total_norm(gradients)
        if not torch.isfinite(norm + get_total_norm(list(means.values())).to(norm)):
            self._raise_not_finite(means)
        if self.max_grad_norm is None:
            return 1.0
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _raise_not_finite(self, means: Mapping[TrainedWeight, Tensor]) -> None:
        step = 1 + max((self._steps(weight) for weight in means), default=0)
        wrong = not_finite(self.module, means)
        self._forget_statistics()
        raise ValueError(
            f"RLS step {step}: NaN or infinity in {', '.join(wrong) or 'the norm of the gradients'}; no weight and no P was "
            "changed. Look at the loss and the data of this batch; lower gradient_scale, or set max_grad_norm"
        )

    def _forget_statistics(self) -> None:
        for weight in self._weights:
            weight.statistics.reset()

    def _gradients(self, groups: list[dict[str, Any]]) -> Iterator[Tensor]:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter.grad

    # --- state -------------------------------------------------------------------------------------------------------

    def _state_of(self, weight: TrainedWeight) -> dict[str, Any]:
        """P, velocity and number of steps of a weight. Under a string key: torch casts what is stored under a parameter."""
        states = self.state.setdefault("rls", {})  # type: ignore[call-overload]
        if not states:
            check_memory(self._weights)  # the module may have moved to another device since
        if weight.name not in states:
            states[weight.name] = weight.initial_state()
        return states[weight.name]

    def _steps(self, weight: TrainedWeight) -> int:
        return self.state.get("rls", {}).get(weight.name, {}).get("steps", 0)  # type: ignore[call-overload]

    def state_dict(self) -> dict[str, Any]:
        """The state, as of any optimizer, with that of the auxiliary one under ``"auxiliary"``."""
        state = super().state_dict()
        if self._auxiliary is not None:
            state["auxiliary"] = self._auxiliary.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, exactly: P in the precision in which it was, counters as integers.

        Raises:
            ValueError: it is of other layers, forms of P or parameter groups.
        """
        self._share_groups()
        saved = state_dict["state"].get("rls", {})
        check_states(saved, self._weights)
        if ("auxiliary" in state_dict) != (self._auxiliary is not None):
            raise ValueError(
                "the state is of an RLS with an auxiliary optimizer, and this one has none, or the reverse"
            )
        auxiliary = state_dict.get("auxiliary")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "auxiliary"})
        if self._auxiliary is not None:
            assert auxiliary is not None
            self._auxiliary.load_state_dict(auxiliary)
        self._share_groups()
        # Torch takes over what is under a string key as it is, the tensors of the caller.
        if saved:
            devices = {weight.name: weight.parameter.device for weight in self._weights}
            self.state["rls"] = {name: on_device(state, devices[name]) for name, state in saved.items()}  # type: ignore[index]

    def _own_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if "ratio" in group]

    def _share_groups(self) -> None:
        """Note the group of each weight; the others are the auxiliary optimizer's: whoever changes one changes both."""
        if self._auxiliary is not None:
            self._auxiliary.param_groups = [group for group in self.param_groups if "ratio" not in group]
        of_parameter = {parameter: group for group in self._own_groups() for parameter in group["params"]}
        # Groups may have been put in their place, as Lightning's BaseFinetuning does when a run is resumed.
        missing = of_parameter.keys() - {parameter for weight in self._weights for parameter in weight.parameters}
        if missing:
            self._take_in(self._table.extend(lambda parameter: parameter in missing))
        self._group_of = {w: of_parameter[w.parameter] for w in self._weights if w.parameter in of_parameter}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters of the module that are in no group yet, as after they have been unfrozen.

        Those of layers that RLS trains become a group of its own, with the options of ``param_group``. What else there is
        joins the auxiliary optimizer's first group, or becomes a group of that where there is nothing for RLS.

        Raises:
            ValueError: one of them is no parameter of the module, or in a group already.
        """
        if not hasattr(self, "_recorder"):
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        parameters: list[nn.Parameter] = [given] if isinstance(given, nn.Parameter) else list(given)
        names = {parameter: plain_name(name) for name, parameter in self.module.named_parameters()}
        if not set(parameters) <= names.keys():
            raise ValueError("RLS trains parameters of its module, and the group has others")
        if twice := [names[parameter] for parameter in parameters if parameter in self._known()]:
            raise ValueError(f"some parameters appear in more than one parameter group: {', '.join(twice)}")
        wanted = set(parameters) - self._left_alone
        new = self._take_in(self._table.extend(lambda parameter: parameter in wanted))
        own = [parameter for weight in new for parameter in weight.parameters]
        rest = [parameter for parameter in parameters if parameter not in set(own)]
        if rest and self._auxiliary_factory is None:
            raise ValueError(_without_an_optimizer({names[parameter]: parameter for parameter in rest}))
        options = {name: value for name, value in param_group.items() if name != "params"}
        if own:
            super().add_param_group({"gradient_scale": self._gradient_scale.of(new[0]), **options, "params": own})
            self._give_to_auxiliary(rest)
        elif self._auxiliary is None:
            self._give_to_auxiliary(rest)
        else:
            self._auxiliary.add_param_group({**options, "params": rest})
            self.param_groups.append(self._auxiliary.param_groups[-1])
        self._share_groups()

    def __getstate__(self) -> dict[str, Any]:
        return state_without_hooks(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_recorder" in state:
            self._recorder.found_unfrozen = weakref.WeakMethod(self._take_in_unfrozen)
            self._share_groups()


def _without_an_optimizer(parameters: Iterable[str]) -> str:
    return (
        f"RLS does not train {', '.join(map(plain_name, parameters))}: give auxiliary=functools.partial(torch.optim.Adam, "
        "lr=1e-3) or the like for them, or freeze them by requires_grad_(False)"
    )


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"RLS takes the module, whose layers it watches, not its parameters: RLS(model, ...), got {type(module).__name__}. "
            "In Lightning return RLS(self, ...) from configure_optimizers, also with LightningCLI or hydra, which hand "
            "parameters to the optimizers that they configure themselves"
        )
