"""Tensor layout: dtype, global shape, mesh placement and local memory of each tensor of a state tree."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch.nn.parameter import is_lazy

from hocket.ckpt.document import dtypes
from hocket.ckpt.document.manifest import MAX_DIMS
from hocket.ckpt.document.planning import Box, TensorPlacement, local_box
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.document.tree import Path, TreeLeaf
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "DTYPES",
    "TensorInfo",
    "describe",
    "mesh_axes",
    "refuse_shapeless",
    "slot_as",
    "torch_dtype",
]

DTYPES: Mapping[torch.dtype, str] = {
    getattr(torch, names.torch): name for name, names in dtypes.DTYPES.items()
}
"""The safetensors name of each supported dtype."""

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """A description of one tensor of a state tree."""

    name: str
    path: Path
    dtype: str
    """The dtype's safetensors name."""
    shape: tuple[int, ...]
    """The global shape."""
    item_bytes: int
    placing: TensorPlacement
    box: Box | None
    """The box of the global tensor that this rank holds; None if the rank is not in the mesh."""
    local: torch.Tensor
    """The local part of the tensor, detached."""
    same_as: str | None
    """The first tensor of the tree that is the same view of the same storage."""
    is_plain: bool = False
    """Whether this is a plain tensor, equal on every rank that holds it, and not a DTensor."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Everything that a plan depends on; equal on all ranks that hold the same tree."""
        return (self.name, self.path, self.dtype, self.shape, self.placing, self.same_as)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor.

    Importing the DTensor module takes seconds. If it has not been imported, no DTensor can exist.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """Return the torch dtype for a safetensors name; the error for an unknown one names `tensor`."""
    try:
        return _TORCH_DTYPES[name]
    except KeyError:
        raise CheckpointIncompatibleError(
            f"`{tensor}` has dtype `{name}`, which this version of torch does not have"
        ) from None


def slot_as(
    parameter: torch.Tensor | None, record: TensorRecord, name: str, *, is_step: bool
) -> torch.Tensor:
    """Return an empty tensor for an optimizer slot, with its parameter's layout if the shapes are equal."""
    dtype = torch_dtype(record.dtype, name)
    if parameter is None:
        return torch.empty(record.shape, dtype=dtype, device="cpu")
    is_counter = is_step and not record.shape
    if record.shape == tuple(parameter.shape) and not is_counter:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Step counters stay on the host, so that optimizers read them without a device synchronisation.
    return torch.empty(record.shape, dtype=dtype, device="cpu" if is_counter else parameter.device)


def mesh_axes(tensors: Mapping[str, TreeLeaf]) -> dict[str, int] | None:
    """Return the axis names and sizes of the first DTensor's mesh, for display; None without DTensors."""
    for leaf in tensors.values():
        if is_dtensor(leaf.value):
            mesh = leaf.value.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
            return dict(zip(names, map(int, mesh.shape), strict=True))
    return None


@torch.no_grad()  # so that `to_local` returns the memory itself, not a node of the graph
def describe(
    tensors: Mapping[str, TreeLeaf], *, rank: int, world_size: int, peers: tuple[int, ...] | None = None
) -> list[TensorInfo]:
    """Describe each tensor of a tree, in tree order.

    A plain tensor is assumed to be equal on every rank of the job, or on every rank of `peers` if other ranks
    hold other trees.

    Raises:
        CheckpointStateError: A tensor cannot be saved or loaded: it is sparse, nested or uninitialised; it
            has no memory (`meta`, fake, or freed); it has more than 64 dims; its dtype has no safetensors
            name or is packed (4 bits an item); it is a tensor subclass other than DTensor; or it is a DTensor
            with a partial placement, or with a strided one other than that of FSDP over tensor parallelism.
    """
    meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    holders = tuple(range(world_size)) if peers is None else peers
    replicated = TensorPlacement((len(holders),), holders, (None,))
    name_by_memory: dict[tuple[object, ...], str] = {}
    infos = []
    for name, leaf in tensors.items():
        tensor = leaf.value
        assert isinstance(tensor, torch.Tensor)
        sharded = tensor if is_dtensor(tensor) else None
        _refuse_unusable(name, tensor, is_plain=sharded is None)
        if sharded is not None:
            mesh = sharded.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = (tuple(map(int, mesh.shape)), tuple(mesh.mesh.flatten().tolist()))
            placing = _placing(name, sharded, *meshes[id(mesh)])
        else:
            placing = replicated
        shape = tuple(map(int, tensor.shape))
        local = (tensor if sharded is None else sharded.to_local()).detach()
        box = local_box(shape, placing, rank)
        if box is not None and 0 in box.size and not local.numel():
            local = local.reshape(box.size)  # torch may give an empty shard another shape
        if box is not None and tuple(local.shape) != box.size:
            raise CheckpointStateError(
                f"`{name}` holds {tuple(local.shape)} of {shape} on rank {rank}, where its placements "
                f"{getattr(tensor, 'placements', ())} give {box.size}. Redistribute it before saving"
            )
        _refuse_without_memory(name, local)
        memory = (_memory_of(local), shape, placing)
        same_as = name_by_memory.setdefault(memory, name)
        infos.append(
            TensorInfo(
                name=name,
                path=leaf.path,
                dtype=DTYPES[tensor.dtype],
                shape=shape,
                item_bytes=tensor.dtype.itemsize,
                placing=placing,
                box=box,
                local=local,
                same_as=None if same_as == name else same_as,
                is_plain=sharded is None,
            )
        )
    return infos


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors that are the same view of the same storage."""
    storage = tensor.untyped_storage()._cdata
    # Two flags mark a view as the conjugate or the negative of its memory.
    bits = (tensor.is_conj(), tensor.is_neg())
    return (storage, tensor.storage_offset(), tensor.stride(), tuple(tensor.shape), tensor.dtype, bits)


def refuse_shapeless(name: str, tensor: torch.Tensor) -> None:
    """Raise `CheckpointStateError` if a tensor has no shape."""
    if is_lazy(tensor):
        raise CheckpointStateError(
            f"`{name}` is not initialised and has no shape yet. Run a batch through the model first"
        )
    if tensor.is_nested:
        raise CheckpointStateError(
            f"`{name}` is a nested tensor; expected a dense one. Save what it is made of: `.unbind()`"
        )


def check_storable(name: str, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise if a tensor of this dtype and shape cannot be stored in a data file.

    Raises:
        CheckpointStateError: The dtype has no safetensors name, or its items are not whole bytes; or there
            are too many dims.
    """
    if dtype not in DTYPES:
        raise CheckpointStateError(
            f"`{name}` has dtype `{dtype}`; expected one that safetensors can store and whose elements are "
            "whole bytes. Save its bytes: `.view(torch.uint8)`"
        )
    if len(shape) > MAX_DIMS:
        raise CheckpointStateError(
            f"`{name}` has {len(shape)} dims; expected at most {MAX_DIMS}. Save it with fewer, for example "
            "`.flatten()`"
        )


