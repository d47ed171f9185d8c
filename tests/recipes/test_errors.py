"""Wrong options, missing files and interruptions of a recipe that is run as a command."""

import errno
import io
import os
import re
import runpy
import signal
import sys
import zipfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import nn

from lightning_struct.__main__ import main as lightning_struct_command
from lightning_struct.functional.checks import NotFinite
from lightning_struct.models import Classifier
from lightning_struct.nn import LowRank
from lightning_struct.recipes import mnist_fnn
from lightning_struct.recipes.checkpoints import check_checkpoint, config_of_checkpoint
from lightning_struct.recipes.messages import ELSEWHERE, run_command

SMALL_DATA = ("--data.synthetic=true", "--data.train_size=40", "--data.val_size=20", "--data.test_size=30")


def ending(command):
    """Exit status or message of a command that ends itself."""
    with pytest.raises(SystemExit) as exit:
        run_command(command)
    return exit.value.code


def message_of(*arguments):
    """The one message with which a fit ends."""
    code = ending(lambda: mnist_fnn.main(["fit", *arguments]))
    assert len(code.splitlines()) == 1
    return code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MisconfigurationException("put the files there"), "error: put the files there"),
        (NotFinite("train_loss is nan"), "error: train_loss is nan"),
        (FloatingPointError("NaN within a solve"), "error: NaN within a solve"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some copy", None, "results/x.ckpt"),
            f"error: No space left on device: results/x.ckpt. {ELSEWHERE}.",
        ),
        (
            OSError(errno.EFBIG, "", "x.ckpt"),
            f"error: File too large: x.ckpt. ulimit -f sets the largest size of a file. {ELSEWHERE}.",
        ),
        (SIGTERMException(), 143),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_user_is_one_message_or_status(error, expected):
    def command():
        raise error

    assert ending(command) == expected


def test_signs_that_an_encoding_lacks_end_no_run(monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    run_command(lambda: print("‖x‖²"))
    printed.flush()
    assert printed.buffer.getvalue().split() == [b"?x??"]


def test_modules_in_the_working_directory_are_found(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("project_of_a_user.py").touch()
    run_command(lambda: import_module("project_of_a_user"))


@pytest.mark.parametrize("error", [KeyError(), ValueError(), FileNotFoundError(errno.ENOENT, "a defect")])
def test_other_errors_keep_their_traceback(error):
    def broken():
        raise error

    with pytest.raises(type(error)):
        run_command(broken)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda: L.Trainer(strategy="foo", accelerator="cpu"), "You selected an invalid strategy name"),
        (lambda: nn.Linear(100, 10)(torch.ones(20, 784)), r"The network does not fit .*\(20x784 and 100x10\)"),
        (
            lambda: LowRank(64, 5, rank=1)(torch.ones(20, 784)),
            r"The network does not fit the data: LowRank takes inputs \(..., 64\), but the input has shape \(20, 784\)",
        ),
    ],
)
def test_what_trainer_and_layers_say_of_their_arguments_is_one_message(command, message):
    assert re.match(f"error: {message}", ending(command))


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["fitt"], "Did you mean fit?"),
        (["fit", "--data.batchsize=3"], "Did you mean --data.batch_size?"),
        (["fit", "--data.num_workers=3"], "--data has the options batch_size, "),
        (["fit", "--model.network.layer_size=[784,10]"], "Did you mean --layer_sizes?"),
        (["fit", "--model=RLSClasifier"], "Did you mean RLSClassifier?"),
        (["fit", "--optimizer=torch.optim.SGD"], "Did you mean --model.optimizer?"),
        (["fit", "--quik"], "Did you mean --quick?"),
        (["fit", "--lr_scheduler.gamma=0.5"], "Did you mean --model.lr_scheduler.gamma?"),
        (["fit", "--batch_size=5"], "Did you mean --data.batch_size?"),
        (["--trainer.max_epochs=3", "fit"], "Options come after the subcommand"),
        (["--config", "hrls", "fit"], "Options come after the subcommand, --config too"),
        (["--data.synthetic=true"], "mnist_fnn fit\n"),
    ],
)
def test_wrong_option_is_answered_with_the_nearest(arguments, question, capsys):
    with pytest.raises(SystemExit) as end:
        mnist_fnn.main(arguments)
    assert end.value.code == 2 and question in capsys.readouterr().err


def printed_help(capsys, program, *arguments):
    with pytest.raises(SystemExit):
        program(arguments)
    return capsys.readouterr().out


def test_help_says_what_the_recipe_trains_and_names_the_command(capsys):
    printed = printed_help(capsys, mnist_fnn.main, "--help")
    assert "fully connected classifier 784-512-10 of MNIST" in " ".join(printed.split())
    assert printed.startswith("usage: python -m lightning_struct.recipes.mnist_fnn {fit,validate,test,predict} [--c")


def test_help_of_a_subcommand_is_that_of_the_recipe_and_all_of_it_if_asked_for(capsys):
    short = printed_help(capsys, lightning_struct_command, "mnist_fnn", "fit", "--help")
    assert short.startswith("usage: lightning-struct mnist_fnn fit ") and len(short.splitlines()) < 120
    for option in ("--quick", "--help.full", "--ckpt_path", "--data.train_size", "--print_config"):
        assert f"  {option}" in short
    assert "--trainer.strategy" not in short
    assert "--trainer.strategy" in printed_help(capsys, mnist_fnn.main, "fit", "--help.full")


