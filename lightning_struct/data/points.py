"""Points of a differential equation's regions, drawn anew while a network is trained on them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_struct.collective import all_gather_rows
from lightning_struct.data.equations import DifferentialEquation, Region, check_equation
from lightning_struct.data.in_memory import BatchedTensorDataset, EvaluatedDataModule
from lightning_struct.data.sampling import DrawLoader, IndependentDraws, keep_batch, seeded_generator
from lightning_struct.functional.checks import checked, is_real
from lightning_struct.utilities import checks
from lightning_struct.utilities.distributed import data_parallel_replicas
from lightning_struct.utilities.namespaces import MisconfigurationException

Points: TypeAlias = dict[str, Tensor]  # by the name of the block: (n, d)

# Points that a residual is evaluated at, for each that is taken in proportion to it.
_CANDIDATES = 10
# The number of points doubles if the loss on new points has not halved in so many draws, and is larger than that on the
# last points by more than this factor: one or the other pair.
_PATIENCE, _GAP = (5, 2), (2.0, 5.0)
# A loss this many times the lowest one is that of another problem, as of the next interval of time: draws count anew.
_RISE = 10.0
# Bounds on the number of points that grows by itself: for each trained parameter, and in all.
_POINTS_PER_PARAMETER, _MOST_POINTS = 10, 30_000
# Parts of the seed: the points of training, of validation, of the test.
_TRAIN, _VAL, _TEST = range(3)


class PointDraws(IndependentDraws):
    """Points of several regions, which stay for some steps and are drawn anew then.

    Of each region there is a fixed share of the batch. If the batch grows (``GrowingBatchSize``), points are added to
    those that are there. What a draw is depends on the seed and its number, and with ``residual_share`` or
    ``max_points`` on the weights at the step that drew it: :meth:`state_dict` has the points.

    With ``max_points`` the number of points grows with the accuracy. It doubles when the steps fit the points rather
    than the equation: when the loss ½ Σ_b mean r² on new points has not halved in five draws, and is more than twice
    that on the last ones, or in two draws, and is more than five times that. In a linear regression with n points and p
    parameters it is (n + p)/(n - p) times that, so that about three points for each parameter in use are enough. A
    ``batch_size`` that is set ends this.

    Args:
        regions: by the name of the block.
        counts: points of each block in a batch, over all processes together.
        draws_per_epoch: batches that are called an epoch.
        redraw_every_n_steps: batches that have the same points; None for all.
        residual_share: share of the points of each block, in [0, 1), that are taken from ten times as many candidates
            in proportion to the absolute value of their residuals. All others are uniformly distributed.
        residuals: the residuals of the network that is trained, by block, for ``residual_share`` and ``max_points``.
        max_points: number of points of all blocks that doubling does not exceed; None leaves their number as it is.
        seed: of the draws, not negative.
        num_replicas: processes that share a draw; None takes those of torch.distributed when the draw is made.
        rank: of this process; None likewise.

    Raises:
        MisconfigurationException: counts that are not one for each region, or below 1; an argument out of range; fewer
            points of a block than processes.
        ValueError: when points are drawn, for residuals that are NaN or infinite.

    Example:
        >>> from lightning_struct.data.equations import Box
        >>> line = {"interior": Box([0.0], [1.0])}
        >>> draws = PointDraws(line, {"interior": 3}, draws_per_epoch=10, redraw_every_n_steps=2)
        >>> first, second, third = (draws.draw(number)["interior"] for number in range(3))
        >>> torch.equal(first, second), torch.equal(second, third)
        (True, False)
    """

    @checked
    def __init__(
        self,
        regions: Mapping[str, Region],
        counts: Mapping[str, int],
        *,
        draws_per_epoch: int,
        redraw_every_n_steps: int | None = 5,
        residual_share: float = 0.0,
        residuals: Callable[[Points], Mapping[str, Tensor]] | None = None,
        max_points: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        _check_options(regions, counts, redraw_every_n_steps, residual_share, max_points)
        for name, value, off in (("residual_share", residual_share, 0), ("max_points", max_points, None)):
            if value and residuals is None:
                raise MisconfigurationException(
                    f"{name}={value} needs the residuals of a network: train with a Trainer, or set it to {off}"
                )
        self.regions, self.counts = dict(regions), {block: counts[block] for block in regions}
        self.redraw_every_n_steps, self.residual_share = redraw_every_n_steps, residual_share
        self._residuals, self.max_points = residuals, max_points
        self._period: int | None = None
        self._points: Points = {}
        self._lowest_loss, self._waited, self._own_size = math.inf, 0, sum(counts.values())
        super().__init__(_NoDataset(), self._own_size, draws_per_epoch, seed=seed, num_replicas=num_replicas, rank=rank)

    @property
    def samples(self) -> None:
        """There is no end to the points of a region."""
        return None

    @property
    def points(self) -> Points:
        """The points of the last draw over all processes; those of the first before it."""
        return self._points or self.draw(0)

    def draw(self, number: int) -> Points:
        """The draw of this number over all processes, by block: (n, d), float64."""
        period = 0 if self.redraw_every_n_steps is None else number // self.redraw_every_n_steps
        if period != self._period:
            last, self._period, self._points = self._points, period, {}
            self._add_points()
            if last and self.max_points is not None:
                self._grow(last, self.max_points)
        self._add_points()
        return {block: self._points[block][:size] for block, size in self._sizes().items()}

    def share(self, draw: Points) -> Points:
        return {block: points.tensor_split(self.num_replicas)[self.rank] for block, points in draw.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.held()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.hold(state_dict)

    def held(self) -> dict[str, Any]:
        """The points that stay until they are drawn anew, as a state for :meth:`hold`."""
        growth = {"lowest_loss": self._lowest_loss, "waited": self._waited, "own_size": self._own_size}
        return {"period": self._period, "points": dict(self._points), "batch_size": self.batch_size, **growth}

    def hold(self, state: Mapping[str, Any]) -> None:
        """Go on with the points of a state."""
        self._period, self._points = state["period"], dict(state["points"])
        self.batch_size, self._own_size = state["batch_size"], state["own_size"]
        self._lowest_loss, self._waited = state["lowest_loss"], state["waited"]

    def _grow(self, last: Points, max_points: int) -> None:
        """Double the number of points if the steps on the last ones fitted these points."""
        # all processes have these points and weights; the first one decides
        loss, fitted = all_gather_rows(torch.stack([self._loss(self._points), self._loss(last)]))[0].tolist()
        if loss < 0.5 * self._lowest_loss or loss > _RISE * self._lowest_loss:
            self._lowest_loss, self._waited = loss, 0
            return
        self._waited += 1
        more = min(2 * self.batch_size, max_points)
        if more <= self.batch_size or self.batch_size != self._own_size:
            return
        if any(self._waited >= patience and loss > gap * fitted for patience, gap in zip(_PATIENCE, _GAP, strict=True)):
            self._lowest_loss, self._waited = loss, 0
            self.batch_size = self._own_size = more

    def _loss(self, points: Points) -> Tensor:
        """½ Σ_b mean r² at the weights of now, (), float64."""
        assert self._residuals is not None
        blocks = self._residuals(points)
        squares = [blocks[block].detach().double().square().sum() / len(at) for block, at in points.items()]
        return 0.5 * torch.stack(squares).sum()

    def _add_points(self) -> None:
        """Draw the points of this period that are missing."""
        sizes = self._sizes()
        held = {block: len(points) for block, points in self._points.items()}
        missing = {block: max(size - held.get(block, 0), 0) for block, size in sizes.items()}
        if any(missing.values()):
            assert self._period is not None
            more = self._sample(missing, seeded_generator(self.seed, _TRAIN, self._period, sum(held.values())))
            self._points = {
                block: torch.cat([self._points[block], points]) if block in held else points
                for block, points in more.items()
            }

    def _sizes(self) -> dict[str, int]:
        """Points of each block in a batch of this size."""
        total, first = self.batch_size, sum(self.counts.values())
        sizes = {
            block: round(total * count / first) if (size := self.regions[block].size) is None else min(count, size)
            for block, count in self.counts.items()
        }
        if few := ", ".join(block for block, size in sizes.items() if size < self.num_replicas):
            raise MisconfigurationException(
                f"{total} points leave some of the {self.num_replicas} processes without any of {few}: draw more "
                "points, or use fewer processes"
            )
        return sizes

    def _sample(self, counts: Mapping[str, int], generator: torch.Generator) -> Points:
        """So many new points of each block."""
        chosen = {
            block: round(self.residual_share * count) if self.regions[block].size is None else 0
            for block, count in counts.items()
        }
        points = {
            block: self.regions[block].sample(count - chosen[block], generator) for block, count in counts.items()
        }
        if self._residuals is not None and any(chosen.values()):
            numbers = {block: max(_CANDIDATES * count, 1) for block, count in chosen.items()}
            candidates = {block: self.regions[block].sample(number, generator) for block, number in numbers.items()}
            residuals = self._residuals(candidates)
            for block, count in chosen.items():
                # absolute values of residuals, or norms if a point has several: (n,), float64
                sizes = residuals[block].detach().to("cpu", torch.float64).reshape(numbers[block], -1).norm(dim=1)
                if not sizes.isfinite().all():
                    where = candidates[block][~sizes.isfinite()][0].tolist()
                    raise ValueError(f"The residual of {block} is NaN or infinite at the point {where}")
                if count:
                    positive = sizes.clamp_min(max(1e-12 * sizes.max().item(), torch.finfo(torch.float64).tiny))
                    taken = torch.multinomial(positive, count, generator=generator)
                    points[block] = torch.cat([points[block], candidates[block][taken]])
        # in random order, so that the shares of processes are alike
        return {block: drawn[torch.randperm(len(drawn), generator=generator)] for block, drawn in points.items()}


class PointsDataModule(EvaluatedDataModule):
    """Points of a differential equation's regions, drawn anew every few steps.

    A training batch has points of every region, by block: a dict of tensors (n, d), in the dtype of the module's
    weights. Points that stay can be fitted by a wrong solution, whose residual is small at the points and large between
    them; so they are drawn anew, by default every five steps. Their number grows with the accuracy, see
    :class:`PointDraws`.

    Held-out points, uniformly distributed and the same in every validation, show the loss that is meant. ``predict``
    has a regular grid of the domain: batches of one tensor (n, d).

    Args:
        equation: its regions are drawn from.
        counts: points of each region in the first batch, over all processes together.
        max_points: number of points of all regions that doubling does not exceed. None: ten for each trained
            parameter, and at most 30,000; with ``residual_share=0`` the number stays.
        redraw_every_n_steps: steps after which the points are drawn anew; None keeps those of the first step.
        residual_share: share of the points of each region, in [0, 1), that are drawn in proportion to the absolute
            value of the residual of the module that is trained, which is called with points as for a step (Wu et al., A
            comprehensive study of non-adaptive and residual-based adaptive sampling for physics-informed neural
            networks, 2023, k = 1).
        steps_per_epoch: steps between two validations.
        eval_count: points of each region in the validation set, and as many in the test set.
        predict_count: points of the grid.
        seed: of all points, not negative.

    Raises:
        MisconfigurationException: counts that are not one for each region, or an argument out of range.

    Example:
        >>> from lightning_struct.data.equations import Poisson
        >>> numbers = {"interior": 900, "boundary": 120}
        >>> data = PointsDataModule(Poisson(), numbers, residual_share=0)  # without a Trainer
        >>> batch = next(iter(data.train_dataloader()))
        >>> {block: tuple(points.shape) for block, points in batch.items()}
        {'interior': (900, 2), 'boundary': (120, 2)}
    """

    def __init__(
        self,
        equation: DifferentialEquation,
        counts: Mapping[str, int],
        *,
        max_points: int | None = None,
        redraw_every_n_steps: int | None = 5,
        residual_share: float = 0.2,
        steps_per_epoch: int = 50,
        eval_count: int = 5_000,
        predict_count: int = 10_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_equation(equation)
        _check_options(equation.regions, counts, redraw_every_n_steps, residual_share, max_points)
        checks.check_counts(eval_count=eval_count, steps_per_epoch=steps_per_epoch, predict_count=predict_count)
        checks.check_counts(0, seed=seed)
        self.max_points = max_points
        self.equation, self.counts, self.seed = equation, dict(counts), seed
        self.redraw_every_n_steps, self.residual_share = redraw_every_n_steps, residual_share
        self.steps_per_epoch, self.eval_count, self.predict_count = steps_per_epoch, eval_count, predict_count
        self._draws: PointDraws | None = None
        self._held: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The points that stay. Lightning loads the state of the loader too, but only within an epoch."""
        return {} if self._draws is None else self._draws.held()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._held = state_dict or None

    def train_dataloader(self) -> DataLoader:
        self._draws = PointDraws(
            self.equation.regions, self.counts, draws_per_epoch=self.steps_per_epoch, seed=self.seed,
            redraw_every_n_steps=self.redraw_every_n_steps, residual_share=self.residual_share,
            residuals=self._residuals if self.trainer else None, max_points=self._max_points,
            **data_parallel_replicas(self.trainer),
        )  # fmt: skip
        if self._held is not None:
            self._draws.hold(self._held)
            self._held = None
        # by keyword: Lightning cannot make a loader anew whose sampler came by position
        return _PointLoader(self._draws.dataset, sampler=self._draws, collate_fn=self._in_dtype_of_module)

    def evaluation_dataloader(self, part: Literal["train", "val", "test"]) -> DataLoader:
        """The points of a set as one batch; of the training set those of the last step.

        In a process that made no step, as one that has spawned others for it, those are uniformly distributed.
        """
        points: Points | None = None
        if part == "train":
            points = (self._held or {}).get("points") if self._draws is None else self._draws.points
        points = points or self._uniform_points(part)
        only_batch: Any = [self._in_dtype_of_module(points)]
        return DataLoader(only_batch, batch_size=None, collate_fn=keep_batch)

    def predict_dataloader(self) -> DataLoader:
        grid = self.equation.domain.grid(self.predict_count).to(self._dtype)
        return DataLoader(BatchedTensorDataset(grid), batch_size=1000, collate_fn=keep_batch)

    def _uniform_points(self, part: Literal["train", "val", "test"]) -> Points:
        counts = self.counts if part == "train" else dict.fromkeys(self.counts, self.eval_count)
        of_part = {"train": _TRAIN, "val": _VAL, "test": _TEST}[part]
        return {
            block: region.sample(counts[block], seeded_generator(self.seed, of_part, index))
            for index, (block, region) in enumerate(self.equation.regions.items())
        }

    @property
    def _max_points(self) -> int | None:
        if not self.trainer:
            return None
        if self.max_points is not None or self.residual_share == 0:
            return self.max_points
        trained = (p.numel() for p in self.trainer.lightning_module.parameters() if p.requires_grad)
        return min(_POINTS_PER_PARAMETER * sum(trained), _MOST_POINTS)

    def _residuals(self, points: Points) -> Mapping[str, Tensor]:
        trainer: Any = self.trainer
        module = trainer.lightning_module
        moved = {block: at.to(module.device, module.dtype) for block, at in points.items()}
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            residuals = module(moved)
        if isinstance(residuals, Tensor) and len(points) == 1:
            residuals = dict.fromkeys(points, residuals)
        if not isinstance(residuals, Mapping) or not all(
            block in residuals and residuals[block].shape[:1] == at.shape[:1] for block, at in points.items()
        ):
            raise MisconfigurationException(
                f"PointsDataModule(residual_share={self.residual_share}) draws points where the residual is large, but "
                f"{type(module).__name__} called with points does not return a residual for each point, by block: make "
                "its forward return residuals, or set residual_share=0"
            )
        return residuals

    def _in_dtype_of_module(self, points: Points) -> Points:
        return {block: at.to(self._dtype) for block, at in points.items()}

    @property
    def _dtype(self) -> torch.dtype:
        trainer: Any = self.trainer
        return trainer.lightning_module.dtype if trainer else torch.get_default_dtype()


