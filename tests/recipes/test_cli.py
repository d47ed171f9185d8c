import re
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import Autoencoder
from lightning_struct.recipes import usps_autoencoder
from lightning_struct.recipes.catalogue import RECIPES
from lightning_struct.recipes.curves_autoencoder import main

RUN = Path("results/curves_autoencoder/version_0")


def weights(cli):
    return torch.cat([parameter.detach().flatten() for parameter in cli.model.parameters()])


def denormals_are_zero():
    return bool(torch.tensor([1e-40]) * 0.5 == 0)


class Noting(L.Callback):
    """Notes whether denormal numbers are zero in a training step, warns and shows a small value there."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.flushed = denormals_are_zero()
        pl_module.log("small", torch.tensor(1.25e-8, dtype=torch.float64), prog_bar=True)
        warnings.warn("a warning of a callback", stacklevel=1)


@pytest.fixture(scope="module")
def finished_run(finish, conf):
    noting = ["--trainer.callbacks+=tests.recipes.test_cli.Noting", "--trainer.enable_progress_bar=true"]
    return finish(main, ["fit", "--config", conf("adam"), *noting])


@pytest.fixture
def finished(finished_run, monkeypatch):
    """A finished run in the working directory."""
    monkeypatch.chdir(finished_run.directory)
    return finished_run


def test_training_flushes_denormal_numbers_and_leaves_the_mode_as_it_was(finished):
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no such mode")
    (callback,) = (c for c in finished.cli.trainer.callbacks if type(c).__name__ == "Noting")
    assert (callback.flushed, denormals_are_zero()) == (True, False)


def test_warnings_of_callbacks_are_shown(finished):
    assert "a warning of a callback" in finished.said


def test_fit_ends_with_the_validation_loss_and_the_paths_of_its_results(finished):
    for path in ("reconstructions.png", "training_curves.png", "checkpoints/epoch=1-step=4.ckpt"):
        assert f"{RUN / path}\n" in finished.printed
    assert re.search(r"validation loss  \S+ at first, \S+ at best\n", finished.printed)


def test_output_that_is_no_terminal_has_a_line_for_the_first_step_and_for_each_epoch(finished):
    lines = [line for line in finished.printed.splitlines() if line.startswith("Epoch")]
    ends = ["Epoch 0: batch 1 of 2, step 1, ", "Epoch 0: step 2, ", "Epoch 1: step 4, "]
    assert len(lines) == 3 and all(map(str.startswith, lines, ends))
    last = r".* train_loss \S+, small 1.25e-08, val_loss \S+, val_squared_error \S+, batch_size 20, \d+\.\d s"
    assert re.fullmatch(last, lines[-1])


@pytest.mark.slow
def test_trial_says_that_it_is_one_and_learns_and_options_win_over_its_own(capsys):
    cli = usps_autoencoder.main(["fit", "--data.train_size=300", "--quick", "--trainer.max_epochs=2"])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "--quick" in lines[0] and "--quick" in lines[-1]
    assert next(cli.model.parameters()).shape == (100, 256)
    assert [len(part) for part in cli.datamodule.splits] == [300, 500, 500]
    losses = [float(loss) for loss in re.findall(r"^Epoch \d+: step .* val_loss ([^,]+)", printed, re.MULTILINE)]
    assert losses[-1] < losses[0] and "training_curves.png" in printed


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.endswith("_pinn")])
def test_trials_end_within_a_minute(name):
    assert "--trainer.max_time=00:00:00:30" in RECIPES[name].quick


RARE_VALIDATIONS = ("--trainer.max_epochs=-1", "--trainer.check_val_every_n_epoch=4", "--trainer.limit_test_batches=0")


@pytest.mark.slow
def test_fit_that_ends_between_two_validations_leaves_its_last_checkpoint_from_which_it_goes_on(conf, capsys):
    whole = main(["fit", "--config", conf("adam"), *RARE_VALIDATIONS, "--trainer.max_epochs=5"])
    capsys.readouterr()
    main(["fit", "--config", conf("adam"), *RARE_VALIDATIONS, "--trainer.max_steps=6"])
    printed, last = capsys.readouterr().out, "results/curves_autoencoder/version_1/checkpoints/last.ckpt"
    assert "Averages over" not in printed
    assert "none was kept\n" in printed and f"last checkpoint  {last}\n" in printed
    resumed = main(["fit", "--ckpt_path", last, "--trainer.max_epochs=5", "--trainer.max_steps=-1"])
    assert resumed.trainer.global_step == 10 and torch.equal(weights(resumed), weights(whole))


def test_last_checkpoint_has_the_last_weights_where_the_best_are_put_back(conf):
    stopping = [
        "--trainer.callbacks+=lightning_struct.callbacks.ValidationMeritStopping",
        "--trainer.callbacks.monitor=val_loss",
        "--model.optimizer.lr=3",
    ]
    cli = main(["fit", "--config", conf("adam"), "--trainer.max_steps=9", *RARE_VALIDATIONS, *stopping])
    last, best = (torch.load(RUN / "checkpoints" / f"{name}.ckpt") for name in ("last", "epoch=3-step=8"))
    name, value = next(iter(cli.model.state_dict().items()))
    assert torch.equal(value, best["state_dict"][name]) and not torch.equal(value, last["state_dict"][name])


def test_checkpoint_of_another_model_or_recipe_is_one_error(conf, finished_run):
    checkpoint = str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")
    with pytest.raises(MisconfigurationException, match="the checkpoint brings its own"):
        main(["test", "--config", conf("adam"), "--model.layer_sizes=[784,7,3]", "--ckpt_path", checkpoint])
    with pytest.raises(MisconfigurationException, match=f"{checkpoint} is of the recipe curves_autoencoder, not of"):
        usps_autoencoder.main(["fit", "--ckpt_path", checkpoint])


class DataInOtherProcesses(L.Callback):
    """Leaves the data module as it is where the processes of the fit were spawned."""

    def teardown(self, trainer, pl_module, stage):
        if stage == "fit":
            trainer.datamodule.splits = None


def test_errors_of_the_last_weights_on_some_batches_though_the_data_were_in_other_processes(conf, capsys):
    options = [
        "--trainer.callbacks=tests.recipes.test_cli.DataInOtherProcesses",
        "--trainer.enable_checkpointing=false",
    ]
    main(["fit", "--config", conf("adam"), "--trainer.max_epochs=1", "--trainer.limit_test_batches=1", *options])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Averages over samples, the last weights, limit_test_batches=1" in printed


def test_trained_weights_are_evaluated_by_their_checkpoint(conf, finished_run):
    checkpoint = str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")
    cli = main(["validate", "--config", conf("adam"), "--ckpt_path", checkpoint])
    images = cli.datamodule.splits.val.tensors[0]
    expected = (Autoencoder.load_from_checkpoint(checkpoint)(images) - images).square().sum(dim=1).mean().item()
    assert cli.trainer.callback_metrics["val_squared_error"].item() == pytest.approx(expected, rel=1e-5)
    assert not Path("results").exists()  # what it measures is printed, and nothing is written


@pytest.mark.filterwarnings("error:The best checkpoint so far")
def test_predict_writes_reconstructions_of_the_test_images_and_says_so(conf, finished_run, caplog):
    checkpoint = str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")
    with caplog.at_level("INFO"):
        cli = main(["predict", "--config", conf("adam"), "--ckpt_path", checkpoint])
    assert caplog.messages[-1] == f"Reconstructions written to {RUN / 'reconstructions.pt'}"
    written = torch.load(RUN / "reconstructions.pt")
    expected = Autoencoder.load_from_checkpoint(checkpoint)(cli.datamodule.splits.test.tensors[0])
    assert torch.allclose(written["reconstructions"], expected, atol=1e-6)


def test_runs_without_a_logger_have_folders_of_their_own(conf, capsys):
    for name in ("version_0", "version_8_copied"):
        (RUN.parent / name).mkdir(parents=True)
    options = ["--trainer.logger=false", "--trainer.max_epochs=1", "--trainer.limit_test_batches=0"]
    main(["fit", "--config", conf("adam"), *options])
    run = RUN.parent / "version_1"
    assert {"checkpoints", "config.yaml", "training_curves.csv"} <= {path.name for path in run.iterdir()}
    assert f"log              {run}\n" in capsys.readouterr().out
    main(["predict", "--ckpt_path", f"{run}/checkpoints/last.ckpt", "--trainer.default_root_dir=elsewhere"])
    assert Path("elsewhere/version_0/reconstructions.pt").exists()


def test_paths_in_the_home_directory_are_those_of_a_shell(conf, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["fit", "--config", conf("adam"), "--trainer.logger.save_dir=~/runs", "--print_config"])
    assert f"save_dir: {tmp_path}/runs\n" in capsys.readouterr().out


def test_losses_keep_their_last_digits_where_these_are_zeros():
    forms = {recipe.results.metrics["test_loss"][1] for recipe in RECIPES.values()}
    assert {format(2.5, form) for form in forms} == {"2.500", "2.50e+00"}
