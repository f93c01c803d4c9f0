"""Debian's Chromium without a window, driven over its debugging pipe by the standard library alone."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a browser.

    Args:
        profile: A folder for the browser's own files.
        size: Width and height of the page in pixels.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1300, 900)) -> None:
        assert CHROMIUM is not None
        told, self._out = os.pipe()
        self._in, said = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; the shell puts them there.
        script = f'exec "$@" 3<&{told} 4>&{said}'
        width, height = size
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"],
            pass_fds=(told, said),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(told)
        os.close(said)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer, rest, after = self._buffer.partition(b"\0")
            if not rest:
                ready, _, _ = select.select([self._in], [], [], deadline - time.monotonic())
                assert ready, f"the browser did not answer `{method}` within 60 s"
                got = os.read(self._in, 1 << 16)
                assert got, "the browser has ended"
                self._buffer += got
                continue
            self._buffer = after
            found = json.loads(answer)
            if found.get("id") == number:
                assert "error" not in found, found
                return dict(found["result"])

    def open(self, url: str) -> None:
        """Load a page."""
        assert not self._ask("Page.navigate", url=url).get("errorText"), url
        self.wait_for("document.readyState == 'complete'")

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, code: str, timeout_s: float = 30) -> Any:
        """Return the value of an expression as soon as it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.evaluate(code)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {code}"
            time.sleep(0.1)
        return found

    def screenshot(self, path: Path) -> bytes:
        """Write a picture of the page, and return its bytes."""
        picture = base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(picture)
        return picture

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self._ask("Browser.close")
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._out)
            os.close(self._in)
