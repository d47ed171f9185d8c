"""river: the regressor of the guide to streams passes the checks that river's own models do."""

import re
from pathlib import Path

import pytest
import torch  # noqa: F401, the code of the guide takes it

from lightning_struct import RecursiveLinear  # noqa: F401

base, checks = pytest.importorskip("river.base"), pytest.importorskip("river.checks")
guide = (Path(__file__).parents[2] / "docs" / "guides" / "streaming.md").read_text()
(source,) = re.findall(r"^class DictRegressor:\n(?:(?: .*)?\n)+", guide, re.MULTILINE)
exec(source.replace("DictRegressor:", "DictRegressor(base.Regressor):"))  # noqa: S102
regressor = globals()["DictRegressor"]


@pytest.mark.parametrize("check", list(checks.yield_checks(regressor())), ids=lambda check: check.__name__)
def test_the_regressor_of_the_guide_passes(check):
    check(regressor())
