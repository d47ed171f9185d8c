"""The Levenberg-Marquardt rule as a callback."""

import math
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_struct.functional.checks import is_extended, is_real
from lightning_struct.functional.solvers.damping import MAX_DAMPING, check_levenberg_marquardt, reduction_ratio_rule
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check
from lightning_struct.utilities.lightning_internals import names_of_optimizers
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException


class LevenbergMarquardtDamping(Callback):
    """Adapts the damping λ of an optimizer by ρ, the true reduction of the loss over the predicted one (section 4.2).

    After each step it sets the ``damping`` by :meth:`decide`, in the first process for all. It does so for every
    optimizer that has a ``damping``, and either a ``reduction_ratio`` or a ``report`` with one, such as
    :class:`~lightning_struct.optim.SHF`. :meth:`decide` gets the damping of the step:
    ``report.damping``, or that of the optimizer before the step. Changes by the optimizer's own rule, such as SHF's
    ``drop``, do not count. The damping is part of the optimizer's state, so the callback has none; a run that is
    resumed without the callback continues by the optimizer's own rule.

    Args:
        drop: factor of λ if ρ > ``upper``, and divisor if ρ < ``lower``; in (0, 1].
        lower: ρ below which the damping rises.
        upper: ρ above which the damping falls.
        min_damping: lower bound on λ.
        max_damping: upper bound on λ.

    Raises:
        MisconfigurationException: an argument is out of range; at the start of training no optimizer has a damping;
            after a step, :meth:`decide` returns no finite number >= 0.

    Example:
        >>> from lightning import Trainer
        >>> callback = LevenbergMarquardtDamping(drop=0.98)
        >>> trainer = Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> callback.decide(damping=10.0, reduction_ratio=0.9)  # the model predicted well
        9.8
    """

    def __init__(
        self,
        drop: float = 0.99,
        lower: float = 0.25,
        upper: float = 0.75,
        min_damping: float = 0.0,
        max_damping: float = MAX_DAMPING,
    ) -> None:
        self.drop, self.lower, self.upper = drop, lower, upper
        self.min_damping, self.max_damping = min_damping, max_damping
        for name, number in vars(self).items():
            check(name, number, is_extended(number), "a number")
        try:
            check_levenberg_marquardt(**vars(self))
        except ValueError as error:
            raise MisconfigurationException(f"LevenbergMarquardtDamping: {error}") from error
        self._hooks: list[RemovableHandle] = []
        self._followed: list[Any] = []
        # of each optimizer the dampings before the steps that it is in: that of a class may call that of its base
        self._steps: list[list[float]] = []

    def decide(self, damping: float, reduction_ratio: float) -> float:
        """Damping of the next step; override it for another rule."""
        bounds = {"min_damping": self.min_damping, "max_damping": self.max_damping}
        return reduction_ratio_rule(
            damping, reduction_ratio, drop=self.drop, lower=self.lower, upper=self.upper, **bounds
        )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not _damped(trainer):
            raise MisconfigurationException(
                "LevenbergMarquardtDamping needs an optimizer with `damping` and a reduction ratio, as SHF, but got "
                f"{names_of_optimizers(trainer)}: return SHF from configure_optimizers, or leave the callback out"
            )

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for steps in self._steps:
            steps.clear()  # after a step that failed and was passed over
        for optimizer in _damped(trainer):  # others than before, if a callback has had them made anew
            if optimizer not in self._followed:
                self._follow(optimizer, trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._followed, self._steps = [], [], []

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # which Lightning does not call then

    def _follow(self, optimizer: Any, trainer: L.Trainer) -> None:
        """Hook the optimizer's own step: ``global_step`` does not tell which of several optimizers has stepped."""
        steps: list[float] = []
        self._steps.append(steps)
        self._followed.append(optimizer)

        def before_step(*_: Any) -> None:
            steps.append(optimizer.damping)

        def after_step(*_: Any) -> None:
            before = steps.pop()
            if steps:  # the step of a base class, called by that of the optimizer, which is not done
                return
            report = getattr(optimizer, "report", None)
            ratio = getattr(optimizer if report is None else report, "reduction_ratio", None)
            if ratio is not None:
                used = getattr(report, "damping", before)
                self._set_damping(optimizer, trainer.strategy.broadcast(self.decide(float(used), float(ratio))))

        self._hooks += [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]

    def _set_damping(self, optimizer: Any, decided: Any) -> None:
        try:
            if not (is_real(decided) or isinstance(decided, Tensor)) or not 0 <= decided < math.inf:
                raise ValueError("it must be a finite number >= 0")
            optimizer.damping = decided
        except ValueError as error:
            raise MisconfigurationException(
                f"{type(self).__name__}.decide() returned {decided!r} as the next damping: {error}"
            ) from error


def _damped(trainer: L.Trainer) -> list[Any]:
    reporting = [each for each in trainer.optimizers if hasattr(each, "report") or hasattr(each, "reduction_ratio")]
    return [optimizer for optimizer in reporting if hasattr(optimizer, "damping")]
