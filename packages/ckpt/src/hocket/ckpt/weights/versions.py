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
from hocket.native import _native

__all__ = ["Versions", "version_name"]

_NAME = re.compile(r"version-\d+")


def version_name(step: int) -> str:
    """Return the name of the version of a step."""
    return f"version-{step}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The committed versions under a prefix, in the order of their steps."""

    uri: str
    listed: Sequence[ListedCheckpoint]
    unreadable: Sequence[ListedCheckpoint] = ()
    """Those whose manifest is damaged, or of a later format."""

    @classmethod
    def find(cls, uri: str | os.PathLike[str]) -> "Versions":
        """List the versions; there are none where the prefix does not exist."""
        uri = local_path(uri)
        listed: list[ListedCheckpoint] = []
        with contextlib.suppress(CheckpointNotFoundError):
            listed = list_checkpoints(uri)
        named = [one for one in listed if _NAME.fullmatch(one.name)]
        return cls(
            uri,
            [one for one in named if one.status == "committed"],
            [one for one in named if one.problem is not None],
        )

    @property
    def newest(self) -> ListedCheckpoint | None:
        """The version of the highest step."""
        return self.listed[-1] if self.listed else None

    def refuse_unreadable(self) -> None:
        """Raise the error of a version after the newest one whose manifest cannot be read.

        Raises:
            CheckpointError: As for `hocket.ckpt.open`.
        """
        newest_step = -1 if self.newest is None else self.newest.step or 0
        for version in self.unreadable:
            if int(version.name.rpartition("-")[2]) > newest_step:
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

    def older_than_whole(self, keep: int) -> list[ListedCheckpoint]:
        """Return the versions before the last `keep` whole ones, the newest first.

        No follower needs them: the whole versions after them can be read alone.
        """
        wholes = [number for number, one in enumerate(self.listed) if one.base is None]
        return list(reversed(self.listed[: wholes[-keep]])) if len(wholes) > keep else []

    def after(self, step: int) -> list[ListedCheckpoint]:
        """Return the versions of later steps, the newest first."""
        return [one for one in reversed(self.listed) if one.step is not None and one.step > step]

    def remove(self, doomed: Sequence[ListedCheckpoint]) -> None:
        """Remove versions in their order, in which every delta stands before its base.

        Raises:
            CheckpointExistsError: A version is the base of another one, which stays.
            StoreError, OSError: A version cannot be removed.
        """
        for version in doomed:
            with contextlib.suppress(CheckpointNotFoundError):
                _native.ckpt_delete(self.uri, version.name)
