from pathlib import Path

import pytest
import torch

from lightning_struct.optim import memory

CPU = torch.device("cpu")


def control_group(directory: Path, **files: str) -> Path:
    """A folder as the kernel has it for the memory of a container."""
    for name, text in files.items():
        (directory / f"memory.{name}").write_text(text)
    return directory


def test_free_memory_of_this_machine_is_known() -> None:
    free = memory.available_memory(CPU)
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux tells it")
    assert free is not None and 2**20 < free < 2**50


def test_the_limit_of_a_container_bounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONTROL_GROUP", control_group(tmp_path, max="10000\n", current="6000\n", stat=""))
    assert memory.available_memory(CPU) == 4000


def test_files_that_lie_unused_in_memory_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 1000\nfile 5000\nactive_file 500\ninactive_file 4500\n"
    monkeypatch.setattr(memory, "CONTROL_GROUP", control_group(tmp_path, max="10000\n", current="6000\n", stat=stat))
    assert memory.available_memory(CPU) == 8500


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONTROL_GROUP", control_group(tmp_path, max="max\n", current="6000\n", stat=""))
    assert memory.available_memory(CPU) != 4000


def test_memory_of_another_device_is_not_asked() -> None:
    assert memory.available_memory(torch.device("meta")) is None


def test_more_than_half_of_the_free_memory_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 5000)
    memory.check_memory("The factors", {"a": (2400, "")}, CPU, "")
    assert not caplog.messages
    memory.check_memory("The factors", {"a": (2400, ""), "b": (200, "")}, CPU, "")
    assert caplog.messages == ["The factors take 2.5 KiB of 4.9 KiB that are free on cpu"]
