"""transformers: small language models with random weights."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_struct import RLS
from lightning_struct.nn import LowRank, replace_linear
from tests.ecosystem.harness import assert_batches_grow, train_thrice

transformers = pytest.importorskip("transformers")


class LanguageModel(L.LightningModule):
    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(tokens, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3) if self.optimizer is None else self.optimizer(self.model)


def fit(model: nn.Module, callbacks: list[Any], optimizer: Any = None, number: int = 128, epochs: int = 2) -> L.Trainer:
    tokens = torch.randint(0, 50, (number, 12), generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(model, optimizer), DataLoader(tokens, 4, shuffle=True), DataLoader(tokens[:16], 8))
    return trainer


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    )


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("make", [gpt2, llama, t5, bert])
def test_growing_batches(make: Any) -> None:
    row = train_thrice(f"transformers: {make.__name__}", "transformers", lambda callbacks: fit(make(), callbacks))
    # what they look up is added to all samples of the batch alike: their layers see one sample
    assert_batches_grow(row, announced=("wpe.weight", "relative_attention_bias.weight", "position_embeddings.weight"))


def rls(model: nn.Module) -> RLS:
    optimizer = RLS(model, auxiliary=partial(torch.optim.Adam, lr=1e-3))
    trained = optimizer.summary()
    assert "h.0.attn.c_attn.weight" in trained and "h.1.mlp.c_proj.weight" in trained
    return optimizer


def test_rls_trains_the_layers_of_gpt2() -> None:
    torch.manual_seed(0)
    model = gpt2()
    trainer = fit(model, [], optimizer=rls, number=32, epochs=2)
    assert trainer.callback_metrics["val_loss"].isfinite()


def test_linear_layers_of_gpt2_are_replaced() -> None:
    torch.manual_seed(0)
    model = gpt2()
    replace_linear(model, lambda i, o, bias: LowRank(i, o, rank=2, bias=bias), exclude="lm_head")
    assert sum(isinstance(layer, LowRank) for layer in model.modules()) == 8
    assert fit(model, [], number=16, epochs=1).callback_metrics["val_loss"].isfinite()
