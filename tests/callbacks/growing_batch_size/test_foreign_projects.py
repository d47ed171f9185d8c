"""Projects that were written without a thought of growing batches, and train with them all the same."""

import copy
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from lightning_struct import GrowingBatchSize
from lightning_struct.functional import required_batch_size

SAMPLES, FIRST, MOST = 40, 4, 16
EPOCHS = 2
CHECKED_STEPS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:A batch of one has no gradient variance"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before `optimizer.step"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log..` but `Trainer.barebones=True"),
    pytest.mark.filterwarnings("ignore:batch normalisation in training couples"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


# --- the projects ----------------------------------------------------------------------------------------------------


def regression(samples=SAMPLES, seed=0):
    """Inputs (samples, 3) and noisy targets (samples, 2)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    return TensorDataset(inputs, inputs[:, :2] + torch.randn(samples, 2, generator=generator))


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
    layers = [
        nn.Conv2d(1, 4, 3, padding=1),
        normalization,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(16, 3))


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

    toggles, backward_passes = True, 1

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
        for loss in [sum(losses)] if self.backward_passes == 1 else losses:
            self.manual_backward(loss)
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


class GANWithTwoPasses(GAN):
    """The discriminator learns from real and fake samples in separate backward passes."""

    backward_passes = 2


class Frozen(Regressor):
    """A trained backbone, without gradient, and a head."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 2)))


class Averaged(Regressor):
    """Keeps an exponential moving average of its weights."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.network).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mean, parameter in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)


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
    "transformer, batches of one": lambda: Project(DemoTransformer(), DataLoader(tokens())),
    "tied weights": lambda: Project(LanguageModel(), DataLoader(tokens(), batch_size=FIRST), token_losses),
    "dropout": lambda: Project(
        Regressor(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))), losses=squared_errors
    ),
    "manual optimization": lambda: Project(Manual(), losses=squared_errors),
    "loss.backward()": lambda: Project(PlainBackward(), losses=squared_errors),
    "frozen backbone": lambda: Project(Frozen(), losses=squared_errors),
    "moving average": lambda: Project(Averaged(), losses=squared_errors),
    "sum of errors": lambda: Project(SumOfErrors(), losses=squared_errors),
    "GAN": lambda: Project(GAN()),
    "GAN without toggling": lambda: Project(GANWithoutToggling()),
    "GAN with two backward passes": lambda: Project(GANWithTwoPasses()),
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
    "workers": lambda: Project(Regressor(), DataLoader(regression(80), batch_size=FIRST, shuffle=True, num_workers=2)),
    "stream": lambda: Project(Regressor(), DataLoader(Stream(regression()), batch_size=FIRST), squared_errors),
    "stream with length": lambda: Project(
        Regressor(), DataLoader(SizedStream(regression()), batch_size=FIRST), squared_errors
    ),
    "stream shared by workers": lambda: Project(
        Regressor(), DataLoader(Stream(regression(80)), batch_size=FIRST, num_workers=2)
    ),
    "stream with length, shared by workers": lambda: Project(
        Regressor(), DataLoader(SizedStream(regression(80)), batch_size=FIRST, num_workers=2)
    ),
    "buckets": lambda: Project(
        Regressor(), DataLoader(regression(), batch_sampler=Buckets(regression(), FIRST)), squared_errors
    ),
    "early stopping": lambda: Project(Regressor(), options={"callbacks": [EarlyStopping("val_loss", patience=9)]}),
    "average of weights": lambda: Project(Regressor(), options={"callbacks": [WeightAveraging()]}),
    "stochastic averages": lambda: Project(
        Regressor(), options={"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=2)]}
    ),
    "reloaded": lambda: Project(Regressor(), losses=squared_errors, options={"reload_dataloaders_every_n_epochs": 1}),
    "every third step": lambda: Project(Regressor(), growing={"every_n_steps": 3}),
    "barebones": lambda: Project(Regressor(), options={"barebones": True}),
}


# --- how they are run --------------------------------------------------------------------------------------------------


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


def fit(directory, project, epochs=EPOCHS, validation=True):
    watch, growing = (
        Watch(),
        GrowingBatchSize(**{"max_batch_size": MOST, "window": 2, "probes": None} | project.growing),
    )
    reference = Reference(project.losses) if project.losses else None
    options = {"max_epochs": epochs, "precision": "64-true", "num_sanity_val_steps": 1} | project.options
    if not options.get("barebones"):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        options = quiet | {"logger": False} | options
    else:
        del options["num_sanity_val_steps"]
    callbacks = [watch, *([reference] if reference else []), growing, *options.pop("callbacks", [])]
    trainer = L.Trainer(accelerator="cpu", default_root_dir=directory, callbacks=callbacks, **options)
    held_out = DataLoader(project.loader.dataset, batch_size=8) if validation else None
    trainer.fit(project.module, project.loader, held_out)
    return SimpleNamespace(trainer=trainer, watch=watch, growing=growing, reference=reference, project=project)


def seed():
    torch.manual_seed(1)
    random.seed(1)


@pytest.fixture(autouse=True)
def seeded():
    seed()


def with_reference():
    return [name for name, make in PROJECTS.items() if make().losses is not None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each project, trained once."""
    done = {}

    def run(name):
        if name not in done:
            seed()
            done[name] = fit(tmp_path_factory.mktemp("run"), PROJECTS[name]())
        return done[name]

    return run


@pytest.mark.parametrize("name", PROJECTS)
def test_batches_grow(runs, name):
    sizes = [record["batch_size"] for record in runs(name).growing.records]
    first = 2 if "batches of one" in name else FIRST
    assert (sizes[0], max(sizes)) == (first, MOST)


@pytest.mark.parametrize("name", PROJECTS)
def test_every_sample_of_each_epoch_is_seen_once(runs, name):
    run = runs(name)
    every = all_rows(run.project.loader)
    assert [Counter(row for batch in epoch for row in batch) for epoch in run.watch.epochs] == [every] * EPOCHS


@pytest.mark.parametrize("name", PROJECTS)
def test_batches_of_an_epoch_are_as_many_as_lightning_counts(runs, name):
    run = runs(name)
    expected = [len(epoch) for epoch in run.watch.epochs]
    if name in ("stream", "stream shared by workers"):
        expected = [float("inf")] * EPOCHS
    assert run.watch.lengths == expected


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "barebones"])
def test_each_epoch_is_validated(runs, name):
    assert runs(name).watch.validations == EPOCHS


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "stochastic averages"])  # which anneals it
def test_learning_rate_falls_in_each_epoch(runs, name):
    schedulers = [config.scheduler for config in runs(name).trainer.lr_scheduler_configs]
    assert [scheduler.last_epoch for scheduler in schedulers] == [EPOCHS]


