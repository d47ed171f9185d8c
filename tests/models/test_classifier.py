from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.models import Classifier, RLSClassifier, SHFClassifier, fully_connected, mini_vgg
from lightning_struct.optim import RLS, SHF

LOSSES = ["cross_entropy", "mse"]


@pytest.fixture
def samples():
    """Three groups of points around their own centre."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    centres = 2 * torch.randn(3, 4, generator=generator)
    return TensorDataset(centres[labels] + 0.1 * torch.randn(30, 4, generator=generator), labels)


def small_classifier(kind=Classifier, **arguments):
    torch.manual_seed(0)
    return kind(fully_connected([4, 8, 3]), num_classes=3, **arguments)


def trainer(directory, **arguments):
    defaults = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": directory}
    return L.Trainer(**(defaults | arguments))


def expected_loss(outputs, labels, loss):
    if loss == "cross_entropy":
        return -outputs.log_softmax(1)[range(len(labels)), labels].mean()
    return 0.5 * (outputs - torch.eye(3)[labels]).square().sum(dim=1).mean()


def test_fully_connected_has_relus_between_its_layers():
    network = fully_connected([12, 5, 4, 3])
    images = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    first, second, third = (layer for layer in network if isinstance(layer, nn.Linear))
    expected = third(second(first(images.flatten(1)).clamp_min(0)).clamp_min(0))
    assert torch.equal(network(images), expected)


def test_mini_vgg_has_the_first_five_convolutions_of_vgg_16():
    with torch.device("meta"):
        network = mini_vgg()
    weights = [tuple(layer.weight.shape) for layer in network if hasattr(layer, "weight")]
    pairs = ((64, 3), (64, 64), (128, 64), (128, 128), (256, 128))
    assert weights == [*((*pair, 3, 3) for pair in pairs), (1024, 4096), (10, 1024)]
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_760_906
    assert [tuple(p.shape) for p in fully_connected().parameters()] == [(512, 784), (512,), (10, 512), (10,)]


@pytest.mark.parametrize(("image_size", "num_classes"), [(32, 10), (16, 7)])
def test_narrow_mini_vgg_makes_logits_of_images(image_size, num_classes):
    network = mini_vgg(channels=2, hidden=5, num_classes=num_classes, image_size=image_size)
    assert network(torch.randn(3, 3, image_size, image_size)).shape == (3, num_classes)


@pytest.mark.parametrize("loss", LOSSES)
def test_training_loss_is_an_average_over_samples(samples, loss):
    model = small_classifier(loss=loss)
    model.log = lambda *args, **kwargs: None
    inputs, labels = samples.tensors
    assert torch.allclose(model.training_step((inputs, labels), 0), expected_loss(model(inputs), labels, loss))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("evaluate", "stage"), [("validate", "val"), ("test", "test")])
@pytest.mark.parametrize("loss", LOSSES)
def test_logged_are_averages_over_samples_though_the_last_batch_is_smaller(tmp_path, samples, loss, evaluate, stage):
    model, run = small_classifier(loss=loss), trainer(tmp_path)
    getattr(run, evaluate)(model, DataLoader(samples, batch_size=20), verbose=False)
    outputs, labels = model(samples.tensors[0]), samples.tensors[1]
    recognised = (outputs.argmax(1) == labels).float().mean().item()
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    expected = {f"{stage}_loss": expected_loss(outputs, labels, loss).item(), f"{stage}_accuracy": recognised}
    assert 0 < recognised < 1 and logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_any_optimizer_trains_it(tmp_path, samples, loss):
    model = small_classifier(loss=loss, optimizer=partial(torch.optim.Adam, lr=0.05))
    run = trainer(tmp_path, max_epochs=10, check_val_every_n_epoch=10)
    run.fit(model, DataLoader(samples, batch_size=10), DataLoader(samples, batch_size=30))
    assert run.callback_metrics["val_accuracy"].item() == 1


@pytest.mark.parametrize(
    ("kind", "rate", "options"),
    [(Classifier, 0.8, {"optimizer": partial(torch.optim.SGD, lr=0.8)}), (RLSClassifier, 1.0, {})],
)
def test_scheduler_changes_the_learning_rate_after_each_epoch(tmp_path, samples, kind, rate, options):
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(small_classifier(kind, lr_scheduler=halve, **options), DataLoader(samples, batch_size=10))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate / 4)


def test_squared_error_of_steps_is_that_of_each_step():
    outputs, labels = torch.randn(4, 3, 3), torch.randint(3, (4, 3))
    model = Classifier(nn.Identity(), num_classes=3, loss="mse")
    model.log = lambda *args, **kwargs: None
    expected = sum(expected_loss(outputs[:, :, step], labels[:, step], "mse") for step in range(3))
    torch.testing.assert_close(model.training_step((outputs, labels), 0), expected)


@pytest.mark.parametrize("kind", [Classifier, RLSClassifier])
def test_labels_that_the_squared_error_would_broadcast_are_refused(samples, kind):
    model = small_classifier(kind, loss="mse")
    model.log = lambda *args, **kwargs: None
    inputs, labels = samples.tensors
    with pytest.raises(MisconfigurationException, match=r"the labels are .* one-hot: give labels \(n,\)"):
        model.training_step((inputs, labels[:, None]), 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("labels", [[0, 3], [-1, 0]])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_labels_that_are_no_classes_are_named_before_training(tmp_path, loss, labels):
    data = DataLoader(TensorDataset(torch.zeros(2, 4), torch.tensor(labels)), batch_size=2)
    low, high = labels
    with pytest.raises(MisconfigurationException, match=rf"Labels go from {low} to {high}, but must be 0 to 2"):
        trainer(tmp_path).validate(small_classifier(loss=loss), data, verbose=False)


def test_predictions_are_classes(tmp_path, samples):
    model = small_classifier()
    predictions = trainer(tmp_path).predict(model, DataLoader(samples, batch_size=20))
    assert torch.equal(torch.cat(predictions), model(samples.tensors[0]).argmax(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((partial(fully_connected, sizes), "layer_sizes must name the pixels, the") for sizes in ([784], [784, 0, 1])),
        (partial(mini_vgg, image_size=28), "image_size must be a multiple of 8"),
        (partial(mini_vgg, channels=0), "channels must be at least 1"),
        (partial(Classifier, nn.Identity(), num_classes=1), "num_classes must be at least 2, but is 1"),
        (partial(Classifier, nn.Identity(), loss="hinge"), "loss must be 'cross_entropy' or 'mse', but is 'hinge'"),
        (
            partial(Classifier(nn.Linear(4, 5), 3), torch.ones(30, 4)),
            r"makes \(30, 5\) of 30 samples, but num_classes=3",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(MisconfigurationException, match=message):
        call()


@pytest.mark.filterwarnings("error:Attribute 'network'")
def test_checkpoint_makes_the_same_model_again_around_a_network(tmp_path, samples):
    model = small_classifier(loss="mse")
    keep = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, enable_checkpointing=True, callbacks=[keep]).fit(model, DataLoader(samples, batch_size=10))
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", network=fully_connected([4, 8, 3]))
    assert again.loss == "mse" and torch.equal(again(samples.tensors[0]), model(samples.tensors[0]))


HYBRID = partial(RLS, exclude=["network.output"], auxiliary=torch.optim.Adam)


@pytest.mark.parametrize(("loss", "optimizer"), [("mse", RLS), ("mse", HYBRID), ("cross_entropy", HYBRID)])
def test_rls_trains_it(tmp_path, samples, loss, optimizer):
    model = small_classifier(RLSClassifier, loss=loss, optimizer=optimizer)
    run = trainer(tmp_path, max_epochs=20, check_val_every_n_epoch=20)
    run.fit(model, DataLoader(samples, batch_size=10), DataLoader(samples, batch_size=30))
    assert run.callback_metrics["val_accuracy"].item() == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("preconditioner", ["diagonal", "kronecker"])
@pytest.mark.parametrize("loss", LOSSES)
def test_shf_trains_it(tmp_path, samples, loss, preconditioner):
    model = small_classifier(
        SHFClassifier, loss=loss, optimizer=partial(SHF, damping=1.0, preconditioner=preconditioner)
    )
    run = trainer(tmp_path, max_epochs=5)
    run.fit(model, DataLoader(samples, batch_size=10), DataLoader(samples, batch_size=30))
    assert run.callback_metrics["val_accuracy"].item() == 1


def test_rls_trains_all_layers_by_the_squared_error_of_the_paper(tmp_path, samples):
    model, alone = (small_classifier(RLSClassifier, optimizer=partial(RLS, momentum=0.5)).double() for _ in range(2))
    samples = TensorDataset(samples.tensors[0].double(), samples.tensors[1])
    trainer(tmp_path, precision="64-true").fit(model, DataLoader(samples, batch_size=10))
    optimizer = RLS(alone.network, momentum=0.5)
    for inputs, labels in DataLoader(samples, batch_size=10):
        optimizer.zero_grad()
        (0.5 * (alone(inputs) - torch.eye(3).double()[labels]).square().sum(dim=1).mean()).backward()
        optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert all(torch.allclose(trained, expected, rtol=0, atol=1e-12) for trained, expected in pairs)


def test_rls_that_diverges_names_batch_and_layer(tmp_path, samples):
    model = small_classifier(RLSClassifier)
    nn.init.constant_(model.network.output.bias, float("nan"))
    with pytest.raises(
        ValueError, match=r"batch 0 of epoch 0: RLS step 1: NaN .* the gradient of network\.output\.weight"
    ):
        trainer(tmp_path).fit(model, DataLoader(samples, batch_size=10))
