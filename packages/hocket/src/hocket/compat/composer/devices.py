"""Devices, as `composer.devices`: names for torch's own."""

from __future__ import annotations

import torch

from hocket.compat.composer.absent import absent_from

#: The class of all devices.
Device = torch.device


def DeviceCPU() -> torch.device:  # noqa: N802 - Composer's name
    """Return the CPU, for `Trainer(device=…)`."""
    return torch.device("cpu")


def DeviceGPU(device_id: int | None = None, *, allow_tf32: bool = True) -> torch.device:  # noqa: N802
    """Return a CUDA device, for `Trainer(device=…)`: of the number given, else the rank's own."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    return torch.device("cuda") if device_id is None else torch.device("cuda", device_id)


def DeviceMPS() -> torch.device:  # noqa: N802 - Composer's name
    """Return the GPU of an Apple computer, for `Trainer(device=…)`."""
    return torch.device("mps")


__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceMPS"]

__getattr__ = absent_from("composer.devices")
