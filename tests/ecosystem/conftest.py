"""Settings of the tests with other packages, which run where they are asked for: one thread, and a table at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.ecosystem.harness")


@pytest.fixture(autouse=True)
def _quiet_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)  # loggers and checkpoints write into the working directory


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from tests.ecosystem import harness

    if harness.TABLE:
        terminalreporter.section("GrowingBatchSize in other packages")
        terminalreporter.write_line(harness.HEAD)
        for row in harness.TABLE:
            terminalreporter.write_line(str(row))
