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
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hocket.dist.launch.report import describe_end, read_record
from hocket.dist.ranks.failures import is_trace_of_consequence


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
def restarts_without_progress(options: argparse.Namespace, status_file: Path) -> Iterator[None]:
    """Have torch's agents, within the block, count the restarts since the last progress and announce each.

    Args:
        options: The options of `hocket-launch`.
        status_file: The file in which the first rank of this machine records checkpoints.
    """
    if not options.max_restarts:
        yield
        return
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
            _announce(result.failures, options.max_restarts, self._remaining_restarts, progress.checkpoint)
        return result

    agent._monitor_workers = monitor_and_count
    try:
        yield
    finally:
        agent._monitor_workers = monitor


def _announce(failures: dict[int, ProcessFailure], most: int, remaining: int, checkpoint: str | None) -> None:
    """Print the failure that led to a restart: the report at the end has those of the last attempt alone."""
    # Of ranks that failed within one second, the agent has noted first the one that it found first.
    rank = min(failures, key=lambda rank: (_is_consequence(failures[rank]), failures[rank].timestamp))
    since = "" if checkpoint is None else f" since the checkpoint {checkpoint}"
    if remaining:
        follows = f"all ranks start again, restart {most - remaining + 1} of {most}{since}"
    else:
        follows = f"no restart is left of {most}{since}"
    text = f"rank {rank} failed, {describe_end(failures[rank])}; {follows}"
    print(f"hocket-launch: {text}", file=sys.stderr, flush=True)


def _is_consequence(failure: ProcessFailure) -> bool:
    record = read_record(Path(failure.error_file))
    return record is not None and is_trace_of_consequence(record[0])
