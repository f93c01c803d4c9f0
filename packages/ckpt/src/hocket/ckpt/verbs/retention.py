"""Retention: policies that select checkpoints to keep, and the deletion of all others.

Only committed checkpoints count. They are listed from storage, so retention survives restarts and works on
object stores; partial and foreign checkpoints are never deleted. A checkpoint is deleted if no policy keeps
it.

Policies order checkpoints by save time, not by step: a run that resumes from an older checkpoint saves lower
steps than the prefix already holds. The checkpoint with the highest step is always kept, because it is the
last of a listing and the one that autoresume loads.

`Thin` keeps and deletes nothing: it drops a part of older checkpoints.
"""

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hocket.ckpt.document.manifest import SaveSummary
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.uris import Place, local_path
from hocket.ckpt.verbs.kept_part import ThinnedCheckpoint
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.verbs.thin import Thin, is_committed, thin_checkpoint
from hocket.native import _native

__all__ = ["CheckpointRetainer", "KeepBest", "KeepEvery", "KeepLast", "KeepPolicy", "RetentionPolicy"]

_log = logging.getLogger(__name__)

UserOf = Callable[[ListedCheckpoint], Any]
"""A function that returns the `user` value of a checkpoint."""


class KeepPolicy(Protocol):
    """A policy that selects checkpoints to keep."""

    def keeps(self, committed: Sequence[ListedCheckpoint], user_of: UserOf) -> set[str]:
        """Return the names to keep of all committed checkpoints, given in save order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLast:
    """A policy that keeps the most recently saved checkpoints."""

    num: int

    def __post_init__(self) -> None:
        _expect_positive("num", self.num)

    def keeps(self, committed: Sequence[ListedCheckpoint], user_of: UserOf) -> set[str]:
        """Return the names of the last `num` checkpoints."""
        return {listing.name for listing in committed[-self.num :]}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepEvery:
    """A policy that keeps the checkpoints whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _expect_positive("steps", self.steps)

    def keeps(self, committed: Sequence[ListedCheckpoint], user_of: UserOf) -> set[str]:
        """Return the names of the checkpoints whose step is a multiple."""
        return {
            listing.name
            for listing in committed
            if listing.step is not None and listing.step % self.steps == 0
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBest:
    """A policy that keeps the best checkpoints by a metric in the `user` value: `user={"loss": 0.1}`.

    Without `mode`, the entry `higher_is_better` of the newest `user` value that has one decides, such as
    `{"loss": 0.1, "higher_is_better": {"loss": False}}`; Hocket's trainer writes it. While there is none, all
    checkpoints are kept, and the log says so.

    Checkpoints without the metric, or with NaN, are not kept by it. While no checkpoint has the metric, all
    are kept: it may not have been measured yet, or its name may be misspelt. The log says so.
    """

    metric: str
    num: int = 1
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        _expect_positive("num", self.num)
        if self.mode not in ("min", "max", None):
            raise ValueError(f"`mode` is {self.mode!r}; expected 'min', 'max' or None")

    def keeps(self, committed: Sequence[ListedCheckpoint], user_of: UserOf) -> set[str]:
        """Return the names of the `num` best checkpoints; of two equal ones the later save is better."""
        is_higher_better = None if self.mode is None else self.mode == "max"
        ranked, names, is_measured = [], set[str](), False
        for age, listing in enumerate(reversed(committed)):
            user = user_of(listing)
            entries = user if isinstance(user, Mapping) else {}
            names.update(map(str, entries))
            value = entries.get(self.metric)
            if is_higher_better is None:
                is_higher_better = _stated_direction(entries, self.metric)
            is_measured = is_measured or value is not None
            if isinstance(value, int | float) and not math.isnan(value):
                ranked.append((value, age, listing.name))
        if not is_measured:
            _log_unmeasured(self.metric, tuple(sorted(names)))
            return {listing.name for listing in committed}
        if is_higher_better is None:
            _log_without_direction(self.metric)
            return {listing.name for listing in committed}
        sign = -1 if is_higher_better else 1
        ranked.sort(key=lambda entry: (sign * entry[0], entry[1]))
        return {name for _, _, name in ranked[: self.num]}


def _stated_direction(entries: Mapping[Any, Any], metric: str) -> bool | None:
    directions = entries.get("higher_is_better")
    direction = directions.get(metric) if isinstance(directions, Mapping) else None
    return direction if isinstance(direction, bool) else None


@functools.cache  # once for a metric and the names that there are
def _log_unmeasured(metric: str, names: tuple[str, ...]) -> None:
    _log.warning(
        "no checkpoint has the metric `%s`, so `KeepBest` keeps all; their `user` values have %s",
        metric,
        ", ".join(f"`{name}`" for name in names) or "no names",
    )


@functools.cache
def _log_without_direction(metric: str) -> None:
    _log.warning(
        "no checkpoint says whether more of the metric `%s` is better, so `KeepBest` keeps all; pass "
        "`mode='min'` or `mode='max'`",
        metric,
    )


RetentionPolicy = KeepPolicy | Thin
"""A policy that keeps checkpoints, or that thins older ones."""

_THIN_BYTES = 64 << 20
"""Memory for the tensors of a checkpoint that is thinned beside the training."""


def _expect_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` is {value!r}; expected an integer from 1 on")


class CheckpointRetainer:
    """The deletion of checkpoints under one prefix that no policy keeps, and the thinning of older ones.

    Args:
        prefix: The folder or URI of the checkpoints.
        policies: The policies; if none of them keeps any, all checkpoints are kept.
        unfenced: As for `thin`.
    """

    def __init__(
        self, prefix: Place, policies: Sequence["RetentionPolicy"], *, unfenced: bool = False
    ) -> None:
        self._prefix = local_path(prefix)
        self._policies = tuple(policy for policy in policies if not isinstance(policy, Thin))
        self._thins = tuple(policy for policy in policies if isinstance(policy, Thin))
        self._unfenced = unfenced
        self._done: set[tuple[str | None, Thin]] = set()
        self._is_thinning = threading.Lock()
        self._thinned_now: str | None = None
        self._doomed: set[str] = set()
        """Names of the checkpoints that are being deleted, which are not thinned any further."""
        self._users: dict[str | None, Any] = {}
        self._numbers: dict[tuple[str, str | None], int] = {}
        self._unread: set[str] = set()

    def after(self, name: str, saving: Collection[str] = ()) -> list[str]:
        """Delete the checkpoints that no policy keeps, after the checkpoint `name` was committed.

        `name` itself and the checkpoint with the highest step are kept. A checkpoint that cannot be read or
        deleted is kept and logged, and the others are still processed.

        Args:
            name: The name of the new checkpoint.
            saving: Names that saves in progress write to; they are kept.

        Returns:
            The names of the deleted checkpoints.
        """
        if not self._policies:
            return []
        committed, newest = self._in_save_order(name)
        kept_names = {name, *saving, *newest}
        self._unread.clear()
        kept_names = kept_names.union(
            *(policy.keeps(committed, self._user_of) for policy in self._policies), self._unread
        )
        # One save may appear under two names (a folder mounted twice) that share their files.
        kept_save_ids = {listing.save_id for listing in committed if listing.name in kept_names}
        deleted = []
        old_names = [listing.name for listing in committed if listing.save_id not in kept_save_ids]
        self._doomed.update(old_names)
        for old_name in old_names:
            if self._thinned_now == old_name:
                with self._is_thinning:
                    pass  # it ends at its next piece
            try:
                with contextlib.suppress(CheckpointNotFoundError):  # another process deleted it first
                    _native.ckpt_delete(self._prefix, old_name)
                deleted.append(old_name)
            except Exception as error:  # noqa: BLE001 - logged; the next save tries again
                _log.warning("could not delete the old checkpoint `%s/%s`: %s", self._prefix, old_name, error)
        self._doomed.difference_update(old_names)
        return deleted

    @property
    def thins(self) -> bool:
        """Whether a policy thins checkpoints."""
        return bool(self._thins)

    def thin(
        self, name: str, saving: Callable[[], Collection[str]], on_bytes: Callable[[int], None]
    ) -> list[str]:
        """Thin the older checkpoints as the policies say, after the checkpoint `name` was committed.

        A checkpoint that cannot be read or written is logged and stays as it is, and the others are still
        processed.

        Args:
            name: The name of the new checkpoint.
            saving: Returns the names that saves in progress write to; they are left alone.
            on_bytes: Called with the bytes of each piece that was written; ends the thinning by
                `CancelledError`.

        Returns:
            The names of the thinned checkpoints.
        """
        thinned = list[str]()
        for policy in self._thins:
            for listing in policy.thins(self._in_save_order(name)[0]):
                if listing.name in {name, *saving()} or (listing.save_id, policy) in self._done:
                    continue
                try:
                    one = self._thin_one(listing, policy, on_bytes)
                except CancelledError:
                    _log.warning("`%s` was not thinned in time; the next run finishes it", listing.uri)
                    return thinned
                except Exception as error:  # noqa: BLE001 - logged; the next save tries again
                    if listing.name in self._doomed or not is_committed(listing.uri):
                        continue  # retention has deleted it meanwhile
                    _log.warning("could not thin the old checkpoint `%s`: %s", listing.uri, error)
                    continue
                self._done.add((one.save_id if one else listing.save_id, policy))
                if one is not None:
                    thinned.append(listing.name)
        return thinned

    def _thin_one(
        self, listing: ListedCheckpoint, policy: Thin, on_bytes: Callable[[int], None]
    ) -> ThinnedCheckpoint | None:
        def passed(num_bytes: int) -> None:
            on_bytes(num_bytes)
            if listing.name in self._doomed:
                raise CheckpointNotFoundError(f"`{listing.uri}` is being deleted")

        with self._is_thinning:
            self._thinned_now = listing.name
            try:
                passed(0)
                return thin_checkpoint(
                    listing,
                    policy.drop,
                    memory_bytes=_THIN_BYTES,
                    unfenced=self._unfenced,
                    on_bytes=passed,
                )
            finally:
                self._thinned_now = None

    def _in_save_order(self, name: str) -> tuple[list[ListedCheckpoint], list[str]]:
        """Return the committed checkpoints after the save of `name`, and the name of the highest step."""
        committed = [listing for listing in list_checkpoints(self._prefix) if listing.status == "committed"]
        newest = [listing.name for listing in committed[-1:]]
        for listing in committed:
            if listing.name == name:
                self._numbers.setdefault((name, listing.created), len(self._numbers) + 1)
        return sorted(committed, key=self._age), newest

    def _age(self, listing: ListedCheckpoint) -> tuple[int, str, int]:
        """Return the sort key by save time: the order within this process, before that the clock."""
        # Thinning changes the save id, and neither name nor time.
        return self._numbers.get((listing.name, listing.created), 0), listing.created or "", listing.step or 0

    def _user_of(self, listing: ListedCheckpoint) -> Any:
        """Return the `user` value, cached by save id: the manifest of a save never changes."""
        if listing.save_id not in self._users:
            try:
                save = SaveSummary.read(listing.uri)
            except Exception as error:  # noqa: BLE001 - it may be the best, so it is kept
                _log.warning("kept `%s`, which cannot be read: %s", listing.uri, error)
                self._unread.add(listing.name)
                return None
            self._users[listing.save_id] = save.user
        return self._users[listing.save_id]
