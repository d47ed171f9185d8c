"""A classifier whose classes arrive in phases, and which forgets none: analytic continual learning."""

from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.models.classifier import Classifier
from lightning_struct.models.training import check_train_loss
from lightning_struct.nn.recursive import RecursiveLinear
from lightning_struct.utilities.namespaces import MisconfigurationException


class ContinualClassifier(Classifier):
    """Classifier that sees its classes in phases, each once, and ends as if it had seen them all together.

    For ``first_epochs`` epochs a network is trained on the classes of the first phase, with an output layer of its own.
    Then it is frozen. Each of the following epochs is a phase: a :class:`~lightning_struct.nn.RecursiveLinear` learns
    the classes of that phase, by their one-hot targets, from a wide random ReLU layer above the network. Samples of
    other classes are left out. After the last phase its weights are those of ridge regression on all samples (Zhuang et
    al., ACIL, NeurIPS 2022, section 3; McDonnell et al., RanPAC, NeurIPS 2023, section 4).

    Classes are 0 to ``num_classes - 1``, in the order of the phases; the output of a class that has not come yet is 0.
    Every batch counts as one step in ``global_step``.

    Args:
        network: from inputs (n, ...) to features (n, features).
        features: their number.
        width: units of the random layer.
        num_classes: labels are 0 to ``num_classes - 1``.
        phases: parts of equal size in which the classes come.
        first_epochs: epochs of the network's training.
        regularization: δ of the last layer.
        optimizer: makes the optimizer of the network.

    Raises:
        MisconfigurationException: the phases do not divide the classes; at the start of fit, for a Trainer whose
            ``max_epochs`` is not ``first_epochs`` + ``phases``; further as for :class:`Classifier`.

    Example:
        >>> model = ContinualClassifier(nn.Flatten(), features=784, width=100)
        >>> model(torch.zeros(5, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        network: nn.Module,
        features: int,
        width: int = 8192,
        num_classes: int = 10,
        phases: int = 5,
        first_epochs: int = 1,
        regularization: float = 1.0,
        optimizer: OptimizerCallable = torch.optim.Adam,
    ) -> None:
        super().__init__(network, num_classes, "mse", optimizer)
        if phases < 1 or num_classes % phases:
            raise MisconfigurationException(f"phases={phases} must divide num_classes={num_classes}")
        self.automatic_optimization = False
        self.first_epochs, self.phases, self.classes_of_phase = first_epochs, phases, num_classes // phases
        self.first_output = nn.Linear(features, self.classes_of_phase)
        self.random = nn.Linear(features, width).requires_grad_(False)
        self.output = RecursiveLinear(width, self.classes_of_phase, regularization=regularization)

    @property
    def phase(self) -> int:
        """Number of the phase, from 0 on; negative while the network is trained."""
        return self.current_epoch - self.first_epochs

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs, (n, num_classes)."""
        outputs = self.output(self.random(self.network(inputs)).relu())
        return F.pad(outputs, (0, self.num_classes - outputs.shape[1]))

    def on_fit_start(self) -> None:
        trainer: Any = self.trainer
        if trainer.max_epochs != self.first_epochs + self.phases and not trainer.fast_dev_run:
            raise MisconfigurationException(
                f"ContinualClassifier takes first_epochs + phases epochs, {self.first_epochs} + {self.phases}: set "
                f"Trainer(max_epochs={self.first_epochs + self.phases}), not {trainer.max_epochs}"
            )

    def on_train_epoch_start(self) -> None:
        if self.phase >= 0:
            self.network.requires_grad_(False).eval()
            self.first_output.requires_grad_(False)
            missing = (self.phase + 1) * self.classes_of_phase - self.output.out_features
            if missing > 0:
                self.output.add_outputs(missing)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = max(self.phase, 0) * self.classes_of_phase
        inputs, labels = batch[0], batch[1]
        is_now = (labels >= first) & (labels < first + self.classes_of_phase)
        inputs, labels = inputs[is_now], labels[is_now]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.phase < 0:
            loss = F.cross_entropy(self.first_output(self.network(inputs)), labels, reduction="sum") / len(batch[0])
            check_train_loss(self, loss, batch_idx)
            self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)
            self.manual_backward(loss)
        else:
            with torch.no_grad():
                self.output.update(self.random(self.network(inputs)).relu(), labels)
        optimizer.step()  # in a phase no parameter has a gradient: it counts the step
