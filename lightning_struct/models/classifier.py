"""Classifiers as LightningModules around any network, trained by any optimizer, RLS or SHF; the tasks' networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_struct.functional.checks import check_types, checked
from lightning_struct.mixins.rls import RLSOptimization
from lightning_struct.mixins.shf import SHFOptimization
from lightning_struct.models.training import Task, check_train_loss
from lightning_struct.optim.rls import RLS
from lightning_struct.optim.shf import SHF
from lightning_struct.utilities.checks import check, check_counts, check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException


@checked
def fully_connected(layer_sizes: Sequence[int] = (784, 512, 10)) -> nn.Sequential:
    """Linear layers between consecutive sizes, with a ReLU between each two; the images are flattened first.

    The default is the network for MNIST of Zhang et al., section VI-A.

    Args:
        layer_sizes: from the pixels to the classes.

    Returns:
        A network from (n, ...) to (n, classes): logits. Its last layer is named ``output``.

    Raises:
        MisconfigurationException: if there are fewer than two sizes, or one that is not positive.

    Example:
        >>> fully_connected([784, 32, 10])(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    if len(layer_sizes) < 2 or min(layer_sizes) < 1:
        raise MisconfigurationException(
            f"layer_sizes must name the pixels, the classes and the layers between, all positive, but is {layer_sizes}"
        )
    layers = [layer for pair in pairwise(layer_sizes[:-1]) for layer in (nn.Linear(*pair), nn.ReLU())]
    return _with_output(nn.Sequential(nn.Flatten(), *layers), *layer_sizes[-2:])


@checked
def mini_vgg(channels: int = 64, hidden: int = 1024, num_classes: int = 10, image_size: int = 32) -> nn.Sequential:
    """The first five convolutions of VGG-16 and two fully connected layers (Zhang et al., section VI-A).

    Convolutions are 3 x 3 with padding 1, each followed by a ReLU; those at full size have ``channels`` channels, the
    later ones two and four times as many. 4.8 million weights at the default sizes.

    Args:
        channels: of the first two convolutions; fewer make a narrower network of the same shape.
        hidden: units of the first fully connected layer.
        num_classes: units of the last one.
        image_size: height and width, a multiple of 8.

    Returns:
        A network from (n, 3, image_size, image_size) to (n, num_classes): logits. Its last layer is named ``output``.

    Raises:
        MisconfigurationException: if a size is not positive, or ``image_size`` not a multiple of 8.

    Example:
        >>> mini_vgg(channels=2, hidden=8, image_size=8)(torch.zeros(5, 3, 8, 8)).shape
        torch.Size([5, 10])
    """
    check_positive(channels=channels, hidden=hidden, num_classes=num_classes, image_size=image_size)
    check("image_size", image_size, image_size % 8 == 0, "a multiple of 8, which three poolings can halve")
    # The paper does not say whether a pooling follows its fifth convolution. In VGG-16 that is the first of three; here
    # it ends the stack, and is followed by the pooling that ends every stack: without it the hidden layer alone would
    # have 16.8 million weights.
    stacks = ((3, channels, channels), (channels, 2 * channels, 2 * channels), (2 * channels, 4 * channels))
    layers: list[nn.Module] = []
    for widths in stacks:
        for pair in pairwise(widths):
            layers += [nn.Conv2d(*pair, kernel_size=3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    features = 4 * channels * (image_size // 8) ** 2
    layers += [nn.Flatten(), nn.Linear(features, hidden), nn.ReLU()]
    return _with_output(nn.Sequential(*layers), hidden, num_classes)


def _with_output(layers: nn.Sequential, features: int, num_classes: int) -> nn.Sequential:
    """The layers, and an output layer that is always named ``output``, so that optimizers can exclude it."""
    layers.add_module("output", nn.Linear(features, num_classes))
    return layers


class Classifier(Task):
    """Classifier of labelled samples: trains any network, and measures its loss and accuracy.

    For example::

        Trainer().fit(Classifier(fully_connected([784, 512, 10])), datamodule=MNISTDataModule(draws="epoch"))

    It logs ``train_loss``, ``val_loss`` and ``test_loss``, averages over samples, and ``val_accuracy`` and
    ``test_accuracy``, shares of the samples in [0, 1].

    A checkpoint of a run from the command line says itself which network it is of. That of a network from Python code
    does not: ``Classifier.load_from_checkpoint(path, network=...)``.

    Args:
        network: from inputs (n, ...) to outputs (n, num_classes), or (n, num_classes, steps) if each step has a
            label.
        num_classes: labels are 0 to ``num_classes - 1``.
        loss: ``"cross_entropy"`` of the outputs as logits, or ``"mse"``, ½‖z - y‖² with y the label one-hot, averaged
            over samples (Zhang et al., equation (57)).
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``.

    Raises:
        MisconfigurationException: if ``num_classes`` is below 2 or the loss unknown; in the first batch, if the outputs
            are not (n, num_classes), or the labels not of their shape; in a validation or test, for labels that are
            not 0 to ``num_classes - 1``.

    Example:
        >>> model = Classifier(fully_connected([784, 32, 10]))
        >>> model(torch.zeros(5, 784)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int = 10,
        loss: Literal["cross_entropy", "mse"] = "cross_entropy",
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        check_types(Classifier.__init__, locals())
        check_counts(2, num_classes=num_classes)
        if loss not in ("cross_entropy", "mse"):
            raise MisconfigurationException(f"loss must be 'cross_entropy' or 'mse', but is {loss!r}")
        # makers of optimizers need not be picklable; a checkpoint has the weights of the network anyway
        self.save_hyperparameters(ignore=["network", "optimizer", "lr_scheduler"])
        if "_instantiator" in self.hparams:  # from a command line: there the network is plain data, which can be saved
            self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.network, self.num_classes, self.loss = network, int(num_classes), loss
        self.val_accuracy = MulticlassAccuracy(self.num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(self.num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the network, (n, num_classes) or (n, num_classes, steps)."""
        outputs = self.network(inputs)
        if outputs.shape[:2] != (len(inputs), self.num_classes):
            raise MisconfigurationException(
                f"The network makes {tuple(outputs.shape)} of {len(inputs)} samples, but "
                f"num_classes={self.num_classes} asks for {(len(inputs), self.num_classes)}: give both the same "
                "number"
            )
        return outputs

    def inputs_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The inputs of a batch, and the targets of the loss.

        Args:
            batch: a sequence that begins with inputs (n, ...) and labels (n,) or (n, steps), int64.

        Returns:
            Inputs, and the labels for the cross-entropy, or one-hot (n, num_classes) or (n, num_classes, steps), in the
            dtype of the weights, for the squared error.
        """
        inputs, labels = batch[0], batch[1]
        if self.loss == "cross_entropy":
            return inputs, labels
        return inputs, F.one_hot(labels, self.num_classes).movedim(-1, 1).to(self.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._training_loss(batch)
        check_train_loss(self, loss, batch_idx)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classes, (n,) or (n, steps), int64."""
        return self(batch[0]).argmax(dim=1)

    def _training_loss(self, batch: Any) -> Tensor:
        inputs, targets = self.inputs_and_targets(batch)
        loss = self._average_loss(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(inputs), sync_dist=True)
        return loss

    def _average_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "cross_entropy":
            return F.cross_entropy(outputs, targets)
        if outputs.shape != targets.shape:  # mse_loss would broadcast them
            raise MisconfigurationException(
                f"The network makes {tuple(outputs.shape)}, but the labels are {tuple(targets.shape)} one-hot: give "
                "labels (n,), or (n, steps) if each step has outputs"
            )
        return 0.5 * F.mse_loss(outputs, targets, reduction="sum") / len(outputs)

    def evaluate(self, batch: Any, batch_idx: int, stage: str) -> None:
        labels = batch[1]
        # here, not in training, as asking a GPU would cost time in every step; it comes before training, too
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= self.num_classes:
            raise MisconfigurationException(
                f"Labels go from {low} to {high}, but must be 0 to {self.num_classes - 1} with "
                f"num_classes={self.num_classes}: give network and model as many classes as the data have"
            )
        inputs, targets = self.inputs_and_targets(batch)
        outputs, accuracy = self(inputs), getattr(self, f"{stage}_accuracy")
        accuracy(outputs, labels)
        loss = self._average_loss(outputs, targets)
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=len(inputs), sync_dist=True)
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True, batch_size=len(inputs))


class RLSClassifier(RLSOptimization, Classifier):
    """The classifier trained by RLS (Zhang et al.).

    For example::

        Trainer().fit(RLSClassifier(mini_vgg()), datamodule=CIFAR10DataModule())

    Under the squared error RLS can train all layers. Under the cross-entropy the output layer is for another optimizer,
    the paper's hybrid::

        hybrid = functools.partial(RLS, exclude=["network.output"], auxiliary=torch.optim.Adam)
        RLSClassifier(mini_vgg(), loss="cross_entropy", optimizer=hybrid)

    Args:
        network: from inputs (n, ...) to outputs (n, num_classes).
        num_classes: labels are 0 to ``num_classes - 1``.
        loss: ``"mse"`` or ``"cross_entropy"``, as of :class:`Classifier`.
        optimizer: makes the RLS from the module: the names of layers begin with ``network.``.
        lr_scheduler: makes the learning-rate scheduler from the RLS; it is stepped after each epoch.

    Raises:
        MisconfigurationException: if ``num_classes`` is below 2 or the loss unknown; in the first batch, if the outputs
            are not (n, num_classes), or the labels not of their shape.

    Example:
        >>> model = RLSClassifier(fully_connected([784, 32, 10]))
        >>> model(torch.zeros(5, 784)).shape, isinstance(model.configure_optimizers(), RLS)
        (torch.Size([5, 10]), True)
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int = 10,
        loss: Literal["cross_entropy", "mse"] = "mse",
        optimizer: Callable[[nn.Module], RLS] = RLS,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(network, num_classes, loss, lr_scheduler=lr_scheduler)
        check_types(RLSClassifier.__init__, locals())
        self.make_rls = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._training_loss(batch)  # RLS finds NaN itself, and names the layers

    def configure_optimizers(self) -> Any:
        optimizer = self.make_rls(self)
        return optimizer if self.make_lr_scheduler is None else ([optimizer], [self.make_lr_scheduler(optimizer)])


def shf_with_chosen_settings(module: nn.Module, loss: str) -> SHF:
    """SHF that chooses its settings by itself."""
    return SHF(module, loss)


class SHFClassifier(SHFOptimization, Classifier):
    """The classifier trained by SHF.

    For example::

        kronecker = functools.partial(SHF, damping=1.0, preconditioner="kronecker", solver=CG(maxiter=10), l2=1e-4)
        Trainer().fit(SHFClassifier(fully_connected(), optimizer=kronecker), datamodule=MNISTDataModule())

    Args:
        network: from inputs (n, ...) to outputs (n, num_classes).
        num_classes: labels are 0 to ``num_classes - 1``.
        loss: ``"cross_entropy"`` or ``"mse"``, as of :class:`Classifier`; SHF gets it as its own ``loss``.
        optimizer: makes the SHF from the module and the loss.

    Raises:
        MisconfigurationException: if ``num_classes`` is below 2 or the loss unknown; in the first batch, if the outputs
            are not (n, num_classes), or the labels not of their shape.

    Example:
        >>> model = SHFClassifier(fully_connected([784, 32, 10]))
        >>> model(torch.zeros(5, 784)).shape, isinstance(model.configure_optimizers(), SHF)
        (torch.Size([5, 10]), True)
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int = 10,
        loss: Literal["cross_entropy", "mse"] = "cross_entropy",
        optimizer: Callable[[nn.Module, str], SHF] = shf_with_chosen_settings,
    ) -> None:
        super().__init__(network, num_classes, loss)
        check_types(SHFClassifier.__init__, locals())
        self.make_shf = optimizer

    def configure_optimizers(self) -> SHF:
        return self.make_shf(self, self.loss)
