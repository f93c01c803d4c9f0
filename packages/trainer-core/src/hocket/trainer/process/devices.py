"""The device of this process, and the number of processes."""

from __future__ import annotations

import os

import torch

from hocket.trainer.errors import TrainerConfigError

_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def choose_device(given: str | torch.device | None) -> torch.device:
    """Return the device to train on: a GPU if there is one, unless another is given.

    Args:
        given: `"cpu"`, `"gpu"`, anything that `torch.device` takes, or None. A GPU without an index is the
            one of this process's `LOCAL_RANK`.

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
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def world_size() -> int:
    """Return the number of processes of the job: of the process group, else from `WORLD_SIZE`, else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_MESSAGE in str(error)
