"""Which parameters RLS trains and which the auxiliary optimizer, and the groups in which they are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_struct.functional.layers.recorder import WeakHook
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.optim.requirements import refuse_replaced, state_without_hooks
from lightning_struct.optim.rls.recorder import InputRecorder
from lightning_struct.optim.rls.settings import Settings
from lightning_struct.optim.rls.weights import TrainedWeight

AuxiliaryFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Group: TypeAlias = dict[str, Any]
_EXAMPLE = "functools.partial(torch.optim.Adam, lr=1e-3)"


class OptimizerWithAuxiliary(torch.optim.Optimizer):
    """An optimizer that trains the weights of layers, and gives all other parameters to an auxiliary optimizer.

    Others may replace the list of groups. RLS trains the groups with a ``"ratio"``. The other groups are the auxiliary
    optimizer's own dicts.

    Args:
        module: whose parameters are trained.
        left_alone: parameters that RLS does not train.
        recorder: of the layers that RLS may train; it has no weights yet.
        settings: of the optimizer.
        factory: makes the auxiliary optimizer; None: there is none.

    Raises:
        TypeError: the factory cannot be called, or makes no optimizer, or one whose step evaluates the loss.
        ValueError: there is nothing for RLS to train, or no auxiliary optimizer for the rest; or that takes other
            parameters than it is given.

    Attributes:
        auxiliary: the auxiliary optimizer; None as long as there is nothing for it.
    """

    auxiliary: torch.optim.Optimizer | None

    def __init__(
        self,
        module: nn.Module,
        left_alone: set[nn.Parameter],
        recorder: InputRecorder,
        settings: Settings,
        factory: AuxiliaryFactory | None,
    ) -> None:
        if factory is not None and not callable(factory):
            raise TypeError(
                "auxiliary must be a function that makes an optimizer from a list of parameters, or None, got "
                f"this {type(factory).__name__}: give a function, {_EXAMPLE}"
            )
        self.module, self.settings = module, settings
        self._left_alone, self._recorder, self._factory = left_alone, recorder, factory
        # Groups of all weights, one for each η; weights that are frozen now join them when they require gradients.
        self.defaults, self.param_groups = settings.group_options(), []
        self._take_in_unfrozen()
        if not self.param_groups:
            names = ", ".join(recorder.without_parameter())
            computed = f". Parametrized or pruned weights are no parameters, as in {names}" if names else ""
            raise ValueError(
                f"{type(module).__name__} has no trainable Linear, convolution, RNN, LSTM or GRU for "
                "RLS to train: take another optimizer, as Adam for embeddings alone; "
                f"lightning_struct.functional.register_layer declares layers of other types{computed}"
            )
        for name in recorder.frozen():
            self._group_of(settings.scale_of(name))  # schedulers know the group when the weight is unfrozen
        super().__init__(self.param_groups, self.defaults)
        self.auxiliary = None
        self._give_to_auxiliary({n: p for n, p in module.named_parameters() if p.requires_grad})
        if factory is not None and self.auxiliary is None and not all(p.requires_grad for p in module.parameters()):
            # Parameters that are unfrozen later join a group that schedulers know by then. The factory may look at
            # parameters.
            self.auxiliary = _made(factory, {"parameters that may be unfrozen later": nn.Parameter(torch.empty(0, 0))})
            for group in self.auxiliary.param_groups:
                group["params"].clear()
            self.auxiliary.state.clear()
            self.param_groups += self.auxiliary.param_groups
        recorder.found_unfrozen = WeakHook(self._take_in_unfrozen)
        recorder.attach()

    def __getstate__(self) -> dict[str, Any]:
        return state_without_hooks(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_recorder" in state:
            self._recorder.found_unfrozen = WeakHook(self._take_in_unfrozen)
            self._share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters of the module that are in no group yet, as after they have been unfrozen.

        Parameters of layers that RLS trains become a group of its own, with the options of ``param_group``. All others
        join the auxiliary optimizer's first group; if there is nothing for RLS among them, they become a new group
        there.

        Raises:
            TypeError: the group is no dict with ``"params"``.
            ValueError: one of them is no parameter of the module, or in a group already; no optimizer trains it; or
                an option is out of range.
        """
        if not hasattr(self, "auxiliary"):  # the first ones
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise TypeError(
                "add_param_group takes a dict with the parameters under 'params' and options beside them, as "
                f"{{'params': layer.parameters(), 'lr': 0.5}}, got {type(param_group).__name__}"
            )
        options = dict(param_group)
        given = options.pop("params")
        parameters: list[nn.Parameter] = [given] if isinstance(given, nn.Parameter) else list(given)
        names = {parameter: plain_name(name) for name, parameter in self.module.named_parameters()}
        if others := ", ".join(str(tuple(parameter.shape)) for parameter in parameters if parameter not in names):
            raise ValueError(f"RLS trains parameters of its module, and the group has others, of shape {others}")
        known = _members(self.param_groups)
        if twice := ", ".join(names[parameter] for parameter in parameters if parameter in known):
            raise ValueError(f"some parameters appear in more than one parameter group: {twice}")
        replace(self.settings, **{name: options[name] for name in options.keys() & self.defaults.keys()})  # checks
        wanted = set(parameters) - self._left_alone
        new = self._recorder.extend(lambda parameter: parameter in wanted)
        own = list(dict.fromkeys(parameter for weight in new for parameter in weight.parameters))
        rest = {names[parameter]: parameter for parameter in parameters if parameter not in set(own)}
        if rest:
            self._factory_for(rest)
        if own:
            scale = self.settings.scale_of(new[0].name)
            self.param_groups.append({**self.defaults, "gradient_scale": scale, **options, "params": own})
        if own or self.auxiliary is None:
            self._give_to_auxiliary(rest)
        else:
            self.auxiliary.add_param_group({**options, "params": list(rest.values())})
            self.param_groups.append(self.auxiliary.param_groups[-1])
        self._share_groups()

    def _share_groups(self) -> dict[TrainedWeight, Group]:
        """The group of each weight. The auxiliary optimizer shares the other groups: a change holds for both."""
        if self.auxiliary is not None:
            self.auxiliary.param_groups = [group for group in self.param_groups if not is_own(group)]
        of_parameter = {p: group for group in self.param_groups if is_own(group) for p in group["params"]}
        # Groups may have been put in their place, as Lightning's BaseFinetuning does when a run is resumed.
        weights = self._recorder.weights
        if missing := of_parameter.keys() - {parameter for weight in weights for parameter in weight.parameters}:
            self._recorder.extend(lambda parameter: parameter in missing)
        return {w: of_parameter[w.parameter] for w in self._recorder.weights if w.parameter in of_parameter}

    def _take_in_unfrozen(self) -> None:
        """Train the weights of layers that require gradients by now, in the groups of their η."""
        known = _members(self.param_groups)
        for weight in self._recorder.extend(lambda p: p.requires_grad and p not in known and p not in self._left_alone):
            group = self._group_of(self.settings.scale_of(weight.name))
            group["params"] += [parameter for parameter in weight.parameters if parameter not in known]
            known.update(weight.parameters)

    def _take_in_rest(self) -> None:
        """Put parameters that have a gradient and are in no group into a group of RLS or of the auxiliary optimizer.

        Raises:
            ValueError: there is no auxiliary optimizer for them; or one took the place of a weight that RLS trains.
        """
        known = _members(self.param_groups)
        rest = {n: p for n, p in self.module.named_parameters() if p.grad is not None and p not in known}
        if rest:
            self._check_parameters()
            self._take_in_unfrozen()
            self._give_to_auxiliary({n: p for n, p in rest.items() if p.requires_grad})

    def _check_parameters(self) -> None:
        """Raise if layers have other weights by now.

        Raises:
            ValueError: see above; some are named.
        """
        present = set(self.module.parameters())
        refuse_replaced([weight.name for weight in self._recorder.weights if weight.parameter not in present], "RLS")

    def _group_of(self, scale: float) -> Group:
        """The group of an η, which is added if there is none."""
        group = next((g for g in self.param_groups if is_own(g) and g["gradient_scale"] == scale), None)
        if group is None:
            group = {**self.defaults, "gradient_scale": scale, "params": []}
            self.param_groups.append(group)
        return group

    def _give_to_auxiliary(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Train those that are in no group by the auxiliary optimizer, in its first group if there is one."""
        known = _members(self.param_groups)
        rest = {name: parameter for name, parameter in parameters.items() if parameter not in known}
        if rest and self.auxiliary is not None:
            self.auxiliary.param_groups[0]["params"] += rest.values()
        elif rest:
            self.auxiliary = _made(self._factory_for(rest), rest)
            self.param_groups += self.auxiliary.param_groups

    def _factory_for(self, parameters: Iterable[str]) -> AuxiliaryFactory:
        """The factory of the auxiliary optimizer; an error that names these parameters if there is none."""
        if self._factory is None:
            raise ValueError(
                f"RLS does not train {', '.join(map(plain_name, parameters))}: give auxiliary=functools.partial("
                "torch.optim.Adam, lr=1e-3) or the like for them, or freeze them by requires_grad_(False)"
            )
        return self._factory


def _made(factory: AuxiliaryFactory, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The auxiliary optimizer of these parameters.

    Raises:
        TypeError: the factory makes no optimizer, or one whose step evaluates the loss.
        ValueError: it leaves some of the parameters out, or takes others, which RLS may train already.
    """
    auxiliary = factory(list(parameters.values()))
    if not isinstance(auxiliary, torch.optim.Optimizer):
        raise TypeError(
            f"auxiliary must make an optimizer, got {type(auxiliary).__name__} from it: give {_EXAMPLE} or the like"
        )
    if isinstance(auxiliary, torch.optim.LBFGS):
        raise TypeError(
            "auxiliary makes an LBFGS, which evaluates the loss several times in a step; RLS steps it once, by the "
            f"gradients that are there. Give {_EXAMPLE} or the like"
        )
    taken = _members(auxiliary.param_groups)
    left_out = [plain_name(name) for name, parameter in parameters.items() if parameter not in taken]
    if left_out or len(taken) > len(parameters):
        differs = f"leaves out {', '.join(left_out)}" if left_out else "takes others as well"
        raise ValueError(
            "auxiliary is called with the list of the parameters that RLS does not train, and must make an optimizer "
            f"of these; it {differs}. Give {_EXAMPLE} or the like, and freeze the others by "
            "requires_grad_(False)"
        )
    return auxiliary


def _members(groups: list[Group]) -> set[nn.Parameter]:
    return {parameter for group in groups for parameter in group["params"]}


def is_own(group: Group) -> bool:
    """Whether a group is one of RLS, not of the auxiliary optimizer."""
    return "ratio" in group
