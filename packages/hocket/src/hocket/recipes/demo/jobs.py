"""Training jobs that the demo starts, watches and kills; each is a real `hocket-launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


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


class JobFailedError(RuntimeError):
    """A job ended by itself with an error."""


class Job:
    """A running job.

    Args:
        spec: The settings of the job.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        spec.folder.mkdir(parents=True, exist_ok=True)
        launcher = Path(sys.executable).with_name("hocket-launch")
        command = [str(launcher), "-n", str(spec.ranks), "-m", "hocket.recipes.train"]
        command += [
            "--data",
            spec.data,
            "--cache",
            str(spec.folder / "cache"),
            "--journal",
            str(spec.journal),
        ]
        command += ["--save-folder", spec.save_folder, "--save-interval", f"{spec.save_every}ba"]
        command += ["--steps", str(spec.steps)]
        if spec.load_path is not None:
            command += ["--load-path", spec.load_path]
        with spec.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
