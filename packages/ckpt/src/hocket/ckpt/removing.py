"""Checkpoints removed, and what unfinished saves left behind."""

from dataclasses import dataclass
from typing import Literal

from hocket.ckpt.datafiles import is_data_path
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError, CheckpointPartialError
from hocket.ckpt.manifest import Manifest
from hocket.native import Store, _native

__all__ = ["MIN_AGE_S", "Collected", "Garbage", "Removed", "collect_garbage", "remove"]

MIN_AGE_S = 24 * 3600.0
"""The least age of what is collected, where nobody says another: a save takes no day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """A checkpoint that was removed, or would be."""

    uri: str
    status: Literal["committed", "partial", "foreign"]
    """`foreign`: with a manifest that does not read."""
    step: int | None
    num_files: int
    num_bytes: int
    """Of the data files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Something that no checkpoint needs and no save under way can still want."""

    name: str
    """The checkpoint's name below the prefix; `.` for a file in the prefix itself."""
    path: str
    """The file inside it."""
    waste: Literal["file", "upload", "manifest", "probe", "unfinished"]
    """A data file that no manifest names, an upload never finished, a manifest that never got its name, a
    key on which a commit tried its store, a hidden file that a conversion to another format was writing."""
    num_bytes: int
    """0 for an upload: stores do not tell."""
    age_s: float
    """How long the save or conversion that wrote it has been still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a collection did."""

    garbage: tuple[Garbage, ...]
    skipped: dict[str, str]
    """Checkpoints that were left alone because their manifest does not read, by name, with the reason."""


def remove(uri: str, *, dry_run: bool = False) -> Removed:
    """Removes a checkpoint, committed or not: its manifest first, so that no instant shows a broken one.

    Takes the manifest, the files that it names and those under `data/` that are named as a save names its
    own, then the folder if nothing else is in it.

    Args:
        uri: The checkpoint's folder or URI.
        dry_run: Only look; what would be refused is refused alike.

    Raises:
        CheckpointNotFoundError: There is none.
        ValueError: The URI has no name in it (`s3://bucket` is no checkpoint), or it or its `data` is a
            symbolic link.

    Example:
        >>> remove(folder + "/demo", dry_run=True).num_files
        4
    """
    prefix, slash, name = uri.rstrip("/").rpartition("/")
    if (slash and not prefix) or prefix.endswith(":/") or name in ("", ".", ".."):
        raise ValueError(f"`{uri}` names no checkpoint; expected a folder or a prefix with a name in it")
    found = _look(uri)
    _native.ckpt_delete(prefix or ".", name, dry_run=dry_run)
    return found


def _look(uri: str) -> Removed:
    step, status, named = None, "committed", set[str]()
    try:
        manifest = Manifest.from_document(_native.ckpt_manifest_read(uri))
        step, named = manifest.step, {file["path"] for file in manifest.files}
    except CheckpointPartialError:
        status = "partial"
    except (CheckpointCorruptError, CheckpointIncompatibleError):
        status = "foreign"
    files = [file for file in Store(uri).list("data") if file.key in named or is_data_path(file.key)]
    return Removed(
        uri=uri,
        status=status,  # type: ignore[arg-type]
        step=step,
        num_files=len(files),
        num_bytes=sum(file.size for file in files),
    )


def collect_garbage(prefix: str, *, min_age_s: float = MIN_AGE_S, dry_run: bool = False) -> Collected:
    """Removes what unfinished and replaced saves left under a prefix; never a byte of a committed checkpoint.

    Taken are files whose save has been still for `min_age_s`, and on an object store uploads that were begun
    so long ago. Of a killed conversion to another format the file that it was writing goes, on a disk; those
    it had finished have the format's names, and nothing tells them from others'. What is not ours stays, and
    so does all of a checkpoint whose manifest does not read.

    Args:
        prefix: A folder of checkpoints, or a URI.
        min_age_s: Seconds. Longer than any save takes: one that is under way is not told from one that died.
        dry_run: Only look.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """
    collected = _native.ckpt_gc(prefix, min_age_s=min_age_s, dry_run=dry_run)
    garbage = tuple(
        Garbage(
            name=one["name"],
            path=one["path"],
            waste=one["waste"],
            num_bytes=one["bytes"],
            age_s=one["age_s"],
        )
        for one in collected["garbage"]
    )
    return Collected(garbage=garbage, skipped=dict(collected["skipped"]))
