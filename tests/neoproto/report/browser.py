"""A headless Chromium, driven through its debugging pipe: no port, no package, every wait bounded."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DEADLINE_S = 60.0


class Browser:
    """One page.

    Attributes:
        complaints: errors and warnings of the console, exceptions nobody caught, and what the policy refused.
        requests: addresses that were asked for.
    """

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        assert PROGRAM is not None
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--window-size={width},{height}", f"--user-data-dir={profile}",
        ]  # fmt: skip
        # Chromium reads commands from 3 and answers on 4.
        redirect = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", PROGRAM, *options, "about:blank"],
            pass_fds=(theirs_read, theirs_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._read, self._write = ours_read, ours_write
        self._pending, self._numbers = b"", itertools.count(1)
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path) -> None:
        """Load a file and wait until its program has run."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=page.absolute().as_uri())
        end = time.monotonic() + DEADLINE_S
        while not self._loaded:
            self._note(self._next(end, "loading the page"))
        self.wait_for("document.documentElement.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + DEADLINE_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"not true within {DEADLINE_S:g} s: {expression}"
            time.sleep(0.05)

    def size(self, width: int, height: int) -> None:
        """Of the window's content, in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, theme: str) -> None:
        """As a reader has set it: light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def picture(self, path: Path) -> None:
        """A screenshot of the window's content."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are noted."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(end, method)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer {what} within {DEADLINE_S:g} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"Chromium ended during {what}, with code {self._process.poll()}"
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]))
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # it ends when its pipe does
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
        os.close(self._read)


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Browser]:
    """A browser that shows a page."""
    with Browser(profile) as browser:
        browser.open(page)
        yield browser
