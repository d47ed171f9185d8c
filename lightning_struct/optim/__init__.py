"""Optimizers on torch alone: they work in a plain training loop."""

import logging

from lightning_struct.optim.messages import show_messages
from lightning_struct.optim.rls import RLS
from lightning_struct.optim.shf import SHF, StepReport

__all__ = ["RLS", "SHF", "StepReport"]

show_messages(logging.getLogger(__name__))
