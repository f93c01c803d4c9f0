"""Writers: the layout of a checkpoint in each format as files, and the file that is written last."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.boxes import pieces, whole
from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.document.file_names import entry_name, in_entry_order
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import PathItem, ValueRecord
from hocket.ckpt.document.tree import unflatten
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.output_file import ConvertedTensor, OutFile, Part, TensorPayload, num_bytes
from hocket.ckpt.formats.pickling import PickledCall, PickledGlobal, PickledInstance, dumps
from hocket.ckpt.formats.torch_save import torch_dtype, torch_zip

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = [
    "ConversionContent",
    "FilePlan",
    "cut",
    "grouped",
    "plan_dcp",
    "plan_safetensors",
    "plan_torch",
    "safetensors_parts",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionContent:
    """The tensors and values to write."""

    tensors: Sequence[ConvertedTensor]
    values: Mapping[str, ValueRecord]
    origin: CheckpointContents
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of mappings with integer keys, which would otherwise be read as lists."""
    step: int | None = None
    """The step to record instead of the source's."""
    user: object = None
    """The `user` value to record instead of the source's."""


@dataclass(kw_only=True, slots=True)
class FilePlan:
    """The files of a destination."""

    root: str
    """The folder or prefix of the files."""
    files: list[OutFile]
    last: OutFile | None = None
    """The file that is written after all others; its presence is the commit."""
    commit: Callable[[Sequence["CkptFile"]], Manifest] | None = None
    """A function that commits instead of `last`, given the records of the files."""
    save_id: str | None = None
    """The save id, for a Hocket checkpoint."""
    replaces: str | None = None
    """The id of the save that the checkpoint takes the place of."""
    left_out: list[str] = field(default_factory=list)
    """Names of values and attached data that the format cannot store."""

    def beyond_range(self) -> dict[str, int]:
        """Return the number of written items that were beyond the range of their dtype, by tensor."""
        counts: Counter[str] = Counter()
        for part in (part for file in self.files for part in file.parts):
            if isinstance(part, TensorPayload) and part.num_beyond:
                counts[part.tensor.name] += part.num_beyond
        return dict(counts)


def grouped(payloads: Iterable[TensorPayload], limit: int) -> list[list[TensorPayload]]:
    """Return payloads file by file, in order and greedily; one larger than `limit` gets its own file."""
    shards: list[list[TensorPayload]] = []
    size = 0
    for payload in payloads:
        if not shards or size + payload.tensor.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(payload)
        size += payload.tensor.num_bytes
    return shards


def cut(tensor: ConvertedTensor, limit: int) -> list[TensorPayload]:
    """Split a tensor into boxes of at most `limit` bytes; a smaller tensor stays whole."""
    if tensor.num_bytes <= limit:
        return [TensorPayload(tensor)]
    boxes = pieces(whole(tensor.shape), ITEM_BYTES[tensor.dtype], limit)
    return [TensorPayload(replace(tensor, shape=box.size), box.start) for box in boxes]


