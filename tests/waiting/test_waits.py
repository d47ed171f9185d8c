"""How often the host waits for the device in a step, counted on a device that is none (see :mod:`.standin`)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from torch.utils import backend_registration

# The first steps choose λ₁, look whether the module keeps to the rules, and warn.
_ALLOWED = {
    "SHF exact residuals": lambda step: 10,  # four, and one or two for each damping that is tried
    "SHF residuals by lsmr": lambda step: step["iterations"] + 10,
    "SHF": lambda step: step["iterations"] + 4,
    "RLS.exact": lambda step: 3,  # whether the gradient is that of the squared error, and whether R is singular
    "RLS": lambda step: 1,
    "layer": lambda step: 0,
    "norms": lambda step: 0,
    "GrowingBatchSize": lambda step: 4,  # if the step is measured
}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch has no such backends"
)
def test_the_host_waits_as_seldom_as_is_documented_and_no_operation_mixes_devices() -> None:
    run = subprocess.run([sys.executable, "-m", "tests.waiting.cases"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(run.stdout)
    assert len(found) > 20
    too_often = {}
    for name, steps in found.items():
        allowed = next(allowed for begin, allowed in _ALLOWED.items() if name.startswith(begin))
        too_often |= {f"{name}, step {i}": step for i, step in enumerate(steps[1:], 1) if step["waits"] > allowed(step)}
    assert not too_often
    for kind in ("layers", "parts"):
        waits = [step["waits"] for step in found[f"GrowingBatchSize by {kind}"]]
        assert 0 < len(waits) - waits.count(0) <= len(waits) / 4
