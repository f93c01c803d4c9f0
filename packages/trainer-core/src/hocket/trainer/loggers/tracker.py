"""`TrackerLogger`, the base class of the loggers for tracking services."""

from __future__ import annotations

import logging
import re
import secrets
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.process.world import global_rank

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 60.0


class TrackerLogger(LoggerDestination):
    """Base of loggers that keep a run in a tracking service.

    The run is opened on the logger's thread, after a checkpoint was loaded: a service that is slow or down
    does not hold up the training, and a resumed training continues the run whose id is in the checkpoint.
    Values logged before the run is open are replayed. If opening fails, the logger ignores all later values;
    the failure is reported at once in the log, and again by `Trainer.close`.

    Args:
        rank_zero_only: Whether only rank 0 logs. When False every rank has a run of its own.
    """

    reads_outputs = False

    def __init__(self, *, rank_zero_only: bool) -> None:
        self.rank_zero_only = rank_zero_only
        self.run_id: str | None = None
        """The run's id in the service; None until it is known."""
        self._key = secrets.token_hex(6)
        """A name of the run for checkpoints, including those saved before the service has answered."""
        self._is_resumed = False
        self._is_asked_to_open = False
        self._is_open = False
        self._has_failed = False
        self._early: list[Callable[[], None]] = []
        self._outcome: BaseException | None = None

    @abstractmethod
    def _open(self, run_name: str) -> None:
        """Open the run on the logger's thread, continuing `self.run_id` if it is set."""

    @abstractmethod
    def _finish(self, outcome: BaseException | None) -> None:
        """Close the run; `outcome` is the exception that ended the training, if any."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Open the run, in the background."""
        self._open_later(state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the run, unless `after_load` has started to open it."""
        self._open_later(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Record whether the training failed, for the run's final status."""
        self._outcome = sys.exception()

    def post_close(self) -> None:
        """Close the run; wait for the service at most 60 seconds."""
        if not self._is_open:
            return
        name = type(self).__name__
        thread = threading.Thread(
            target=self._finish_or_warn, args=(self._outcome,), name=f"hocket-finish-{name}", daemon=True
        )
        thread.start()
        thread.join(_FINISH_TIMEOUT_S)
        if thread.is_alive():
            _log.warning("`%s` did not finish its run within %g s; leaving it", name, _FINISH_TIMEOUT_S)
        self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Return the key and the id of the run, so that a resumed training continues it."""
        return {"key": self._key, "run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of `state_dict`, unless a run is open already."""
        if not self._is_open and "key" in state:
            self._key, self.run_id = state["key"], state.get("run_id")
            self._is_resumed = True

    def _open_later(self, state: State, logger: Logger) -> None:
        if not self._is_asked_to_open:
            self._is_asked_to_open = True
            logger.call(self, partial(self._open_and_replay, state.run_name))

    def _open_and_replay(self, run_name: str) -> None:
        rank = global_rank()
        try:
            self._open(run_name if self.rank_zero_only else f"{run_name}-rank{rank}")
        except BaseException:
            self._has_failed = True
            self._early.clear()
            raise
        self._is_open = True
        early_calls, self._early = self._early, []
        for call in early_calls:
            call()

    def _when_open(self, call: Callable[[], None]) -> None:
        """Run `call` at once if the run is open, else when it opens; drop it if opening has failed."""
        if self._is_open:
            call()
        elif not self._has_failed:
            self._early.append(call)

    def _finish_or_warn(self, outcome: BaseException | None) -> None:
        try:
            self._finish(outcome)
        except Exception as error:  # noqa: BLE001 - the training is over; there is nobody to raise it to
            name = type(self).__name__
            _log.warning("`%s` could not finish its run: %s: %s", name, type(error).__name__, error)


def clean_name(name: str, *, allowed: str) -> str:
    """Replace every character outside the regular-expression class `allowed` with `_`."""
    return re.sub(f"[^{allowed}]", "_", name)
