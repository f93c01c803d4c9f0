"""Restarts, counted from the last progress on: a checkpoint that is later than all before it."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from hocket.dist.launch.verdicts.findings import find_end
from hocket.dist.launch.verdicts.job_findings import JobFindings
from hocket.dist.launch.verdicts.verdict import judge


class Progress:
    """The checkpoints of a job, as the first rank of this machine records them in the status file.

    Args:
        path: The status file, a JSON object with `checkpoint`, and with `folder` and `batch` where known.

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
