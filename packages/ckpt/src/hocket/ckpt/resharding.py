"""A checkpoint of N ranks rewritten for M, from store to store, in bounded memory.

The new files are small: each is read, put together and written in one piece of memory, so that the whole
takes no more than it is given, however large the tensors are. Which file holds what follows from the source
and the arguments alone, and so does the save id: a rerun after a kill finds the files that are finished, and
compares them with what they would become, digest by digest.
"""

import json
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from hocket.ckpt.chunks import near
from hocket.ckpt.datafiles import compression_level, data_path, entry_name, file_metadata, stored_bytes
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)
from hocket.ckpt.manifest import ITEM_BYTES, Chunk, Manifest, PerRank, TensorRecord
from hocket.ckpt.memory import Memory, carve
from hocket.ckpt.overlap import overlap
from hocket.ckpt.planning import Box, Placing, local_box
from hocket.ckpt.reader import numpy_dtype, of_one_save, read_manifest
from hocket.ckpt.resuming import check_sizes, identity_of, is_whole, spared
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = ["MEMORY_BYTES", "Resharded", "reshard"]

MEMORY_BYTES = 256 << 20
"""What a reshard may hold of the tensors' data, where nobody says another number."""

_LEAST_MEMORY_BYTES = 16 << 20
_WORKERS = 2
# A worker holds a file, the same again while it gathers it, and a ring of as much while it writes it.
_HELD = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """What a reshard did."""

    manifest: Manifest
    num_written: int
    """Files that were written now."""
    num_found: int
    """Files that an earlier run had finished."""


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
    """Rewrites a checkpoint for another number of ranks, cut as FSDP2 cuts dim 0.

    Each rank of the new job reads only its own files. Values, step and what the user attached stay; what
    differed by rank goes, unless the number of ranks stays what it was.

    Args:
        source: The checkpoint's folder or URI.
        destination: Where the new one goes; nothing else may be there.
        ranks: For how many.
        memory_bytes: How much of the tensors' data may be held at a time.
        compression: `zstd:N` for compressed data files, whatever the source's are.
        unfenced: Save also to a store that ignores conditions, where of two savers under one name both may
            believe that they won: only where nothing else ever writes. Such a store is refused otherwise.
        on_file: Called after each file with its path and the bytes of its tensors, from several threads.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointCorruptError: A block of the source is not what was written.
        CheckpointExistsError: Something else is at the destination, or another run of this is writing there.
        CheckpointIncompatibleError: The source requires its own number of ranks, or has another format.
        CheckpointUnfencedError: The store cannot keep two savers apart, and `unfenced` was not given.

    Example:
        >>> reshard(folder + "/demo", folder + "/demo-3", ranks=3).manifest.world_size
        3
    """
    _check_arguments(ranks, memory_bytes)
    source, destination = os.fspath(source), os.fspath(destination)
    level = compression_level(compression)
    manifest = read_manifest(source)
    per_rank = _own_values(manifest, source, ranks)
    file_bytes = memory_bytes // (_WORKERS * _HELD)
    files = list(_plan(manifest, ranks, file_bytes))
    arguments = [*identity_of(source, manifest), ranks, memory_bytes, level]
    save_id = _native.xxh3_128(json.dumps(["reshard", 1, *arguments]).encode()).hex()
    done = _committed(destination, save_id)
    if done is not None:
        return Resharded(manifest=done, num_written=0, num_found=len(done.files))
    job = _Job(source, manifest, destination, save_id, level, file_bytes, on_file)
    with of_one_save(source, manifest.save_id), spared(destination, save_id, list(map(job.path, files))):
        written = job.run(files)
        resharded = _manifest(manifest, save_id, ranks, files, written, per_rank)
        check_sizes(destination, {file["path"]: stored_bytes(file) for file in written})
        document = _native.ckpt_manifest_encode(resharded.to_document())
        _native.ckpt_commit(destination, document, save_id, unfenced=unfenced)
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
    """The manifest of an earlier run that came to its end, if all its files are still there."""
    try:
        head = json.loads(_native.ckpt_manifest_head(destination))
    except CheckpointNotFoundError:
        return None
    if head["save_id"] != save_id:
        raise CheckpointExistsError(
            f"`{destination}` holds another checkpoint already, of step {head['step']}, and was not touched. "
            "Name another place, or remove it first."
        )
    manifest = Manifest.from_document(_native.ckpt_manifest_read(destination))
    return manifest if is_whole(destination, manifest.files) else None


