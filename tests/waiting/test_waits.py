"""How often the host waits for the device in a step, and how many operations it starts.

Both are counted on a device that is none (see :mod:`.standin`).
"""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from tests.processes import in_own_process

# The first steps choose λ₁, look whether the module keeps to the rules, and warn.
_ALLOWED = {
    "SHF exact residuals": lambda step: 10,  # four, and one or two for each damping that is tried
    "SHF residuals by lsmr": lambda step: step["iterations"] + 10,
    "SHF": lambda step: step["iterations"] + 4,
    "RLS": lambda step: 1,
    "Adam": lambda step: 0,
    "RecursiveLinear": lambda step: 4,
    "layer LDRSubdiagonal": lambda step: 1,  # looks whether an entry below the diagonal is zero
    "layer": lambda step: 0,
    "norms": lambda step: 0,
    "GrowingBatchSize": lambda step: 4,  # if the step is measured
}


# The last column of the table: the most operations of a step.
_PAGE = Path(__file__).resolve().parents[2] / "docs/results/gpu.md"
_ROWS = re.findall(r"(?m)^\| (\w[^|]*?) \| \d+ \| (\d+) \|$", _PAGE.read_text())
_LAYERS = re.search(r"(?s)Layers, forwards and backwards: (.*?)\.\n", _PAGE.read_text())
_OPERATIONS = {name: int(most) for name, most in _ROWS}
_OPERATIONS |= {f"layer {name}": int(most) for name, most in re.findall(r"(\w+) (\d+)", _LAYERS[1] if _LAYERS else "")}


def steps_of_all_cases() -> dict[str, list[dict[str, Any]]]:
    from tests.waiting.cases import steps  # which makes the stand-in the accelerator of this process

    return steps()


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch has no such backends"
)
def test_the_host_waits_as_seldom_and_starts_as_few_operations_as_is_documented_and_none_mixes_devices() -> None:
    found = in_own_process(steps_of_all_cases)
    assert len(found) > 20
    too_often = {}
    for name, steps in found.items():
        allowed = next(allowed for begin, allowed in _ALLOWED.items() if name.startswith(begin))
        too_often |= {f"{name}, step {i}": step for i, step in enumerate(steps[1:], 1) if step["waits"] > allowed(step)}
    assert not too_often
    for kind in ("layers", "parts"):
        waits = [step["waits"] for step in found[f"GrowingBatchSize by {kind}"]]
        assert 0 < len(waits) - waits.count(0) <= len(waits) / 4
    operations = {name: steps[1]["operations"] for name, steps in found.items()}
    growing = [step["operations"] for step in found["GrowingBatchSize by layers"][1:]]
    operations |= {"GrowingBatchSize, measured": max(growing), "GrowingBatchSize, unmeasured": min(growing)}
    assert len(_OPERATIONS) > 20
    assert not {name: operations[name] for name, most in _OPERATIONS.items() if operations[name] > most}
