"""Checkpoints without the frozen weights: both namespaces, and a resumed run like one that was not stopped."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import AdapterCheckpoint, ValidationMeritStopping
from lightning_struct.nn import LDRSubdiagonal, adapter_state_dict, add_adapters, load_adapter_state_dict, load_adapters
from lightning_struct.utilities.namespaces import MisconfigurationException

both_names = pytest.mark.parametrize("pl", ["lightning.pytorch", "pytorch_lightning"], indirect=True)


def module(pl, base=0, adapted=True):
    """A module whose base is decided by a seed, and whose adapters are drawn."""

    class Adapted(pl.LightningModule):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(base)
                self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
            if adapted:
                add_adapters(self.net, partial(LDRSubdiagonal, rank=2), include="0", train="3.bias")

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["own"] = "kept"

    return Adapted()


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (24,), generator=generator)), 8)


def trainer(pl, epochs=0, callbacks=None, checkpointing=False, precision="32-true"):
    callbacks = [AdapterCheckpoint()] if callbacks is None else callbacks
    silent = {
        "logger": False,
        "enable_checkpointing": checkpointing,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=callbacks, num_sanity_val_steps=0, precision=precision, **silent
    )


def fit(pl, model, epochs, path=None):
    run = trainer(pl, epochs)
    run.fit(model, loader(), ckpt_path=path)
    return run


@pytest.fixture
def stopped(pl, tmp_path):
    """A module after two epochs, and its checkpoint."""
    model = module(pl)
    fit(pl, model, 2).save_checkpoint(tmp_path / "whole.ckpt")
    return model, tmp_path / "whole.ckpt"


@both_names
def test_checkpoint_has_the_adapters_and_not_the_base(pl, stopped):
    model, path = stopped
    checkpoint = torch.load(path, weights_only=False)
    weights = checkpoint["state_dict"]
    expected = adapter_state_dict(model)
    assert weights.keys() == expected.keys()
    assert {"net.0.update.adapter.G", "net.1.running_mean", "net.3.bias"} < weights.keys()
    assert not {"net.0.base.weight", "net.3.weight"} & weights.keys()
    assert checkpoint["own"] == "kept"
    other = load_adapter_state_dict(module(pl), weights)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def test_adapters_of_a_checkpoint_are_added_to_the_module_or_to_the_network_in_it(pl, stopped):
    model, path = stopped
    x = torch.randn(5, 6)
    for base in (module(pl, adapted=False), module(pl, adapted=False).net):
        loaded = getattr(load_adapters(base, path), "net", base)
        assert torch.equal(loaded.eval()(x), model.net.eval()(x))
    with pytest.raises(ValueError, match="beside another base: 0.base.weight has norm"):
        load_adapters(module(pl, base=7, adapted=False).net, path)
    with pytest.raises(ValueError, match="has no adapters: give a folder of save_adapters or a file"):
        torch.save({"state_dict": {}}, path)
        load_adapters(module(pl, adapted=False), path)


def test_a_checkpoint_of_version_0_3_is_read(pl, stopped):
    straight, path = stopped
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["adapter_base_norms"] = checkpoint.pop("adapter_description")["base_norms"]
    torch.save(checkpoint, path)
    fit(pl, again := module(pl), 2, path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in straight.state_dict().items())


def test_weights_alone_are_the_adapters_too(pl, tmp_path):
    model = module(pl)
    run = trainer(pl, 1)
    run.strategy.connect(model)
    AdapterCheckpoint().setup(run, model, "fit")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert torch.load(tmp_path / "weights.ckpt")["state_dict"].keys() == adapter_state_dict(model).keys()


@both_names
def test_resumed_run_goes_on_as_if_it_had_not_stopped(pl, stopped):
    straight, resumed = module(pl), module(pl)
    resumed.load_state_dict(straight.state_dict())
    first = {name: value.clone() for name, value in straight.state_dict().items()}
    torch.manual_seed(0)
    fit(pl, straight, 2)
    run = fit(pl, resumed, 1)
    file = stopped[1].with_name("half.ckpt")
    run.save_checkpoint(file)
    again = module(pl)  # its adapters are drawn anew
    assert any(not torch.equal(value, first[name]) for name, value in again.state_dict().items())
    fit(pl, again, 2, file)
    assert all(torch.equal(v, again.state_dict()[name]) for name, v in straight.state_dict().items())


def compiled(model):
    model.net = torch.compile(model.net, backend="eager")
    return model


@pytest.mark.parametrize("change", [(compiled, lambda model: model), (lambda model: model, compiled)])
def test_a_compiled_module_and_a_plain_one_resume_from_each_other(pl, tmp_path, change):
    first, then = change
    fit(pl, saved := first(module(pl)), 1).save_checkpoint(tmp_path / "half.ckpt")
    weights = torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"]
    loaded = load_adapter_state_dict(then(module(pl)), weights)
    for value, other in zip(saved.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other)
    fit(pl, saved, 2, tmp_path / "half.ckpt")
    fit(pl, resumed := then(module(pl)), 2, tmp_path / "half.ckpt")
    for value, other in zip(saved.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(value, other)


@pytest.mark.parametrize("precisions", [("bf16-true", "bf16-true"), ("bf16-true", "32-true"), ("32-true", "bf16-true")])
def test_the_same_base_in_another_precision_is_no_other_one(pl, tmp_path, precisions):
    file = tmp_path / "half.ckpt"
    before, now = (
        trainer(pl, epochs, precision=precision) for epochs, precision in zip((1, 2), precisions, strict=True)
    )
    before.fit(module(pl), loader())
    before.save_checkpoint(file)
    now.fit(module(pl), loader(), ckpt_path=file)
    assert now.current_epoch == 2


def test_module_has_its_own_hooks_again_after_the_run(stopped):
    model, _ = stopped
    assert not {"on_save_checkpoint", "on_load_checkpoint"} & vars(model).keys()


def test_module_has_its_own_hooks_again_after_an_error(pl, tmp_path):
    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            raise RuntimeError("stopped")

    model = module(pl)
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(pl, 1, [AdapterCheckpoint(), Failing()]).fit(model, loader())
    without = trainer(pl, 1, [])
    without.fit(model, loader())
    without.save_checkpoint(tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt")["state_dict"].keys() == model.state_dict().keys()


def test_checkpoint_beside_another_base_is_refused(pl, stopped):
    with pytest.raises(MisconfigurationException, match="another base: net.0.base.weight has norm"):
        trainer(pl, 3).fit(module(pl, base=7), loader(), ckpt_path=stopped[1])


def test_checkpoint_of_other_adapters_is_refused(pl, stopped):
    other = module(pl, adapted=False)
    add_adapters(other.net, partial(LDRSubdiagonal, rank=1), include="0", train="3.bias")
    with pytest.raises(RuntimeError, match="size mismatch for net.0.update.adapter.G"):
        trainer(pl, 3).fit(other, loader(), ckpt_path=stopped[1])


def test_fit_without_adapters_is_an_error(pl):
    with pytest.raises(MisconfigurationException, match="AdapterCheckpoint: Adapted has no adapters: call add_adap"):
        trainer(pl, 1).fit(module(pl, adapted=False), loader())


@both_names
@pytest.mark.parametrize("first", [0, 1])
def test_best_weights_are_kept_and_put_back_without_the_base(pl, tmp_path, first):
    def fit_and_put_back(epochs, path=None):
        merit, last = (
            ValidationMeritStopping("val_loss"),
            pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1),
        )
        callbacks = [AdapterCheckpoint(), merit][:: 1 if first == 0 else -1]
        run, model = trainer(pl, epochs, [*callbacks, last], checkpointing=True), module(pl)
        losses = iter([3.0, 1.0, 2.0, 4.0][-epochs:] if path is None else [2.0, 4.0])
        model.validation_step = lambda batch, batch_idx: None
        model.on_validation_epoch_end = lambda: model.log("val_loss", next(losses))
        run.fit(model, loader(), loader(), ckpt_path=path)
        assert merit.best_value == 1.0
        return model.state_dict()

    whole = fit_and_put_back(4)
    (state,) = (
        state
        for state in torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["callbacks"].values()
        if "best_weights" in state
    )
    assert state["best_weights"].keys() == adapter_state_dict(module(pl)).keys()
    resumed = fit_and_put_back(4, tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_best_weight_that_was_frozen_later_is_kept(pl, stopped):
    model, path = stopped
    checkpoint = torch.load(path, weights_only=False)
    best = model.state_dict() | {"net.3.weight": torch.zeros(3, 8)}
    saved = checkpoint | {"state_dict": model.state_dict(), "callbacks": {"some": {"best_weights": best}}}
    AdapterCheckpoint().on_save_checkpoint(trainer(pl), model, saved)
    kept = saved["callbacks"]["some"]["best_weights"]
    assert "net.3.weight" in kept and "net.0.base.weight" not in kept


@pytest.mark.parametrize("first", [0, 1])
def test_averaged_weights_are_kept_and_resumed_without_the_base(pl, tmp_path, first):
    if not hasattr(pl.callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no such callback")

    def averaged_fit(epochs, path=None):
        callbacks = [AdapterCheckpoint(), pl.callbacks.EMAWeightAveraging(decay=0.9)]
        last = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        run, model = trainer(pl, epochs, [*callbacks[first:], *callbacks[:first], last], checkpointing=True), module(pl)
        run.fit(model, loader(), ckpt_path=path)
        run.save_checkpoint(tmp_path / "after.ckpt")
        assert "on_save_checkpoint" not in vars(model)
        return model.state_dict()

    whole = averaged_fit(3)
    for file in "epoch=1.ckpt", "after.ckpt":
        saved = torch.load(tmp_path / file, weights_only=False)
        for weights in (saved["state_dict"], saved["current_model_state"]):
            assert "net.0.update.adapter.G" in weights and "net.0.base.weight" not in weights
        assert saved["own"] == "kept"
    resumed = averaged_fit(3, tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("everywhere", [True, False])
def test_the_base_is_pruned_in_training(pl, everywhere):
    model = module(pl)
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.5, use_global_unstructured=everywhere)
    trainer(pl, 1, [pruning]).fit(model, loader())
    assert (model.net[0].base.weight == 0).any()
    assert set(dict(model.named_parameters())) == set(dict(module(pl).named_parameters()))
