"""Resharding: rewrites a checkpoint of N ranks for M ranks, between stores, in bounded memory.

The contents of every file, and the save id, depend only on the source and the arguments. A rerun after a kill
therefore finds the finished files and compares them with what belongs there.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from hocket.ckpt.document.file_names import parse_compression
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import PerRank
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.hocket import plan_shards
from hocket.ckpt.read.opener import open_hocket
from hocket.ckpt.uris import local_path
from hocket.ckpt.verbs.rewrite import committed, rewrite
from hocket.native import _native

__all__ = ["MEMORY_BYTES", "ReshardReport", "reshard"]

MEMORY_BYTES = 256 << 20
"""Default memory limit for tensor data."""

_LEAST_MEMORY_BYTES = 16 << 20
_MOST_WRITERS = 8
# The fixed costs of a writer and of its readers would not fit less.
_LEAST_WRITER_BYTES = 64 << 20
# Small files, so that a rerun finds most of what a killed run wrote.
_FILES_IN_MEMORY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """The result of a reshard."""

    manifest: Manifest
    num_written: int
    """Number of files that this run wrote."""
    num_found: int
    """Number of files that an earlier run had finished."""


OnFile = Callable[[str, int], None]


def reshard(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    ranks: int,
    memory_bytes: int = MEMORY_BYTES,
    compression: str | None = None,
    unfenced: bool = False,
    on_file: OnFile | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint for another number of ranks, sharded along dim 0 as by FSDP2.

    Each rank of the new job reads only its own files. Values, step and `user` are kept; per-rank values are
    dropped unless the number of ranks is unchanged.

    Args:
        source: The checkpoint's folder or URI.
        destination: The new checkpoint's folder or URI; it must not hold anything else.
        ranks: The new number of ranks.
        memory_bytes: Memory limit for tensor data.
        compression: `zstd:N` or `planes+zstd:N` for compressed data files, whatever the source's are.
        unfenced: Also write to a store that ignores or rejects conditional writes. Two savers of one name may
            then both succeed, so set it only if there is no other writer. Such a store is refused otherwise.
        on_file: Called after each file with its path and its tensor bytes, from several threads.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointCorruptError: A block of the source does not match its digest.
        CheckpointExistsError: The destination holds something else, or another run is writing to it.
        CheckpointIncompatibleError: The source requires its own number of ranks, or has another format.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.

    Example:
        >>> reshard(folder + "/demo", folder + "/demo-3", ranks=3).manifest.world_size
        3
    """
    _check_arguments(ranks, memory_bytes)
    destination = local_path(destination)
    encoding = parse_compression(compression)
    opened = open_hocket(source, follow=False)
    manifest = opened.manifest
    per_rank = _own_values(manifest, source, ranks)
    arguments = [*opened.identity(), ranks, memory_bytes, compression]
    # Files hold the writer's version, so it is part of the identity.
    text = json.dumps(["reshard", 2, _native.__version__, *arguments])
    save_id = _native.xxh3_128(text.encode()).hex()
    finished = committed(destination, save_id)
    if finished is not None and finished[1]:
        return ReshardReport(manifest=finished[0], num_written=0, num_found=len(finished[0].files))
    plan = plan_shards(
        destination,
        manifest.tensors,
        ranks=ranks,
        file_bytes=memory_bytes // _FILES_IN_MEMORY,
        save_id=save_id,
        compression=encoding,
        unfenced=unfenced,
        writer="hocket.ckpt.reshard",
        step=manifest.step,
        world_size=ranks,
        mesh={"shard": ranks},
        values=manifest.values,
        per_rank=per_rank,
        user=manifest.user,
        integer_keyed=manifest.integer_keyed,
        thinned=manifest.thinned,
    )
    # A writer compresses in one thread; one that does not compress waits for the disk or the store.
    wanted = 2 if encoding is None else min(os.cpu_count() or 1, _MOST_WRITERS)
    num_writers = max(1, min(wanted, memory_bytes // _LEAST_WRITER_BYTES))
    rewritten = rewrite(opened, plan, memory_bytes=memory_bytes, num_writers=num_writers, on_file=on_file)
    assert rewritten.manifest is not None
    num_written = len(plan.files) - rewritten.num_found
    return ReshardReport(manifest=rewritten.manifest, num_written=num_written, num_found=rewritten.num_found)


def _check_arguments(ranks: int, memory_bytes: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"`ranks` is {ranks!r}; expected an integer from 1 on")
    if memory_bytes < _LEAST_MEMORY_BYTES:
        raise ValueError(f"`memory_bytes` is {memory_bytes}; expected at least {_LEAST_MEMORY_BYTES}")


def _own_values(manifest: Manifest, source: str | os.PathLike[str], ranks: int) -> PerRank | None:
    per_rank = manifest.per_rank
    if per_rank is None or len(per_rank.ranks) == ranks:
        return per_rank
    if per_rank.policy == "require":
        raise CheckpointIncompatibleError(
            f"`{source}` was saved by {len(per_rank.ranks)} ranks and requires as many, for its `per_rank` "
            f"values; it cannot be cut for {ranks}"
        )
    return None