def safetensors_parts(
    payloads: Sequence[TensorPayload], metadata: Mapping[str, str], alignment: int
) -> tuple[list[Part], list[tuple[TensorPayload, int]]]:
    """Return the parts of a safetensors file, and the offset of each payload in its data.

    Raises:
        CheckpointIncompatibleError: A tensor has the name that the format reserves, or that of another entry.
    """
    if any(payload.tensor.name == "__metadata__" for payload in payloads):
        raise CheckpointIncompatibleError(
            "a tensor is called `__metadata__`, a key that safetensors reserves for a file's metadata. "
            "Rename it: `--rename __metadata__=NAME`"
        )
    named = [(entry_name(it.tensor.name, it.start or (), is_whole=it.start is None), it) for it in payloads]
    named = in_entry_order(named, lambda one: (one[1].tensor.dtype, one[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    payload_offsets = []
    offset = 0
    for name, payload in named:
        tensor = payload.tensor
        payload_offsets.append((payload, offset))
        end = offset + tensor.num_bytes
        if name in header:
            raise CheckpointIncompatibleError(
                f"two entries of a file would be called `{name}`: a part of one tensor, and another tensor. "
                "Rename one of them with `hocket-ckpt convert --rename`"
            )
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return [len(text).to_bytes(8, "little") + text, *(payload for _, payload in named)], payload_offsets


def plan_safetensors(root: str, name: str | None, content: ConversionContent, limit: int) -> FilePlan:
    """Plan one file, or several with an index. Shared storage is written once per tensor.

    Args:
        root: The folder or prefix.
        name: The name of a single file; None for `model.safetensors` or shards.
        content: The tensors and values to write.
        limit: Limit of tensor bytes per file.
    """
    payloads = list(map(TensorPayload, content.tensors))
    shards = grouped(payloads, limit) if name is None else [payloads]
    shards = shards or [[]]
    names = [name or "model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    metadata = {"format": "pt", **content.origin.metadata}
    files = [
        OutFile(path=path, parts=safetensors_parts(shard, metadata, 8)[0])
        for path, shard in zip(names, shards, strict=True)
    ]
    last = None
    if len(shards) > 1:
        weight_map = {it.tensor.name: path for path, shard in zip(names, shards, strict=True) for it in shard}
        total = sum(tensor.num_bytes for tensor in content.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
        last = OutFile(path="model.safetensors.index.json", parts=[text])
    left_out = [*content.values, *_attached(content, has_metadata=True)]
    return FilePlan(root=root, files=files, last=last, left_out=left_out)


def plan_torch(root: str, name: str, content: ConversionContent) -> FilePlan:
    """Plan one file of `torch.save` that holds the whole tree."""
    leaves: list[tuple[tuple[str | int, ...], object]] = [
        *((tensor.path, tensor) for tensor in content.tensors),
        *((record.path, record.value) for record in content.values.values()),
    ]
    tree = unflatten(leaves, content.integer_keyed)
    # The owner of a storage comes before its aliases, whatever their order in the tree.
    ordered = sorted(content.tensors, key=lambda tensor: tensor.same_as is not None)
    files = [OutFile(path=name, parts=torch_zip(tree, ordered))]
    return FilePlan(root=root, files=files, left_out=_attached(content))


def _attached(content: ConversionContent, *, has_metadata: bool = False) -> list[str]:
    """Return the names of step, `user`, per-rank values and metadata, as far as the source has them."""
    # `format` names the library that the tensors come from.
    is_lost = not has_metadata and content.origin.metadata.keys() - {"format"}
    attached = [name for name, value in content.origin.attached.items() if value is not None]
    return [*attached, *(["__metadata__"] if is_lost else [])]


_DCP = "torch.distributed.checkpoint.metadata"


def plan_dcp(root: str, content: ConversionContent, limit: int) -> FilePlan:
    """Plan a distributed checkpoint of torch: one item per value, and per tensor or box of a tensor."""
    items: list[tuple[dict[str, Any], list[Part]]] = [
        ({"fqn": name}, torch_zip(record.value, [])) for name, record in content.values.items()
    ]
    boxes: dict[str, list[TensorPayload]] = {}
    for tensor in content.tensors:
        boxes[tensor.name] = cut(replace(tensor, same_as=None), limit)
        for number, box in enumerate(boxes[tensor.name]):
            index = {"fqn": tensor.name, "offset": _size(_start_of(box)), "index": number}
            items.append((index, torch_zip(box.tensor, [box.tensor], start=box.start)))
    contents: dict[str, list[Part]] = {}
    storage: list[tuple[PickledInstance, PickledInstance]] = []
    path, size = "", 0
    for index, parts in items:
        length = sum(map(num_bytes, parts))
        if not contents or (size and size + length > limit):
            path, size = f"__0_{len(contents)}.distcp", 0
            contents[path] = []
        contents[path] += parts
        storage_info = {"relative_path": path, "offset": size, "length": length}
        storage.append(
            (
                PickledInstance(PickledGlobal(_DCP, "MetadataIndex"), index),
                PickledInstance(PickledGlobal(_FILESYSTEM, "_StorageInfo"), storage_info),
            )
        )
        size += length
    metadata = PickledInstance(
        PickledGlobal(_DCP, "Metadata"),
        {
            "state_dict_metadata": {
                **{
                    name: PickledInstance(PickledGlobal(_DCP, "BytesStorageMetadata"))
                    for name in content.values
                },
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
    files = [OutFile(path=path, parts=parts) for path, parts in contents.items()]
    last = OutFile(path=".metadata", parts=[dumps(metadata)])
    return FilePlan(root=root, files=files, last=last, left_out=_attached(content))


def _keys(path: tuple[PathItem, ...], content: ConversionContent) -> tuple[PathItem, ...]:
    """Return a path with mapping keys as strings, as torch's planner has it; list indices stay integers."""
    keyed = content.integer_keyed
    return tuple(str(step) if path[:depth] in keyed else step for depth, step in enumerate(path))


_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Pairs(dict[Any, Any]):
    """A mapping as a list of pairs, because keys that are pickled instances are not hashable here."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self._pairs = pairs

    def items(self) -> Any:
        """Return the pairs."""
        return self._pairs


def _size(extents: tuple[int, ...]) -> PickledCall:
    return PickledCall(PickledGlobal("torch", "Size"), (extents,))


def _start_of(box: TensorPayload) -> tuple[int, ...]:
    """Return the offsets of a payload in its tensor."""
    return box.start if box.start is not None else (0,) * len(box.tensor.shape)


def _tensor_metadata(tensor: ConvertedTensor, boxes: Sequence[TensorPayload]) -> PickledInstance:
    layout = PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = PickledCall(PickledGlobal(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (torch_dtype(tensor.dtype), layout, False, memory_format, False)
    chunks = [{"offsets": _size(_start_of(box)), "sizes": _size(box.tensor.shape)} for box in boxes]
    return PickledInstance(
        PickledGlobal(_DCP, "TensorStorageMetadata"),
        {
            "properties": PickledInstance(PickledGlobal(_DCP, "TensorProperties"), properties),
            "size": _size(tensor.shape),
            "chunks": [
                PickledInstance(PickledGlobal(_DCP, "ChunkStorageMetadata"), chunk) for chunk in chunks
            ],
        },
    )
