"""How each format lays a checkpoint out: files made of parts, and the file that comes last."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hocket.ckpt.datafiles import data_path, entry_name, file_metadata
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.boxes import pieces
from hocket.ckpt.formats.catalogue import Catalogue
from hocket.ckpt.formats.parts import OutFile, Part, Payload, Tensor, num_bytes
from hocket.ckpt.formats.pickling import Call, Global, New, dumps
from hocket.ckpt.formats.torch_save import torch_dtype, torch_zip
from hocket.ckpt.manifest import ITEM_BYTES, Chunk, Manifest, PathItem, TensorRecord, ValueRecord
from hocket.ckpt.tree import unflatten
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["Content", "Plan", "plan_dcp", "plan_hocket", "plan_safetensors", "plan_torch"]

_PAGE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What is to be written."""

    tensors: Sequence[Tensor]
    values: Mapping[str, ValueRecord]
    origin: Manifest | Catalogue
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of mappings with integers for keys, which else look like lists."""


@dataclass(kw_only=True, slots=True)
class Plan:
    """The files of a destination."""

    root: str
    """The folder or prefix that the files stand in."""
    files: list[OutFile]
    last: OutFile | None = None
    """Written when all others are there: its presence is the commit."""
    commit: Callable[[Sequence["CkptFile"]], None] | None = None
    """Or what to do then, with the records of the files."""
    save_id: str | None = None
    """What it will be committed as, for a Hocket checkpoint."""
    left_out: list[str] = field(default_factory=list)
    """Values, and what goes with the tree, that the format has no place for."""


def _shards(payloads: Iterable[Payload], limit: int) -> Iterator[list[Payload]]:
    """Greedy, in order: a larger one gets a file of its own."""
    shard: list[Payload] = []
    size = 0
    for payload in payloads:
        if shard and size + payload.tensor.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(payload)
        size += payload.tensor.num_bytes
    if shard:
        yield shard


def _cut(tensor: Tensor, limit: int) -> list[Payload]:
    """A tensor as boxes of at most `limit` bytes; one that is no larger stays whole."""
    if tensor.num_bytes <= limit:
        return [Payload(tensor)]
    boxes = pieces(tensor.shape, ITEM_BYTES[tensor.dtype], limit)
    return [Payload(replace(tensor, shape=box.size), box.start) for box in boxes]


def _safetensors(
    payloads: Sequence[Payload], metadata: Mapping[str, str], alignment: int
) -> tuple[list[Part], list[tuple[Payload, int]]]:
    """Parts of a safetensors file, and where each payload begins in its data.

    Raises:
        CheckpointIncompatibleError: A tensor has the name that the format keeps for itself.
    """
    if any(payload.tensor.name == "__metadata__" for payload in payloads):
        raise CheckpointIncompatibleError(
            "a tensor is called `__metadata__`, under which safetensors keeps a file's own notes. Rename it: "
            "`--rename __metadata__=NAME`."
        )
    ordered = sorted(payloads, key=lambda it: (-ITEM_BYTES[it.tensor.dtype], it.tensor.name, it.start or ()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    places = []
    at = 0
    for payload in ordered:
        tensor = payload.tensor
        places.append((payload, at))
        end = at + tensor.num_bytes
        name = entry_name(tensor.name, payload.start or (), is_whole=payload.start is None)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return [len(text).to_bytes(8, "little") + text, *ordered], places


def plan_safetensors(root: str, name: str | None, content: Content, limit: int) -> Plan:
    """One file, or several with an index. A storage that tensors share is written for each.

    Args:
        root: The folder or prefix.
        name: The file's name where it is to be just one; None for `model.safetensors` or shards.
        content: What to write.
        limit: Bytes of tensors in a file.
    """
    payloads = list(map(Payload, content.tensors))
    shards = list(_shards(payloads, limit)) if name is None else [payloads]
    shards = shards or [[]]
    names = [name or "model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = [
        OutFile(path=path, parts=_safetensors(shard, {"format": "pt"}, 8)[0])
        for path, shard in zip(names, shards, strict=True)
    ]
    last = None
    if len(shards) > 1:
        weight_map = {it.tensor.name: path for path, shard in zip(names, shards, strict=True) for it in shard}
        total = sum(tensor.num_bytes for tensor in content.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
        last = OutFile(path="model.safetensors.index.json", parts=[text])
    left_out = [*content.values, *_attached(content)]
    return Plan(root=root, files=files, last=last, left_out=left_out)


def plan_torch(root: str, name: str, content: Content) -> Plan:
    """One file of `torch.save`, with the whole tree."""
    leaves: list[tuple[tuple[str | int, ...], object]] = [
        *((tensor.path, tensor) for tensor in content.tensors),
        *((record.path, record.value) for record in content.values.values()),
    ]
    tree = unflatten(leaves, content.integer_keyed)
    # A storage's owner stands before those that share it, whatever their order in the tree.
    ordered = sorted(content.tensors, key=lambda tensor: tensor.same_as is not None)
    files = [OutFile(path=name, parts=torch_zip(tree, ordered))]
    return Plan(root=root, files=files, left_out=_attached(content))


def _attached(content: Content) -> list[str]:
    """What only Hocket's format has a place for, as far as there is some."""
    if not isinstance(content.origin, Manifest):
        return []
    return [name for name, value in content.origin.attached.items() if value is not None]


_DCP = "torch.distributed.checkpoint.metadata"


