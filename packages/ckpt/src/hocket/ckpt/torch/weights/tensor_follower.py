"""A follower that updates the tensors of a module in place, each rank those that it holds."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.tree import flatten
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.torch.layout import TensorInfo, describe
from hocket.ckpt.weights.follower import Follower, Slot, record_of

__all__ = ["TensorFollower"]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorFollower(Follower):
    """A follower whose memory is that of torch tensors, which are updated in place.

    Tensors and DTensors are taken, under any layout: each rank reads its own part of each. Tensors on a
    device are updated through a copy in host memory, which the follower keeps. Ranks update on their own,
    each to the version that is newest when it looks.

    Args:
        uri: The folder or prefix of a `Publisher`.
        into: A state tree as it was published, such as `model.state_dict()`; only its tensors are used.
        scratch_bytes: Memory limit for the bytes that are read, beside the tensors.

    Example:
        >>> weights = {"weight": torch.zeros(3)}
        >>> TensorFollower(versions, weights).update().step
        2
        >>> weights
        {'weight': tensor([0., 1., 4.])}
    """

    def __init__(self, uri: str | os.PathLike[str], into: object, *, scratch_bytes: int = 64 << 20) -> None:
        super().__init__(uri, into={}, scratch_bytes=scratch_bytes)
        is_parallel = dist.is_available() and dist.is_initialized()
        infos = describe(
            flatten(into, tensor_type=torch.Tensor).tensors,
            rank=dist.get_rank() if is_parallel else 0,
            world_size=dist.get_world_size() if is_parallel else 1,
            peers=None,
        )
        self._infos = [info for info in infos if info.same_as is None and info.box is not None]
        self._copies: dict[str, torch.Tensor] = {}

    def _has_slots_of(self, manifest: Manifest) -> bool:
        for info in self._infos:
            self._check(info, manifest)
        return True

    def _new_slots(self, manifest: Manifest) -> list[Slot]:
        slots = []
        for info in self._infos:
            self._check(info, manifest)
            assert info.box is not None
            memory = info.local
            if memory.device.type != "cpu":
                memory = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
                self._copies[info.name] = memory
            slots.append(Slot(info.name, info.box, _as_array(memory, info.name)))
        return slots

    def _check(self, info: TensorInfo, manifest: Manifest) -> None:
        if info.name not in manifest.tensors:
            raise CheckpointIncompatibleError(f"`{self.uri}` has no tensor `{info.name}`, which `into` has")
        record = record_of(manifest, info.name)
        if (record.shape, record.dtype) != (info.shape, info.dtype):
            raise CheckpointIncompatibleError(
                f"`{info.name}` is {info.dtype} of shape {list(info.shape)} in `into`; `{self.uri}` has "
                f"{record.dtype} of shape {list(record.shape)}"
            )

    @torch.no_grad()
    def _finish(self) -> None:
        for info in self._infos:
            if info.name in self._copies:
                info.local.copy_(self._copies[info.name], non_blocking=True)
        for device in {info.local.device for info in self._infos if info.name in self._copies}:
            torch.accelerator.synchronize(device)


def _as_array(memory: torch.Tensor, name: str) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array with items of its size; NumPy has no bf16."""
    if memory.is_conj() or memory.is_neg():
        raise CheckpointStateError(f"`{name}` is a conjugate or negative view and cannot be updated in place")
    if memory.is_complex():
        array: npt.NDArray[Any] = memory.numpy()
        return array
    view = (
        memory.view(_SAME_SIZE[memory.itemsize])
        if memory.ndim
        else memory.reshape(1).view(_SAME_SIZE[memory.itemsize])
    )
    return np.asarray(view.numpy()).reshape(tuple(memory.shape)) if not memory.ndim else view.numpy()
