"""Signals to the launcher: the first is passed on to the ranks, which save; its copies are not repeated."""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException, api

SAVE_SIGNALS = "HOCKET_SAVE_SIGNALS"
"""The variable with the names of the signals on which the trainer saves and stops."""
GRACE = "HOCKET_GRACE_S"
"""The variable with the seconds that ranks have to save before they are killed."""

_COPY_S = 1.0
"""Seconds in which a second SIGINT is a copy: `srun` and a terminal may both send it."""


def set_variables(options: argparse.Namespace) -> None:
    """Tell the ranks what `--save-signals` and `--grace` say."""
    if options.save_signals is not None:
        os.environ[SAVE_SIGNALS] = options.save_signals
    if options.grace is not None:
        os.environ[GRACE] = f"{options.grace:g}"
    elif options.shutdown_timeout is not None:
        os.environ.setdefault(GRACE, str(options.shutdown_timeout))


class Notices:
    """The signals that this launcher has received.

    torch's agent ends all ranks when its handler raises. A scheduler, a terminal and `srun` may send the same
    signal several times, and an exception per copy would end the ranks while they save.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._interrupted_at: float | None = None
        self._ranks: Any = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Replace the handler that torch's agent installs, within the block."""
        own: Any = api
        previous, own._terminate_process_handler = own._terminate_process_handler, self._handle
        try:
            yield
        finally:
            own._terminate_process_handler = previous

    def grace_s(self, ranks: Any, otherwise: int | None) -> float:
        """Return the seconds that ranks which are being ended have, and kill them on a signal from here on.

        Args:
            ranks: The `PContext` that is being closed.
            otherwise: The seconds after the failure of a rank; None for torch's 30.
        """
        shutdown_s = 30.0 if otherwise is None else float(otherwise)
        if not isinstance(sys.exception(), SignalException):
            return shutdown_s
        self._ranks = ranks
        seconds = float(os.environ.get(GRACE) or shutdown_s)
        # A notice ahead of Slurm's time limit is followed by SIGTERM at the limit, and then by SIGKILL.
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return max(seconds, float(end) - time.time() + seconds) if end.isdecimal() else seconds

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = self._first is None
        if number == signal.SIGINT and self._interrupted_at is None:
            self._interrupted_at = now
        if is_first:
            self._first = number
            raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.Signals(number))
        is_second_interrupt = number == signal.SIGINT and now - (self._interrupted_at or now) >= _COPY_S
        if number == signal.SIGQUIT or is_second_interrupt:
            self._kill_ranks()

    def _kill_ranks(self) -> None:
        if self._ranks is None:
            return
        for pid in self._ranks.pids().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill = os.killpg if os.getpgid(pid) == pid else os.kill
                kill(pid, signal.SIGKILL)