def plan_dcp(root: str, content: Content, limit: int) -> Plan:
    """What `torch.distributed.checkpoint.load` reads: an item a value, and one a tensor or a box of it."""
    items: list[tuple[dict[str, Any], list[Part]]] = [
        ({"fqn": name}, torch_zip(record.value, [])) for name, record in content.values.items()
    ]
    boxes: dict[str, list[Payload]] = {}
    for tensor in content.tensors:
        boxes[tensor.name] = _cut(replace(tensor, same_as=None), limit)
        for number, box in enumerate(boxes[tensor.name]):
            index = {"fqn": tensor.name, "offset": _size(_start(box)), "index": number}
            items.append((index, torch_zip(box.tensor, [box.tensor], start=box.start)))
    files: list[OutFile] = []
    storage: list[tuple[New, New]] = []
    size = 0
    for index, parts in items:
        length = sum(map(num_bytes, parts))
        if not files or (size and size + length > limit):
            files.append(OutFile(path=f"__0_{len(files)}.distcp"))
            size = 0
        files[-1].parts += parts
        place = {"relative_path": files[-1].path, "offset": size, "length": length}
        storage.append(
            (New(Global(_DCP, "MetadataIndex"), index), New(Global(_FILESYSTEM, "_StorageInfo"), place))
        )
        size += length
    metadata = New(
        Global(_DCP, "Metadata"),
        {
            "state_dict_metadata": {
                **{name: New(Global(_DCP, "BytesStorageMetadata")) for name in content.values},
                **{tensor.name: _tensor_metadata(tensor, boxes[tensor.name]) for tensor in content.tensors},
            },
            "planner_data": {
                **{name: _keys(record.path, content) for name, record in content.values.items()},
                **{tensor.name: _keys(tensor.path, content) for tensor in content.tensors},
            },
            "storage_data": _Pairs(storage),
            "storage_meta": None,
            "version": "1.0.0",
        },
    )
    last = OutFile(path=".metadata", parts=[dumps(metadata)])
    return Plan(root=root, files=files, last=last, left_out=_attached(content))


def _keys(path: tuple[PathItem, ...], content: Content) -> tuple[PathItem, ...]:
    """A path in which only positions in lists are integers; as torch's planner has it, keys are text."""
    keyed = content.integer_keyed
    return tuple(str(step) if path[:depth] in keyed else step for depth, step in enumerate(path))


_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Pairs(dict[Any, Any]):
    """A mapping by its pairs: keys that are instances for the reader need no hash here."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self._pairs = pairs

    def items(self) -> Any:
        """The pairs."""
        return self._pairs


def _size(extents: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (extents,))


def _start(box: Payload) -> tuple[int, ...]:
    return box.start if box.start is not None else (0,) * len(box.tensor.shape)


def _tensor_metadata(tensor: Tensor, boxes: Sequence[Payload]) -> New:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Global(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (torch_dtype(tensor.dtype), layout, False, memory_format, False)
    chunks = [{"offsets": _size(_start(box)), "sizes": _size(box.tensor.shape)} for box in boxes]
    return New(
        Global(_DCP, "TensorStorageMetadata"),
        {
            "properties": New(Global(_DCP, "TensorProperties"), properties),
            "size": _size(tensor.shape),
            "chunks": [New(Global(_DCP, "ChunkStorageMetadata"), chunk) for chunk in chunks],
        },
    )


def plan_hocket(
    root: str,
    content: Content,
    limit: int,
    *,
    save_id: str,
    level: int | None,
    unfenced: bool = False,
) -> Plan:
    """A Hocket checkpoint: its manifest is the commit.

    Args:
        root: The folder or prefix.
        content: What to write.
        limit: Bytes of tensors in a file, and of a chunk.
        save_id: What it is committed as, and what its files are named by.
        level: zstd's, for compressed files.
        unfenced: Commit also where the store cannot keep two savers apart.
    """
    owners = [tensor for tensor in content.tensors if tensor.same_as is None and tensor.num_bytes]
    payloads = [payload for tensor in owners for payload in _cut(tensor, limit)]
    files: list[OutFile] = []
    chunks: dict[str, list[Chunk]] = {}
    for number, shard in enumerate(_shards(payloads, limit)):
        parts, places = _safetensors(shard, file_metadata(save_id), _PAGE)
        path = data_path(save_id, 0, number, level=level)
        assert isinstance(parts[0], bytes)
        files.append(OutFile(path=path, parts=parts, data_start=len(parts[0]), level=level))
        for it, offset in places:
            chunk = Chunk(
                file=number, offset=offset, length=it.tensor.num_bytes, start=_start(it), size=it.tensor.shape
            )
            chunks.setdefault(it.tensor.name, []).append(chunk)
    tensors = {
        tensor.name: TensorRecord(
            dtype=tensor.dtype,
            shape=tensor.shape,
            path=tensor.path,
            same_as=tensor.same_as,
            chunks=tuple(sorted(chunks.get(tensor.name, ()), key=lambda chunk: chunk.start)),
        )
        for tensor in content.tensors
    }

    def commit(written: Sequence["CkptFile"]) -> None:
        origin = content.origin if isinstance(content.origin, Manifest) else None
        manifest = Manifest(
            save_id=save_id,
            step=origin.step if origin else 0,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            version=_native.__version__,
            writer="hocket.ckpt.convert",
            world_size=origin.world_size if origin else 1,
            mesh=origin.mesh if origin else None,
            files=tuple(written),
            tensors=tensors,
            values=content.values,
            integer_keyed=content.integer_keyed,
            per_rank=origin.per_rank if origin else None,
            user=origin.user if origin else None,
        )
        document = _native.ckpt_manifest_encode(manifest.to_document())
        _native.ckpt_commit(root, document, save_id, unfenced=unfenced)

    return Plan(root=root, files=files, commit=commit, save_id=save_id)
