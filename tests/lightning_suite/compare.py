"""Lightning's own tests with GrowingBatchSize in each Trainer, compared with a plain run.

    python -m tests.lightning_suite.compare DIRECTORY [tests_pytorch/loops ...]

``DIRECTORY`` is a checkout of Lightning's repository at the installed version. A test that passes in the plain run and
fails in the other is an error, unless ``explained.txt`` has it, with the reason.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("loops", "trainer", "callbacks", "checkpointing", "core", "loggers", "models", "tuner", "utilities")


def outcomes(directory: Path, parts: list[str], injects: bool) -> dict[str, str]:
    """The outcome of each test: passed, skipped or failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        variables = {"OUTCOMES": str(file), "PYTHONPATH": str(HERE.parents[1])} | ({"INJECT": "1"} if injects else {})
        plugin = ["-p", "no:cacheprovider", "-p", "tests.lightning_suite.inject", "-o", "addopts="]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *parts]
        subprocess.run(command, cwd=directory / "tests", env=os.environ | variables, check=False)
        lines = [line.split("\t") for line in file.read_text().splitlines()]
    worst: dict[str, str] = {}
    for outcome, name in lines:
        worst[name] = "failed" if "failed" in (outcome, worst.get(name)) else outcome
    return worst


def explained() -> dict[str, str]:
    """The reasons for which tests fail with one callback more."""
    lines = (HERE / "explained.txt").read_text().splitlines()
    return dict(line.split("\t") for line in lines if line and not line.startswith("#"))


def main() -> None:
    directory, *parts = sys.argv[1:]
    parts = parts or [f"tests_pytorch/{part}" for part in PARTS]
    plain, injected = (outcomes(Path(directory).resolve(), parts, injects) for injects in (False, True))
    passing, reasons = [name for name, outcome in plain.items() if outcome == "passed"], explained()
    failing = [name for name in passing if injected.get(name) != "passed"]
    new = [name for name in failing if name.partition("[")[0] not in reasons]
    print(f"\n{len(passing)} tests pass plain; of them {len(failing)} do not with the callback, {len(new)} unexplained")
    print(*(f"unexplained: {name}" for name in new), sep="\n")
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
