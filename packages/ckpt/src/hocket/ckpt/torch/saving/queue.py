"""Queues of one store: its saves, which report every failure to the caller, and the thinning after them."""

import logging
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future

from hocket.ckpt.errors import CheckpointError, CheckpointTimeoutError
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.saving.async_save import SaveHandle, SaveThread
from hocket.ckpt.torch.saving.job import SaveJob
from hocket.ckpt.verbs.retention import CheckpointRetainer

__all__ = ["SaveQueue", "ThinQueue"]

# Seconds that rank 0, which serves the key-value store, waits for ranks that have not read the last outcome.
# Ranks poll twenty times a second, so the limit is reached only if a rank is late or dead.
_FAREWELL_S = 3
_FAREWELL_AFTER_ERROR_S = 0.5
"""After an error on rank 0 the others may have ended before, and the error waits to be told."""

# A thinning that is cut off harms nothing, and a process that was asked to end may have little time.
_CLOSE_S = 20

_log = logging.getLogger(__name__)


class SaveQueue:
    """The saves of one store, run one at a time. They share a thread and a staging buffer.

    A forked child starts with an empty queue; saves in progress stay with the parent.

    Attributes:
        one_at_a_time: Held from `wait` to `begin`, so that two threads cannot start a save at once. Closing
            does not take it, because a signal handler may close a store whose save it interrupted.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.one_at_a_time = threading.RLock()  # reentrant: a signal handler may save on the same thread
        self._coordinator = coordinator
        self._worker = SaveThread()
        self._last: SaveHandle | None = None
        self._names: list[str] = []
        self._unheard: list[SaveHandle] = []
        self._unseen: str | None = None  # the last save's key, while a rank may not have read its outcome
        self._staged_is_written = threading.Event()
        self._staged_is_written.set()

    def wait(self, mode: str, timeout_s: float) -> None:
        """Wait for the staging buffer or, before a synchronous save, for the end of the running save.

        Raises:
            CheckpointTimeoutError: The wait took longer than twice `timeout_s`.
        """
        if mode == "async":
            is_free = self._staged_is_written.wait(2 * timeout_s)
        else:
            try:
                if self._last is not None:
                    self._last._future.exception(2 * timeout_s)
                is_free = True
            except TimeoutError:
                is_free = False
        if not is_free:
            raise CheckpointTimeoutError(
                f"the previous save, `{self._last and self._last.uri}`, is still under way after "
                f"{2 * timeout_s:g} s. Save less often, or to a faster store"
            )

    def take_staging(self, job: SaveJob) -> None:
        """Give the staging buffer to a save until its bytes are written."""
        # Returns at once, unless a signal handler saved after the first `wait`.
        self.wait("async", job.timeout_s)
        self._staged_is_written.clear()
        job.is_staged = True

    @property
    def names(self) -> set[str]:
        """The names of the checkpoints whose saves this rank has begun and not finished."""
        return set(self._names)

    def begin(self, job: SaveJob, name: str, *, mode: str) -> SaveHandle:
        """Run a save in this thread if it is synchronous, else in the background thread.

        Raises:
            BaseException: The synchronous save's error; or an error such as Ctrl-C, which is never deferred.
        """
        self._names.append(name)
        if mode == "async":
            future = self._worker.submit(lambda: self._run(job, name))
        else:
            self._run(job, name)
            future = Future()
            future.set_result(None)
        self._last = SaveHandle(name, job.uri, job.step, future)
        if job.error is not None and not isinstance(job.error, Exception):
            raise job.error  # `_run` has reported it to the other ranks
        self._unheard.append(self._last)
        return self._last

    def _run(self, job: SaveJob, name: str) -> None:
        """Write and finish a save.

        Raises:
            CheckpointError: The save failed on this rank, or on the rank that the message names.
        """
        try:
            try:
                job.write()
            finally:
                if job.is_staged:  # a refused save never held the buffer
                    self._staged_is_written.set()
            previous_key, self._unseen = self._unseen, job.key
            job.finish()
        finally:
            self._names.remove(name)
        if previous_key is not None and self._coordinator.is_rank_0:
            # Every rank has reported this save, so every rank has read the previous outcome.
            self._coordinator.forget(f"{previous_key}/outcome", f"{previous_key}/seen")

    def raise_unheard(self, *, but: SaveHandle | None = None) -> None:
        """Raise the first error that no caller has received; each once, and not that of `but`."""
        for handle in tuple(self._unheard):
            if handle is but or not handle.done():
                continue
            self._unheard.remove(handle)
            failure = handle.failure()
            if failure is not None and not handle.is_heard:
                handle.is_heard = True
                raise CheckpointError(
                    f"the asynchronous save of `{handle.uri}`, step {handle.step}, failed, and nobody waited "
                    f"for it: {type(failure).__name__}: {failure}"
                ) from failure

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after all saves; return whether it stopped in time."""
        return self._worker.stop(timeout_s)

    def say_farewell(self) -> None:
        """Keep rank 0's process alive briefly for ranks that have not read the last outcome yet."""
        unseen_key, self._unseen = self._unseen, None
        if unseen_key is not None and self._coordinator.is_rank_0:
            num_others = self._coordinator.world_size - 1
            # `SystemExit`, of a notice or of `sys.exit`, is no error: the others are there.
            has_failed = not isinstance(sys.exception(), SystemExit | None)
            timeout_s = _FAREWELL_AFTER_ERROR_S if has_failed else _FAREWELL_S
            self._coordinator.await_ticks(f"{unseen_key}/seen", num_others, timeout_s=timeout_s)


class ThinQueue:
    """The thinning of the checkpoints of one store, one at a time, where a policy asks for it."""

    def __init__(self, retainer: CheckpointRetainer | None) -> None:
        self._retainer = retainer
        self._thread = SaveThread("hocket-ckpt-thin")
        self._is_stopped = threading.Event()

    def add(self, name: str, saving: Callable[[], Collection[str]]) -> None:
        """Queue the thinning of older checkpoints after the commit of `name`.

        Args:
            name: The name of the new checkpoint.
            saving: Returns the names that saves in progress write to.
        """
        retainer = self._retainer
        if retainer is not None and retainer.thins:
            self._thread.submit(lambda: self._run(retainer, name, saving))

    def _run(self, retainer: CheckpointRetainer, name: str, saving: Callable[[], Collection[str]]) -> None:
        try:
            if not self._is_stopped.is_set():
                retainer.thin(name, saving, self._check_time)
        except Exception as error:  # noqa: BLE001 - the checkpoints are whole; the next save tries again
            _log.warning("could not thin the checkpoints before `%s`: %s", name, error)

    def _check_time(self, _: int) -> None:
        if self._is_stopped.is_set():
            raise CancelledError

    def stop(self, timeout_s: float) -> None:
        """Wait some seconds for the queue, at most `timeout_s`, and leave the rest to the next run."""
        if not self._thread.stop(min(timeout_s, _CLOSE_S)):
            self._is_stopped.set()
