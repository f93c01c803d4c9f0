"""A follower: arrays that hold a version of published weights, and go from version to version in place."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import BoxRead, whole
from hocket.ckpt.document.dtypes import numpy_dtype
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.globs import check_globs, taken
from hocket.ckpt.uris import absolute
from hocket.ckpt.verbs.list import ListedCheckpoint
from hocket.ckpt.weights.newest import NewestRecord
from hocket.ckpt.weights.versions import Versions
from hocket.native import _native

__all__ = ["Follower", "Slot", "WeightUpdate", "move_to_newest", "record_of", "wait_for"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """A move from one version to another."""

    step: int
    """The step of the version that is held now."""
    num_deltas: int
    """Number of deltas that were applied; 0 if a version was read whole."""
    num_bytes: int
    """Stored size of the versions that were read."""

    @property
    def is_whole(self) -> bool:
        """Whether a version was read whole, with the deltas that it consists of."""
        return self.num_deltas == 0


class Slot(NamedTuple):
    """A part of a tensor, and the memory that holds it; the array's items have the tensor's size in bytes."""

    name: str
    box: Box
    array: npt.NDArray[Any]


class Follower:
    """Arrays that hold a version of the weights published under a prefix. Needs no torch.

    `update` moves them to the newest version: it applies the deltas since the version that they hold, or
    reads the newest one whole, whatever the layout of the ranks that published it. An update of arrays that
    hold a version reads and verifies its bytes before it changes the first byte of the arrays.

    Args:
        uri: The folder or prefix of a `Publisher`.
        into: Arrays to update in place, by tensor name; each has its tensor's shape and dtype. If None, the
            follower allocates `arrays` for all tensors, or those of `include`.
        include: Globs of the tensors to follow, if not all.
        scratch_bytes: Memory limit for the bytes that are read, beside the arrays.

    Attributes:
        uri: The folder or prefix.
        step: The step of the version that the arrays hold; None before the first update, and after one that
            failed while the arrays changed. The next update then reads a version whole.
        save_id: The id of that version's save.
        arrays: The arrays by name.

    Example:
        >>> follower = Follower(versions)
        >>> follower.update().step
        2
        >>> follower.arrays["weight"]
        array([0., 1., 4.], dtype=float32)
        >>> follower.update() is None
        True
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        into: Mapping[str, npt.NDArray[Any]] | None = None,
        include: Sequence[str] = (),
        scratch_bytes: int = 64 << 20,
    ) -> None:
        check_globs(include=include)
        self.uri = absolute(uri)
        self.step: int | None = None
        self.save_id: str | None = None
        self.arrays: dict[str, npt.NDArray[Any]] = dict(into or {})
        self._owns_arrays = into is None
        self._include = include
        self._scratch_bytes = scratch_bytes
        self._slots: list[Slot] = []
        self._checksums: list[int] = []

    def __repr__(self) -> str:
        held = "nothing read yet" if self.step is None else f"at step {self.step}"
        return f"<{type(self).__name__} of {self.uri!r}: {held}>"

    def update(self) -> WeightUpdate | None:
        """Move to the newest version; return None if it is held already.

        Raises:
            CheckpointNotFoundError: There is no version, or a version's base is gone.
            CheckpointCorruptError: A block does not match its digest. `step` names the version that the
                arrays hold.
            CheckpointIncompatibleError: A tensor of `into` is missing, or has another shape or dtype.
            StoreError: The store failed.
        """
        return move_to_newest(self.uri, lambda: self.save_id, self.move_to)

    def wait(self, *, timeout_s: float | None = None, interval_s: float = 1.0) -> WeightUpdate:
        """Wait for a version that is not held yet, and move to it.

        Args:
            timeout_s: The longest wait; None for no limit.
            interval_s: Time between two checks of the prefix.

        Raises:
            CheckpointTimeoutError: There was none in time.
            CheckpointError: As for `update`, except that a prefix without a version is no error.
        """
        return wait_for(self.update, self.uri, timeout_s=timeout_s, interval_s=interval_s)

    def hold(self, manifest: Manifest, step: int, save_id: str) -> None:
        """Declare that the arrays hold a version, which has the tensors of a manifest."""
        self._slots = self._new_slots(manifest)
        self.step, self.save_id, self._checksums = step, save_id, self._checksums_now()

    def move_to(self, versions: Versions, newest: ListedCheckpoint) -> WeightUpdate:
        """Move to a version; raise `CheckpointNotFoundError` if it was removed meanwhile."""
        deltas = versions.deltas_since(self.save_id, newest) if self.step is not None else None
        if deltas is not None and self._is_changed():
            _log.warning("the arrays of `%s` were changed since the last update; it is read whole", self.uri)
            deltas = None
        num_applied = num_bytes = 0
        try:
            for delta in deltas or ():
                if not self._apply(delta):
                    deltas = None
                    break
                num_applied += 1
                num_bytes += delta.num_bytes or 0
            if deltas is None:
                num_bytes = self._read_whole(versions, newest)
        except BaseException:
            if num_applied and self.step is not None:
                self._settle()  # at the version of the last delta that was applied
            raise
        self._settle()
        assert self.step is not None
        return WeightUpdate(step=self.step, num_deltas=len(deltas or ()), num_bytes=num_bytes)

    def _settle(self) -> None:
        """Record what the arrays hold, and bring them to where they are used."""
        self._checksums = self._checksums_now()
        self._finish()

    def _apply(self, version: ListedCheckpoint) -> bool:
        """Apply a delta to the arrays; return False, and change nothing, if it does not fit them."""
        opened = _native.Checkpoint(version.uri)
        manifest = Manifest.of(opened)
        if manifest.delta is None or manifest.delta.save_id != self.save_id:
            raise CheckpointNotFoundError(f"`{version.uri}` was replaced meanwhile")
        if not self._has_slots_of(manifest):
            return False
        boxes = _box_reads(self._slots)
        opened.check_boxes(boxes, with_bases=False, scratch_bytes=self._scratch_bytes)
        with self._changing():
            opened.apply_delta(boxes, scratch_bytes=self._scratch_bytes)
        self.step, self.save_id = manifest.step, manifest.save_id
        return True

    def _read_whole(self, versions: Versions, version: ListedCheckpoint) -> int:
        """Read a version whole, through its bases; return the stored bytes of all of them."""
        opened = _native.Checkpoint(version.uri)
        manifest = Manifest.of(opened)
        if not self._slots or not self._has_slots_of(manifest):
            self._slots = self._new_slots(manifest)
            self.step = self.save_id = None
        boxes = _box_reads(self._slots)
        if self.step is not None:
            opened.check_boxes(boxes, scratch_bytes=self._scratch_bytes)
        with self._changing():
            opened.read_boxes(boxes, scratch_bytes=self._scratch_bytes)
        self.step, self.save_id = manifest.step, manifest.save_id
        by_name = {one.name: one for one in versions.listed}
        num_bytes, current = 0, by_name.get(version.name)
        while current is not None:
            num_bytes += current.num_bytes or 0
            current = by_name.pop(current.base, None) if current.base is not None else None
        return num_bytes

    def _changing(self) -> _Changing:
        return _Changing(self)

    # --- methods that subclasses for other memory override ---

    def _has_slots_of(self, manifest: Manifest) -> bool:
        """Return whether the arrays fit a version: the same names, shapes and dtypes."""
        wanted = self._wanted(manifest)
        held = {slot.name: slot for slot in self._slots}
        return wanted.keys() == held.keys() and all(
            held[name].array.shape == record.shape and held[name].array.dtype == numpy_dtype(record.dtype)
            for name, record in wanted.items()
        )

    def _new_slots(self, manifest: Manifest) -> list[Slot]:
        """Allocate the arrays of a version, or check those of the caller."""
        wanted = self._wanted(manifest)
        if self._owns_arrays:
            self.arrays = {
                name: np.empty(record.shape, numpy_dtype(record.dtype)) for name, record in wanted.items()
            }
            aliases = {name: record.same_as for name, record in manifest.tensors.items() if record.same_as}
            for name in taken(aliases, include=self._include):
                owner = aliases[name]
                self.arrays[name] = self.arrays[owner] if owner in wanted else self.arrays[name]
        else:
            refuse_misfits(self.uri, self.arrays, manifest)
        return [Slot(name, whole(record.shape), self.arrays[name]) for name, record in wanted.items()]

    def _finish(self) -> None:
        """Bring the memory of the slots to where it is used; called whenever it holds another version."""

    def _wanted(self, manifest: Manifest) -> dict[str, TensorRecord]:
        """Return the tensors to read; one that shares its storage with another is read once."""
        if not self._owns_arrays:
            seen = dict[int, str]()
            for name, array in self.arrays.items():
                seen.setdefault(array.ctypes.data if array.size else id(array), name)
            return {name: record_of(manifest, name) for name in seen.values() if name in manifest.tensors}
        chosen = taken(manifest.tensors, include=self._include)
        if not chosen:
            raise CheckpointNotFoundError(
                f"`{self.uri}`: no tensor matches {', '.join(f'`{glob}`' for glob in self._include)}"
            )
        owners = {name: manifest.tensors[name].same_as or name for name in chosen}
        return {
            name: record_of(manifest, name)
            for name, owner in owners.items()
            if owner == name or owner not in owners
        }

    # --- detection of other changes to the arrays ---

    def _checksums_now(self) -> list[int]:
        return [checksum_of(slot.array) for slot in self._slots]

    def _is_changed(self) -> bool:
        return self._checksums_now() != self._checksums


