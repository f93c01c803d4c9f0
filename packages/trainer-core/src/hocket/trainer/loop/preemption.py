"""Notices of a run's end, such as SIGTERM: stop at the next step boundary, save, and exit the process."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.world import global_rank
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.ranks.stop_signal import StopSignal

SAVE_SIGNALS = "HOCKET_SAVE_SIGNALS"
"""The variable with the names of the signals that save; `hocket-launch --save-signals` sets it."""
GRACE = "HOCKET_GRACE_S"
"""The variable with the seconds between a notice and the end of the process; `--grace` sets it."""

_SLURM_END = "SLURM_JOB_END_TIME"
_DEFAULT_SIGNALS = "SIGTERM,SIGUSR1,SIGHUP"
_DEFAULT_GRACE_S = 30.0
_SPARED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.25
_COPY_S = 1.0
"""Seconds in which a second SIGINT is a copy: a terminal and a launcher may both send it."""


class InterruptExit(SystemExit, KeyboardInterrupt):
    """The end of a run after Ctrl-C: a quiet exit, and the `KeyboardInterrupt` that a script may catch."""


class StopNotice:
    """The handler of signals that announce the end of the process.

    During a fit, a notice requests a stop instead of ending the process at once. The exchange of each step
    carries the request, so all ranks end after the same batch and save. Schedulers and launchers may send a
    notice several times, and to every process of a job: copies within the grace period are ignored, also
    while the trainer is closed. SIGINT is a notice, too, except in a notebook or at a prompt; a second one
    ends the process.

    A signal that the user handles is left alone. A handler with a true attribute `ends_process`, such as that
    of a checkpoint store that finishes its saves first, is replaced, and gets the signal that ends the
    process.

    Attributes:
        received: The number of the first notice that this process received; 0 without one.
        deadline: The time by `time.monotonic` until which signals are copies; infinite without a notice.
        killed_at: The time at which the process will be killed; infinite where nobody has told it.
    """

    def __init__(self) -> None:
        self.received = 0
        self.deadline = self.killed_at = math.inf
        self._stop: StopSignal | None = None
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._saves = False
        self._pid = os.getpid()

    def install(self, stop: StopSignal, *, saves: bool) -> None:
        """Handle the signals from here on.

        Args:
            stop: The signal that receives the request.
            saves: Whether the run saves when it stops.

        Raises:
            TrainerConfigError: If `HOCKET_SAVE_SIGNALS` or `HOCKET_GRACE_S` has no signals or seconds.
        """
        self._stop, self._saves, self._pid = stop, saves, os.getpid()
        self.received, self._interrupted_at = 0, None
        self.deadline = self.killed_at = math.inf
        numbers = [*_save_signals(), *([] if _is_interactive() else [signal.SIGINT])]
        _grace_s()
        stop.notify = self.notify
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            previous = signal.getsignal(number)
            if number not in self._previous and _may_replace(number, previous):
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def notify(self, grace_s: float | None) -> None:
        """Take a notice that did not come as a signal, as one by SIGTERM."""
        if self.received:
            return
        now = time.monotonic()
        if grace_s is not None:
            self.killed_at = now + grace_s
        self._take(signal.SIGTERM, now + (_grace_s() if grace_s is None else grace_s))

    def release(self) -> None:
        """Restore the handlers, unless a notice was received: its copies are ignored until `restore`."""
        if self._stop is not None:
            self._stop.notify = None
        if not self.received:
            self.restore()

    def restore(self) -> None:
        """Restore the handlers that were there before."""
        while self._previous:
            number, previous = self._previous.popitem()
            # Another handler may have been set meanwhile.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def has_ended_training(self, sync: StepSync) -> bool:
        """Return whether a stop ended the training, and any rank received a notice.

        Collective if a stop has ended the training; a stop ends it on every rank or on none.
        """
        return bool(self._exit_code(sync))

    def exit_if_received(self, sync: StepSync) -> None:
        """Raise `SystemExit` if this process, or with several ranks any rank, received a notice.

        Collective if a stop has ended the training.

        Raises:
            SystemExit: With 128 + the signal, the exit code of a process that the signal ended; after Ctrl-C
                an `InterruptExit`.
        """
        if code := self._exit_code(sync) or (self.received and 128 + self.received):
            raise (InterruptExit if code == 128 + signal.SIGINT else SystemExit)(code)

    def _exit_code(self, sync: StepSync) -> int:
        assert self._stop is not None, "`install` was called"
        if not (self._stop.is_agreed or self._stop.is_final):
            return 0
        number = int(max(sync.gather(float(self.received))))
        return 128 + number if number else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A fork of this process: the notice was sent to all processes of the job, or SIGTERM by its
            # parent.
            if number == signal.SIGTERM:
                self._end(number)
            return
        now = time.monotonic()
        is_interrupt = number == signal.SIGINT
        if is_interrupt and self._interrupted_at is None:
            self._interrupted_at = now
        is_copy = now - (self._interrupted_at or now) < _COPY_S if is_interrupt else now < self.deadline
        if not self.received:
            deadline = now + _grace_s()
            if GRACE in os.environ or os.environ.get(_SLURM_END, "").isdecimal():
                self.killed_at = deadline
            self._take(number, deadline)
            if is_interrupt:
                # A copy that came meanwhile is one, however long a slow terminal took to write the line.
                self._interrupted_at = time.monotonic()
        elif not is_copy:
            self._end(number)

    def _take(self, number: int, deadline: float) -> None:
        """Request the stop for the first notice."""
        assert self._stop is not None, "`install` was called"
        self.received, self.deadline = number, deadline
        self._stop.request(signal.Signals(number).name)
        self._announce(number)

    def _announce(self, number: int) -> None:
        """Tell the user, once for the job; `print` must not be called in the handler of a signal."""
        if global_rank() != 0:
            return
        what = "saves and stops" if self._saves else "stops without a save, since it makes none,"
        more = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        text = f"hocket: {signal.Signals(number).name}: the run {what} after the present step{more}\n"
        with suppress(OSError):
            os.write(2, text.encode())

    def _end(self, number: int) -> None:
        """Let the handler that was there before have the signal."""
        signal.signal(number, self._previous.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)


def _save_signals() -> list[signal.Signals]:
    names = os.environ.get(SAVE_SIGNALS, _DEFAULT_SIGNALS)
    known = signal.Signals.__members__
    for name in (given := [name.strip() for name in names.split(",") if name.strip()]):
        if name not in known or name in ("SIGKILL", "SIGSTOP", "SIGINT", "SIGQUIT"):
            raise TrainerConfigError(
                f"`{SAVE_SIGNALS}` is {names!r}, and `{name}` is no signal that can announce the end; "
                f"expected names such as {_DEFAULT_SIGNALS}"
            )
    return [known[name] for name in given]


def _grace_s() -> float:
    """Return the seconds between a notice and the end of the process, as far as they are known."""
    text = os.environ.get(GRACE, str(_DEFAULT_GRACE_S))
    try:
        seconds = float(text)
    except ValueError:
        raise TrainerConfigError(f"`{GRACE}` is {text!r}, expected a number of seconds") from None
    # A notice ahead of the time limit, by `--signal`, is followed by SIGTERM at the limit, and that by
    # SIGKILL.
    end = os.environ.get(_SLURM_END, "")
    return max(seconds, float(end) - time.time() + seconds) if end.isdecimal() else seconds


def _may_replace(number: int, previous: Any) -> bool:
    """Return whether nobody else handles a signal."""
    if number == signal.SIGINT:
        return previous is signal.default_int_handler
    if getattr(previous, "ends_process", False):
        return True
    return previous is signal.SIG_DFL and not _is_caught(number)


def _is_caught(number: int) -> bool:
    """Return whether code in C, such as `faulthandler.register`, handles a signal; False where unknown."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


@contextmanager
def sparing_workers() -> Iterator[None]:
    """Have workers that are forked within the block leave notices of the end to their parent.

    Slurm, PBS and a launcher send them to all processes of a rank. A worker that ends raises an error in its
    parent, which then cannot save. Workers still end when their parent sends SIGTERM, or has ended.
    """
    try:
        from torch.utils.data._utils import signal_handling
    except ImportError:  # a torch that has moved it
        yield
        return
    handling: Any = signal_handling
    set_handlers = getattr(handling, "_set_worker_signal_handlers", None)
    if set_handlers is None or not hasattr(signal, "sigtimedwait"):
        yield
        return

    def set_and_spare(*arguments: Any) -> None:
        set_handlers(*arguments)
        _spare()

    handling._set_worker_signal_handlers = set_and_spare
    try:
        yield
    finally:
        handling._set_worker_signal_handlers = set_handlers


def _spare() -> None:
    """Receive the signals in a thread of this worker, which can tell who sent them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SPARED)
    watch = threading.Thread(target=_watch, args=(os.getppid(),), name="hocket-worker-signals", daemon=True)
    watch.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        found = signal.sigtimedwait(_SPARED, _POLL_S)
        if found is not None and found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)
    os._exit(1)
