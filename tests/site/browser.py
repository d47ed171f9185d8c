"""A headless Chromium, driven over a pipe by the DevTools protocol: the standard library is enough for it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from itertools import count
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
# Chromium reads commands from descriptor 3 and writes answers to 4.
ON_DESCRIPTORS_3_AND_4 = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); \
os.execv(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a Chromium.

    Args:
        path: of the program.
    """

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        shift = [os.dup(end) for end in (commands, answers) for _ in range(2)][1::2]  # above 4
        start = [sys.executable, "-c", ON_DESCRIPTORS_3_AND_4, *map(str, shift), path]
        self._process = subprocess.Popen(
            [*start, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=shift,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *shift):
            os.close(end)
        self._numbers, self._received, self._events = count(1), b"", deque[str](maxlen=1000)
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self._call("Page.enable")

    def open(self, url: str) -> None:
        """Open an address, and wait until it has loaded."""
        self._events.clear()
        self._call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._receive().get("method", ""))

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the window in pixels; narrow windows are those of phones."""
        is_phone = width < 500
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def close(self) -> None:
        """End the program, and delete its profile."""
        self._process.terminate()
        self._process.wait(20)
        self._profile.cleanup()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._events.append(answer.get("method", ""))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise EOFError("Chromium has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)