class _NoVersionError(CheckpointNotFoundError):
    """There is no version under a prefix yet."""


def move_to_newest(
    uri: str,
    held: Callable[[], str | None],
    move: Callable[[Versions, ListedCheckpoint], WeightUpdate],
) -> WeightUpdate | None:
    """Call `move` for the newest version, again if it was removed meanwhile; return None if it is held.

    Raises:
        CheckpointNotFoundError: There is no version.
    """
    for attempt in range(_ATTEMPTS):
        record = NewestRecord.read(uri)
        if record is not None and record.save_id is not None and record.save_id == held():
            return None  # without a listing, which reads the head of each version
        versions = Versions.find(uri)
        versions.refuse_unreadable()
        newest = versions.newest
        if newest is None:
            raise _NoVersionError(
                f"`{uri}` holds no version of weights; expected the prefix of a `Publisher`"
            )
        if newest.save_id == held():
            return None
        try:
            return move(versions, newest)
        except CheckpointNotFoundError:
            # The publisher may have removed old versions meanwhile.
            if attempt == _ATTEMPTS - 1:
                raise
    return None


def wait_for(
    update: Callable[[], WeightUpdate | None], uri: str, *, timeout_s: float | None, interval_s: float
) -> WeightUpdate:
    """Call `update` until it finds a version.

    Raises:
        CheckpointTimeoutError: There was none in time.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            found = update()
        except _NoVersionError:
            found = None
        if found is not None:
            return found
        left_s = math.inf if end is None else end - time.monotonic()
        if left_s <= 0:
            raise CheckpointTimeoutError(f"`{uri}` got no new version within {timeout_s:g} s")
        time.sleep(min(interval_s, left_s))


class _Changing:
    """A context that clears a follower's version if an error is raised while its arrays change."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._follower.step = self._follower.save_id = None
            error.add_note(
                "some of the arrays have changed; their contents are undefined until the next update"
            )


