"""A pytest plugin for Lightning's own tests, which puts GrowingBatchSize into each Trainer if ``INJECT`` is set.

``OUTCOMES`` names the file to which a line for each test is appended: its outcome, and its name.
"""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector

from lightning_struct import GrowingBatchSize

SECONDS = 120  # of a test, at most: some start processes that wait for each other


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("flaky", "cloud"):
        config.addinivalue_line("markers", f"{marker}: of Lightning's tests")
    if "INJECT" in os.environ:
        configure = _CallbackConnector.on_trainer_init

        def with_growing_batches(self: Any, callbacks: Any, *arguments: Any, **options: Any) -> None:
            given = callbacks if isinstance(callbacks, list) else [] if callbacks is None else [callbacks]
            configure(self, [*given, GrowingBatchSize()], *arguments, **options)

        _CallbackConnector.on_trainer_init = with_growing_batches  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    def end(*arguments: Any) -> None:
        raise TimeoutError(f"{item.name} took {SECONDS} seconds")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["OUTCOMES"], "a") as file:
            file.write(f"{report.outcome}\t{report.nodeid}\n")
