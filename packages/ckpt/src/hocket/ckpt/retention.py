"""Which checkpoints stay: policies, and the deleting of what none of them keeps.

Only committed checkpoints count, by listing, so that retention survives restarts and works remotely; what is
partial or foreign is never touched. A checkpoint goes if no policy keeps it.

The newest, to a policy, is what was saved last, which need not have the highest step: a run that goes on from
an older checkpoint saves lower steps than stand there. The highest step stays, too, whatever policies say: it
is what a listing ends with, and what a run that resumes by itself takes.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.listing import Listing, list_checkpoints
from hocket.ckpt.manifest import Manifest
from hocket.native import _native

__all__ = ["KeepBest", "KeepEvery", "KeepLast", "Policy", "Retainer"]

_log = logging.getLogger(__name__)

UserOf = Callable[[Listing], Any]
"""Reads what the user attached to a checkpoint."""


class Policy(Protocol):
    """What keeps checkpoints."""

    def keeps(self, committed: Sequence[Listing], user_of: UserOf) -> set[str]:
        """Names of those to keep, of all that are committed, what was saved last at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLast:
    """Keeps those that were saved last."""

    num: int

    def __post_init__(self) -> None:
        _expect_positive("num", self.num)

    def keeps(self, committed: Sequence[Listing], user_of: UserOf) -> set[str]:
        """Names of the last `num`."""
        return {listing.name for listing in committed[-self.num :]}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepEvery:
    """Keeps those of every so many steps: steps that `steps` divides."""

    steps: int

    def __post_init__(self) -> None:
        _expect_positive("steps", self.steps)

    def keeps(self, committed: Sequence[Listing], user_of: UserOf) -> set[str]:
        """Names of those whose step is a multiple."""
        return {
            listing.name
            for listing in committed
            if listing.step is not None and listing.step % self.steps == 0
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBest:
    """Keeps the best by a number that was attached when saving: `user={"loss": 0.1}`.

    One without the number, or with NaN, is not among the best.
    """

    metric: str
    num: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _expect_positive("num", self.num)
        if self.mode not in ("min", "max"):
            raise ValueError(f"`mode` is {self.mode!r}; expected 'min' or 'max'")

    def keeps(self, committed: Sequence[Listing], user_of: UserOf) -> set[str]:
        """Names of the `num` best; of two that are as good, the one saved later."""
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for age, listing in enumerate(reversed(committed)):
            user = user_of(listing)
            value = user.get(self.metric) if isinstance(user, Mapping) else None
            if isinstance(value, int | float) and not math.isnan(value):
                ranked.append((sign * value, age, listing.name))
        return {name for _, _, name in sorted(ranked)[: self.num]}


def _expect_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` is {value!r}; expected an integer from 1 on")


class Retainer:
    """Deletes what no policy keeps, under one prefix.

    Args:
        prefix: The folder or URI of the checkpoints.
        policies: What keeps them; with none, all stay.
    """

    def __init__(self, prefix: str, policies: Sequence[Policy]) -> None:
        self._prefix = prefix
        self._policies = tuple(policies)
        self._users: dict[str | None, Any] = {}
        self._numbers: dict[str | None, int] = {}
        self._unread: set[str] = set()

    def after(self, name: str) -> list[str]:
        """Deletes, once the checkpoint `name` is committed, those that no policy keeps.

        `name` itself stays, and so does the highest step. One that cannot be read or deleted stays, too, is
        logged, and keeps none of the others from going.

        Returns:
            The names of the deleted.
        """
        if not self._policies:
            return []
        committed = [found for found in list_checkpoints(self._prefix) if found.status == "committed"]
        kept = {name, *(listing.name for listing in committed[-1:])}
        self._numbers.update((it.save_id, len(self._numbers) + 1) for it in committed if it.name == name)
        committed.sort(key=self._age)
        self._unread.clear()
        kept = kept.union(
            *(policy.keeps(committed, self._user_of) for policy in self._policies), self._unread
        )
        # One save may stand under two names (a folder that is mounted twice): its files are the same.
        kept_saves = {listing.save_id for listing in committed if listing.name in kept}
        gone = []
        for each in (listing.name for listing in committed if listing.save_id not in kept_saves):
            try:
                with contextlib.suppress(CheckpointNotFoundError):  # somebody else was quicker
                    _native.ckpt_delete(self._prefix, each)
                gone.append(each)
            except Exception as error:  # noqa: BLE001 - the next save tries again
                _log.warning("could not delete the old checkpoint `%s/%s`: %s", self._prefix, each, error)
        return gone

    def _age(self, listing: Listing) -> tuple[int, str, int]:
        """What was saved later has more: in this process as it came, and before that by the clock."""
        return self._numbers.get(listing.save_id, 0), listing.created or "", listing.step or 0

    def _user_of(self, listing: Listing) -> Any:
        """Read once for each save: a manifest does not change under its save id."""
        if listing.save_id not in self._users:
            try:
                manifest = Manifest.from_document(_native.ckpt_manifest_read(listing.uri))
            except Exception as error:  # noqa: BLE001 - nobody can say that it is not the best
                _log.warning("kept `%s`, which cannot be read: %s", listing.uri, error)
                self._unread.add(listing.name)
                return None
            self._users[listing.save_id] = manifest.user
        return self._users[listing.save_id]
