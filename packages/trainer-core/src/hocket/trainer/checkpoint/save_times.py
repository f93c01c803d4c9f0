"""The durations of a run's saves, and its last commit, which the launcher reads."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from hocket.trainer.process.world import global_rank
from hocket.trainer.protocols import SaveHandle
from hocket.trainer.ranks.step_sync import StepSync

STATUS_FILE = "HOCKET_STATUS_FILE"
"""The variable of the launcher with the JSON file for the last commit of the ranks of its machine."""

_ENDLESS_S = 1e9


class SaveTimes:
    """The saves of one series of checkpoints, timed from their beginning to their commit.

    Args:
        folder: The location of the checkpoints.
        is_durable: Whether the checkpoints stay, so that the launcher may name the last one.

    Attributes:
        last_name: The checkpoint of this run that was committed last; empty before the first one.
    """

    def __init__(self, folder: str, *, is_durable: bool = True) -> None:
        self.last_name = ""
        self._folder = folder
        self._is_durable = is_durable
        self._shortest_s = 0.0
        self._batch = 0
        self._begun_at = 0.0

    def begin(self, batch: int) -> None:
        """Record the beginning of a save."""
        self._batch, self._begun_at = batch, time.monotonic()

    def commit(self, handle: SaveHandle) -> None:
        """Record the commit of the save that began last, and write it to the status file of the launcher.

        The training may learn of it a batch later; the handle of a store may have the time as `ended_at`.

        The launcher names the last durable one when a signal ends the job, and counts restarts from the last
        commit on.
        """
        seconds = (getattr(handle, "ended_at", None) or time.monotonic()) - self._begun_at
        self._shortest_s = min(seconds, self._shortest_s or seconds)
        self.last_name = handle.name
        path = os.environ.get(STATUS_FILE)
        if path and os.environ.get("LOCAL_RANK", str(global_rank())) == "0":
            status: dict[str, Any] = {"folder": self._folder, "batch": self._batch}
            with contextlib.suppress(OSError, ValueError):  # the status file is optional
                if self._is_durable:
                    status["checkpoint"] = handle.name
                elif Path(path).exists():
                    status = json.loads(Path(path).read_text()) | status
                new = Path(f"{path}.{os.getpid()}")
                new.write_text(json.dumps(status))
                new.replace(path)

    def too_late_for_save(self, sync: StepSync, deadline: float) -> str | None:
        """Return why a save cannot end in time, the same on all ranks; None if it may. Collective.

        Without an earlier save of this run nothing is known, and nothing would be lost by trying.

        Args:
            sync: The exchange between the ranks.
            deadline: The time by `time.monotonic` at which this process is killed.
        """
        left_s = min(sync.gather(min(deadline - time.monotonic(), _ENDLESS_S)))
        needed_s = min(sync.gather(self._shortest_s))
        if not needed_s or needed_s <= left_s:
            return None
        return f"{max(left_s, 0):.1f} s are left, and the shortest save of this run took {needed_s:.1f} s"
