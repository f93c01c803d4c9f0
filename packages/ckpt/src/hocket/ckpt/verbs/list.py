"""Listing of the checkpoints under a folder or an object prefix."""

import os
from dataclasses import dataclass
from typing import Literal

from hocket.ckpt.uris import child_uri, local_path
from hocket.native import _native

__all__ = ["ListedCheckpoint", "list_checkpoints"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """A child of a prefix: a committed checkpoint, a partial one, or something foreign."""

    name: str
    uri: str
    status: Literal["committed", "partial", "foreign"]
    """`partial`: data files of a save that never finished. `foreign`: not a Hocket checkpoint, or one whose
    manifest is damaged or of a later version, which `problem` says."""
    step: int | None = None
    """The step. This and the following fields are None if the checkpoint is not committed."""
    created: str | None = None
    """Creation time, `YYYY-MM-DDTHH:MM:SS.ffffffZ`."""
    save_id: str | None = None
    format: int | None = None
    version: str | None = None
    """The Hocket version that wrote the checkpoint."""
    num_files: int | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    """Size of the data files in bytes."""
    is_thinned: bool = False
    """Whether a part of the state was dropped by `thin`."""
    base: str | None = None
    """The checkpoint beside it that this one is a delta to."""
    problem: str | None = None
    """The reason why a child with a manifest counts as foreign."""


def list_checkpoints(prefix: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """List the checkpoints under a prefix, the newest last.

    Uncommitted ones come first, the others are sorted by step, creation time and name. Reads the first few
    KiB and the last bytes of each manifest, and nothing else, so that damage between them is found only when
    the checkpoint is opened. Symbolic links are skipped; their targets are listed under their own prefix.

    Args:
        prefix: A folder, or a URI such as `s3://bucket/run`.

    Raises:
        CheckpointNotFoundError: There is no such prefix.

    Example:
        >>> [listing.name for listing in list_checkpoints(folder) if listing.status == "committed"]
        ['demo']
    """
    prefix = local_path(prefix)
    return [
        ListedCheckpoint(
            name=found["name"],
            uri=child_uri(prefix, found["name"]),
            status=found["status"],
            step=found["step"],
            created=found["created"],
            save_id=found["save_id"],
            format=found["format"],
            version=found["version"],
            num_files=found["files"],
            num_tensors=found["tensors"],
            num_bytes=found["bytes"],
            is_thinned=found["thinned"],
            base=found["base"],
            problem=found["problem"],
        )
        for found in _native.ckpt_list(prefix)
    ]
