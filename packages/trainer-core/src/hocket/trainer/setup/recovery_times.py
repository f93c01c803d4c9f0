"""The phases of a restart after a failure, from the launcher's finding it to the first step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.log.notices import print_notices

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

FAILURE = "HOCKET_FAILURE"
"""The launcher's times, a JSON object `{"found": …, "ended": …, "started": …}` in seconds since 1970."""


class RecoveryTimes(Callback):
    """A callback that prints the phases once, after the first step of a restarted rank 0.

    Args:
        launcher_times: Seconds since 1970 by phase; "found" is the first.
    """

    def __init__(self, launcher_times: Mapping[str, float]) -> None:
        self._times = dict(launcher_times)
        self._is_printed = False

    def init(self, state: State, logger: Logger) -> None:
        """Record that all ranks have joined."""
        self._times["joined"] = time.time()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record that the checkpoint is loaded."""
        self._times.setdefault("loaded", time.time())

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print the phases after the first step."""
        if self._is_printed:
            return
        self._is_printed = True
        found_at = self._times.pop("found")
        phases = {**self._times, "first step": time.time()}
        text = ", ".join(f"{name} {at - found_at:.1f}" for name, at in phases.items())
        print_notices(state, [f"seconds since the launcher found a failed rank: {text}"])


def recovery_times() -> RecoveryTimes | None:
    """Return the callback if the launcher has started this rank after a failure."""
    text = os.environ.pop(FAILURE, None)
    return None if text is None else RecoveryTimes(json.loads(text))
