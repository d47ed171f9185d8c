"""Projects that were written without a thought of growing batches, and how tests train them."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from lightning_struct import GrowingBatchSize, NoiseEstimator, ValidationRule
from tests.mixins.helpers import make_trainer

SAMPLES, FIRST, MOST = 40, 4, 16
EPOCHS = 2
CHECKED_STEPS = 4

# In each step, and exactly.
MEASURING = {
    "max_batch_size": MOST,
    "window": 2,
    "theta": 0.3,
    "estimator": "layers",
    "every_n_steps": 1,
    "probes": None,
}

# Lightning's and torch's, of what the projects do on purpose
WARNINGS_OF_PROJECTS = [
    pytest.mark.filterwarnings("ignore:A batch of one has no gradient variance"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before `optimizer.step"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log..` but `Trainer.barebones=True"),
    pytest.mark.filterwarnings("ignore:batch normalisation in training couples"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


# --- the projects ----------------------------------------------------------------------------------------------------


def regression(samples=SAMPLES, seed=0, kind=TensorDataset):
    """Inputs (samples, 3) and noisy targets (samples, 2)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    return kind(inputs, inputs[:, :2] + torch.randn(samples, 2, generator=generator))


def images(samples=SAMPLES):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(pixels, torch.randint(0, 3, (samples,), generator=generator))


def tokens(samples=SAMPLES, length=5, vocabulary=11):
    """Token sequences, and the same shifted by one."""
    text = torch.randint(0, vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1], text[:, 1:])


def perceptron():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


class Regressor(L.LightningModule):
    """Trained automatically, with a learning rate that falls by the epoch."""

    def __init__(self, network=None):
        super().__init__()
        self.network = perceptron() if network is None else network

    def forward(self, inputs):
        return self.network(inputs)

    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def squared_errors(module, batch):
    """(n,), what the mean squared error is the mean of."""
    inputs, targets = batch
    return (module(inputs) - targets).square().mean(1)


class SumOfErrors(Regressor):
    def loss(self, outputs, targets):
        return 0.1 * F.mse_loss(outputs, targets, reduction="sum")


class Classifier(Regressor):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def cross_entropies(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def convolutional(normalization):
    stages = nn.Conv2d(1, 4, 3, padding=1), normalization, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2)
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(16, 3))


class LanguageModel(L.LightningModule):
    """The weight of the decoder is that of the embedding."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.decoder = nn.Linear(6, vocabulary)
        self.decoder.weight = self.embedding.weight

    def forward(self, inputs):
        return self.decoder(self.recurrent(self.embedding(inputs))[0])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    configure_optimizers = Regressor.configure_optimizers


def token_losses(module, batch):
    return F.cross_entropy(module(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


class DemoTransformer(LightningTransformer):
    """Lightning's own, on a text of our own."""

    def __init__(self):
        super().__init__(vocab_size=11)
        self.model = Transformer(vocab_size=11, ninp=8, nhid=8, nlayers=1)

    def prepare_data(self): ...

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    configure_optimizers = Regressor.configure_optimizers


def transformer_losses(module, batch):
    inputs, targets = batch
    return F.nll_loss(module(inputs, targets), targets.flatten(), reduction="none").view(targets.shape).mean(1)


class Manual(Regressor):
    """Optimised by hand, with its gradients clipped."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class PlainBackward(Manual):
    """Calls backward of the loss itself."""

    def manual_backward(self, loss):
        loss.backward()

    def clip_gradients(self, *args, **kwargs): ...


class GAN(L.LightningModule):
    """A generator and a discriminator, trained in turns; the fakes that the discriminator learns from are detached."""

    toggles = True

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def verdicts(self, samples, real):
        """(n,), the losses of taking ``samples`` for what they are, or are not."""
        target = torch.full((len(samples), 1), float(real))
        return F.binary_cross_entropy_with_logits(self.discriminator(samples), target, reduction="none").squeeze(1)

    def generator_losses(self, batch):
        return self.verdicts(self.generator(batch[0][:, :2]), real=True)

    def discriminator_losses(self, batch):
        return self.verdicts(batch[0], real=True), self.verdicts(self.generator(batch[0][:, :2]).detach(), real=False)

    def training_step(self, batch, batch_idx):
        generator, discriminator = self.optimizers()
        self.begin(discriminator)
        losses = [part.mean() for part in self.discriminator_losses(batch)]
        self.manual_backward(sum(losses))
        discriminator.step()
        self.end(discriminator)
        self.begin(generator)
        self.manual_backward(self.generator_losses(batch).mean())
        generator.step()
        self.end(generator)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def begin(self, optimizer):
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()

    def end(self, optimizer):
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.generator_losses(batch).mean())

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9)]


class GANWithoutToggling(GAN):
    """What the generator's loss leaves in the gradients of the discriminator is zeroed before it is used."""

    toggles = False


