"""The versions under a prefix: their names, the way from one to another, and the removal of old ones."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.uris import local_path
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.weights.newest import NewestRecord
from hocket.native import _native

__all__ = ["Versions", "version_name"]

_NAME = re.compile(r"version-\d+")


def version_name(step: int) -> str:
    """Return the name of the version of a step."""
    return f"version-{step}"


def _step_of(version: ListedCheckpoint) -> int:
    """Return the step in a version's name."""
    return int(version.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions under a prefix, in the order of their steps."""

    uri: str
    listed: Sequence[ListedCheckpoint]
    """Those that are committed, up to the newest one."""
    later: Sequence[ListedCheckpoint] = ()
    """Those after the newest one: of an abandoned run, or of a publisher that was refused or killed."""
    unreadable: Sequence[ListedCheckpoint] = ()
    """Those whose manifest is damaged, or of a later format, up to the newest one."""
    partial: Sequence[ListedCheckpoint] = ()
    """Those that were never committed."""
    named: str | None = None
    """The name of the newest version, as its publisher has recorded it."""

    @classmethod
    def find(cls, uri: str | os.PathLike[str]) -> "Versions":
        """List the versions; there are none where the prefix does not exist."""
        uri = local_path(uri)
        # The record is read before the listing, so that the listing has the version that it names.
        record = NewestRecord.read(uri)
        last = None if record is None else record.step
        found: list[ListedCheckpoint] = []
        with contextlib.suppress(CheckpointNotFoundError):
            found = [one for one in list_checkpoints(uri) if _NAME.fullmatch(one.name)]
        committed = [one for one in found if one.status == "committed"]
        return cls(
            uri,
            listed=[one for one in committed if last is None or (one.step or 0) <= last],
            later=[one for one in committed if last is not None and (one.step or 0) > last],
            unreadable=[
                one for one in found if one.problem is not None and (last is None or _step_of(one) <= last)
            ],
            partial=[one for one in found if one.status == "partial"],
            named=None if record is None else record.version,
        )

    @property
    def newest(self) -> ListedCheckpoint | None:
        """The version that its publisher has recorded; without it, the one of the highest step."""
        recorded = [one for one in self.listed if one.name == self.named]
        return (recorded or self.listed)[-1] if self.listed else None

    def refuse_unreadable(self) -> None:
        """Raise the error of a version after the newest one whose manifest cannot be read.

        Raises:
            CheckpointError: As for `hocket.ckpt.open`.
        """
        newest_step = -1 if self.newest is None else self.newest.step or 0
        for version in self.unreadable:
            if _step_of(version) > newest_step:
                Manifest.read(version.uri)

    def deltas_since(self, save_id: str | None, target: ListedCheckpoint) -> list[ListedCheckpoint] | None:
        """Return the deltas that lead from a save to a version, in order; None if there is no such way."""
        by_name = {one.name: one for one in self.listed}
        way: list[ListedCheckpoint] = []
        current: ListedCheckpoint | None = target
        while current is not None and current.base is not None and len(way) < len(by_name):
            way.append(current)
            current = by_name.get(current.base)
            if current is not None and current.save_id == save_id:
                return way[::-1]
        return None

    def remove_older_than_whole(self, keep: int) -> None:
        """Remove the versions before the last `keep` whole ones, the newest first.

        No follower needs them: the whole versions after them can be read alone. Files that killed publishers
        left of older versions are removed, too.

        Raises:
            StoreError, OSError: A version cannot be removed.
        """
        wholes = [number for number, one in enumerate(self.listed) if one.base is None]
        if len(wholes) > keep:
            first = wholes[-keep]
            left = [one for one in self.partial if _step_of(one) < (self.listed[first].step or 0)]
            self.remove([*reversed(self.listed[:first]), *left])

    def after(self, step: int) -> list[ListedCheckpoint]:
        """Return the versions of later steps, the newest first."""
        both = [*self.listed, *self.later]
        return [one for one in reversed(both) if one.step is not None and one.step > step]

    def remove(self, doomed: Sequence[ListedCheckpoint]) -> None:
        """Remove versions in their order, in which every delta stands before its base.

        Raises:
            CheckpointExistsError: A version is the base of another one, which stays.
            StoreError, OSError: A version cannot be removed.
        """
        for version in doomed:
            with contextlib.suppress(CheckpointNotFoundError):
                _native.ckpt_delete(self.uri, version.name, save_id=version.save_id)
