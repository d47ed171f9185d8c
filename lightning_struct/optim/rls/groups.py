"""Which parameters RLS trains and which the auxiliary optimizer, and the groups in which they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.optim.requirements import WEIGHTS_ALONE, refuse_replaced
from lightning_struct.optim.rls.recorder import InputRecorder
from lightning_struct.optim.rls.selection import WeightTable
from lightning_struct.optim.rls.settings import Settings
from lightning_struct.optim.rls.weights import TrainedWeight

AuxiliaryFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Group: TypeAlias = dict[str, Any]


class Membership:
    """Who trains each parameter of a module: RLS, the auxiliary optimizer, or nobody as long as it is frozen.

    The list of groups is the optimizer's, and others may replace it: methods are given it, and extend it. Groups with a
    ``"ratio"`` are those of RLS. The others are the auxiliary optimizer's, the same dicts as there.

    Args:
        module: whose parameters these are.
        left_alone: parameters that RLS does not train.
        table: of the weights that RLS may train; it has none yet.
        recorder: told of weights that join later.
        settings: of the optimizer.
        defaults: options of the groups of RLS, the optimizer's own dict.
        factory: makes the auxiliary optimizer; None: there is none.

    Raises:
        TypeError: the factory cannot be called.

    Attributes:
        auxiliary: the auxiliary optimizer; None as long as there is nothing for it.
    """

    def __init__(
        self,
        module: nn.Module,
        left_alone: set[nn.Parameter],
        table: WeightTable,
        recorder: InputRecorder,
        settings: Settings,
        defaults: Mapping[str, Any],
        factory: AuxiliaryFactory | None,
    ) -> None:
        if factory is not None and not callable(factory):
            raise TypeError(
                "auxiliary must be a function that makes an optimizer from a list of parameters, or None, got "
                f"this {type(factory).__name__}: give a function, "
                "functools.partial(torch.optim.Adam, lr=1e-3)"
            )
        self._module, self._left_alone, self._table, self._recorder = module, left_alone, table, recorder
        self._settings, self._defaults, self._factory = settings, defaults, factory
        self.auxiliary: torch.optim.Optimizer | None = None

    def first_groups(self) -> list[Group]:
        """Groups of all weights, one for each η; what is frozen now joins them when it requires gradients.

        Raises:
            ValueError: there are none.
        """
        groups: list[Group] = []
        self._put_into_groups(self._table.extend(self._is_new(groups)), groups)
        if not groups:
            names = ", ".join(self._table.without_parameter())
            computed = f". Weights that are parametrized or pruned are no parameters: those of {names}" if names else ""
            raise ValueError(
                f"{type(self._module).__name__} has no trainable Linear, convolution, RNN, LSTM, GRU or attention for "
                "RLS to train: take another optimizer, as Adam for embeddings alone; "
                f"lightning_struct.functional.register_layer declares layers of other types{computed}"
            )
        for name in self._table.frozen():
            self._group_of(self._settings.scale_of(name), groups)  # which schedulers know when it is unfrozen
        return groups

    def begin(self, groups: list[Group]) -> None:
        """Give all other parameters that require gradients now to the auxiliary optimizer.

        Raises:
            ValueError: there is none.
        """
        known = _members(groups)
        parameters = dict(self._module.named_parameters())
        self._give_to_auxiliary({n: p for n, p in parameters.items() if p.requires_grad and p not in known}, groups)
        has_frozen = not all(parameter.requires_grad for parameter in parameters.values())
        if self._factory is not None and self.auxiliary is None and has_frozen:
            # What may be unfrozen later joins a group that schedulers know by then.
            self.auxiliary = _made_without_parameters(self._factory)
            groups += self.auxiliary.param_groups

    def take_in_unfrozen(self, groups: list[Group]) -> None:
        """Train the weights of layers that require gradients by now, in the groups of their η."""
        self._put_into_groups(self._take_in(self._is_new(groups)), groups)

    def take_in_rest(self, groups: list[Group]) -> None:
        """Give what has got a gradient and is in no group to whom it belongs.

        Raises:
            ValueError: to the auxiliary optimizer, and there is none; or it took the place of a weight that RLS trains.
        """
        known = _members(groups)
        rest = {n: p for n, p in self._module.named_parameters() if p.grad is not None and p not in known}
        if not rest:
            return
        self.check_parameters()
        self.take_in_unfrozen(groups)
        known = _members(groups)
        self._give_to_auxiliary({n: p for n, p in rest.items() if p.requires_grad and p not in known}, groups)

    def add_group(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Train the parameters of this group: of layers by RLS, the others by the auxiliary optimizer.

        Raises:
            TypeError: the group is no dict with ``"params"``.
            ValueError: one of them is no parameter of the module, or in a group already; or nobody trains it; or an
                option is out of range.
        """
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                "add_param_group takes a dict with the parameters under 'params' and options beside them, as "
                f"{{'params': layer.parameters(), 'lr': 0.5}}, got {type(group).__name__}"
            )
        given = group["params"]
        parameters: list[nn.Parameter] = [given] if isinstance(given, nn.Parameter) else list(given)
        names = {parameter: plain_name(name) for name, parameter in self._module.named_parameters()}
        if others := [tuple(parameter.shape) for parameter in parameters if parameter not in names]:
            raise ValueError(
                f"RLS trains parameters of its module, and the group has others, of shape {', '.join(map(str, others))}"
            )
        known = _members(groups)
        if twice := [names[parameter] for parameter in parameters if parameter in known]:
            raise ValueError(f"some parameters appear in more than one parameter group: {', '.join(twice)}")
        options = {name: value for name, value in group.items() if name != "params"}
        replace(self._settings, **{name: options[name] for name in options.keys() & self._defaults.keys()})  # checks
        wanted = set(parameters) - self._left_alone
        new = self._take_in(lambda parameter: parameter in wanted)
        own = list(dict.fromkeys(parameter for weight in new for parameter in weight.parameters))
        rest = {names[parameter]: parameter for parameter in parameters if parameter not in set(own)}
        if rest:
            self._factory_for(rest)
        if own:
            groups.append(
                {**self._defaults, "gradient_scale": self._settings.scale_of(new[0].name), **options, "params": own}
            )
        if own or self.auxiliary is None:
            self._give_to_auxiliary(rest, groups)
        else:
            self.auxiliary.add_param_group({**options, "params": list(rest.values())})
            groups.append(self.auxiliary.param_groups[-1])

    def share(self, groups: list[Group]) -> dict[TrainedWeight, Group]:
        """The group of each weight; the others become the auxiliary optimizer's: whoever changes one changes both."""
        if self.auxiliary is not None:
            self.auxiliary.param_groups = [group for group in groups if not _is_own(group)]
        of_parameter = {parameter: group for group in groups if _is_own(group) for parameter in group["params"]}
        # Groups may have been put in their place, as Lightning's BaseFinetuning does when a run is resumed.
        missing = of_parameter.keys() - {parameter for weight in self._table.weights for parameter in weight.parameters}
        if missing:
            self._take_in(lambda parameter: parameter in missing)
        return {w: of_parameter[w.parameter] for w in self._table.weights if w.parameter in of_parameter}

    def check_groups(self, saved: list[Group], groups: list[Group]) -> None:
        """Raise where groups of a state do not stand for these.

        Raises:
            ValueError: see above.
        """
        if list(map(_is_own, saved)) != list(map(_is_own, groups)):
            raise ValueError(
                "the state is of another optimizer than RLS, or of one with other groups: load it into an RLS that is "
                f"made as the one that was saved, with the groups that were added since. {WEIGHTS_ALONE}"
            )

    def check_parameters(self) -> None:
        """Raise where layers have other weights by now.

        Raises:
            ValueError: see above; some are named.
        """
        present = set(self._module.parameters())
        refuse_replaced([weight.name for weight in self._table.weights if weight.parameter not in present], "RLS")

    def _is_new(self, groups: list[Group]) -> Callable[[nn.Parameter], bool]:
        """Whether RLS may train a parameter that requires gradients and is in no group."""
        known = _members(groups) | self._left_alone
        return lambda parameter: parameter.requires_grad and parameter not in known

    def _take_in(self, is_trained: Callable[[nn.Parameter], bool]) -> list[TrainedWeight]:
        new = self._table.extend(is_trained)
        for weight in new:
            self._recorder.watch_gradients(weight)
        return new

    def _put_into_groups(self, weights: list[TrainedWeight], groups: list[Group]) -> None:
        """Add weights to the groups of their η, which are made where there are none."""
        known = _members(groups)
        for weight in weights:
            group = self._group_of(self._settings.scale_of(weight.name), groups)
            group["params"] += [parameter for parameter in weight.parameters if parameter not in known]
            known.update(weight.parameters)

    def _group_of(self, scale: float, groups: list[Group]) -> Group:
        """The group of an η, which is added where there is none."""
        group = next((g for g in groups if _is_own(g) and g["gradient_scale"] == scale), None)
        if group is None:
            group = {**self._defaults, "gradient_scale": scale, "params": []}
            groups.append(group)
        return group

    def _give_to_auxiliary(self, parameters: Mapping[str, nn.Parameter], groups: list[Group]) -> None:
        """Train these by the auxiliary optimizer, in its first group if there is one."""
        if not parameters:
            return
        if self.auxiliary is not None:
            self.auxiliary.param_groups[0]["params"] += parameters.values()
            return
        self.auxiliary = _made(self._factory_for(parameters), parameters)
        groups += self.auxiliary.param_groups

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
            f"auxiliary must make an optimizer, got {type(auxiliary).__name__} from it: give functools.partial("
            "torch.optim.Adam, lr=1e-3) or the like"
        )
    if isinstance(auxiliary, torch.optim.LBFGS):
        raise TypeError(
            "auxiliary makes an LBFGS, which evaluates the loss several times in a step; RLS steps it once, by the "
            "gradients that are there. Give functools.partial(torch.optim.Adam, lr=1e-3) or the like"
        )
    taken = _members(auxiliary.param_groups)
    left_out = [plain_name(name) for name, parameter in parameters.items() if parameter not in taken]
    if left_out or len(taken) > len(parameters):
        differs = f"leaves out {', '.join(left_out)}" if left_out else "takes others as well"
        raise ValueError(
            "auxiliary is called with the list of the parameters that RLS does not train, and must make an optimizer "
            f"of these; it {differs}. Give functools.partial(torch.optim.Adam, lr=1e-3) or the like, and freeze what "
            "is not to be trained by requires_grad_(False)"
        )
    return auxiliary


def _made_without_parameters(factory: AuxiliaryFactory) -> torch.optim.Optimizer:
    """An auxiliary optimizer that has nothing to train yet; the factory may look at what it is given."""
    auxiliary = _made(factory, {"what may be unfrozen later": nn.Parameter(torch.empty(0, 0))})
    for group in auxiliary.param_groups:
        group["params"].clear()
    auxiliary.state.clear()
    return auxiliary


def _members(groups: list[Group]) -> set[nn.Parameter]:
    return {parameter for group in groups for parameter in group["params"]}


def _is_own(group: Group) -> bool:
    return "ratio" in group
