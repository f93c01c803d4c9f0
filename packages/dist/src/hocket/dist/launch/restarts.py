"""Restarts, counted from the last progress on, and folders in which copies of the state outlive attempts.

Progress is a checkpoint, or a copy in memory, that is later than all before it.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from hocket.dist.launch.verdicts.findings import find_end
from hocket.dist.launch.verdicts.job_findings import JobFindings
from hocket.dist.launch.verdicts.verdict import judge

MEMORY_FOLDERS = "HOCKET_MEMORY_FOLDERS"
"""The variable that names the folders for copies of the state, divided by `os.pathsep`, the fastest first."""

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "hocket-memory-"
_LOCK = "lock"
_TRIALS = 5


class Progress:
    """The checkpoints of a job, as the first rank of this machine records them in the status file.

    Args:
        path: The status file, a JSON object with `checkpoint`, and with `folder` and `batch` where known.
            After a copy in memory, `batch` is that of the copy.

    Attributes:
        checkpoint: The name of the last checkpoint, None without one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._latest: dict[str, int] = {}
        self.checkpoint: str | None = None
        self.has_advanced()  # not by what another launcher has left there

    def has_advanced(self) -> bool:
        """Return whether a checkpoint was committed since the last call at a batch never reached before."""
        try:
            status = json.loads(self._path.read_text())
            if "checkpoint" in status:
                self.checkpoint = str(status["checkpoint"])
            folder, batch = str(status.get("folder", "")), int(status["batch"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        has_advanced = batch > self._latest.get(folder, -1)
        self._latest[folder] = max(batch, self._latest.get(folder, -1))
        return has_advanced


@contextlib.contextmanager
def restarts_without_progress(
    options: argparse.Namespace, status_file: Path, findings: JobFindings
) -> Iterator[None]:
    """Have torch's agents, within the block, count the restarts since the last progress and announce each.

    Args:
        options: The options of `hocket-launch`.
        status_file: The file in which the first rank of this machine records checkpoints.
        findings: The states of the ranks, from which the verdict is made.
    """
    agent: Any = LocalElasticAgent
    monitor, progress = agent._monitor_workers, Progress(status_file)

    def monitor_and_count(self: Any, group: Any) -> RunResult:
        findings.notice_deadline()
        result: RunResult = monitor(self, group)
        # The agent itself gives restarts up by another state, `UNHEALTHY`.
        if result.state == WorkerState.FAILED:
            if progress.has_advanced():
                # Both numbers grow: their difference counts the attempts, and names their log folders.
                group.spec.max_restarts += options.max_restarts - self._remaining_restarts
                self._remaining_restarts = options.max_restarts
            follows = _describe_restart(options.max_restarts, self._remaining_restarts, progress.checkpoint)
            if self._remaining_restarts:
                verdict = findings.conclude() or judge([find_end(*min(result.failures.items()))], {})
                print(f"hocket-launch: {verdict.text}; {follows}", file=sys.stderr, flush=True)
            else:
                findings.end_job(follows)
        return result

    agent._monitor_workers = monitor_and_count
    try:
        yield
    finally:
        agent._monitor_workers = monitor


def _describe_restart(most: int, remaining: int, checkpoint: str | None) -> str:
    """Return what follows a failure, as the end of a sentence; empty in a job without restarts."""
    since = "" if checkpoint is None else f" since the checkpoint {checkpoint}"
    if not most:
        return ""
    if remaining:
        return f"all ranks start again, restart {most - remaining + 1} of {most}{since}"
    return f"no restart is left of {most}{since}"


@contextlib.contextmanager
def memory_folders(options: argparse.Namespace) -> Iterator[None]:
    """Make folders, within the block, for copies of the state that outlive the ranks of this machine.

    One is in shared memory, and one in the temporary folder for machines with little of it. They are made
    where ranks are started again. Folders that a killed launcher has left are removed.

    Args:
        options: The options of `hocket-launch`.
    """
    # A launcher may run in a rank of another one, whose folders are not for this job.
    before = os.environ.pop(MEMORY_FOLDERS, None)
    with contextlib.ExitStack() as made:
        folders: list[Path] = []
        parents = (_SHARED_MEMORY, tempfile.gettempdir()) if options.max_restarts else ()
        # Each parent once: a process may take its own lock again, so this one would remove its own folder.
        for parent in dict.fromkeys(Path(one).resolve() for one in parents):
            if os.access(parent, os.W_OK | os.X_OK):
                _remove_left(parent)
                folders += _make_locked(parent, made)
        if folders:
            os.environ[MEMORY_FOLDERS] = os.pathsep.join(map(str, folders))
        try:
            yield
        finally:
            os.environ.pop(MEMORY_FOLDERS, None)
            if before is not None:
                os.environ[MEMORY_FOLDERS] = before


def _make_locked(parent: Path, made: contextlib.ExitStack) -> list[Path]:
    """Return a new folder with a file that this process locks, or an empty list where that fails.

    `made` removes the folder.

    A lock of `fcntl` ends with the process, and forks do not inherit it.
    """
    with contextlib.suppress(OSError):
        for _ in range(_TRIALS):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            made.callback(shutil.rmtree, folder, ignore_errors=True)
            file = made.enter_context((folder / _LOCK).open("w"))
            with contextlib.suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (folder / _LOCK).exists():  # another launcher may have taken it for one that was left
                    return [folder]
    return []


def _remove_left(parent: Path) -> None:
    """Remove the folders of this user whose launcher has ended without removing them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Links are left alone: in a shared folder, one of another user may lead to files of this user.
            status = folder.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            with (folder / _LOCK).open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for child in folder.iterdir():
                    if child.name != _LOCK:  # the last, so that what cannot be removed now is found again
                        shutil.rmtree(child)
                shutil.rmtree(folder)
