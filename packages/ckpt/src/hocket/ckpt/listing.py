"""What stands under a folder or an object prefix."""

import os
from dataclasses import dataclass
from typing import Literal

from hocket.native import _native

__all__ = ["Listing", "list_checkpoints"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A child of a prefix: a checkpoint, or what looks like one, or neither."""

    name: str
    uri: str
    status: Literal["committed", "partial", "foreign"]
    """`partial`: data files without a manifest, a save that never finished. `foreign`: nothing of ours."""
    step: int | None = None
    """This and what follows is None where it is not committed."""
    created: str | None = None
    """`YYYY-MM-DDTHH:MM:SS.ffffffZ`."""
    save_id: str | None = None
    format: int | None = None
    version: str | None = None
    """The Hocket version that wrote it."""
    num_files: int | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    """Bytes of the data files."""
    problem: str | None = None
    """Why a child with a manifest counts as foreign."""


def list_checkpoints(prefix: str | os.PathLike[str]) -> list[Listing]:
    """Lists checkpoints: the uncommitted first, then by step, created and name, so that the newest is last.

    Reads the first few KiB of each manifest and nothing else. A symbolic link is passed over: what it
    points to is listed where it stands.

    Args:
        prefix: A folder, or a URI such as `s3://bucket/run`.

    Raises:
        CheckpointNotFoundError: There is no such prefix.

    Example:
        >>> [listing.name for listing in list_checkpoints(folder) if listing.status == "committed"]
        ['demo']
    """
    prefix = os.fspath(prefix)
    base = prefix.rstrip("/")
    return [
        Listing(
            name=found["name"],
            uri=f"{base}/{found['name']}",
            status=found["status"],
            step=found["step"],
            created=found["created"],
            save_id=found["save_id"],
            format=found["format"],
            version=found["version"],
            num_files=found["files"],
            num_tensors=found["tensors"],
            num_bytes=found["bytes"],
            problem=found["problem"],
        )
        for found in _native.ckpt_list(prefix)
    ]
