"""Answers of the elastic rendezvous: as soon as there are any, and not awaited when the network is gone.

torch's agent asks the rendezvous ten times a second whether hosts wait to join. A question to a host whose
network is gone has no answer for a minute, and meanwhile nobody sees that the ranks have ended.

torch looks at the state of the rendezvous once a second, so that a new round of three hosts takes 3 s. A few
hosts may look more often: each look costs the store one message, with the names of all hosts.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo, dynamic_rendezvous

_PROMPT_S = 1.0
"""Seconds to wait for the number of hosts that want to join."""
_CLOSE_S = 2.0
"""Seconds to wait until the others have heard that the job is over."""
_ANSWER_S = 30.0
"""Seconds to wait for an answer before a restart, which needs the rendezvous."""

_POLL_S = 1.0
"""The seconds between two looks of torch at the state of the rendezvous."""


class _Question:
    """A call that a thread makes, and its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._is_answered = threading.Event()

    def ask(self) -> None:
        """Make the call."""
        try:
            self._answer = self._call()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        self._is_answered.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer; return whether it came in time."""
        return self._is_answered.wait(timeout_s)

    def answer(self) -> Any:
        """Return the answer, or raise the error of the call."""
        if self._error is not None:
            raise self._error
        return self._answer


class _Answers:
    """Asks one question after the other, on a thread that no process waits for at its end."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._open: _Question | None = None
        threading.Thread(target=self._ask_all, name="hocket-rendezvous", daemon=True).start()

    def ask(self, call: Callable[[], Any], timeout_s: float, otherwise: Any) -> Any:
        """Return the result of a call, or another value if there is none in time.

        While an earlier call has no answer, that of the earlier one is awaited.
        """
        if self._open is None:
            self._open = _Question(call)
            self._questions.put(self._open)
        if not self._open.wait(timeout_s):
            return otherwise
        answered, self._open = self._open, None
        return answered.answer()

    def is_silent(self, timeout_s: float) -> bool:
        """Return whether an earlier call has no answer in time."""
        if self._open is not None and not self._open.wait(timeout_s):
            return True
        self._open = None
        return False

    def close(self) -> None:
        """Let the thread end."""
        self._questions.put(None)

    def _ask_all(self) -> None:
        while (question := self._questions.get()) is not None:
            question.ask()


@contextlib.contextmanager
def prompt_answers() -> Iterator[None]:
    """Have torch's agent see that ranks have ended, within the block, although the rendezvous is silent."""
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    count, meet, shut_down = handler.num_nodes_waiting, handler.next_rendezvous, handler.shutdown
    answers = _Answers()

    def count_promptly(self: Any) -> int:
        return int(answers.ask(partial(count, self), _PROMPT_S, otherwise=0))

    def meet_if_answered(self: Any) -> RendezvousInfo:
        if answers.is_silent(_ANSWER_S):
            raise RendezvousError(f"no answer within {_ANSWER_S:g} s")
        info: RendezvousInfo = meet(self)
        return info

    def shut_down_promptly(self: Any) -> bool:
        if answers.is_silent(0):
            return False
        return bool(answers.ask(partial(shut_down, self), _CLOSE_S, otherwise=False))

    handler.num_nodes_waiting = count_promptly
    handler.next_rendezvous, handler.shutdown = meet_if_answered, shut_down_promptly
    try:
        yield
    finally:
        handler.num_nodes_waiting, handler.next_rendezvous, handler.shutdown = count, meet, shut_down
        answers.close()


def poll_interval(num_hosts: int) -> float:
    """Return the seconds between two looks at the state of the rendezvous, up to torch's own."""
    return min(_POLL_S, 0.1 + num_hosts / 100)


@contextlib.contextmanager
def frequent_polls(num_hosts: int) -> Iterator[None]:
    """Have hosts look at the state of the rendezvous more often than torch does, within the block.

    Args:
        num_hosts: The largest number of hosts.
    """
    module: Any = dynamic_rendezvous
    holder, delay = module._BackendRendezvousStateHolder, module._delay
    sync, interval_s = holder.sync, poll_interval(num_hosts)

    def sync_frequently(self: Any) -> bool | None:
        # torch serves a state from its cache for so long.
        self._cache_duration = min(self._cache_duration, interval_s)
        has_set: bool | None = sync(self)
        return has_set

    def delay_shortly(seconds: float | tuple[float, float]) -> None:
        # A range of seconds is one of random delays, by which hosts do not all write at once.
        delay(seconds if isinstance(seconds, tuple) else min(seconds, interval_s))

    holder.sync, module._delay = sync_frequently, delay_shortly
    try:
        yield
    finally:
        holder.sync, module._delay = sync, delay
