"""Training of modules that should go the same way, and what is compared."""

from functools import partial

import torch

from lightning_struct.optim import RLS

ADAM = partial(torch.optim.Adam, lr=1e-2)


def weights(module):
    """All parameters in one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def matrix(optimizer, name):
    """P of a weight, of its first group."""
    return optimizer.state["rls"][name]["P"][0]


def descend(module, optimizer, loss_of, steps, change=lambda: None):
    """Steps, each by the gradient of ``loss_of(step)`` and what ``change`` makes of it; the losses before them."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        change()
        optimizer.step()
        losses.append(loss.item())
    return losses


def first_step(module, loss_of, **options):
    """What the first step of RLS adds to each parameter, by name; the module is changed."""
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    descend(module, RLS(module, **options), lambda _: loss_of(module), range(1))
    return {name: parameter.detach() - before[name] for name, parameter in module.named_parameters()}


def assert_equal(module, other, tolerance=0.0):
    """All weights are the same, within the tolerance."""
    torch.testing.assert_close(weights(module), weights(other), rtol=0, atol=tolerance)