def _plan(manifest: Manifest, ranks: int, file_bytes: int) -> Iterator[_File]:
    """The files, rank by rank, each of at most `file_bytes`, with their parts in the order of their bytes."""
    # Ranks beyond the rows of the longest tensor hold nothing, and are not asked.
    rows = [record.shape[0] for record in manifest.tensors.values() if record.shape]
    holders = range(min(ranks, max(rows, default=1) or 1))
    placing = Placing((ranks,), tuple(holders), (0,))

    def order(part: _Part) -> tuple[int, str]:
        record = manifest.tensors[part.name]
        return -ITEM_BYTES[record.dtype], _entry_name(part, record.shape)

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
    # A single number is nobody's in particular.
    alone = Box((), ()) if rank == 0 else None
    box = local_box(record.shape, placing, rank) if record.shape else alone
    if box is not None and box.num_items:
        yield from _pieces(box, ITEM_BYTES[record.dtype], limit)


def _pieces(box: Box, item_bytes: int, limit: int) -> Iterator[Box]:
    """Cuts a box along its first dim that can be cut, until each piece has at most `limit` bytes."""
    num_bytes = box.num_items * item_bytes
    dim = next((dim for dim, size in enumerate(box.size) if size > 1), None)
    if num_bytes <= limit or dim is None:
        yield box
        return
    step = max(1, limit // (num_bytes // box.size[dim]))
    for row in range(0, box.size[dim], step):
        start = (*box.start[:dim], box.start[dim] + row, *box.start[dim + 1 :])
        size = (*box.size[:dim], min(step, box.size[dim] - row), *box.size[dim + 1 :])
        yield from _pieces(Box(start, size), item_bytes, limit)


class _Job:
    """Reads and writes the files, a few at a time."""

    def __init__(
        self,
        source: str,
        manifest: Manifest,
        destination: str,
        save_id: str,
        level: int | None,
        file_bytes: int,
        on_file: OnFile | None,
    ) -> None:
        self.num_found = 0
        self._source = source
        self._manifest = manifest
        self._destination = destination
        self._save_id = save_id
        self._level = level
        self._on_file = on_file
        self._found: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._memory = Memory(file_bytes)

    def run(self, files: Sequence[_File]) -> list["CkptWritten"]:
        """Has every file at the destination; returns their records."""
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="hocket-reshard") as pool:
            futures = [pool.submit(self._bring, file) for file in files]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                for future in futures:
                    future.cancel()
        self.num_found = self._found.qsize()
        for future in ended:
            future.result()  # raises what stopped the rest
        return [future.result() for future in futures]

    def path(self, file: _File) -> str:
        """A file's path inside the checkpoint."""
        return data_path(self._save_id, file.rank, file.number, level=self._level)

    def _bring(self, file: _File) -> "CkptWritten":
        memory = self._memory.take()
        # Behind each other as in the file, which then is written from where they lie.
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
        """Fills the arrays with the parts, each in one run."""
        reads, scattered = [], []
        for part, array in zip(parts, arrays, strict=True):
            record = self._manifest.tensors[part.name]
            if record.data is not None and not record.chunks:
                whole = np.frombuffer(record.data, array.dtype).reshape(record.shape)
                box = tuple(slice(a, a + n) for a, n in zip(*part.box, strict=True))
                array[...] = whole[box]
                continue
            for chunk in near(record.chunks, *part.box):
                shared = overlap(chunk, part.box)
                if shared is None:
                    continue
                # With an ellipsis, lest a 0-d array come as a copy.
                target = array[cast("Any", (*shared.within(part.box.start), ...))]
                run = target
                if not (target.flags.c_contiguous and shared.rows == target.shape):
                    run = np.empty(shared.rows, array.dtype)
                    scattered.append((target, run, shared.wanted))
                offset = chunk.offset + shared.first * array.itemsize
                reads.append((chunk.file, offset, run.nbytes, run.ctypes.data))
        _native.ckpt_read(self._source, self._manifest.files, reads)
        for target, run, wanted in scattered:
            target[...] = run[wanted]


def _is_there(destination: str, expected: "CkptWritten") -> bool:
    """Whether a file has its size and each of its digests. What is cut short or half flushed does not."""
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
    tensors: Mapping[str, TensorRecord] = {
        name: replace(record, chunks=tuple(chunks.get(name, ()))) for name, record in source.tensors.items()
    }
    return replace(
        source,
        save_id=save_id,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        version=_native.__version__,
        writer="hocket.ckpt.reshard",
        world_size=ranks,
        mesh={"shard": ranks},
        files=tuple(written),
        tensors=tensors,
        per_rank=per_rank,
    )
