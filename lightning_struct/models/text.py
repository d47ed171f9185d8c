"""A recurrent network that reads numbered words."""

from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_struct.data.imdb import PADDING
from lightning_struct.utilities.checks import check_positive
from lightning_struct.utilities.namespaces import MisconfigurationException

CELLS = {"lstm": nn.LSTM, "rnn": nn.RNN}


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
        check_positive(
            vocabulary_size=vocabulary_size,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_classes=num_classes,
        )
        if cell not in CELLS:
            raise MisconfigurationException(f"cell must be 'lstm' or 'rnn', but is {cell!r}")
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, padding_idx=PADDING)
        self.recurrent = CELLS[cell](embedding_size, hidden_size, num_layers, batch_first=True)
        self.output = nn.Linear(hidden_size, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """Logits (n, num_classes) of words (n, length), int64, with 0 after the end of each text.

        Raises:
            MisconfigurationException: if a word has a number that the embedding does not have.
        """
        largest = int(words.max())
        if largest >= self.embedding.num_embeddings:
            raise MisconfigurationException(
                f"Word {largest} is not among the vocabulary_size={self.embedding.num_embeddings} of the network: give "
                "network and data the same vocabulary_size"
            )
        lengths = words.ne(PADDING).sum(dim=1).cpu()
        texts = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(texts)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.output(hidden[-1])
