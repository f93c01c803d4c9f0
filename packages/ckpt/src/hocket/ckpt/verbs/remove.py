"""Removal of checkpoints and of the files that unfinished saves left behind."""

import os
from dataclasses import dataclass
from typing import Literal

from hocket.ckpt.document.file_names import is_data_path
from hocket.ckpt.document.manifest import SaveSummary
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError, CheckpointPartialError
from hocket.ckpt.uris import Place, local_path
from hocket.native import Store, _native

__all__ = ["MIN_AGE_S", "GarbageFile", "GcReport", "RemovedCheckpoint", "collect_garbage", "remove"]

MIN_AGE_S = 24 * 3600.0
"""Default minimum age of collected files; longer than any save takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovedCheckpoint:
    """A checkpoint that was removed, or would be with `dry_run`."""

    uri: str
    status: Literal["committed", "partial", "foreign"]
    """The checkpoint's status; `foreign` if its manifest cannot be read."""
    step: int | None
    num_files: int
    num_bytes: int
    """Size of the data files in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GarbageFile:
    """A file or upload that no checkpoint needs and no running save can still use."""

    name: str
    """The checkpoint's name below the prefix; `.` for a file in the prefix itself."""
    path: str
    """The file's path inside the checkpoint."""
    waste: Literal["file", "upload", "manifest", "probe", "unfinished"]
    """The kind of garbage.

    A data file that no manifest names, an unfinished upload, a manifest that was never renamed, the key of a
    test for conditional writes, or the hidden file of an unfinished conversion.
    """
    num_bytes: int
    """Size in bytes; 0 for an upload, because stores do not report it."""
    age_s: float
    """Seconds since the last write of the save or conversion that wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GcReport:
    """The result of a collection."""

    garbage: tuple[GarbageFile, ...]
    skipped: dict[str, str]
    """Checkpoints that were skipped because they cannot be read or changed: name → reason."""


def remove(uri: Place, *, dry_run: bool = False) -> RemovedCheckpoint:
    """Remove a checkpoint, committed or not; no reader ever sees a broken one.

    Removes the manifest first, then the files of its save, and the folder if it is empty. Files of other
    saves, of which one may be running, are left to `collect_garbage`. Without a manifest that can be read,
    the files of all saves are removed.

    Args:
        uri: The checkpoint's folder or URI.
        dry_run: Change nothing; raises the same errors.

    Raises:
        CheckpointExistsError: A delta beside it has it as its base.
        CheckpointNotFoundError: There is no checkpoint.
        ValueError: The URI names no checkpoint (`s3://bucket`), it or its `data` is a symbolic link, or there
            is no manifest that can be read and a process still writes a file.

    Example:
        >>> remove(folder + "/demo", dry_run=True).num_files
        4
    """
    uri = os.fspath(uri)
    prefix, slash, name = local_path(uri).rstrip("/").rpartition("/")
    if (slash and not prefix) or prefix.endswith(":/") or name in ("", ".", ".."):
        raise ValueError(f"`{uri}` names no checkpoint; expected a folder or a prefix with a name in it")
    removed = _look(uri)
    _native.ckpt_delete(prefix or ".", name, dry_run=dry_run)
    return removed


def _look(uri: str) -> RemovedCheckpoint:
    step, status, save_paths = None, "committed", set[str]()
    try:
        save = SaveSummary.read(uri)
        step, save_paths = save.step, set(save.paths)
    except CheckpointPartialError:
        status = "partial"
    except (CheckpointCorruptError, CheckpointIncompatibleError):
        status = "foreign"
    files = [file for file in Store(uri).list("data") if file.key in save_paths or is_data_path(file.key)]
    return RemovedCheckpoint(
        uri=uri,
        status=status,  # type: ignore[arg-type]
        step=step,
        num_files=len(files),
        num_bytes=sum(file.size for file in files),
    )


def collect_garbage(prefix: Place, *, min_age_s: float = MIN_AGE_S, dry_run: bool = False) -> GcReport:
    """Remove what unfinished and replaced saves left under a prefix; never a byte of a committed checkpoint.

    Removes files whose save has not written for `min_age_s` and, on an object store, uploads that were
    started that long ago. Of a killed conversion to another format it removes the unfinished hidden file, on
    a local disk only; the finished files have the format's own names and cannot be distinguished from others.
    Foreign files are kept, and so is everything in a checkpoint that cannot be read or changed.

    Args:
        prefix: A folder of checkpoints, or a URI.
        min_age_s: Minimum age in seconds. It must be longer than any save takes, because a running save
            cannot be distinguished from a dead one.
        dry_run: Change nothing.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """
    collected = _native.ckpt_gc(local_path(prefix), min_age_s=min_age_s, dry_run=dry_run)
    garbage = tuple(
        GarbageFile(
            name=entry["name"],
            path=entry["path"],
            waste=entry["waste"],
            num_bytes=entry["bytes"],
            age_s=entry["age_s"],
        )
        for entry in collected["garbage"]
    )
    return GcReport(garbage=garbage, skipped=dict(collected["skipped"]))
