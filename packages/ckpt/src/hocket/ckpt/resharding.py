"""Resharding: rewrites a checkpoint of N ranks for M ranks, between stores, in bounded memory.

The new files are small: each is read, assembled and written in one memory block, so that the memory limit
holds for tensors of any size. The contents of every file, and the save id, depend only on the source and the
arguments. A rerun after a kill therefore finds the finished files and compares their digests with the
expected ones.
"""

import json
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.ckpt.box_reads import BoxReads
from hocket.ckpt.boxes import index_of, pieces
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)
from hocket.ckpt.file_names import (
    compression_level,
    data_path,
    entry_name,
    entry_order,
    file_metadata,
    stored_bytes,
)
from hocket.ckpt.manifest import ITEM_BYTES, Chunk, Manifest, PerRank, TensorRecord
from hocket.ckpt.manifest_builder import build_manifest, commit
from hocket.ckpt.memory import Memory, carve
from hocket.ckpt.opener import open_hocket
from hocket.ckpt.planning import Box, Placing, local_box
from hocket.ckpt.reader import Checkpoint, numpy_dtype, of_one_save
from hocket.ckpt.rerun import check_sizes, identity_of, is_whole, no_empty_folders, spared
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = ["MEMORY_BYTES", "Resharded", "reshard"]

MEMORY_BYTES = 256 << 20
"""Default memory limit for tensor data."""

_LEAST_MEMORY_BYTES = 16 << 20
_WORKERS = 2
# A worker holds a file, a second copy while it gathers it, and a ring of the same size while it writes.
_HELD = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """The result of a reshard."""

    manifest: Manifest
    num_written: int
    """Number of files that this run wrote."""
    num_found: int
    """Number of files that an earlier run had finished."""


