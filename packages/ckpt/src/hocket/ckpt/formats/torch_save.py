"""Files in the format of `torch.save`, and items of a distributed checkpoint."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.ckpt.document.boxes import c_strides
from hocket.ckpt.document.dtypes import DTYPES
from hocket.ckpt.formats.output_file import ConvertedTensor, Part, TensorPayload, ZipBuilder
from hocket.ckpt.formats.pickling import PersistentStorage, PickledCall, PickledGlobal, dumps

__all__ = ["torch_dtype", "torch_zip"]

_ORDERED_DICT = PickledCall(PickledGlobal("collections", "OrderedDict"), ())


def torch_dtype(name: str) -> PickledGlobal:
    """Return the torch dtype as a global for a pickle."""
    return PickledGlobal("torch", DTYPES[name].torch)


def torch_zip(
    tree: Any, tensors: Sequence[ConvertedTensor], *, start: tuple[int, ...] | None = None
) -> list[Part]:
    """Return the parts of a file in the format of `torch.save`.

    Args:
        tree: The tree to save; the tensors in it are objects of `tensors`.
        tensors: All tensors. An alias comes after the tensor that owns the storage.
        start: Offsets in the sources' tensors, if they are boxes of these.
    """
    keys: dict[str, str] = {}
    builder = ZipBuilder()
    for tensor in tensors:
        keys[tensor.name] = keys[tensor.same_as] if tensor.same_as is not None else str(len(keys))
    builder.add("data.pkl", dumps(_with_tensors(tree, keys)))
    builder.add(".format_version", b"1")
    builder.add(".storage_alignment", b"64")
    builder.add("byteorder", b"little")
    for tensor in tensors:
        if tensor.same_as is None:
            builder.add(f"data/{keys[tensor.name]}", TensorPayload(tensor, start))
    builder.add("version", b"3\n")
    return list(builder.finish())


def _with_tensors(node: Any, keys: Mapping[str, str]) -> Any:
    if isinstance(node, ConvertedTensor):
        return _rebuild(node, keys[node.name])
    if isinstance(node, list):
        return [_with_tensors(item, keys) for item in node]
    if isinstance(node, Mapping):
        return {key: _with_tensors(item, keys) for key, item in node.items()}
    return node


def _rebuild(tensor: ConvertedTensor, key: str) -> PickledCall:
    num_items = math.prod(tensor.shape)
    storage_type = DTYPES[tensor.dtype].storage
    # `numel` counts items of a typed storage and bytes of an untyped one.
    storage = (
        ("storage", PickledGlobal("torch", storage_type), key, "cpu", num_items)
        if storage_type is not None
        else ("storage", PickledGlobal("torch.storage", "UntypedStorage"), key, "cpu", tensor.num_bytes)
    )
    shape, strides = tensor.shape, c_strides(tensor.shape)
    if tensor.expanded_to is not None:
        is_stored = [stored == extent for stored, extent in zip(shape, tensor.expanded_to, strict=True)]
        strides = tuple(stride if stored else 0 for stride, stored in zip(strides, is_stored, strict=True))
        shape = tensor.expanded_to
    arguments = (PersistentStorage(storage), 0, shape, strides, False, _ORDERED_DICT)
    if storage_type is not None:
        return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v2"), arguments)
    return PickledCall(
        PickledGlobal("torch._utils", "_rebuild_tensor_v3"), (*arguments, torch_dtype(tensor.dtype))
    )
