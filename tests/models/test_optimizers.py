"""The optimizer of a model, from what makes it of parameters."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.models.training import optimizer_and_scheduler
from lightning_struct.optim import RLS
from lightning_struct.utilities.namespaces import MisconfigurationException


def test_what_takes_the_module_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="there are models of their names, as RLSClassifier"):
        optimizer_and_scheduler(nn.Linear(2, 2).parameters(), RLS, None)  # type: ignore[arg-type]


def test_other_errors_of_an_optimizer_are_its_own() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        optimizer_and_scheduler(nn.Linear(2, 2).parameters(), partial(torch.optim.Adam, rate=1.0), None)
