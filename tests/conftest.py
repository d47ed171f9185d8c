"""Settings of all tests."""

from collections import Counter

import pytest
from hypothesis import settings

# Examples are the same in every run, and none fails for taking its time on a busy machine.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


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
