"""Settings of all tests."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# Examples are the same in every run, and none fails for taking its time on a busy machine.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


NAMED_ONLY = [Path(__file__).with_name(name) for name in ("ecosystem", "site")]  # they need more than the rest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a folder of ``NAMED_ONLY`` out, unless the command names it."""
    asked_for = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    is_left_out = collection_path in NAMED_ONLY and not any(path.is_relative_to(collection_path) for path in asked_for)
    return True if is_left_out else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="of each test's cases run the first, and every so many")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of parametrised tests as ``--one-in`` says; each test keeps one at least."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % config.getoption("--one-in"):
            left_out.append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
