"""The layout of a Hocket checkpoint as files, for every rewrite to it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.chunks import Chunk, ChunkColumns
from hocket.ckpt.document.file_names import Compression, data_path, file_metadata
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.manifest_builder import build_manifest, commit
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.output_file import ConvertedTensor, OutFile, Part, TensorPayload
from hocket.ckpt.formats.writers import ConversionContent, FilePlan, cut, grouped, safetensors_parts
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["CONVERSION_WRITER", "plan_conversion", "plan_hocket", "plan_shards"]

CONVERSION_WRITER = "hocket.ckpt.convert"
"""The writer of a checkpoint that a conversion wrote."""

# Data starts at a page, so that it can be read past the page cache.
_PAGE_BYTES = 4096


def plan_hocket(
    root: str,
    shards: Iterable[tuple[int, Sequence[TensorPayload]]],
    tensors: Mapping[str, TensorRecord],
    *,
    save_id: str,
    compression: Compression | None,
    unfenced: bool = False,
    replaces: str | None = None,
    **fields: Any,
) -> FilePlan:
    """Plan a Hocket checkpoint, whose manifest is the commit.

    Args:
        root: The folder or prefix.
        shards: The rank and the contents of each file; the files of a rank follow each other.
        tensors: The records of all tensors, by name; their chunks are not used.
        save_id: The save id, which also names the files.
        compression: The encoding of compressed files.
        unfenced: Also commit to a store that ignores or rejects conditional writes.
        replaces: The id of the save whose manifest is replaced in one step; its files are kept.
        fields: The other fields of the manifest, as for `build_manifest`.
    """
    files: list[OutFile] = []
    chunks: dict[str, list[Chunk]] = {}
    numbers: Counter[int] = Counter()
    metadata = file_metadata(save_id)
    for index, (rank, shard) in enumerate(shards):
        parts, payload_offsets = safetensors_parts(shard, metadata, _PAGE_BYTES)
        path = data_path(save_id, rank, numbers[rank], is_compressed=compression is not None)
        numbers[rank] += 1
        assert isinstance(parts[0], bytes)
        files.append(OutFile(path=path, parts=parts, data_start=len(parts[0]), compression=compression))
        for payload, offset in payload_offsets:
            chunk = Chunk(
                file=index,
                offset=offset,
                length=payload.tensor.num_bytes,
                start=payload.start or (0,) * len(payload.tensor.shape),
                size=payload.tensor.shape,
            )
            chunks.setdefault(payload.tensor.name, []).append(chunk)

    def commit_files(written: Sequence["CkptFile"]) -> Manifest:
        manifest = build_manifest(files=written, tensors=tensors, chunks=chunks, save_id=save_id, **fields)
        commit(root, manifest, replaces, unfenced=unfenced, must_exist=replaces is not None)
        return manifest

    return FilePlan(root=root, files=files, commit=commit_files, save_id=save_id, replaces=replaces)


def plan_shards(
    root: str,
    tensors: Mapping[str, TensorRecord],
    *,
    ranks: int,
    file_bytes: int,
    save_id: str,
    compression: Compression | None,
    unfenced: bool = False,
    **fields: Any,
) -> FilePlan:
    """Plan a Hocket checkpoint whose tensors are cut along dim 0 for a number of ranks.

    The extension has the chunks as columns, and the contents of a file are made when it is written, so that a
    plan for thousands of ranks is small.

    Args:
        root: The folder or prefix.
        tensors: The records of all tensors, by name; their chunks are not used.
        ranks: The number of ranks.
        file_bytes: The most data of a file; a rank may have several files.
        save_id: The save id, which also names the files.
        compression: The encoding of compressed files.
        unfenced: Also commit to a store that ignores or rejects conditional writes.
        fields: The other fields of the manifest, as for `build_manifest`.

    Raises:
        CheckpointIncompatibleError: A tensor has the name that safetensors reserves, or another entry's.
    """
    owners = {name: record for name, record in tensors.items() if record.same_as is None}
    names = list(owners)
    cut_tensors = [(name, record.dtype, record.shape) for name, record in owners.items()]
    try:
        planned = _native.CkptShardPlan(cut_tensors, ranks=ranks, file_bytes=file_bytes)
    except ValueError as error:
        raise CheckpointIncompatibleError(str(error)) from error
    metadata = file_metadata(save_id)

    def make(index: int) -> list[Part]:
        header, entries = planned.file(index, metadata)
        return [header, *(_payload(names[number], owners, start, size) for number, start, size in entries)]

    files = [
        OutFile(
            path=data_path(save_id, rank, number, is_compressed=compression is not None),
            compression=compression,
            make=partial(make, index),
            sources=names,
        )
        for index, (rank, number) in enumerate(planned.files())
    ]

    def commit_files(written: Sequence["CkptFile"]) -> Manifest:
        records = {name: replace(record, chunks=()) for name, record in tensors.items()}
        manifest = build_manifest(files=written, tensors=records, chunks={}, save_id=save_id, **fields)
        encoded = planned.encode(manifest.to_document())
        _native.ckpt_commit(root, encoded, save_id, unfenced=unfenced)
        for number, name in enumerate(names):
            columns = planned.chunks(number)
            if columns is not None:
                records[name] = replace(records[name], chunks=ChunkColumns(columns))
        return replace(manifest, tensors=records)

    return FilePlan(root=root, files=files, commit=commit_files, save_id=save_id)


def _payload(
    name: str, tensors: Mapping[str, TensorRecord], start: Sequence[int], size: Sequence[int]
) -> TensorPayload:
    record = tensors[name]
    shape = tuple(size)
    tensor = ConvertedTensor(source=name, name=name, path=record.path, dtype=record.dtype, shape=shape)
    return TensorPayload(tensor, None if shape == record.shape else tuple(start))


def plan_conversion(
    root: str,
    content: ConversionContent,
    limit: int,
    *,
    save_id: str,
    compression: Compression | None,
    unfenced: bool,
) -> FilePlan:
    """Plan a Hocket checkpoint whose files are all of rank 0, of at most `limit` tensor bytes each."""
    owners = [tensor for tensor in content.tensors if tensor.same_as is None and tensor.num_bytes]
    payloads = [payload for tensor in owners for payload in cut(tensor, limit)]
    tensors = {
        tensor.name: TensorRecord(
            dtype=tensor.dtype, shape=tensor.shape, path=tensor.path, same_as=tensor.same_as
        )
        for tensor in content.tensors
    }
    origin = content.origin
    user = dict(origin.metadata) if origin.metadata.keys() - {"format"} else origin.user
    return plan_hocket(
        root,
        ((0, shard) for shard in grouped(payloads, limit)),
        tensors,
        save_id=save_id,
        compression=compression,
        unfenced=unfenced,
        writer=CONVERSION_WRITER,
        step=content.step if content.step is not None else origin.step,
        world_size=origin.world_size,
        mesh=origin.mesh,
        values=content.values,
        integer_keyed=content.integer_keyed,
        per_rank=origin.per_rank,
        user=content.user if content.user is not None else user,
        thinned=origin.thinned,
    )
