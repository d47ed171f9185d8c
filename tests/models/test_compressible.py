import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import CharacterTransformer


def test_texts_longer_than_the_network_looks_back_are_refused():
    network = CharacterTransformer(characters=5, steps=3, width=8, heads=2, blocks=1)
    with pytest.raises(MisconfigurationException, match="The texts have 4 characters, but .* steps=3"):
        network(torch.zeros(2, 4, dtype=torch.int64))
