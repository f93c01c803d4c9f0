"""The check that checkpoints can be saved at a place, before a training would lose its work to it."""

import os
import secrets
from pathlib import Path

from hocket.ckpt.errors import CheckpointUnwritableError
from hocket.ckpt.uris import child_uri
from hocket.native import Store, _native
from hocket.native.errors import StoreConfigError
from hocket.native.paths import is_uri, read_only_problem

__all__ = ["check_place"]

_PROBED = ".hocket-probe"
"""The folder of the objects that test a store before the first save; `collect_garbage` finds those left."""

_HAS_EFFECTIVE_IDS = os.access in os.supports_effective_ids


def check_place(uri: str, *, is_rank_0: bool, unfenced: bool) -> None:
    """Create a local folder and check that files can be created in it; write an object to a store, on rank 0.

    Args:
        uri: An absolute path, or a prefix.
        is_rank_0: Whether this is rank 0.
        unfenced: Whether the store may ignore conditional writes.

    Raises:
        CheckpointUnwritableError: The folder cannot be created or written to; the message says why.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
        StoreConfigError: The URI is of a place that is only read, such as a web server.
        StoreError: The store cannot be reached or written to.
    """
    if not is_uri(uri):
        _make_folder(uri)
        return
    if (problem := read_only_problem(uri)) is not None:
        raise StoreConfigError(problem)
    if is_rank_0:
        folder, save_id = child_uri(uri, _PROBED), secrets.token_hex(16)
        if not unfenced:
            _native.ckpt_check_fence(folder, save_id)
            return
        probe, key = Store(folder), f".hocket-probe-{save_id}-{os.getpid()}"
        probe.put(key, b"probe")
        probe.delete(key)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        obstacle = _find_obstacle(Path(folder))
        reason = obstacle or f"{error.strerror or error}; use another folder"
        raise _unwritable(folder, reason, error.errno) from error
    if (obstacle := _find_obstacle(Path(folder))) is not None:
        raise _unwritable(folder, obstacle, None)


def _unwritable(folder: str, reason: str, number: int | None) -> CheckpointUnwritableError:
    error = CheckpointUnwritableError(f"checkpoints cannot be saved to `{folder}`: {reason}")
    error.errno = number
    return error


def _find_obstacle(folder: Path) -> str | None:
    """Say what is in the way of new files below a path, and what to do; None if nothing is known to be."""
    # Functions of `os.path`, because those of `Path` raise for a folder that may not be searched.
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if os.path.islink(folder) and not os.path.exists(folder):
        return (
            f"`{folder}` is a link to `{os.readlink(folder)}`, which does not exist or cannot be reached; "
            "create that folder, or use another one"
        )
    if not os.path.isdir(folder):
        return f"`{folder}` is a file, where a folder is expected; use another folder, or move the file away"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"`{folder}` is on a file system that is mounted read-only; use a folder on another one"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=_HAS_EFFECTIVE_IDS):
        return (
            f"user {os.geteuid()} may not create files in `{folder}`; use another folder, or change its "
            "permissions"
        )
    return None
