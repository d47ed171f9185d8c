from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_struct.data import TextCorpusDataModule
from lightning_struct.models import LanguageModel
from lightning_struct.nn import LDRSubdiagonal, LowRank, jacobian_norms

SGD = partial(torch.optim.SGD, lr=2.0)


def model(vocabulary_size=30, **options):
    torch.manual_seed(0)
    return LanguageModel(vocabulary_size, 6, 5, **{"optimizer": SGD, "dropout": 0.0, **options})


def text(**options):
    sizes = {"train_size": 400, "val_size": 120, "test_size": 120, "batch_size": 4, "eval_batch_size": 2, "steps": 9}
    return TextCorpusDataModule(synthetic=True, synthetic_vocabulary=30, **{**sizes, **options})


def trainer(**options):
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 1, **options},
    )


def test_logits_and_state_are_those_of_an_lstm_between_embedding_and_output():
    lit, words = model(), torch.arange(12).view(3, 4)
    reference = nn.LSTM(6, 5)
    cell = lit.recurrent.directions[0]
    with torch.no_grad():
        reference.weight_ih_l0.copy_(torch.cat([gate.weight for gate in cell.input_hidden]))
        reference.bias_ih_l0.copy_(torch.cat([gate.bias for gate in cell.input_hidden]))
        reference.weight_hh_l0.copy_(torch.cat([gate.weight for gate in cell.hidden_hidden]))
        reference.bias_hh_l0.zero_()
    outputs, (h, c) = reference(lit.embedding(words))
    logits, state = lit(words)
    assert torch.allclose(logits, lit.output(outputs), atol=1e-6) and logits.shape == (3, 4, 30)
    assert torch.allclose(state[0], h, atol=1e-6) and torch.allclose(state[1], c, atol=1e-6)


def test_input_hidden_matrices_are_made_by_the_factory():
    lit = LanguageModel(30, layer=partial(LowRank, rank=2))
    gates = lit.recurrent.directions[0].input_hidden
    assert len(gates) == 4 and sum(gate.G.numel() + gate.H.numel() for gate in gates) == 2048
    assert all(isinstance(gate, nn.Linear) for gate in lit.recurrent.directions[0].hidden_hidden)


def test_state_is_carried_through_the_text_and_no_further():
    """The losses of all batches of an epoch, averaged, are the loss of the text read at once; in every epoch."""
    lit, data = model(optimizer=partial(torch.optim.SGD, lr=0.0)), text()
    run = trainer(max_epochs=2)
    run.fit(lit, datamodule=data)
    for part in ("val", "test"):
        words = data.evaluation_dataloader(part).table
        with torch.no_grad():
            logits = lit(words[:-1])[0]
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
        (logged,) = (
            run.validate(lit, datamodule=data, verbose=False)
            if part == "val"
            else run.test(lit, datamodule=data, verbose=False)
        )
        assert logged[f"{part}_loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert logged[f"{part}_perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)


def test_training_sees_the_state_but_its_gradient_stops_at_the_batch():
    lit, data = model(), text()
    data.setup("fit")
    lit.log = lambda *arguments, **options: None
    first, second, *_ = data.train_dataloader()
    lit.training_step(first, 0)
    loss = lit.training_step(second, 1)
    _, state = lit(first[0])
    expected = nn.functional.cross_entropy(
        lit(second[0], tuple(part.detach() for part in state))[0].flatten(0, 1), second[1].flatten()
    )
    assert torch.equal(loss, expected)
    gradients = [torch.autograd.grad(value, list(lit.parameters())) for value in (loss, expected)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_rate_is_quartered_after_an_epoch_that_is_no_better():
    # the rate is so small that nothing is learned; without eps it may become still smaller
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.25, patience=0, threshold=0.0, eps=0.0)
    lit = model(optimizer=partial(torch.optim.SGD, lr=1e-30), lr_scheduler=plateau)
    run = trainer(max_epochs=3)
    run.fit(lit, datamodule=text())
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-30 / 16)


@pytest.mark.slow
def test_resumed_within_an_epoch_it_ends_where_the_uninterrupted_run_ends(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)  # 6 in an epoch
    whole, options = structured(dropout=0.5), {"max_epochs": 2, "limit_val_batches": 0}
    trainer(callbacks=[keep], enable_checkpointing=True, **options).fit(whole, datamodule=text(train_size=200))
    expected = [parameter.detach().clone() for parameter in whole.parameters()]
    torch.manual_seed(1)
    resumed = structured(dropout=0.5)
    trainer(**options).fit(resumed, datamodule=text(train_size=200), ckpt_path=tmp_path / "step=8.ckpt")
    assert all(torch.equal(*pair) for pair in zip(expected, resumed.parameters(), strict=True))


