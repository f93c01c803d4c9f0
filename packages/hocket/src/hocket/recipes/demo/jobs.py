"""Training jobs that the demo starts, watches and kills; each is a real `hocket-launch`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from hocket.dist.launch.warm.rank_server import LAUNCHER, PRELOADED
from hocket.dist.launch.warm.starter import ColdStartError, RankServer, WarmProcess

IMPORTED = ("hocket.dist.launch.command", "hocket.recipes.gpt", "hocket.stream", "hocket.trainer.loggers")
"""The modules that the launcher and `hocket.recipes.train` import on top of those of any training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The settings of a job.

    Attributes:
        name: Name of the job in the demo's output. Its folder is named after it.
        ranks: Number of processes.
        steps: Batches to train in all, counted from the run's beginning.
        save_every: Batches between checkpoints.
        data: Folder or URI of the shards.
        save_folder: Folder or URI of its checkpoints.
        folder: Its local folder: journal, cache and log.
        load_path: A checkpoint to start from; None leaves it to `autoresume`.
    """

    name: str
    ranks: int
    steps: int
    save_every: int
    data: str
    save_folder: str
    folder: Path
    load_path: str | None = None

    @property
    def journal(self) -> Path:
        """Folder of the job's losses and sample lists."""
        return self.folder / "journal"

    @property
    def log(self) -> Path:
        """The path of the file that the job printed to."""
        return self.folder / "log.txt"

    def arguments(self) -> list[str]:
        """Return the arguments of `hocket-launch`."""
        settings = {
            "--data": self.data,
            "--cache": str(self.folder / "cache"),
            "--journal": str(self.journal),
            "--save-folder": self.save_folder,
            "--save-interval": f"{self.save_every}ba",
            "--steps": str(self.steps),
            "--load-path": self.load_path,
        }
        arguments = ["-n", str(self.ranks), "-m", "hocket.recipes.train"]
        for name, value in settings.items():
            arguments += [] if value is None else [name, value]
        return arguments


class JobFailedError(RuntimeError):
    """A job ended by itself with an error."""


class Launchers:
    """Starts launchers, each as a fork of one process that has imported torch, or else as a new interpreter.

    The process imports in the background while the demo goes on.
    """

    def __init__(self) -> None:
        self._env = {**os.environ}
        self._env.setdefault("OMP_NUM_THREADS", "1")  # as the launcher sets it for its ranks
        self._server = RankServer.spawn(self._env) if sys.platform == "linux" else None
        if self._server is not None:
            self._server.prepare([*PRELOADED, *IMPORTED])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()

    def start(self, arguments: Sequence[str], log: IO[bytes]) -> WarmProcess | subprocess.Popen[bytes]:
        """Start `hocket-launch ARGUMENTS` in a session of its own, with its output in a file."""
        program = [*LAUNCHER, *arguments]
        if self._server is not None:
            with open(os.devnull, "rb") as stdin, contextlib.suppress(ColdStartError):
                return self._server.start(
                    program, env=self._env, stdin=stdin.fileno(), stdout=log.fileno(), stderr=log.fileno()
                )
        return subprocess.Popen(
            [sys.executable, *program],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Job:
    """A running job.

    Args:
        spec: The settings of the job.
        launchers: The start of its launcher.
    """

    def __init__(self, spec: JobSpec, launchers: Launchers) -> None:
        self.spec = spec
        spec.folder.mkdir(parents=True, exist_ok=True)
        with spec.log.open("wb") as log:
            self._process = launchers.start(spec.arguments(), log)
        self._deadline = time.monotonic() + 60 + 20 * spec.steps

    def is_running(self) -> bool:
        """Return whether the job still runs.

        Raises:
            JobFailedError: The job ended with an error, or is past its deadline.
        """
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._deadline:
                self.kill()
                raise JobFailedError(f"the job `{self.spec.name}` did not end in time; {self._tail()}")
            return True
        if code != 0:
            raise JobFailedError(f"the job `{self.spec.name}` ended with exit code {code}; {self._tail()}")
        return False

    def steps_done(self) -> int:
        """Return the last step that rank 0 has finished, 0 before the first."""
        return last_step(self.spec.journal / "samples-rank0.jsonl")

    def kill(self) -> None:
        """Send SIGKILL to the launcher and all of its descendants, and wait until they are gone."""
        try:
            launcher = psutil.Process(self._process.pid)
            family = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(timeout=30)
        psutil.wait_procs(family, timeout=30)

    def _tail(self) -> str:
        lines = self.spec.log.read_text(errors="replace").splitlines()
        return f"the end of `{self.spec.log}`:\n" + "\n".join(lines[-25:])


def last_step(journal: Path) -> int:
    """Return the step in the last whole line of a journal, 0 if there is none."""
    try:
        with journal.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0