def _check_options(
    regions: Mapping[str, Region],
    counts: Mapping[str, int],
    every_n_steps: int | None,
    residual_share: float,
    max_points: int | None,
) -> None:
    """Check that there is a number of points for each region, and the options of their draws.

    Raises:
        MisconfigurationException: a region without a count, a count without a region, a count that is no whole number
            of at least 1, or an option out of range.
    """
    checks.check("counts", counts, isinstance(counts, Mapping), "a mapping of regions to numbers of points")
    if set(counts) != set(regions):
        raise MisconfigurationException(
            f"counts must have a number of points for each of the regions {', '.join(regions)}, but has "
            f"{', '.join(counts) or 'none'}"
        )
    if few := {block: count for block, count in counts.items() if not checks.is_count(count)}:
        raise MisconfigurationException(f"counts must be whole numbers of at least 1, but are {few}")
    checks.check_positive(redraw_every_n_steps=every_n_steps, max_points=max_points)
    is_share = is_real(residual_share) and 0 <= residual_share < 1
    checks.check("residual_share", residual_share, is_share, "in [0, 1)")


class _PointLoader(DrawLoader):
    """The loader of drawn points."""

    instead_of_overfitting = (
        "leave that out and let the points stay: Trainer(limit_train_batches=...) and redraw_every_n_steps=None "
        "(--trainer.limit_train_batches=2 --data.redraw_every_n_steps=null)"
    )


class _NoDataset(Dataset):
    """Stands for a loader's data set: the points themselves are drawn."""

    def __getitems__(self, points: Any) -> Any:
        return points

    def __len__(self) -> int:
        return 0
