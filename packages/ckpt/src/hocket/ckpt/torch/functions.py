"""`save` and `load` for scripts that keep no store, and `provide`, the trainer's entry point."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from hocket.ckpt.torch.host_store import HostCheckpointStore
from hocket.ckpt.torch.loading.job import Loaded
from hocket.ckpt.torch.saving.async_save import SaveHandle, close_quietly
from hocket.ckpt.torch.store import CheckpointStore
from hocket.ckpt.uris import absolute, local_path
from hocket.ckpt.verbs.retention import KeepLast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["load", "provide", "save"]

_stores: dict[tuple[str, int], CheckpointStore] = {}
"""The most recently used stores by prefix and world size, the last one used at the end."""

_MOST_STORES = 4  # each may hold a thread and a staging buffer


def provide(
    uri: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    for_saving: bool = False,
    per_host: bool = False,
    **options: Any,
) -> CheckpointStore:
    """Create a checkpoint store: the entry point `checkpoints` of the group `hocket.providers`.

    Args:
        uri: A folder or an object prefix.
        keep_last: Number of newest checkpoints to keep; None keeps all, or those that `retention` keeps.
        for_saving: Whether checkpoints will be saved: a local folder is created now, and rank 0 tests whether
            a commit to an object store can succeed.
        per_host: Whether each host has a folder of its own; the store then keeps the newest checkpoint alone.
        **options: Options of `CheckpointStore`.

    Raises:
        CheckpointUnwritableError: With `for_saving`, if a local folder cannot be created or written to.
        CheckpointError, StoreError: With `for_saving`, if an object store cannot be written to.
    """
    if keep_last is not None:
        retention = options.get("retention", ())
        others = retention if isinstance(retention, Sequence) else (retention,)
        options["retention"] = (KeepLast(num=keep_last), *others)
    store = HostCheckpointStore(uri, **options) if per_host else CheckpointStore(uri, **options)
    if for_saving:
        try:
            store.check_writable()
        except BaseException:
            close_quietly(store)
            raise
    return store


def save(
    state: object,
    destination: str | os.PathLike[str],
    *,
    step: int = 0,
    per_rank: Mapping[str, object] | None = None,
    user: object = None,
    mode: Literal["sync", "async"] = "sync",
    overwrite: bool = False,
    peers: Sequence[int] | DeviceMesh | None = None,
) -> SaveHandle:
    """Save a state tree as the checkpoint `destination`; collective. See `CheckpointStore.save`.

    `step` orders the checkpoints of a folder; a single checkpoint needs none.

    The most recently used stores are cached by prefix, so that a loop that saves under one prefix plans only
    once. A store that is evicted from the cache first waits for its save in progress.

    Example:
        >>> handle = save({"weight": torch.arange(3.0)}, f"{folder}/first")
        >>> load(f"{folder}/first", {"weight": torch.zeros(3)}).state
        {'weight': tensor([0., 1., 2.])}
    """
    store, name = _store_of(local_path(destination))
    return store.save(
        state,
        step=step,
        name=name,
        per_rank=per_rank,
        user=user,
        mode=mode,
        overwrite=overwrite,
        peers=peers,
    )


def load(
    source: str | os.PathLike[str],
    into: object,
    *,
    strict: bool = True,
    cast: bool = False,
    include: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    check: bool = True,
    read_once: bool = False,
    peers: Sequence[int] | DeviceMesh | None = None,
) -> Loaded:
    """Load the checkpoint `source` into a state tree; collective. See `CheckpointStore.load`."""
    source = local_path(source)
    store, _ = _store_of(source)
    return store.load(
        source,
        into,
        strict=strict,
        cast=cast,
        include=include,
        ignore=ignore,
        check=check,
        read_once=read_once,
        peers=peers,
    )


def _store_of(uri: str) -> tuple[CheckpointStore, str]:
    prefix, slash, name = local_path(uri).rstrip("/").rpartition("/")
    if not name or prefix.endswith(":/"):
        raise ValueError(f"a checkpoint's URI is {uri!r}; expected a folder, or a prefix with a name in it")
    prefix = absolute((prefix or "/") if slash else ".")
    # A store that was opened before the process group was initialised has world size 1.
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    store = _stores.pop((prefix, world_size), None)
    _stores[prefix, world_size] = store = store or CheckpointStore(prefix)
    while len(_stores) > _MOST_STORES:  # the same on all ranks, because they make the same calls
        close_quietly(_stores.pop(next(iter(_stores))))
    return store, name
