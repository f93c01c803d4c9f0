"""Handling of SIGTERM during `fit`: stop at the next step boundary, save, and exit the process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.ranks.stop_signal import StopSignal


class SigtermStop:
    """A context in which SIGTERM requests a stop instead of ending the process at once.

    Cluster schedulers and the launcher send SIGTERM before they reclaim a machine. The exchange of each step
    carries the request, so all ranks end after the same batch and save. A second SIGTERM ends the process at
    once.

    The context installs no handler outside the main thread, or if the user has set a handler for SIGTERM. A
    handler with a true attribute `ends_process`, such as that of a checkpoint store that finishes its saves
    first, is replaced during the context and handles the second SIGTERM.

    Args:
        stop: The signal that receives the request.

    Attributes:
        is_received: Whether this process received SIGTERM.
    """

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self, stop: StopSignal) -> None:
        self.is_received = False
        self._stop = stop
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        previous = signal.getsignal(signal.SIGTERM)
        if is_main and (previous is signal.SIG_DFL or getattr(previous, "ends_process", False)):
            self._previous, self._pid = previous, os.getpid()
            signal.signal(signal.SIGTERM, self._handle)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._previous)

    def has_ended_training(self, sync: StepSync) -> bool:
        """Return whether a stop ended the training, and any rank received SIGTERM.

        Collective if a stop has ended the training; a stop ends it on every rank or on none.
        """
        if not (self._stop.is_agreed or self._stop.is_final):
            return False
        return any(sync.gather(float(self.is_received))) if sync.num_ranks > 1 else self.is_received

    def exit_if_received(self, sync: StepSync) -> None:
        """Raise `SystemExit` if this process, or with several ranks any rank, received SIGTERM.

        Collective if a stop has ended the training.

        Raises:
            SystemExit: With 143, the exit code of a process that SIGTERM ended.
        """
        if self.has_ended_training(sync) or self.is_received:
            raise SystemExit(self.EXIT_CODE)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_received or os.getpid() != self._pid:
            # A second SIGTERM, or one in a forked worker, goes to the previous handler.
            signal.signal(number, self._previous)
            os.kill(os.getpid(), number)
            return
        self.is_received = True
        self._stop.request("SIGTERM")