@pytest.mark.parametrize("name", with_reference())
def test_variance_is_that_of_the_gradients_of_single_samples(runs, name):
    run = runs(name)
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(run.reference.ratios, rel=1e-9)


# --- several optimizers ------------------------------------------------------------------------------------------------


class GANReference(L.Callback):
    """As :class:`Reference`, of the optimizer with the larger ratio."""

    def __init__(self):
        self.ratios, self._batch, self._of_batch = [], None, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch, self._of_batch = batch, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if len(self.ratios) == CHECKED_STEPS:
            return
        parameters = optimizer.param_groups[0]["params"]
        of_generator = parameters[0] is next(pl_module.generator.parameters())
        losses = (
            pl_module.generator_losses(self._batch)
            if of_generator
            else sum(pl_module.discriminator_losses(self._batch))
        )
        shares = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses / len(losses)]
        self._of_batch.append(
            variance_ratio(torch.stack([torch.cat([g.flatten() for g in share]) for share in shares]))
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._of_batch:
            self.ratios.append(max(self._of_batch))


@pytest.mark.parametrize("module", [GAN, GANWithoutToggling])
def test_of_several_optimizers_the_larger_variance_counts(tmp_path, module):
    reference = GANReference()
    run = fit(tmp_path, Project(module(), options={"callbacks": [reference]}))
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(reference.ratios, rel=1e-9)


class Penalised(GAN):
    """WGAN-GP: a critic whose gradient in its input is penalised, and a generator that learns in every second batch."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.begin(critic)
        real, fake = batch[0], self.generator(batch[0][:, :2]).detach()
        between = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        self.manual_backward(self.discriminator(fake).mean() - self.discriminator(real).mean() + penalty)
        critic.step()
        self.end(critic)
        if batch_idx % 2:
            self.begin(generator)
            self.manual_backward(self.generator_losses(batch).mean())
            generator.step()
            self.end(generator)


def test_a_penalty_on_gradients_leaves_the_decision_to_the_other_optimizer(tmp_path):
    with pytest.warns(UserWarning, match=r"leaves discriminator.0.weight, .* differentiated twice"):
        run = fit(tmp_path, Project(Penalised()))
    assert len(run.growing.records) == len(run.watch.sizes) // 2


def test_a_penalty_on_the_gradients_of_all_is_refused(tmp_path):
    class Alone(Penalised):
        def configure_optimizers(self):
            return torch.optim.SGD(self.discriminator.parameters(), lr=0.05)

        def optimizers(self):
            return None, super().optimizers()

        def training_step(self, batch, batch_idx):
            super().training_step(batch, 0)

    message = (
        r"none of the gradients of SGD; discriminator.0.weight, .*: it is differentiated twice.*gradient_statistics\(\)"
    )
    with pytest.warns(UserWarning), pytest.raises(MisconfigurationException, match=message):
        fit(tmp_path, Project(Alone()))


# --- what cannot be measured -------------------------------------------------------------------------------------------


class EmbeddingAsDecoder(LanguageModel):
    def __init__(self):
        super().__init__()
        self.decoder = None

    def forward(self, inputs):
        return F.linear(self.recurrent(self.embedding(inputs))[0], self.embedding.weight)


class WeightDecay(Regressor):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 0.1 * self.network[0].weight.square().sum()


LEFT_OUT = {
    "used outside of its layer": (
        EmbeddingAsDecoder,
        lambda: DataLoader(tokens(), batch_size=FIRST),
        "embedding.weight",
    ),
    "in the loss": (WeightDecay, lambda: DataLoader(regression(), batch_size=FIRST), "network.0.weight"),
}


@pytest.mark.parametrize("module, loader, name", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_parameter_that_cannot_be_measured_is_left_out_by_name(tmp_path, module, loader, name):
    with pytest.warns(UserWarning, match=f"GrowingBatchSize leaves {name} out of the variance"):
        fit(tmp_path, Project(module(), loader()))


class OthersOnly(Reference):
    """Goes by all parameters but one."""

    def __init__(self, losses, name):
        super().__init__(losses)
        self.name = name

    def parameters_of(self, module):
        return [p for name, p in module.named_parameters() if name != self.name]


def test_the_others_count_where_a_parameter_is_left_out(tmp_path):
    reference = OthersOnly(squared_errors, "network.0.weight")
    with pytest.warns(UserWarning, match="network.0.weight"):
        run = fit(tmp_path, Project(WeightDecay(), options={"callbacks": [reference]}))
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(reference.ratios, rel=1e-9)


def test_a_stream_without_gradient_grows_to_the_limit(tmp_path):
    class Constant(Regressor):
        def loss(self, outputs, targets):
            return super().loss(0 * outputs, targets)

    run = fit(tmp_path, Project(Constant(), DataLoader(Stream(regression()), batch_size=FIRST)))
    assert {record["batch_size_predicted"] for record in run.growing.records} == {MOST}


def test_a_module_with_statistics_of_its_own_is_asked_for_them(tmp_path):
    class Own(Regressor):
        def gradient_statistics(self):
            return SimpleNamespace(batch_size=4, variance=9.0, gradient_squared_norm=1.0, validation_value=None)

    run = fit(tmp_path, Project(Own()))
    assert {record["variance_ratio"] for record in run.growing.records} == {9.0 / 4}


# --- batches of another form -------------------------------------------------------------------------------------------


class Samples:
    """Of a batch, as attributes."""

    def __init__(self, samples):
        self.inputs, self.targets = (torch.stack(parts).double() for parts in zip(*samples, strict=True))


class OfObjects(Regressor):
    def training_step(self, batch, batch_idx):
        return self.loss(self(batch.inputs), batch.targets)


class OfLists(Classifier):
    def __init__(self):
        super().__init__(convolutional(nn.Identity()))

    def training_step(self, batch, batch_idx):
        pixels, labels = zip(*batch, strict=True)
        return self.loss(self(torch.stack(pixels)), torch.stack(labels))


class TimeFirst(Regressor):
    """Reads (time, samples, features)."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(3, 5)
        self.network = nn.Linear(5, 2)

    def forward(self, inputs):
        return self.network(self.recurrent(inputs)[0][-1])


def time_first(samples):
    inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return inputs.expand(7, *inputs.shape), targets


FORMS = {
    "objects": lambda: (OfObjects(), DataLoader(regression(42), batch_size=FIRST, collate_fn=Samples)),
    "lists of samples": lambda: (OfLists(), DataLoader(images(42), batch_size=FIRST, collate_fn=list)),
    "time first": lambda: (TimeFirst(), DataLoader(regression(42), batch_size=FIRST, collate_fn=time_first)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("mode", ["batch", "accumulate"])
def test_samples_are_counted_in_batches_of_any_form(tmp_path, form, mode):
    module, loader = form()
    growing = GrowingBatchSize(window=2, max_batch_size=8, theta=0.05, mode=mode)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    trainer = L.Trainer(accelerator="cpu", callbacks=[growing], max_epochs=1, precision="64-true", **quiet)
    trainer.fit(module, loader)
    sizes = [record["batch_size"] for record in growing.records]
    assert (sizes[0], sum(sizes), growing.records[-1]["samples"]) == (FIRST, 42, 42)


# --- steps -------------------------------------------------------------------------------------------------------------


class Gradients(L.Callback):
    """By how much the gradient of a step differs from the mean over the samples of its batches."""

    def __init__(self):
        self.batches, self.weights, self.errors, self.windows = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = list(pl_module.parameters())
        losses = torch.cat([squared_errors(pl_module, batch) for batch in self.batches])
        expected = torch.autograd.grad(losses.mean(), parameters)
        scale = trainer.accumulate_grad_batches / len(self.batches)  # Lightning's own for what is left of an epoch
        errors = [(scale * p.grad - gradient).abs().max() for p, gradient in zip(parameters, expected, strict=True)]
        self.errors.append(max(errors).item())
        self.windows.append(len(self.batches))
        self.batches = []


@pytest.mark.parametrize("growing", [{"mode": "accumulate"}, {"mode": "accumulate", "allow_shrinking": True}])
def test_an_accumulated_gradient_is_the_mean_over_its_samples(tmp_path, growing):
    gradients = Gradients()
    project = Project(Regressor(), options={"callbacks": [gradients], "accumulate_grad_batches": 1}, growing=growing)
    fit(tmp_path, project, epochs=3)
    assert max(gradients.windows) == MOST // FIRST
    assert max(gradients.errors) < 1e-12


class AccumulatingByHand(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(self(batch[0]), batch[1]) / 2)
        if batch_idx % 2 or self.trainer.is_last_batch:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_sizes_are_those_of_one_batch_where_a_module_accumulates_by_hand(tmp_path):
    reference = Reference(squared_errors)
    run = fit(tmp_path, Project(AccumulatingByHand(), options={"callbacks": [reference]}))
    first = run.growing.records[0]
    expected = required_batch_size(reference.ratios[0] * FIRST, 1.0, SAMPLES, theta=0.5)
    assert (first["batch_size"], first["samples"], first["batch_size_predicted"]) == (FIRST, 2 * FIRST, expected)


class OneCycle(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_schedule_by_the_step_is_warned_about(tmp_path):
    with pytest.warns(
        UserWarning, match="OneCycleLR is stepped after each optimizer step, of which there will be fewer"
    ):
        run = fit(tmp_path, Project(OneCycle()))
    assert run.trainer.lr_scheduler_configs[0].scheduler.last_epoch == run.trainer.global_step < 20


@pytest.mark.parametrize("module", [Regressor, Manual])
def test_a_scaled_loss_changes_nothing_and_skipped_steps_do_not_count(tmp_path, module):
    reference = Reference(squared_errors)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1000)
    options = {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "callbacks": [reference]}
    run = fit(tmp_path, Project(module(), DataLoader(regression(80), batch_size=FIRST), options=options))
    skipped = int(math.log2(2.0**18 / scaler.get_scale()))
    assert 0 < skipped == run.trainer.global_step - len(run.growing.records)
    first = run.growing.records[0]
    assert first["variance_ratio"] == pytest.approx(reference.ratios[first["samples"] // FIRST - 1], rel=0.01)


class CompiledInPlace(Regressor):
    def __init__(self, backend):
        super().__init__()
        self.network.compile(backend=backend)


COMPILED = {
    "wrapped": lambda: Regressor(torch.compile(perceptron(), backend="aot_eager")),
    "in place": lambda: CompiledInPlace("eager"),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", COMPILED.values(), ids=COMPILED)
def test_a_compiled_network_is_measured_as_any_other(tmp_path, module):
    reference = Reference(squared_errors)
    run = fit(tmp_path, Project(module(), options={"callbacks": [reference]}))
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(reference.ratios, rel=1e-9)


# --- several loaders ---------------------------------------------------------------------------------------------------


class TwoTasks(Regressor):
    """Each of two loaders has its own network; notes what it reads of them."""

    def __init__(self):
        super().__init__()
        self.other = perceptron()
        self.read = defaultdict(lambda: ([], []))

    def training_step(self, batch, batch_idx):
        losses = []
        for i, (network, name) in enumerate([(self.network, "labels"), (self.other, "pairs")]):
            if batch[name] is not None:
                self.read[self.current_epoch][i].append(len(batch[name][0]))
                losses.append(self.loss(network(batch[name][0]), batch[name][1]))
        return sum(losses)


def two_loaders(mode, sizes=(40, 12)):
    labels = DataLoader(regression(sizes[0]), batch_size=4, shuffle=True)
    return CombinedLoader({"labels": labels, "pairs": DataLoader(regression(sizes[1], seed=1), batch_size=2)}, mode)


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    runs = {}

    def run(mode):
        if mode not in runs:
            seed()
            growing = {"max_batch_size": 21}
            directory = tmp_path_factory.mktemp("tasks")
            runs[mode] = fit(directory, Project(TwoTasks(), two_loaders(mode), growing=growing), validation=False)
        return runs[mode]

    return run


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_grow_in_proportion(two_tasks, mode):
    of_labels, of_pairs = (sizes[:4] for sizes in two_tasks(mode).project.module.read[0])  # what follows is left over
    assert of_labels[0] == 4 < of_labels[-1]
    assert of_pairs == [math.ceil(size / 2) for size in of_labels]


@pytest.mark.parametrize("mode, ends", [("min_size", 1), ("max_size", 0), ("max_size_cycle", 0)])
def test_the_loader_that_ends_the_epoch_is_read_once(two_tasks, mode, ends):
    read = two_tasks(mode).project.module.read
    assert [sum(read[epoch][ends]) for epoch in range(EPOCHS)] == [(40, 12)[ends]] * EPOCHS


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_batches_of_several_loaders_are_as_many_as_lightning_counts(two_tasks, mode):
    run = two_tasks(mode)
    assert run.watch.lengths == [max(map(len, run.project.module.read[epoch])) for epoch in range(EPOCHS)]


def test_an_exhausted_loader_is_read_once(two_tasks):
    read = two_tasks("max_size").project.module.read
    assert [sum(read[epoch][1]) for epoch in range(EPOCHS)] == [12] * EPOCHS


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_sizes_are_those_of_all_loaders_together(two_tasks, mode):
    run = two_tasks(mode)
    read = [sum(run.project.module.read[epoch][i]) for epoch in range(EPOCHS) for i in (0, 1)]
    assert run.growing.records[0]["batch_size"] == 6
    assert run.growing.records[-1]["samples"] == sum(read)


def both_losses(module, batch):
    """(n,), of the samples of both loaders, scaled so that their mean is half of the sum of the two means."""
    losses = [squared_errors(module, batch[name]) for name in ("labels", "pairs")]
    n = sum(map(len, losses))
    return torch.cat([of_loader * n / (2 * len(of_loader)) for of_loader in losses])


def test_a_network_may_see_batches_of_different_sizes(tmp_path):
    class Shared(Regressor):
        def training_step(self, batch, batch_idx):
            return sum(self.loss(self(inputs), targets) for inputs, targets in batch.values())

    run = fit(tmp_path, Project(Shared(), two_loaders("min_size"), both_losses), validation=False)
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(run.reference.ratios, rel=1e-9)


# --- limits ------------------------------------------------------------------------------------------------------------


def sizes_of(run):
    return [[len(batch) for batch in epoch] for epoch in run.watch.epochs]


def test_a_limit_in_batches_stays_one_in_batches(tmp_path):
    run = fit(tmp_path, Project(Regressor(), options={"limit_train_batches": 5}))
    first, second = sizes_of(run)
    assert len(first) == 5 and len(second) == min(5, math.ceil(SAMPLES / MOST))
    assert max(first) > FIRST


@pytest.mark.parametrize(
    "options, samples",
    [({"limit_train_batches": 0.5}, 20), ({"overfit_batches": 0.5}, 20), ({"overfit_batches": 3}, 12)],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_other_limits_are_limits_of_samples(tmp_path, options, samples):
    run = fit(tmp_path, Project(Regressor(), options=options))
    assert [sum(epoch) for epoch in sizes_of(run)] == [samples] * EPOCHS
    assert run.watch.lengths == [len(epoch) for epoch in sizes_of(run)]


def test_growth_leaves_no_batch_over_that_is_smaller_than_the_first(tmp_path):
    network = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    )  # which refuses a single sample
    run = fit(tmp_path, Project(Regressor(network), growing={"theta": 0.05, "max_batch_size": 13}))
    assert sizes_of(run) == [[4, 4, 4, 13, 8, 7], [13, 13, 7, 7]]


def test_max_steps_ends_within_an_epoch(tmp_path):
    run = fit(tmp_path, Project(Regressor(), options={"max_epochs": -1, "max_steps": 7}))
    assert len(run.watch.sizes) == run.trainer.global_step == 7 and max(run.watch.sizes) == MOST


@pytest.mark.parametrize("batches", [1, 5])
def test_fast_dev_run_takes_its_batches(tmp_path, batches):
    run = fit(tmp_path, Project(Regressor(), options={"fast_dev_run": batches}))
    assert len(run.watch.sizes) == batches


# --- the rest of a project ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_ends_where_the_epoch_does(tmp_path, bar):
    totals = []

    class Totals(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            task = (
                bars.train_progress_bar if bar is TQDMProgressBar else bars.progress.tasks[bars.train_progress_bar_id]
            )
            totals.append(task.total)

    bars = bar()
    options = {"enable_progress_bar": True, "callbacks": [bars, Totals()]}
    run = fit(tmp_path, Project(Regressor(), options=options))
    assert totals == [len(epoch) for epoch in sizes_of(run)]


def test_the_best_weights_are_saved_beside_it(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
    run = fit(tmp_path, Project(Regressor(), options={"enable_checkpointing": True, "callbacks": [checkpoint]}))
    assert len(list(tmp_path.glob("*.ckpt"))) == EPOCHS and run.trainer.global_step == len(run.watch.sizes)


def test_a_second_fit_goes_on_with_the_grown_batch(tmp_path):
    run = fit(tmp_path, Project(Regressor()))
    run.trainer.fit_loop.max_epochs = 2 * EPOCHS
    run.trainer.fit(run.project.module, DataLoader(regression(), batch_size=FIRST, shuffle=True))
    assert sizes_of(run)[EPOCHS:] == [[16, 16, 8]] * EPOCHS


def test_loader_and_trainer_are_given_back_as_they_were(tmp_path):
    loader = DataLoader(regression(), batch_size=FIRST, shuffle=True)
    sampler = loader.batch_sampler
    run = fit(tmp_path, Project(Regressor(), loader))
    patched = {"process_dataloader", "setup_data"} & {*vars(run.trainer.strategy), *vars(run.trainer.fit_loop)}
    assert (type(loader), len(loader), patched) == (DataLoader, 10, set()) and loader.batch_sampler is sampler


def test_loaders_that_are_prepared_early_grow_too(tmp_path):
    class Early(L.Callback):
        def setup(self, trainer, pl_module, stage):
            self.estimate = trainer.estimated_stepping_batches

    early = Early()
    run = fit(tmp_path, Project(Regressor(), options={"callbacks": [early]}))
    assert (early.estimate, max(run.watch.sizes)) == (20, MOST)


def test_the_tuner_finds_a_learning_rate_with_batches_of_the_first_size(tmp_path):
    class Tuned(Regressor):
        lr = 0.05

    module, loader = Tuned(), DataLoader(regression(), batch_size=FIRST, shuffle=True)
    growing, watch = GrowingBatchSize(window=2, max_batch_size=MOST), Watch()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[watch, growing], max_epochs=2, **quiet)
    Tuner(trainer).lr_find(module, loader, num_training=20, update_attr=False)
    watch.by_epoch.clear()
    trainer.fit(module, loader)
    assert (watch.sizes[0], max(watch.sizes)) == (FIRST, MOST)
