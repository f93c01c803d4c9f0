"""Devices, as `composer.devices`: they wrap torch's devices, and move modules and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.compat.composer.absent import absent_from
from hocket.trainer.process.devices import choose_device


class _DeviceMeta(type):
    name: str

    def __instancecheck__(cls, instance: Any) -> bool:
        """Count torch's devices as instances, because `trainer.state.device` is a `torch.device`."""
        if isinstance(instance, torch.device):
            return cls.name in ("", instance.type, {"cuda": "gpu"}.get(instance.type))
        return super().__instancecheck__(instance)


class Device(metaclass=_DeviceMeta):
    """A device to train on, for `Trainer(device=…)` and `State(device=…)`.

    Attributes:
        name: Composer's name of the kind of device.
        dist_backend: The backend of its process groups.
        torch_device: The `torch.device`.
    """

    name: ClassVar[str] = ""
    dist_backend: ClassVar[str] = ""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Move a module, in place, and return it."""
        return module.to(self.torch_device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device; the copy is non-blocking."""
        return tensor.to(self.torch_device, non_blocking=True)

    def batch_to_device(self, batch: Any) -> Any:
        """Return a batch, of nested mappings and sequences, with its tensors on the device."""
        if isinstance(batch, torch.Tensor):
            return self.tensor_to_device(batch)
        if isinstance(batch, Mapping):
            return {key: self.batch_to_device(value) for key, value in batch.items()}
        if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
            items = [self.batch_to_device(item) for item in batch]
            if hasattr(batch, "_fields"):  # a named tuple
                return type(batch)(*items)
            return tuple(items) if isinstance(batch, tuple) else items
        return batch

    def optimizer_to_device(self, optimizer: Optimizer) -> Optimizer:
        """Move an optimizer's state, in place, and return the optimizer."""
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = self.tensor_to_device(value)
        return optimizer


class DeviceCPU(Device):
    """The CPU."""

    name = "cpu"
    dist_backend = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


class DeviceGPU(Device):
    """A CUDA device: the one with the given number, else the rank's own."""

    name = "gpu"
    dist_backend = "nccl"

    def __init__(self, device_id: int | None = None, *, allow_tf32: bool = True) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
        super().__init__(torch.device("cuda") if device_id is None else torch.device("cuda", device_id))


class DeviceMPS(Device):
    """The GPU of an Apple computer."""

    name = "mps"
    dist_backend = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("mps"))


def as_torch_device(device: Any) -> Any:
    """Return the `torch.device` of a `Device`; return any other value unchanged."""
    torch_device = vars(device).get("torch_device") if hasattr(device, "__dict__") else None
    return device if torch_device is None else torch_device


__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceMPS"]

__getattr__ = absent_from("composer.devices")


def get_device(device: Any = None) -> Device:
    """Return the device to train on: a GPU if there is one, unless another is asked for."""
    if isinstance(device, Device) and not isinstance(device, torch.device):
        return device
    chosen = choose_device(device)
    if chosen.type == "cuda":
        return DeviceGPU(chosen.index)
    return DeviceMPS() if chosen.type == "mps" else DeviceCPU()