def test_resumed_within_an_epoch_with_other_columns_it_says_so(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(callbacks=[checkpoints], enable_checkpointing=True).fit(model(), datamodule=text())
    with pytest.raises(MisconfigurationException, match="goes on in 8 columns, but its state is that of 4"):
        trainer().fit(model(), datamodule=text(batch_size=8), ckpt_path=tmp_path / "step=3.ckpt")


def test_checkpoint_that_is_only_tested_leaves_random_numbers_alone(tmp_path):
    data = text()
    run = trainer()
    run.fit(model(), datamodule=data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    lit = model()
    trainer().test(lit, datamodule=data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    trainer(max_steps=1).fit(lit, datamodule=data)
    assert torch.equal(torch.get_rng_state(), expected)


def structured(**options):
    return model(layer=partial(LDRSubdiagonal, rank=2), **options)


def step_of_one_batch(lit, clip):
    """The first batch, and the weights before and after the step on it, by name."""
    before = {name: weight.detach().clone() for name, weight in lit.named_parameters()}
    data = text()
    trainer(max_steps=1, gradient_clip_val=clip, limit_val_batches=0).fit(lit, datamodule=data)
    return next(iter(data.train_dataloader())), before, dict(lit.named_parameters())


@pytest.mark.slow
def test_structured_weights_are_trained_in_units_that_move_their_matrix_by_no_more_than_themselves():
    """The step is that of SGD with clipping in the variables ‖∂M/∂θ‖ θ."""
    rate, clip = 2.0, 0.05
    lit = structured()
    gates = lit.recurrent.directions[0].input_hidden
    norms = [jacobian_norms(gate) for gate in gates]
    unit = {key: sum(of_gate[key] for of_gate in norms) / 4 for key in norms[0]}
    (words, targets), before, after = step_of_one_batch(lit, clip)
    reference = structured()
    reference.load_state_dict(before)
    loss = nn.functional.cross_entropy(reference(words)[0].flatten(0, 1), targets.flatten())
    gradients = dict(zip(before, torch.autograd.grad(loss, list(reference.parameters())), strict=True))
    units = {name: unit.get(name.rpartition(".")[2], 1.0) if "input_hidden" in name else 1.0 for name in before}
    scaled = {name: gradients[name] / units[name] for name in before}
    norm = torch.cat([gradient.flatten() for gradient in scaled.values()]).norm()
    assert norm > clip and unit["subdiagonal_a"] > 1.5
    for name, weight in after.items():
        expected = before[name] - rate * clip / norm * scaled[name] / units[name]
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-6, msg=name)


def test_structured_layers_of_several_classes_are_each_in_their_units():
    lit = model(layer=partial(LowRank, rank=2))
    gates = lit.recurrent.directions[0].input_hidden
    gates[0] = LDRSubdiagonal(6, 5)
    others, *groups = lit.configure_optimizers().param_groups
    assert {id(p) for group in groups for p in group["params"]} == {
        id(getattr(gate, name)) for gate in gates for name in jacobian_norms(gate)
    }
    assert sum(len(group["params"]) for group in (others, *groups)) == len(list(lit.parameters()))


def test_unbalanced_structured_weights_are_trained_as_all_others():
    (words, targets), before, after = step_of_one_batch(structured(balanced=False), None)
    reference = structured()
    reference.load_state_dict(before)
    nn.functional.cross_entropy(reference(words)[0].flatten(0, 1), targets.flatten()).backward()
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(
            after[name].detach(), before[name] - 2.0 * weight.grad, rtol=1e-3, atol=1e-6, msg=name
        )


def test_predictions_are_the_likeliest_next_words():
    lit, data = model(), text()
    predicted = torch.cat(trainer().predict(lit, datamodule=data))
    words = data.evaluation_dataloader("test").table[:-1]
    assert torch.equal(predicted, lit(words)[0].argmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be at least 1, but is 0"),
        ({"vocabulary_size": 9, "hidden_size": 0}, "hidden_size must be at least 1"),
        (
            {"vocabulary_size": 9, "hidden_size": 5, "tied": True},
            "tied needs embedding_size=128 and hidden_size=5 to be the same",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        LanguageModel(**options)


def test_initial_weights_of_embedding_and_output_are_those_of_the_example_and_may_be_shared():
    assert (tied := LanguageModel(30, 6, 6, tied=True)).output.weight is tied.embedding.weight
    lit = LanguageModel(300)
    for weight in (lit.embedding.weight, lit.output.weight):
        assert weight.abs().max() <= 0.1 and weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert not lit.output.bias.any()


def test_word_beyond_the_vocabulary_is_refused():
    with pytest.raises(MisconfigurationException, match="Word 30 is not below the network's vocabulary_size=30"):
        model()(torch.tensor([[30]]))
