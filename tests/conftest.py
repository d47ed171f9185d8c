"""Settings of all tests."""

from itertools import combinations
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
    parser.addoption("--all-cases", action="store_true", help="run all cases of tests marked as covering(n)")
    parser.addoption("--one-in", type=int, default=1, help="of each test's cases run the first, and every so many")


def covering(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Few cases of a test, chosen greedily, so that any ``number`` values of different parameters meet in one."""
    values = {item: [(name, id(value)) for name, value in item.callspec.params.items()] for item in items}
    met = {item: set(combinations(values[item], number)) for item in items}
    missing, chosen = set().union(*met.values()), []
    while missing:
        chosen.append(max(items, key=lambda item: len(met[item] & missing)))
        missing -= met[chosen[-1]]
    return chosen or items


@pytest.hookimpl(trylast=True)  # of those that -k and -m select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases as the marker ``covering`` and ``--one-in`` say; each test keeps one at least."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("covering")
        chosen = covering(cases, *mark.args) if mark and not config.getoption("--all-cases") else cases
        kept.update(chosen[:: config.getoption("--one-in")])
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]
