"""Recurrent networks that read numbered words: a language model with structured matrices, and a classifier."""

import statistics
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_struct.data.imdb import PADDING
from lightning_struct.functional.checks import check_types
from lightning_struct.models.structured import LayerOfSizes
from lightning_struct.models.training import Task, check_train_loss, optimizer_and_scheduler
from lightning_struct.nn import StructuredLinear, StructuredLSTM, jacobian_norms
from lightning_struct.utilities.checks import check, check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException

State = tuple[Tensor, Tensor]
CELLS = {"lstm": nn.LSTM, "rnn": nn.RNN}
INITIAL_RANGE = 0.1  # of embedding and output layer, as in torch's example


class LanguageModel(Task):
    """Language model that reads a text in columns, predicting the next words (section 5.1, appendix F.2, Table 2).

    For example::

        data = TextCorpusDataModule(data_dir="data")
        Trainer(gradient_clip_val=0.25).fit(LanguageModel(data.vocabulary_size), datamodule=data)

    Embedding, dropout, one layer of :class:`StructuredLSTM`, dropout, output layer. The state is carried from batch to
    batch within an epoch, and gradients stop there. All that the paper leaves open is as in torch's example
    ``word_language_model``, which it names: dropout of .2, initial weights, an output layer with weights of its own.

    SGD at the rate of a dense weight is far too fast for structured ones: see :func:`jacobian_norms`. So each parameter
    θ of a structured matrix M is trained in units in which a step moves M by no more than itself, ‖∂M/∂θ‖ θ with the
    norm at the start: its gradient is divided by that norm before gradients are clipped, and its rate too.

    A checkpoint has the state of the text and of the generators of random numbers: a resumed run goes on bit for bit,
    with dropout if it has as many processes.

    It logs ``train_loss``, ``val_loss`` and ``test_loss``, the cross-entropy in nats, average over words, and
    ``val_perplexity`` and ``test_perplexity``, its exponential.

    Args:
        vocabulary_size: number of words; inputs are from 0 to ``vocabulary_size - 1``.
        embedding_size: length of the vector that stands for a word.
        hidden_size: units of the LSTM.
        layer: makes the input-hidden matrices, ``layer(embedding_size, hidden_size)``, with bias as ``nn.Linear`` has
            it.
        gates: ``"separate"`` matrices for the four gates, as in the paper, or a ``"joint"`` one.
        dropout: probability, for the embedded words and for the outputs of the LSTM.
        tied: the output layer has the weights of the embedding; the authors' code has this as an option.
        balanced: train structured matrices in those units. ``False``: all parameters alike, as in the authors' code.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``.

    Raises:
        MisconfigurationException: if a size is not positive, or ``tied`` with sizes that differ; in a batch, if a word
            has a number that the embedding does not have, or the text goes on in another number of columns.

    Example:
        >>> words = torch.tensor([[4, 7], [9, 2], [3, 3]])  # three steps of two columns
        >>> logits, state = LanguageModel(vocabulary_size=10, embedding_size=4, hidden_size=6)(words)
        >>> logits.shape
        torch.Size([3, 2, 10])
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding_size: int = 128,
        hidden_size: int = 128,
        layer: LayerOfSizes = nn.Linear,
        gates: Literal["separate", "joint"] = "separate",
        dropout: float = 0.2,
        tied: bool = False,
        balanced: bool = True,
        optimizer: OptimizerCallable = torch.optim.SGD,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        check_types(LanguageModel.__init__, locals())
        check_positive(vocabulary_size=vocabulary_size, embedding_size=embedding_size, hidden_size=hidden_size)
        if tied and embedding_size != hidden_size:
            raise MisconfigurationException(
                f"tied needs embedding_size={embedding_size} and hidden_size={hidden_size} to be the same"
            )
        # makers of layers and optimizers need not be picklable
        self.save_hyperparameters(ignore=["layer", "optimizer", "lr_scheduler"])
        if "_instantiator" in self.hparams:  # from a command line: there the layer is plain data, which can be saved
            self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])

        def gate(in_features: int, out_features: int, *, bias: bool) -> nn.Module:
            return layer(in_features, out_features)  # bias: as the caller has made ``layer``

        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.recurrent = StructuredLSTM(embedding_size, hidden_size, gate, gates=gates)
        self.output = nn.Linear(hidden_size, vocabulary_size)
        check("dropout", dropout, 0 <= dropout <= 1, "from 0 to 1")
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.uniform_(self.output.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.output.bias)
        if tied:
            self.output.weight = self.embedding.weight
        self.balanced = balanced
        self._states: dict[str, State] = {}
        self._resumed: State | None = None  # of all columns
        self._random_states: Tensor | None = None  # of all processes

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits of the next words, (steps, columns, vocabulary_size), and the state after the last step.

        Args:
            words: (steps, columns), int64.
            state: of the LSTM, two tensors (1, columns, hidden_size); None: zeros.
        """
        _check_words(words, self.embedding.num_embeddings)
        outputs, state = self.recurrent(self.dropout(self.embedding(words)), state)
        return self.output(self.dropout(outputs)), state

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._next_loss("train", batch, batch_idx)
        check_train_loss(self, loss, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch[0].numel(), sync_dist=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self._log_perplexity("val")

    def on_test_epoch_end(self) -> None:
        self._log_perplexity("test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Likeliest next words, (steps, columns), int64."""
        return self._next_logits("predict", batch[0], batch_idx).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        def balanced(groups: Any) -> torch.optim.Optimizer:
            optimizer = self.make_optimizer(groups)
            for group in optimizer.param_groups:
                group["lr"] /= group["jacobian_norm"]
            return optimizer

        return optimizer_and_scheduler(self._parameter_groups(), balanced, self.make_lr_scheduler)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:  # checkpoints hold the groups
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= group["jacobian_norm"]

    def on_train_start(self) -> None:
        if self._random_states is not None:
            state, size = self._random_states[self.trainer.global_rank], torch.get_rng_state().numel()
            torch.set_rng_state(state[:size])
            if self.device.type == "cuda" and state.numel() > size:
                torch.cuda.set_rng_state(state[size:], self.device)
            self._random_states = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        random_states = self.all_gather(_random_state(self.device).to(self.device))
        assert isinstance(random_states, Tensor)
        checkpoint["random_states"] = random_states.view(self.trainer.world_size, -1).cpu()
        if "train" in self._states:  # a resumed run may have another number of processes
            parts = self._states["train"]
            if self.trainer.world_size > 1:
                h, c = (torch.cat(list(self.all_gather(part)), dim=1) for part in parts)
                parts = h, c
            checkpoint["state_of_the_text"] = parts

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._states.clear()  # of another run of this object
        self._resumed = checkpoint.get("state_of_the_text")
        random_states = checkpoint.get("random_states")
        fits = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fits and random_states is not None and len(random_states) == self.trainer.world_size:
            self._random_states = random_states

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Groups: one per name of a structured parameter, with its mean Jacobian norm, and one of all others."""
        layers = [layer for layer in self.modules() if self.balanced and isinstance(layer, StructuredLinear)]
        norms = [jacobian_norms(layer) for layer in layers]
        names = dict.fromkeys(name for of_layer in norms for name in of_layer)  # the layers may be of several classes
        groups: list[dict[str, Any]] = [
            {
                "params": [getattr(layer, name) for layer, of in zip(layers, norms, strict=True) if name in of],
                "jacobian_norm": statistics.mean(of[name] for of in norms if name in of),
            }
            for name in names
        ]
        structured = {parameter for group in groups for parameter in group["params"]}
        others = [parameter for parameter in self.parameters() if parameter not in structured]
        return [{"params": others, "jacobian_norm": 1.0}, *groups]

    def _next_logits(self, stage: str, words: Tensor, batch_idx: int) -> Tensor:
        """Logits of a batch that continues the last one of this stage; the first begins with zeros as state."""
        state = self._states.get(stage) if batch_idx else None
        if batch_idx and state is None:  # the first batch of a run that is resumed from within an epoch
            assert self._resumed is not None
            world_size, rank = self.trainer.world_size, self.trainer.global_rank
            h, c = (part.tensor_split(world_size, dim=1)[rank].to(self.device) for part in self._resumed)
            state = h, c
        if state is not None and state[0].shape[1] != words.shape[1]:
            raise MisconfigurationException(
                f"The text goes on in {words.shape[1]} columns, but its state is that of {state[0].shape[1]}: resume "
                "within an epoch with the batch_size of the checkpoint, or from the end of one"
            )
        logits, (h, c) = self(words, state)
        self._states[stage] = h.detach(), c.detach()
        return logits

    def _next_loss(self, stage: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        words, targets = batch
        return F.cross_entropy(self._next_logits(stage, words, batch_idx).flatten(0, 1), targets.flatten())

    def evaluate(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str) -> None:
        loss = self._next_loss(stage, batch, batch_idx)
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=batch[0].numel(), sync_dist=True)

    def _log_perplexity(self, stage: str) -> None:
        average = self.trainer.callback_metrics[f"{stage}_loss"]  # over all words and processes
        self.log(f"{stage}_perplexity", average.exp(), prog_bar=True)


def _check_words(words: Tensor, vocabulary_size: int) -> None:
    """Refuse words that the embedding does not have."""
    if (largest := int(words.max())) >= vocabulary_size:
        raise MisconfigurationException(
            f"Word {largest} is not below the network's vocabulary_size={vocabulary_size}: give both the same"
        )


def _random_state(device: torch.device) -> Tensor:
    """States of the random generators that dropout draws from, (bytes,), uint8."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


class RecurrentNetwork(nn.Module):
    """Recurrent network: an embedding, stacked recurrent layers, and an output layer that reads their last state.

    The default is the network for IMDB of Zhang et al., section VI-A, which does not name the vocabulary and the size
    of the embedding. Padding is not read: the last state of each text is that after its own last word.

    For example::

        Trainer().fit(Classifier(RecurrentNetwork(), num_classes=2), datamodule=IMDBDataModule())

    RLS leaves the embedding to another optimizer, the paper names none::

        optimizer = functools.partial(RLS, max_grad_norm=1.0, auxiliary=torch.optim.Adam)
        model = RLSClassifier(RecurrentNetwork(), num_classes=2, optimizer=optimizer)

    Args:
        vocabulary_size: number of words, 0 for padding included; inputs are from 0 to ``vocabulary_size - 1``.
        embedding_size: length of the vector that stands for a word.
        hidden_size: units of each recurrent layer.
        num_layers: recurrent layers.
        num_classes: units of the output layer.
        cell: ``"lstm"``, or ``"rnn"``, the plain recurrent network with tanh for which the paper derives its algorithm.

    Raises:
        MisconfigurationException: if a size is not positive or the cell unknown.

    Example:
        >>> import torch
        >>> words = torch.tensor([[4, 9, 2], [7, 0, 0]])  # the second text has one word
        >>> RecurrentNetwork(vocabulary_size=10, embedding_size=4, hidden_size=6)(words).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        vocabulary_size: int = 20_000,
        embedding_size: int = 128,
        hidden_size: int = 512,
        num_layers: int = 2,
        num_classes: int = 2,
        cell: Literal["lstm", "rnn"] = "lstm",
    ) -> None:
        super().__init__()
        check_types(RecurrentNetwork.__init__, locals())
        check_positive(vocabulary_size=vocabulary_size, embedding_size=embedding_size, hidden_size=hidden_size)
        check_positive(num_layers=num_layers, num_classes=num_classes)
        if cell not in CELLS:
            raise MisconfigurationException(f"cell must be 'lstm' or 'rnn', but is {cell!r}")
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, padding_idx=PADDING)
        self.recurrent = CELLS[cell](int(embedding_size), int(hidden_size), int(num_layers), batch_first=True)
        self.output = nn.Linear(hidden_size, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """Logits (n, num_classes) of words (n, length), int64, with 0 after the end of each text.

        Raises:
            MisconfigurationException: if a word has a number that the embedding does not have.
        """
        _check_words(words, self.embedding.num_embeddings)
        lengths = words.ne(PADDING).sum(dim=1).cpu()
        texts = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(texts)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.output(hidden[-1])