def checksum_of(array: npt.NDArray[Any]) -> int:
    """Return the CRC-32 of an array's bytes in C order."""
    contiguous = np.ascontiguousarray(array)
    return _native.crc32(contiguous.ctypes.data, contiguous.nbytes)


def refuse_misfits(uri: str, arrays: Mapping[str, npt.NDArray[Any]], manifest: Manifest) -> None:
    """Raise `CheckpointIncompatibleError` for arrays that do not fit the tensors of their names.

    Two names may have one array. Arrays that begin at one address and differ otherwise are refused.
    """
    at: dict[int, str] = {}
    for name, array in arrays.items():
        record = record_of(manifest, name) if name in manifest.tensors else None
        if record is None:
            raise CheckpointIncompatibleError(f"`{uri}` has no tensor `{name}`, which `into` names")
        dtype = numpy_dtype(record.dtype)
        if array.shape != record.shape or array.dtype != dtype or not array.flags.writeable:
            raise CheckpointIncompatibleError(
                f"the array for `{name}` has shape {list(array.shape)} and dtype {array.dtype}"
                f"{'' if array.flags.writeable else ', read-only'}; expected {list(record.shape)} of {dtype}"
            )
        other = at.setdefault(array.ctypes.data, name) if array.size else name
        if _steps(arrays[other]) != _steps(array):
            raise CheckpointIncompatibleError(
                f"the arrays for `{other}` and `{name}` overlap in memory and are not the same array"
            )


def _steps(array: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return the size and the stride of each dim with several items."""
    return [step for step in zip(array.shape, array.strides, strict=True) if step[0] > 1]


def record_of(manifest: Manifest, name: str) -> TensorRecord:
    """Return a tensor's record; for an alias, that of the tensor that owns the storage."""
    record = manifest.tensors[name]
    return record if record.same_as is None else manifest.tensors[record.same_as]


def _box_reads(slots: Iterable[Slot]) -> list[BoxRead]:
    return [
        (
            slot.name,
            slot.box.start,
            slot.box.size,
            slot.array.ctypes.data,
            None if slot.array.flags.c_contiguous else slot.array.strides,
        )
        for slot in slots
        if slot.array.size
    ]
