"""The device of this process."""

from __future__ import annotations

import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.job_place import JobPlaceError, choose_gpu
from hocket.trainer.process.world import find_place

_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def choose_device(given: str | torch.device | None) -> torch.device:
    """Return the device to train on: a GPU if there is one, unless another is given.

    Args:
        given: `"cpu"`, `"gpu"`, anything that `torch.device` takes, or None. A GPU without an index is the
            one of this process's local rank, or the only one that it sees.

    Raises:
        TrainerConfigError: If there is no such device.
    """
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda" if given == "gpu" else given)
    except RuntimeError as error:
        raise TrainerConfigError(
            f"`device` is `{given}`; expected `cpu`, `gpu` or a device of torch such as `cuda:0`"
        ) from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise TrainerConfigError(
            f"`device` is `{given}`; Hocket trains on `cpu`, `gpu` (or `cuda`) and `mps`"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TrainerConfigError(f"`device` is `{given}`, and torch finds no Apple GPU; use `cpu`")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise TrainerConfigError(f"`device` is `{given}`, and torch finds no GPU; use `cpu`, or mend CUDA")
    if device == torch.device("cuda"):
        device = torch.device("cuda", _own_gpu())
    torch.cuda.set_device(device)
    return device


def _own_gpu() -> int:
    """Return the index of this process's GPU."""
    place = find_place()
    if place is not None and place.local_rank is None and (chosen := torch.cuda.current_device()):
        return chosen  # the code that made the process group has chosen the device, too
    try:
        return choose_gpu(place, torch.cuda.device_count())
    except JobPlaceError as error:
        raise TrainerConfigError(str(error)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_MESSAGE in str(error)
