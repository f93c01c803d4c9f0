"""Composer's forms of checkpoint paths: the newest of a folder, a symbolic link, a rank's file."""

from __future__ import annotations

import os
import re

from hocket.ckpt import list_checkpoints
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.uris import local_path
from hocket.trainer.errors import TrainerConfigError

_RANK_FILE = re.compile(r"(?:[-_.]?rank(?:\d+|\{rank\}))?(?:\.(?:pt|tar|gz|tgz|zst|lz4|bz2|symlink))*$")


def find_checkpoint(given: str | os.PathLike[str], *, autoresume: bool = False) -> str | None:
    """Return the checkpoint that `load_path` means.

    An existing file is returned as it is. A last part that starts with `latest`, and a folder or prefix of
    checkpoints, mean the newest committed checkpoint there. `ep1-ba10-rank0.pt` means the folder `ep1-ba10`.

    Args:
        given: A path or URI.
        autoresume: Return None instead of raising where the folder has no checkpoint.

    Raises:
        TrainerConfigError: If there is no checkpoint.
    """
    path = local_path(given).rstrip("/")
    if os.path.isfile(path):
        return path
    folder, _, last = path.rpartition("/")
    is_latest = last.startswith("latest")
    found = _newest((folder or ".") if is_latest else path)
    if found is not None:
        return found
    if not is_latest:
        # The path of a checkpoint itself; the load raises if it does not exist.
        return path if os.path.isdir(path) else _RANK_FILE.sub("", path)
    if autoresume:
        return None
    raise TrainerConfigError(
        f"`load_path` is `{given}`, the newest checkpoint of `{folder or '.'}`, and there is none; expected "
        "a folder that a run has saved to, or `autoresume=True` for a run that may be the first"
    )


def _newest(folder: str) -> str | None:
    try:
        checkpoints = list_checkpoints(folder)
    except CheckpointNotFoundError:
        return None
    # The newest is last.
    return next((entry.uri for entry in reversed(checkpoints) if entry.status == "committed"), None)