class _Part(NamedTuple):
    """A box of a tensor, as an entry of a file."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write."""

    rank: int
    number: int
    parts: tuple[_Part, ...]


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
) -> Resharded:
    """Rewrite a checkpoint for another number of ranks, sharded along dim 0 as by FSDP2.

    Each rank of the new job reads only its own files. Values, step and `user` are kept; per-rank values are
    dropped unless the number of ranks is unchanged.

    Args:
        source: The checkpoint's folder or URI.
        destination: The new checkpoint's folder or URI; it must not hold anything else.
        ranks: The new number of ranks.
        memory_bytes: Memory limit for tensor data.
        compression: `zstd:N` for compressed data files, whatever the source's are.
        unfenced: Also write to a store that ignores conditional writes. Two savers of one name may then both
            succeed, so set it only if there is no other writer. Such a store is refused otherwise.
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
    source, destination = os.fspath(source), os.fspath(destination)
    level = compression_level(compression)
    opened = open_hocket(source)
    manifest = opened.manifest
    per_rank = _own_values(manifest, source, ranks)
    file_bytes = memory_bytes // (_WORKERS * _HELD)
    files = list(_plan(manifest, ranks, file_bytes))
    arguments = [*identity_of(source, manifest), ranks, memory_bytes, level]
    save_id = _native.xxh3_128(json.dumps(["reshard", 1, *arguments]).encode()).hex()
    done = _committed(destination, save_id)
    if done is not None:
        return Resharded(manifest=done, num_written=0, num_found=len(done.files))
    job = _Job(opened, destination, save_id, level, file_bytes, on_file)
    paths = list(map(job.path, files))
    with (
        no_empty_folders(destination),
        of_one_save(source, manifest.save_id),
        spared(destination, save_id, paths),
    ):
        written = job.run(files)
        resharded = _manifest(manifest, save_id, ranks, files, written, per_rank)
        check_sizes(destination, {file["path"]: stored_bytes(file) for file in written})
        commit(destination, resharded, unfenced=unfenced)
    return Resharded(manifest=resharded, num_written=len(files) - job.num_found, num_found=job.num_found)


def _check_arguments(ranks: int, memory_bytes: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"`ranks` is {ranks!r}; expected an integer from 1 on")
    if memory_bytes < _LEAST_MEMORY_BYTES:
        raise ValueError(f"`memory_bytes` is {memory_bytes}; expected at least {_LEAST_MEMORY_BYTES}")


def _own_values(manifest: Manifest, source: str, ranks: int) -> PerRank | None:
    own = manifest.per_rank
    if own is None or len(own.ranks) == ranks:
        return own
    if own.policy == "require":
        raise CheckpointIncompatibleError(
            f"`{source}` was saved by {len(own.ranks)} ranks and requires as many, for its `per_rank` "
            f"values; it cannot be cut for {ranks}."
        )
    return None


def _committed(destination: str, save_id: str) -> Manifest | None:
    """Return the manifest of an earlier run that finished, if all its files still exist."""
    try:
        head = json.loads(_native.ckpt_manifest_head(destination))
    except CheckpointNotFoundError:
        return None
    if head["save_id"] != save_id:
        raise CheckpointExistsError(
            f"`{destination}` holds another checkpoint already, of step {head['step']}, and was not touched. "
            "Name another place, or remove it first."
        )
    manifest = Manifest.read(destination)
    return manifest if is_whole(destination, manifest.files) else None


def _plan(manifest: Manifest, ranks: int, file_bytes: int) -> Iterator[_File]:
    """Yield the files, rank by rank, each of at most `file_bytes`, with their parts in byte order."""
    # Ranks beyond the row count of the longest tensor hold nothing and are skipped.
    rows = [record.shape[0] for record in manifest.tensors.values() if record.shape]
    holders = range(min(ranks, max(rows, default=1) or 1))
    placing = Placing((ranks,), tuple(holders), (0,))

    def order(part: _Part) -> tuple[int, str]:
        record = manifest.tensors[part.name]
        return entry_order(record.dtype, _entry_name(part, record.shape))

    for rank in holders:
        number, filled = 0, 0
        parts: list[_Part] = []
        for name, record in manifest.tensors.items():
            if record.same_as is not None:
                continue
            for box in _boxes(record, placing, rank, file_bytes):
                num_bytes = box.num_items * ITEM_BYTES[record.dtype]
                if parts and filled + num_bytes > file_bytes:
                    yield _File(rank, number, tuple(sorted(parts, key=order)))
                    number, parts, filled = number + 1, [], 0
                parts.append(_Part(name, box))
                filled += num_bytes
        if parts:
            yield _File(rank, number, tuple(sorted(parts, key=order)))


def _boxes(record: TensorRecord, placing: Placing, rank: int, limit: int) -> Iterator[Box]:
    # A 0-d tensor cannot be sharded; rank 0 writes it.
    alone = Box((), ()) if rank == 0 else None
    box = local_box(record.shape, placing, rank) if record.shape else alone
    if box is not None and box.num_items:
        yield from pieces(box, ITEM_BYTES[record.dtype], limit)


class _Job:
    """A reshard in progress; reads and writes several files at a time."""

    def __init__(
        self,
        source: Checkpoint,
        destination: str,
        save_id: str,
        level: int | None,
        file_bytes: int,
        on_file: OnFile | None,
    ) -> None:
        self.num_found = 0
        self._source = source
        self._manifest = source.manifest
        self._destination = destination
        self._save_id = save_id
        self._level = level
        self._on_file = on_file
        self._found: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._memory = Memory(file_bytes)

    def run(self, files: Sequence[_File]) -> list["CkptWritten"]:
        """Write every file that the destination lacks; return the records of all files."""
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="hocket-reshard") as pool:
            futures = [pool.submit(self._bring, file) for file in files]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                for future in futures:
                    future.cancel()
        self.num_found = self._found.qsize()
        for future in ended:
            future.result()  # raises the error that stopped the others
        return [future.result() for future in futures]

    def path(self, file: _File) -> str:
        """Return a file's path inside the checkpoint."""
        return data_path(self._save_id, file.rank, file.number, level=self._level)

    def _bring(self, file: _File) -> "CkptWritten":
        memory = self._memory.take()
        # Arrays are consecutive as in the file, so that the file is written directly from this block.
        records = [self._manifest.tensors[part.name] for part in file.parts]
        dtypes = [numpy_dtype(record.dtype) for record in records]
        arrays = carve(memory, [part.box.size for part in file.parts], dtypes, alignment=1)
        self._gather(file.parts, arrays)
        entries = [
            (
                _entry_name(part, record.shape),
                record.dtype,
                part.box.size,
                array.ctypes.data,
                array.nbytes,
            )
            for part, record, array in zip(file.parts, records, arrays, strict=True)
        ]
        path = self.path(file)
        written = self._write(path, entries)
        self._memory.give_back(memory)
        if self._on_file is not None:
            self._on_file(path, sum(array.nbytes for array in arrays))
        return written

    def _write(self, path: str, entries: list[tuple[str, str, tuple[int, ...], int, int]]) -> "CkptWritten":
        metadata, level = file_metadata(self._save_id), self._level

        def write() -> "CkptWritten":
            return _native.ckpt_write_file(
                self._destination, path, entries=entries, metadata=metadata, level=level
            )

        try:
            return write()
        except CheckpointExistsError:
            expected = _native.ckpt_describe_file(path, entries=entries, metadata=metadata, level=level)
        if not _is_there(self._destination, expected):
            _native.ckpt_discard_file(self._destination, path)
            return write()
        self._found.put(None)
        return expected

    def _gather(self, parts: Sequence[_Part], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Read the parts into the arrays, each of which is contiguous."""
        plan = BoxReads()
        for part, array in zip(parts, arrays, strict=True):
            record = self._manifest.tensors[part.name]
            if record.data is not None and not record.chunks:
                whole = np.frombuffer(record.data, array.dtype).reshape(record.shape)
                array[...] = whole[index_of(*part.box)]
            else:
                plan.add(array, part.box, record.chunks)
        plan.run(lambda reads: self._source.read_ranges(reads, check=True))


def _is_there(destination: str, expected: "CkptWritten") -> bool:
    """Return whether a file exists with its size and digests; truncated or unflushed files do not match."""
    try:
        return not _native.ckpt_verify_file(destination, expected)
    except (CheckpointCorruptError, CheckpointNotFoundError):
        return False


def _entry_name(part: _Part, shape: tuple[int, ...]) -> str:
    return entry_name(part.name, part.box.start, is_whole=part.box.size == shape)


def _manifest(
    source: Manifest,
    save_id: str,
    ranks: int,
    files: Sequence[_File],
    written: Sequence["CkptWritten"],
    per_rank: PerRank | None,
) -> Manifest:
    chunks: dict[str, list[Chunk]] = {}
    for index, (file, record) in enumerate(zip(files, written, strict=True)):
        for part in file.parts:
            offset, length = record["entries"][_entry_name(part, source.tensors[part.name].shape)]
            chunks.setdefault(part.name, []).append(
                Chunk(file=index, offset=offset, length=length, start=part.box.start, size=part.box.size)
            )
    return build_manifest(
        writer="hocket.ckpt.reshard",
        files=written,
        tensors=source.tensors,
        chunks=chunks,
        save_id=save_id,
        step=source.step,
        world_size=ranks,
        mesh={"shard": ranks},
        values=source.values,
        per_rank=per_rank,
        user=source.user,
        integer_keyed=source.integer_keyed,
    )