def test_missing_checkpoint_is_one_error_before_anything_is_written():
    with pytest.raises(MisconfigurationException, match="There is no checkpoint nowhere.ckpt"):
        mnist_fnn.main(["fit", "--data.synthetic=true", "--ckpt_path", "nowhere.ckpt"])
    assert not Path("results").exists()


KEPT = pytest.mark.skipif(
    version("jsonargparse").startswith("4.40."), reason="its errors do not keep what a class has said"
)
CASES = [
    pytest.param(["--model.network.layer_sizes=[784]"], "layer_sizes must name the pixels, the classes", marks=KEPT),
    (["--trainer.logger=tests.recipes.test_errors.LoggerOfAnotherPackage"], "No module named 'another_package'"),
    (["--model=tests.recipes.test_errors.Misled"], "optimizer got an empty parameter list"),
]


@pytest.mark.parametrize(("arguments", "message"), CASES)
def test_what_classes_say_of_their_arguments_is_one_message(arguments, message):
    assert message_of(*SMALL_DATA, *arguments).startswith(f"error: {message}")


def test_missing_data_is_one_message_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe", "fit", "--data.download=false", f"--data.data_dir={tmp_path}/nowhere"])
    monkeypatch.delitem(sys.modules, "lightning_struct.recipes.mnist_autoencoder", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lightning_struct.recipes.mnist_autoencoder", run_name="__main__")
    assert end.value.code.startswith(f"error: MNIST is not in {tmp_path}/nowhere")  # printed; the status is 1


class Misled(Classifier):
    """A classifier whose optimizer gets nothing that it could train."""

    def configure_optimizers(self):
        return torch.optim.SGD([])


def test_files_that_are_no_checkpoints_are_one_error():
    torch.save({"state_dict": {"weight": torch.zeros(100)}}, "some.ckpt")
    Path("some.ckpt").write_bytes(Path("some.ckpt").read_bytes()[:300])
    with pytest.raises(MisconfigurationException, match="some.ckpt is no complete checkpoint"):
        check_checkpoint("some.ckpt", "mnist_fnn")
    with zipfile.ZipFile("some.zip", "w") as archive:
        archive.writestr("some.txt", "some text")
    with pytest.raises(MisconfigurationException, match="some.zip is no checkpoint: name another file"):
        config_of_checkpoint("some.zip", "mnist_fnn")


def test_best_and_last_checkpoint_of_another_process_are_not_known():
    newest = Path("results/mnist_fnn/version_0/checkpoints/some.ckpt")
    newest.parent.mkdir(parents=True)
    newest.touch()
    with pytest.raises(MisconfigurationException, match=f"There is no checkpoint best. The newest here is {newest}"):
        check_checkpoint("best", "mnist_fnn")
    with pytest.raises(MisconfigurationException, match=f"There is no checkpoint last. The newest here is {newest}"):
        mnist_fnn.main(["test", *SMALL_DATA, "--ckpt_path", "last"])


class LoggerOfAnotherPackage(CSVLogger):
    def __init__(self):
        import another_package  # noqa: F401


def test_results_that_are_a_file_are_one_message(conf):
    Path("results").write_text("not a folder")
    message = message_of("--config", conf("classifier"))
    assert "results/mnist_fnn" in message and ELSEWHERE in message


def test_missing_extra_is_one_message_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert "pip install 'lightning-struct[recipes]'" in message_of()


class Interruption(L.Callback):
    """Sends this process SIGINT in the second epoch."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def on_exception(self, trainer, pl_module, exception):
        vars(trainer.strategy)["broadcast"] = lambda _: pytest.fail("the other processes may be gone")


@pytest.fixture
def interruptible():
    """With Python's handler of SIGINT, which it leaves out where a shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_interrupted_run_keeps_its_curves_and_says_how_to_resume(conf, capsys):
    callback = "--trainer.callbacks+=tests.recipes.test_errors.Interruption"
    code = ending(lambda: mnist_fnn.main(["fit", "--config", conf("classifier"), callback]))
    run = Path("results/mnist_fnn/version_0")
    resume = f"python -m lightning_struct.recipes.mnist_fnn fit --ckpt_path {run}/checkpoints/last.ckpt"
    assert code == 130 and resume in capsys.readouterr().err
    assert {"metrics.csv", "training_curves.png"} <= {path.name for path in run.iterdir()}


@pytest.mark.parametrize(
    ("content", "flips", "message"),
    [
        ({"weight": torch.zeros(300)}, False, "no checkpoint of Lightning, as it has no state_dict"),
        (torch.zeros(300), False, "no checkpoint of Lightning, as it has no state_dict"),
        ({"state_dict": {"weight": torch.ones(300)}, "pytorch-lightning_version": "2.6.0"}, True, "damaged"),
    ],
)
def test_a_file_that_is_no_checkpoint_or_damaged_is_refused(content, flips, message):
    torch.save(content, "some.ckpt")
    if flips:
        written = Path("some.ckpt").read_bytes()
        one = torch.ones(1).numpy().tobytes()
        Path("some.ckpt").write_bytes(written.replace(8 * one, 7 * one + torch.zeros(1).numpy().tobytes(), 1))
    with pytest.raises(MisconfigurationException, match=f"some.ckpt is {message}"):
        mnist_fnn.main(["fit", "--config=adam", "--ckpt_path=some.ckpt"])


@pytest.mark.parametrize(("options", "synthetic"), [([], True), (["--data.data_dir=files"], False)])
def test_a_trial_is_on_given_data_if_there_are_any(options, synthetic, capsys):
    with pytest.raises(SystemExit):
        mnist_fnn.main(["fit", "--quick", *options, "--print_config"])
    assert f"synthetic: {str(synthetic).lower()}" in capsys.readouterr().out
