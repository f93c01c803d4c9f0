"""The saves of one store that are under way: they take turns, and no failure of theirs goes unheard."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from hocket.ckpt.errors import CheckpointError, CheckpointTimeoutError
from hocket.ckpt.torch.background import SaveHandle, Worker
from hocket.ckpt.torch.rendezvous import Rendezvous
from hocket.ckpt.torch.saving import SaveJob

__all__ = ["Turns"]

# How long the coordinator, whose process serves the rendezvous, stays for ranks that have not heard the last
# outcome: they ask twenty times a second. Only a rank that is gone or late makes it wait to the end.
_FAREWELL_S = 3


class Turns:
    """A store's saves, one after the other: they share a thread and a staging buffer.

    A forked child begins with new ones: what the parent has under way is the parent's.

    Attributes:
        one_at_a_time: Held from `wait` to `begin`, so that no other thread comes between. Closing does
            without: a handler of signals may close a store whose save it has interrupted.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.one_at_a_time = threading.RLock()  # a handler of signals may also save, on the same thread
        self._rendezvous = rendezvous
        self._worker = Worker()
        self._last: SaveHandle | None = None
        self._unheard: list[SaveHandle] = []
        self._unseen: str | None = None  # the last save's key: not every rank may know how it ended
        self._staged_is_written = threading.Event()
        self._staged_is_written.set()

    def wait(self, mode: str, timeout_s: float) -> None:
        """Waits for the staging buffer, or, before a synchronous save, for all of the save under way.

        Raises:
            CheckpointTimeoutError: It takes longer than twice `timeout_s`.
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
                f"The save before, `{self._last and self._last.uri}`, is still under way after "
                f"{2 * timeout_s:g} s. Save less often, or to a faster store."
            )

    def take_staging(self, job: SaveJob) -> None:
        """Gives the staging buffer to a save, until its bytes are written."""
        self.wait("async", job.timeout_s)  # not long, but where a signal's save came after the first `wait`
        self._staged_is_written.clear()
        job.is_staged = True

    def begin(self, job: SaveJob, name: str, finish: Callable[[SaveJob], None], *, mode: str) -> SaveHandle:
        """Has `finish` run: here for a synchronous save, on the thread for an asynchronous one.

        Raises:
            BaseException: The synchronous save's failure; or what is nobody's to keep, such as Ctrl-C.
        """
        if mode == "async":
            future = self._worker.submit(lambda: finish(job))
        else:
            finish(job)
            future = Future()
            future.set_result(None)
        self._last = SaveHandle(name, job.uri, job.step, future)
        if job.error is not None and not isinstance(job.error, Exception):
            raise job.error  # the other ranks hear of it
        self._unheard.append(self._last)
        return self._last

    def run(self, job: SaveJob) -> None:
        """Writes and settles a save.

        Raises:
            CheckpointError: It failed, here or on the rank that is named.
        """
        try:
            job.write()
        finally:
            if job.is_staged:  # one that was refused says nothing of the buffer
                self._staged_is_written.set()
        before, self._unseen = self._unseen, job.key
        job.settle()
        if before is not None and self._rendezvous.is_coordinator:
            # All ranks have reported this save, so all have seen the outcome of the one before.
            self._rendezvous.forget(f"{before}/outcome", f"{before}/seen")

    def raise_unheard(self, *, but: SaveHandle | None = None) -> None:
        """Raises the first failure that nobody has heard of; each once, and not that of `but`."""
        for handle in tuple(self._unheard):
            if handle is but or not handle.done():
                continue
            self._unheard.remove(handle)
            failure = handle.failure()
            if failure is not None and not handle.is_heard:
                handle.is_heard = True
                raise CheckpointError(
                    f"The asynchronous save of `{handle.uri}`, step {handle.step}, failed, and nobody waited "
                    f"for it: {type(failure).__name__}: {failure}"
                ) from failure

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread once all saves are done; whether that was in time."""
        return self._worker.stop(timeout_s)

    def say_farewell(self) -> None:
        """Has the coordinator stay a moment for ranks that have not heard the last outcome yet."""
        unseen, self._unseen = self._unseen, None
        if unseen is not None and self._rendezvous.is_coordinator:
            num_others = self._rendezvous.world_size - 1
            self._rendezvous.await_ticks(f"{unseen}/seen", num_others, timeout_s=_FAREWELL_S)
