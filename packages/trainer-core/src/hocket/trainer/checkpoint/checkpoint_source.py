"""The source of a run's first state: `autoresume`, `load_path`, a `latest` name, or an object store."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.protocols import CheckpointStore, Entry
from hocket.trainer.ranks.step_sync import StepSync

_LATEST = re.compile(r"latest(?:[-_.]?rank(?:\d+|\{rank\}))?(?:\.(?:pt|symlink))*")


def newest_of(
    store: CheckpointStore, sync: StepSync, *, notices: list[str] | None = None, before: int | None = None
) -> Entry | None:
    """Return the committed checkpoint with the highest step; None if there is none. Collective.

    Args:
        store: The store to look in.
        sync: Carries rank 0's choice to the other ranks.
        notices: Gets a sentence for each checkpoint that cannot be read, since it may be a later one.
        before: Only checkpoints of earlier steps that a run can continue from; None for all.

    Raises:
        ResumeError: If a rank does not see the checkpoint that rank 0 sees.
    """
    entries = store.list()
    committed = [entry for entry in entries if entry.status == "committed"]
    if before is not None:
        earlier = [one for one in committed if (one.step or 0) < before]
        committed = [one for one in earlier if not getattr(one, "is_thinned", False)]
    newest = max(committed, key=lambda entry: entry.step or 0, default=None)
    if notices is not None:
        notices += _describe_unreadable(entries, None if newest is None else newest.name)
    # The step plus 1, because steps start at 0; 0 stands for no checkpoint.
    (step_plus_1,) = sync.from_rank_0(0 if newest is None else (newest.step or 0) + 1)
    if step_plus_1 == 0:
        return None
    matches = [entry for entry in committed if entry.step == step_plus_1 - 1]
    if not matches:
        raise ResumeError(
            f"rank 0 found a checkpoint of step {step_plus_1 - 1} to go on from, and this rank sees "
            f"{[entry.name for entry in committed]}; the save folder must be the same one for all ranks"
        )
    return matches[-1]


def _describe_unreadable(entries: Iterable[Entry], newest: str | None) -> list[str]:
    """Return a sentence for each checkpoint that cannot be read; not every store states a `problem`."""
    rest = "no other was found" if newest is None else f"the newest that can be read is `{newest}`"
    return [
        f"the checkpoint `{entry.name}` cannot be read and is passed over, though it may be a later one "
        f"({problem}); {rest}"
        for entry in entries
        if (problem := getattr(entry, "problem", None)) is not None
    ]


def folder_of_latest(load_path: str) -> str | None:
    """Return the folder of a path that ends in a name for its newest checkpoint, such as `run/latest`.

    Composer's names for it (`latest-rank0.pt`, `latest-rank0.pt.symlink`) are known, too. Returns None for
    any other path, and for a path that exists.
    """
    folder, _, name = load_path.rstrip("/").rpartition("/")
    if _LATEST.fullmatch(name) is None or os.path.exists(load_path):
        return None
    return folder or "."


def from_object_store(load_path: str, object_store: Any, made: ExitStack) -> str:
    """Return a path or URI from which a checkpoint in an object store can be loaded.

    An object with `get_uri(name)` gives the URI, and the checkpoint is read from there. Any other, such as a
    logger that keeps files, downloads the checkpoint to a temporary folder of this rank.

    Args:
        load_path: The object's name, or the prefix of a checkpoint's objects.
        object_store: Has `get_uri(name)`; or `download_object(name, filename)` and `list_objects(prefix)`; or
            `download_file(name, destination)`.
        made: The exit stack that deletes the folder when the trainer is closed.

    Raises:
        TrainerConfigError: If the object has none of these methods.
    """
    if callable(get_uri := getattr(object_store, "get_uri", None)):
        uri: str = get_uri(load_path)
        return uri
    download = getattr(object_store, "download_object", None) or getattr(object_store, "download_file", None)
    if not callable(download):
        raise TrainerConfigError(
            f"`load_object_store` is a `{type(object_store).__name__}`; expected an object with "
            "`get_uri(name)`, `download_object(name, filename)` or `download_file(name, destination)`; or "
            "state the whole URI as `load_path`, such as `s3://bucket/run/ep1-ba100`"
        )
    folder = made.enter_context(tempfile.TemporaryDirectory(prefix="hocket-load-"))
    root = load_path.strip("/")
    target = os.path.join(folder, os.path.basename(root))
    list_objects = getattr(object_store, "list_objects", None)
    names = [root] if list_objects is None else list(list_objects(root)) or [root]
    for name in names:
        part = name.strip("/").removeprefix(root).strip("/")
        path = os.path.join(target, part) if part else target
        os.makedirs(os.path.dirname(path), exist_ok=True)
        download(name, path)
    return target
