"""Physics-informed networks: the solution of an equation as a network, trained on the equation's residuals."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, broadcast_numbers
from lightning_struct.data.equations import DifferentialEquation, check_equation
from lightning_struct.functional.checks import check_types, checked, first_line, positive_size
from lightning_struct.functional.jacobian.derivatives import (
    Derivatives,
    Periodic,
    periodic_inputs,
    tanh_network_derivatives,
    tanh_network_laplacian,
)
from lightning_struct.mixins.shf import SHFOptimization
from lightning_struct.models.training import Task, check_train_loss
from lightning_struct.optim.shf import SHF
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.namespaces import MisconfigurationException

# Smallest factor of the residuals of conditions in an interval: their errors go on to all later times.
_OF_CONDITIONS = 10.0
# A condition is not met if its mean square is above a hundredth of that of its values, which count as at least a
# hundredth of the largest ones.
_UNMET = 0.01


class TanhNetwork(nn.Module):
    """A function of points: fully connected layers with tanh between them.

    Args:
        dimension: coordinates of a point.
        hidden_sizes: units of the hidden layers.
        periodic: the periods p of coordinates x by their indices, or the indices of those with period 2: the layers see
            cos 2πjx/p and sin 2πjx/p, j = 1 to 4, in their place.
        outputs: k, the number of unknown functions.

    Example:
        >>> network = TanhNetwork(2, [20, 20, 20])
        >>> network(torch.zeros(5, 2)).shape, sum(weights.numel() for weights in network.parameters())
        (torch.Size([5]), 921)
    """

    @checked
    def __init__(self, dimension: int, hidden_sizes: Sequence[int], periodic: Periodic = (), outputs: int = 1) -> None:
        super().__init__()
        self.periodic: Periodic = dict(periodic) if isinstance(periodic, Mapping) else tuple(periodic)
        inputs = periodic_inputs(torch.zeros(1, positive_size("dimension", dimension)), self.periodic).shape[1]
        sizes = [
            inputs,
            *(positive_size("hidden_sizes", size) for size in hidden_sizes),
            positive_size("outputs", outputs),
        ]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, points: Tensor) -> Tensor:
        """Values (n,) at points (n, d), or (n, k) of several functions."""
        return self.layers(periodic_inputs(points, self.periodic) if self.periodic else points).squeeze(-1)

    def partial_derivatives(
        self, points: Tensor, once: Sequence[int], twice: Sequence[int], thrice: Sequence[int] = ()
    ) -> Derivatives:
        """Derivatives in the coordinates, see :func:`~lightning_struct.functional.partial_derivatives`."""
        return tanh_network_derivatives(list(self.layers), points, once, twice, thrice, self.periodic)

    def laplacian(self, points: Tensor, coordinates: Sequence[int]) -> Tensor:
        """Sum of the second derivatives along coordinates, see :func:`~lightning_struct.functional.laplacian`."""
        return tanh_network_laplacian(list(self.layers), points, coordinates, self.periodic)


class _Interval:
    """The function of one interval of time: a network of coordinates that are -1 to 1 there."""

    def __init__(self, network: TanhNetwork, scales: Sequence[list[float]], number: Tensor | int) -> None:
        self._network, self._scales, self._number = network, scales, number

    def __call__(self, points: Tensor) -> Tensor:
        return self._network(self._local(points))

    def partial_derivatives(
        self, points: Tensor, once: Sequence[int], twice: Sequence[int], thrice: Sequence[int] = ()
    ) -> Derivatives:
        found = self._network.partial_derivatives(self._local(points), once, twice, thrice)
        rates = self._scales[1]
        orders = enumerate((found.first, found.second, found.third), start=1)
        scaled = ({i: rates[i] ** order * numbers for i, numbers in of.items()} for order, of in orders)
        return Derivatives(found.values, *scaled)

    def _local(self, points: Tensor) -> Tensor:
        low, rates, step = (torch.tensor(scale, dtype=points.dtype, device=points.device) for scale in self._scales)
        return (points - low) * rates - (1 + self._number * step)


class IntervalNetwork(nn.Module):
    """A function of points in space and time: a :class:`TanhNetwork` for each of several equal intervals of time.

    The networks are trained one after another. Each begins as a copy of the last one, and its initial condition is the
    end of that: the residuals of the block ``"initial"`` are those of the new network minus those of the last one, at
    the time where they meet. Wrong solutions whose residuals are small at late times cannot arise so.

    Args:
        equation: has a ``time``, and says which coordinates are ``periodic``.
        hidden_sizes: units of the hidden layers of each network.
        intervals: their number.

    Attributes:
        current: the network that is trained.
        number: of its interval, ().
        began: when that began, as a share of all training.

    Raises:
        MisconfigurationException: the equation has no time; fewer than one interval.

    Example:
        >>> from lightning_struct.data import AllenCahn
        >>> network = IntervalNetwork(AllenCahn(), [8], intervals=5)
        >>> network(torch.tensor([[0.0, 0.0], [0.5, 0.95]])).shape
        torch.Size([2])
    """

    number: Tensor

    @checked
    def __init__(self, equation: DifferentialEquation, hidden_sizes: Sequence[int], intervals: int = 10) -> None:
        super().__init__()
        check_counts(intervals=intervals)
        if equation.time is None:
            raise MisconfigurationException(
                f"{type(equation).__name__} has no time whose intervals could be solved: set time in the class, the "
                "index of that coordinate, or give hidden_sizes in place of this network"
            )
        low, high = equation.domain.low, equation.domain.high
        self.time, self.intervals, self.began = equation.time, intervals, 0.0
        is_time = (torch.arange(len(low)) == self.time).double()
        self._begin, self._length = low[self.time].item(), (high - low)[self.time].item() / intervals
        rates = 2 * (1 + (intervals - 1) * is_time) / (high - low)
        # numbers whatever the dtype of the network: an interval ends where the next one begins
        self._scales = [scale.tolist() for scale in (low, rates, 2 * is_time)]
        self.current = TanhNetwork(equation.domain.dimension, hidden_sizes, equation.periodic, equation.unknowns)
        self.last = _with_fixed_weights(self.current)
        self.finished = nn.ModuleList(_with_fixed_weights(self.current) for _ in range(intervals - 1))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    @checked
    def forward(self, points: Tensor) -> Tensor:
        """Values (n,) or (n, k) at points (n, d); after the interval that is trained they are those of its network."""
        return self._chosen(points, [u(points) for u in self._functions()])

    def partial_derivatives(
        self, points: Tensor, once: Sequence[int], twice: Sequence[int], thrice: Sequence[int] = ()
    ) -> Derivatives:
        """Derivatives in the coordinates, see :func:`~lightning_struct.functional.partial_derivatives`."""
        found = [u.partial_derivatives(points, once, twice, thrice) for u in self._functions()]
        orders = ([getattr(of_one, order) for of_one in found] for order in ("first", "second", "third"))
        chosen = ({i: self._chosen(points, [at[i] for at in of]) for i in of[0]} for of in orders)
        return Derivatives(self._chosen(points, [of_one.values for of_one in found]), *chosen)

    def residuals(self, equation: DifferentialEquation, points: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Residuals by block of the network that is trained, at points of the domain moved into its interval.

        Those of conditions are multiplied by ten, or by (1/length of an interval)ᵏ if that is more and the block
        ``"initial"`` has k conditions for each unknown at a point: so large are k-th derivatives in time beside the
        values.
        """
        moved = {block: self._moved(at) for block, at in points.items()}
        residuals = equation.residuals(self._interval(self.current, self.number), moved)
        if "initial" in residuals:
            last = equation.residual("initial", self._interval(self.last, self.number - 1), moved["initial"])
            residuals["initial"] = residuals["initial"] - (self.number > 0) * last
        order = -(-residuals["initial"][0].numel() // equation.unknowns) if "initial" in residuals else 1
        factor = max(_OF_CONDITIONS, self._length**-order)
        return {block: r if block == "interior" else factor * r for block, r in residuals.items()}

    def go_on(self, progress: float, equation: DifferentialEquation, points: Mapping[str, Tensor]) -> list[str]:
        """Advance if the interval has had its share of the training and meets its conditions; else it takes longer.

        Args:
            progress: share of all training that is over.
            equation: it.
            points: of the domain, by block, to look at the conditions.

        Returns:
            Blocks of conditions that two shares have not met: no later interval can be right. Else none.
        """
        # the first network has two shares: it begins at random, and its errors go on to all others
        left = self.intervals - int(self.number)
        share = 1 / left if self.number else 2 / (left + 1)
        spent = (progress - self.began) / (1 - self.began)
        if left == 1 or spent < share:
            return []
        unmet = self._unmet(equation, points)
        if not unmet:
            self.advance()
            self.began = progress
        return unmet if spent >= min(2 * share, (1 + share) / 2) else []

    def _unmet(self, equation: DifferentialEquation, points: Mapping[str, Tensor]) -> list[str]:
        """Blocks with a condition that is not met, by all processes: its residual is nearly that of the function 0."""
        zero = deepcopy(self)
        for weights in zero.current.parameters():
            weights.data.zero_()
        with torch.no_grad():
            found = [network.residuals(equation, points) for network in (self, zero)]
        blocks = [block for block in points if block != "interior"]
        sizes = [found[0][block][0].numel() for block in blocks]
        squares = [torch.cat([of[block].square().mean(0).reshape(-1) for block in blocks]) for of in found]
        errors, values = all_reduce(torch.stack(squares))
        is_unmet = errors > _UNMET * values.clamp_min(_UNMET * values.max())
        return [block for block, of_block in zip(blocks, is_unmet.split(sizes), strict=True) if of_block.any()]

    def advance(self) -> None:
        """Go on to the next interval, if there is one."""
        number = int(self.number)
        if number == self.intervals - 1:
            return
        for network in (self.last, self.finished[number]):
            for fixed, weights in zip(network.buffers(), self.current.parameters(), strict=True):
                fixed.copy_(weights.detach())
        self.number += 1

    def _moved(self, points: Tensor) -> Tensor:
        before, t, after = points.tensor_split((self.time, self.time + 1), dim=1)
        return torch.cat(
            [before, self._begin + (t - self._begin) / self.intervals + self.number * self._length, after], dim=1
        )

    def _interval(self, network: Any, number: Tensor | int) -> _Interval:
        return _Interval(network, self._scales, number)

    def _functions(self) -> list[_Interval]:
        number = int(self.number)
        return [self._interval(network, i) for i, network in enumerate([*self.finished[:number], self.current])]

    def _chosen(self, points: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Select, from values by interval, those at the times of the points."""
        chosen = values[0]
        for number, of_interval in enumerate(values[1:], start=1):
            is_later = points[:, self.time] >= self._begin + number * self._length
            chosen = torch.where(is_later if chosen.dim() == 1 else is_later[:, None], of_interval, chosen)
        return chosen


def _with_fixed_weights(network: TanhNetwork) -> TanhNetwork:
    """A copy whose weights are buffers: no optimizer sees them, and a checkpoint has them."""
    network = deepcopy(network)
    for module in network.modules():
        for name, weights in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, weights.detach())
    return network


class PhysicsInformedNetwork(Task):
    """A network that is trained to solve a differential equation (Raissi, Perdikaris & Karniadakis, 2019).

    It is called with points, by block, and returns the residuals there. The loss is the sum over blocks of half the
    mean squared residual. It logs ``train_loss``; ``val_loss`` and ``test_loss``, those of points that are not
    trained on, and their part of each block, as ``val_loss_interior``; and if the solution is known
    ``relative_l2_error``, ‖u - solution‖/‖solution‖ over the interior points of a validation or test, or at the points
    of the ``reference`` of the equation.

    For example::

        equation = Poisson(dimension=2)
        data = PointsDataModule(equation, {"interior": 900, "boundary": 120})
        Trainer(precision="64-true").fit(PhysicsInformedNetwork(equation, [64]), datamodule=data)

    A checkpoint names neither its equation nor the sizes of its network; give both:
    ``PhysicsInformedNetwork.load_from_checkpoint(path, equation=..., hidden_sizes=...)``.

    Args:
        equation: the differential equation.
        hidden_sizes: units of the hidden layers, with tanh.
        network: another network: it maps points (n, d) to values (n,), or (n, k) for k unknown functions, each row by
            itself; ``hidden_sizes`` must not be given then.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``.

    Attributes:
        network: maps points (n, d) to values of the solution (n,), or (n, k).

    Raises:
        MisconfigurationException: ``equation`` is none, or it has parameters and is no module; neither ``hidden_sizes``
            nor ``network``, or both; a size that is not positive; in a Trainer, a data module whose equation lacks a
            region of this one.

    Example:
        >>> from lightning_struct.data import Poisson
        >>> points = {"interior": torch.rand(5, 2), "boundary": torch.rand(3, 2)}
        >>> residuals = PhysicsInformedNetwork(Poisson(2), [8])(points)
        >>> {block: tuple(residual.shape) for block, residual in residuals.items()}
        {'interior': (5,), 'boundary': (3,)}
    """

    def __init__(
        self,
        equation: DifferentialEquation,
        hidden_sizes: Sequence[int] | None = None,
        network: nn.Module | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        check_equation(equation)
        _check_unknowns(equation)
        if isinstance(hidden_sizes, int):
            raise MisconfigurationException(f"hidden_sizes is a list, one number for each layer: [{hidden_sizes}]")
        check_types(PhysicsInformedNetwork.__init__, locals())
        if (hidden_sizes is None) == (network is None) or min(hidden_sizes or [1]) < 1:
            raise MisconfigurationException(
                f"A PhysicsInformedNetwork needs hidden_sizes, all positive, or a network, but got {hidden_sizes} and "
                f"{network}"
            )
        self.equation = equation
        self.network = network or make_network(equation, hidden_sizes or [])
        self._squared_error: Tensor | None = None

    def setup(self, stage: str) -> None:
        """Refuse points of another equation: without those of a region, its conditions would not be trained."""
        super().setup(stage)
        other = getattr(getattr(self.trainer, "datamodule", None), "equation", None)
        if isinstance(other, DifferentialEquation) and not other.regions.keys() >= self.equation.regions.keys():
            raise MisconfigurationException(
                f"The points of the data module are those of {type(other).__name__}, with the regions "
                f"{', '.join(other.regions)}, but {type(self.equation).__name__}, which the model is to solve, has "
                f"{', '.join(self.equation.regions)}: give both the same equation"
            )

    @checked
    def forward(self, points: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Residuals at points (n, d) by block: (n,), or (n, k) if a point has k conditions."""
        if self.training and isinstance(self.network, IntervalNetwork):
            return self.network.residuals(self.equation, points)
        return self.equation.residuals(self.network, points)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(network := self.network, IntervalNetwork):
            unmet = network.go_on(self._progress(network), self.equation, batch)
            if unmet:
                self.trainer.should_stop = True
                rank_zero_warn(
                    f"The fit stops in interval {int(network.number) + 1} of {network.intervals}, since its conditions "
                    f"{', '.join(unmet)} are not met after twice its share of the training: what follows would be "
                    "wrong. Train longer, with a larger network, or with more intervals"
                )

    def _progress(self, network: IntervalNetwork) -> float:
        """The share of the fit that is over, by its steps or by its time, as the first process has it."""
        trainer: Any = self.trainer
        steps = trainer.estimated_stepping_batches
        timers = [each for each in trainer.callbacks if isinstance(each, Timer)]
        times = [(each.time_elapsed(), left) for each in timers if (left := each.time_remaining()) is not None]
        if math.isinf(steps) and not times:
            raise MisconfigurationException(
                f"{type(self.equation).__name__} is solved in {network.intervals} intervals of time, which share the "
                "fit: give the Trainer max_steps, max_epochs or max_time"
            )
        spent = max([trainer.global_step / steps, *(before / (before + after) for before, after in times)])
        return broadcast_numbers([spent], self.device)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = sum(self.block_losses(batch).values(), start=torch.zeros((), device=self.device))
        check_train_loss(self, loss, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=_points(batch), sync_dist=True)
        return loss

    def block_losses(self, points: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """½ mean r² of each block: summed over the conditions of a point, averaged over points."""
        return {block: 0.5 * residuals.square().sum() / len(residuals) for block, residuals in self(points).items()}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The field: (n, d + 1), the coordinates of points (n, d) and the value there, or (n, d + k)."""
        points = batch if isinstance(batch, Tensor) else batch[0]
        if isinstance(self.network, IntervalNetwork):
            self.equation.domain.check_inside(points, f"The domain of {type(self.equation).__name__}")
        return torch.cat([points, self.network(points).reshape(len(points), -1)], dim=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.network, IntervalNetwork):
            checkpoint["interval_began"] = self.network.began

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.network, IntervalNetwork):
            self.network.began = checkpoint.get("interval_began", 0.0)
        # Lightning loads weights before Trainer(precision="64-true") makes the module float64: they would be rounded
        self.to(next(weights.dtype for weights in checkpoint["state_dict"].values() if weights.is_floating_point()))

    def evaluate(self, batch: Mapping[str, Tensor], batch_idx: int, stage: str) -> None:
        losses, points = self.block_losses(batch), _points(batch)
        total = sum(losses.values(), start=torch.zeros((), device=self.device))
        self.log(f"{stage}_loss", total, prog_bar=True, batch_size=points, sync_dist=True)
        by_block = {f"{stage}_loss_{block}": loss for block, loss in losses.items()}
        self.log_dict(by_block, batch_size=points, sync_dist=True)
        known = self.equation.known(batch["interior"]) if "interior" in batch else None
        if known is not None:
            at, solution = known
            values = self.network(at)
            if solution.shape != values.shape:
                raise MisconfigurationException(
                    f"{type(self.equation).__name__}.solution returns {tuple(solution.shape)} at {len(at)} "
                    f"points, and the network {tuple(values.shape)}: both must have one shape, mostly (n,), as "
                    "points[:, 0].sin() has"
                )
            squares = torch.stack([(values - solution).square().sum(), solution.square().sum()])
            self._squared_error = squares if self._squared_error is None else self._squared_error + squares

    def on_validation_epoch_end(self) -> None:
        if self._squared_error is not None:
            error, size = all_reduce(self._squared_error)
            self._squared_error = None
            self.log("relative_l2_error", (error / size).sqrt(), prog_bar=True, sync_dist=True)  # the same on all

    on_test_epoch_end = on_validation_epoch_end


def make_network(equation: DifferentialEquation, hidden_sizes: Sequence[int]) -> TanhNetwork | IntervalNetwork:
    """The network for an equation: in intervals of time, if the equation names its time.

    Raises:
        MisconfigurationException: the residuals cannot be computed with so many unknown functions.
    """
    domain = equation.domain
    network: TanhNetwork | IntervalNetwork
    if equation.time is None:
        periods = {i: (domain.high - domain.low)[i].item() for i in equation.periodic}
        network = TanhNetwork(domain.dimension, hidden_sizes, periods, equation.unknowns)
    else:
        network = IntervalNetwork(equation, hidden_sizes)
    generator = torch.Generator().manual_seed(0)
    points = {block: region.sample(7, generator) for block, region in equation.regions.items()}
    try:
        equation.residuals(deepcopy(network).double(), points)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise MisconfigurationException(
            f"the residuals of {type(equation).__name__} cannot be computed with unknowns={equation.unknowns}: set the "
            f"number of functions in the class ({first_line(error)})"
        ) from error
    return network


def shf_of_residuals(module: nn.Module) -> SHF:
    """SHF for a module that returns residuals."""
    return SHF(module, "least_squares")


class SHFPhysicsInformedNetwork(SHFOptimization, PhysicsInformedNetwork):
    """A physics-informed network trained by SHF, a Gauss-Newton method: see :class:`~lightning_struct.optim.SHF`.

    For example::

        equation = Poisson(dimension=2)
        data = PointsDataModule(equation, {"interior": 900, "boundary": 120})
        Trainer(precision="64-true").fit(SHFPhysicsInformedNetwork(equation, [64]), datamodule=data)

    Args:
        equation: the differential equation.
        hidden_sizes: units of the hidden layers, with tanh.
        network: another network: it maps points (n, d) to values (n,), or (n, k) for k unknown functions, each row by
            itself; ``hidden_sizes`` must not be given then.
        optimizer: makes the SHF from the module.

    Raises:
        MisconfigurationException: neither ``hidden_sizes`` nor ``network``, or both; a size that is not positive.

    Example:
        >>> from lightning_struct.data import Heat
        >>> model = SHFPhysicsInformedNetwork(Heat(), [8])
        >>> model({"interior": torch.rand(5, 2)})["interior"].shape, isinstance(model.configure_optimizers(), SHF)
        (torch.Size([5]), True)
    """

    def __init__(
        self,
        equation: DifferentialEquation,
        hidden_sizes: Sequence[int] | None = None,
        network: nn.Module | None = None,
        optimizer: Callable[[nn.Module], SHF] = shf_of_residuals,
    ) -> None:
        super().__init__(equation, hidden_sizes, network)
        check_types(SHFPhysicsInformedNetwork.__init__, locals())
        self.make_shf = optimizer

    def configure_optimizers(self) -> SHF:
        return self.make_shf(self)


def _check_unknowns(equation: DifferentialEquation) -> None:
    """Refuse parameters that no optimizer would see."""
    if isinstance(equation, nn.Module):
        return
    for name, value in vars(equation).items():
        parameters = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(p, nn.Parameter) and p.requires_grad for p in parameters):
            kind, base = (cls.__name__ for cls in type(equation).__mro__[:2])
            raise MisconfigurationException(
                f"{kind}.{name} would not be trained, as {kind} is no module: write class {kind}({base}, nn.Module), "
                "and begin its __init__ with nn.Module.__init__(self)"
            )


def _points(batch: Mapping[str, Tensor]) -> int:
    return sum(map(len, batch.values()))
