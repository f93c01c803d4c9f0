"""A local S3 server for tests, benchmarks and demos: `tools/s3d`, which cargo builds at the first use."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 1200
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 10
IDLE_S = 0.05


class ServerError(RuntimeError):
    """The server could not be built or started; the message says why."""


class Server:
    """One running server over one folder, as a context manager.

    Faults are lines as on the server's command line: `"kind=slowdown,rate=0.05,op=GetObject,key=*/data/*"`.

    Args:
        *faults: Rules that hold from the start; `set_faults` changes them.
        root: The folder to serve; by default a temporary one that is removed with the server.
        seed: Seed that determines which of the matching requests a rule hits.
        latency_ms: Latency added to every request.
        bandwidth: Bandwidth of every connection in each direction, in bytes per second; 0 is unlimited.
        mode: `keys-expire` accepts access keys `hocket-{ms}` that expire that many milliseconds after 1970;
            `anonymous` refuses signatures; `gcs` implements Google's XML API.
        profile: Profile of cargo; measurements against the server need `release`.
    """

    def __init__(
        self,
        *faults: str,
        root: Path | None = None,
        seed: int = 0,
        latency_ms: int = 0,
        bandwidth: int = 0,
        mode: str = "",
        profile: str = "dev",
    ):
        self.endpoint = ""
        self.bucket = ""
        self.env: dict[str, str] = {}
        self._faults = faults
        self._numbers = {"seed": seed, "latency-ms": latency_ms, "bandwidth": bandwidth}
        self._mode = mode
        self._profile = profile
        self._root = root
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._stack as stack:
            root = self._root or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3d-")))
            self._process = self._start(root)
            stack.callback(self._stop, self._process)
            self._read_announcement(self._process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        return 0 if self._process is None else self._process.pid

    def uri(self, prefix: str = "") -> str:
        """Return the URI of `prefix` in the server's bucket."""
        scheme = "gs" if self._mode == "gcs" else "s3"
        return f"{scheme}://{self.bucket}/{prefix}"

    def set_faults(self, *faults: str, seed: int = 0, latency_ms: int = 0, bandwidth: int = 0) -> None:
        """Replace all faults; without arguments, remove them. The rules' counts restart from zero."""
        settings = {"faults": list(faults), "seed": seed, "latency_ms": latency_ms, "bandwidth": bandwidth}
        self._call("POST", "faults", settings)

    def stats(self) -> dict[str, Any]:
        """Return counts of requests by operation, responses by status, faults by kind and rule, and bytes."""
        return self._call("GET", "stats")

    def await_idle(self, timeout_s: float = 30) -> None:
        """Wait until no request is in progress, so that those of a killed client have taken effect, too.

        Raises:
            TimeoutError: A request is still in progress.
        """
        deadline = time.monotonic() + timeout_s
        idle = 0
        while idle < 2:  # the second check finds requests that arrived during the first one
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is still at work after {timeout_s:g} s: {self.stats()}")
            time.sleep(IDLE_S)
            idle = 0 if self.stats()["in_flight"] else idle + 1

    def reset(self) -> None:
        """Set all counts to zero, including those that decide which request a rule hits."""
        self._call("POST", "reset")

    def _start(self, root: Path) -> subprocess.Popen[str]:
        command = [str(build(self._profile)), "--root", str(root), "--port", "0", "--until-stdin-closes"]
        for fault in self._faults:
            command += ["--fault", fault]
        for name, number in self._numbers.items():
            command += [f"--{name}", str(number)]
        if self._mode:
            command.append(f"--{self._mode}")
        # In a process group of its own, so that Ctrl-C reaches only the tests, which then stop the server.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )

    def _read_announcement(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            status = process.poll()
            raise ServerError(
                f"s3d did not start within {START_TIMEOUT_S} s (exit status {status}); see its standard error"
            )
        announcement = json.loads(line)
        self.endpoint, self.bucket = announcement["endpoint"], announcement["bucket"]
        if self._mode == "gcs":
            self.env = {"STORAGE_EMULATOR_HOST": self.endpoint}
            return
        self.env = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": announcement["access_key"],
            "AWS_SECRET_ACCESS_KEY": announcement["secret_key"],
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @staticmethod
    def _stop(process: subprocess.Popen[str]) -> None:
        with process:  # closes the pipes; the server exits when its standard input closes
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}/_s3d/{path}", data=data, method=method)
        # Without the environment's proxies: this is loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                result: dict[str, Any] = json.load(answer)
                return result
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(error.read().decode()) from None


@functools.cache
def build(profile: str = "dev") -> Path:
    """Build the server and return its program; quick when nothing changed.

    `HOCKET_TEST_S3D` may name a program built before: cargo would wait for other builds.

    Raises:
        FileNotFoundError: There is no cargo.
        ServerError: The build failed.
    """
    if (built := os.environ.get("HOCKET_TEST_S3D")) is not None and profile == "dev":
        return Path(built)
    cargo = shutil.which("cargo")
    if cargo is None:
        raise FileNotFoundError("`cargo` was not found; install a Rust toolchain (rustup) to build tools/s3d")
    command = [
        cargo,
        "build",
        "--quiet",
        # Beside the whole workspace its dependencies have the features of `cargo test`, and compile once.
        "--workspace",
        "--features=hocket-py/as-in-tests",
        "--bin=s3d",
        "--profile",
        profile,
        "--message-format=json-render-diagnostics",
    ]
    completed = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    if completed.returncode:
        raise ServerError(f"`{' '.join(command)}` failed:\n{completed.stderr[-4000:]}")
    programs = [
        message["executable"]
        for message in map(json.loads, completed.stdout.splitlines())
        if message.get("executable") and message["target"]["name"] == "s3d"
    ]
    return Path(programs[-1])