class Frozen(Regressor):
    """A trained backbone, without gradient, and a head."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 2)))


class SecondOrder(Regressor):
    """LBFGS evaluates the loss several times in a step."""

    def configure_optimizers(self):
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class Stream(IterableDataset):
    """Reads the samples one after another; each worker its own share."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.data[i] for i in range(start, len(self.data), step))


class SizedStream(Stream):
    def __len__(self):
        return len(self.data)


class Buckets(Sampler):
    """Batches of samples that are alike."""

    def __init__(self, data, size):
        order = sorted(range(len(data)), key=lambda i: data[i][0].sum().item())
        self.batches = [order[i : i + size] for i in range(0, len(data), size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


@dataclass
class Project:
    """``losses(module, batch)``, (n,), are those of the samples, where each has one of its own."""

    module: L.LightningModule
    loader: object = None
    losses: object = None
    options: dict = field(default_factory=dict)
    growing: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.loader is None:
            self.loader = DataLoader(regression(), batch_size=FIRST, shuffle=True)


def image_loader():
    return DataLoader(images(), batch_size=FIRST, shuffle=True)


PROJECTS = {
    "regression": lambda: Project(Regressor(), losses=squared_errors),
    "image classifier": lambda: Project(Classifier(convolutional(nn.BatchNorm2d(4))), image_loader()),
    "group normalisation": lambda: Project(
        Classifier(convolutional(nn.GroupNorm(2, 4))), image_loader(), cross_entropies
    ),
    "transformer": lambda: Project(DemoTransformer(), DataLoader(tokens(), batch_size=FIRST), transformer_losses),
    "tied weights": lambda: Project(LanguageModel(), DataLoader(tokens(), batch_size=FIRST), token_losses),
    "dropout": lambda: Project(
        Regressor(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))), losses=squared_errors
    ),
    "manual optimization": lambda: Project(Manual(), losses=squared_errors),
    "loss.backward()": lambda: Project(PlainBackward(), losses=squared_errors),
    "frozen backbone": lambda: Project(Frozen(), losses=squared_errors),
    "sum of errors": lambda: Project(SumOfErrors(), losses=squared_errors),
    "GAN": lambda: Project(GAN()),
    "GAN without toggling": lambda: Project(GANWithoutToggling()),
    "LBFGS": lambda: Project(SecondOrder()),
    "bfloat16": lambda: Project(Regressor(), options={"precision": "bf16-mixed"}),
    "clipping": lambda: Project(Regressor(), losses=squared_errors, options={"gradient_clip_val": 0.05}),
    "accumulated batches": lambda: Project(
        Regressor(),
        DataLoader(regression(), batch_size=2),
        losses=squared_errors,
        options={"accumulate_grad_batches": 2},
    ),
    "growth by accumulation, batches of one": lambda: Project(
        Regressor(), DataLoader(regression()), growing={"mode": "accumulate"}
    ),
    "growth by accumulation": lambda: Project(Regressor(), losses=squared_errors, growing={"mode": "accumulate"}),
    "stream": lambda: Project(Regressor(), DataLoader(Stream(regression()), batch_size=FIRST), squared_errors),
    "stream with length": lambda: Project(
        Regressor(), DataLoader(SizedStream(regression()), batch_size=FIRST), squared_errors
    ),
    "stream shared by workers": lambda: Project(
        Regressor(), DataLoader(Stream(regression(80)), batch_size=FIRST, num_workers=2)
    ),
    "buckets": lambda: Project(
        Regressor(), DataLoader(regression(), batch_sampler=Buckets(regression(), FIRST)), squared_errors
    ),
    "early stopping": lambda: Project(Regressor(), options={"callbacks": [EarlyStopping("val_loss", patience=9)]}),
    "average of weights": lambda: Project(Regressor(), options={"callbacks": [WeightAveraging()]}),
    "stochastic averages": lambda: Project(
        Regressor(), options={"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=2)]}
    ),
    "barebones": lambda: Project(Regressor(), options={"barebones": True}),
}


# --- how they are run
# --------------------------------------------------------------------------------------------------


class Watch(L.Callback):
    """What the module was given, and what Lightning counted."""

    def __init__(self):
        self.by_epoch, self.lengths, self.validations = defaultdict(list), [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.by_epoch[trainer.current_epoch].append(rows(batch))

    def on_train_epoch_end(self, trainer, pl_module):
        self.lengths.append(trainer.num_training_batches)

    def on_validation_end(self, trainer, pl_module):
        self.validations += not trainer.sanity_checking

    @property
    def epochs(self):
        return list(self.by_epoch.values())

    @property
    def sizes(self):
        return [len(batch) for epoch in self.epochs for batch in epoch]


class Reference(L.Callback):
    """‖Var‖₁/(n‖ḡ‖²) of the first steps, from the gradient of each sample's loss."""

    def __init__(self, losses):
        self.losses, self.ratios = losses, []
        self._gradients = []

    def parameters_of(self, module):
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if len(self.ratios) == CHECKED_STEPS:
            return
        with torch.random.fork_rng(), trainer.precision_plugin.forward_context():
            losses = self.losses(pl_module, batch)
        parameters = self.parameters_of(pl_module)
        for loss in losses / len(losses):
            gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
            self._gradients.append(torch.cat([part.flatten() for part in gradient]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._gradients and trainer.global_step > len(self.ratios):
            self.ratios.append(variance_ratio(torch.stack(self._gradients)))
            self._gradients = []


def variance_ratio(shares):
    """Of the shares (n, parameters) that the samples have in a gradient."""
    n = len(shares)
    gradients = n * shares
    return (gradients.var(0).sum() / (n * gradients.mean(0).square().sum())).item()


def rows(batch):
    """What tells each sample of a batch from the others."""
    first = tree_leaves(batch)[0]
    return [tuple(row.flatten().tolist()) for row in first]


def all_rows(loader):
    data = loader.dataset.data if isinstance(loader.dataset, Stream) else loader.dataset
    return Counter(rows(torch.stack([sample[0] for sample in data]).double()))


def arguments(estimator="auto", every_n_steps=None, probes=8, window=5, **options):
    """Arguments of GrowingBatchSize, with the fields of its values by their names; a schedule goes without these."""
    if "schedule" in options:
        return options
    return {
        "estimator": NoiseEstimator(estimator, every_n_steps, probes),
        "validation": ValidationRule(window=window),
        **options,
    }


def fit(directory, project, epochs=EPOCHS, validation=True):
    watch = Watch()
    growing = GrowingBatchSize(**arguments(**(MEASURING | project.growing)))
    reference = Reference(project.losses) if project.losses else None
    options = {"max_epochs": epochs, "precision": "64-true"} | project.options
    callbacks = [watch, *([reference] if reference else []), growing, *options.pop("callbacks", [])]
    if options.get("barebones"):  # which allows no other option to be named
        trainer = L.Trainer(accelerator="cpu", default_root_dir=directory, callbacks=callbacks, **options)
    else:
        trainer = make_trainer(directory, callbacks=callbacks, **({"num_sanity_val_steps": 1} | options))
    held_out = DataLoader(project.loader.dataset, batch_size=8) if validation else None
    trainer.fit(project.module, project.loader, held_out)
    return SimpleNamespace(trainer=trainer, watch=watch, growing=growing, reference=reference, project=project)


def seed():
    torch.manual_seed(1)
    random.seed(1)