def _refuse_unusable(name: str, tensor: torch.Tensor, *, is_plain: bool) -> None:
    refuse_shapeless(name, tensor)
    if tensor.layout is not torch.strided:
        raise CheckpointStateError(
            f"`{name}` has layout `{tensor.layout}`; expected a dense tensor. Save `.to_dense()`"
        )
    if tensor.is_meta:
        raise CheckpointStateError(
            f"`{name}` is on the `meta` device and has no memory. Materialise the model first"
        )
    check_storable(name, tensor.dtype, tensor.shape)
    if is_plain and hasattr(tensor, "__tensor_flatten__"):
        raise CheckpointStateError(
            f"`{name}` is a `{type(tensor).__qualname__}`; expected a plain tensor or a DTensor. Save its "
            f"parts"
        )


def _refuse_without_memory(name: str, local: torch.Tensor) -> None:
    storage = local.untyped_storage()
    if storage.device.type == "meta":  # a fake tensor reports another device itself
        raise CheckpointStateError(
            f"`{name}` is a fake tensor on `{local.device}` and has no memory. Make it outside of "
            "`FakeTensorMode`"
        )
    if local.is_contiguous():
        last = local.storage_offset() + local.numel() - 1
    else:
        steps = zip(local.shape, local.stride(), strict=True)
        last = local.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    num_bytes = (last + 1) * local.itemsize if local.numel() else 0
    if storage.nbytes() < num_bytes:
        raise CheckpointStateError(
            f"`{name}` reaches over {num_bytes} bytes of a storage that has {storage.nbytes()}: its memory "
            "was freed. Save or load it while it has its memory; FSDP frees what it has gathered"
        )


def _placing(
    name: str, tensor: DTensor, mesh_shape: tuple[int, ...], ranks: tuple[int, ...]
) -> TensorPlacement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts: list[int | None] = []
    late_axes = []
    for axis, placement in enumerate(tensor.placements):
        # By exact type: in some versions of torch a strided shard derives from `Shard`.
        if type(placement) is Replicate:
            cuts.append(None)
            continue
        is_late = type(placement) is _StridedShard
        if type(placement) is not Shard and not (is_late and _cuts_last(tensor, mesh_shape, axis)):
            raise CheckpointStateError(
                f"`{name}` is placed as `{placement!r}` on axis {axis} of a mesh of {mesh_shape}; expected "
                "`Replicate`, `Shard`, or the strided shard that FSDP makes over tensor parallelism. "
                "Redistribute it before saving"
            )
        cuts.append(cast("Any", placement).dim % max(tensor.ndim, 1))
        if is_late:
            late_axes.append(axis)
    return TensorPlacement(mesh_shape, ranks, tuple(cuts), tuple(late_axes))


def _cuts_last(tensor: DTensor, mesh_shape: tuple[int, ...], axis: int) -> bool:
    """Return whether a strided shard splits its dim after all later axes that split the same dim."""
    strided: Any = tensor.placements[axis]
    later_axes = zip(tensor.placements[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
    cut = math.prod(size for placement, size in later_axes if getattr(placement, "dim", None) == strided.dim)
    return bool(strided.split_factor == cut)
