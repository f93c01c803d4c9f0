"""Small functions of `composer.utils` that scripts call."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hocket.compat.composer.devices import Device, DeviceCPU, DeviceGPU, DeviceMPS
from hocket.trainer.evaluation.forward_only import restore_modes
from hocket.trainer.process.devices import choose_device

#: torch's number types by name.
STR_TO_DTYPE = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


class StringEnum(Enum):
    """An enumeration of strings; a member, made from its name or string, equals its string, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, str):
            raise TypeError(f"`{cls.__name__}` is made of {value!r}; expected a text or one of its members")
        text = value.lower()
        return next((one for one in cls if text in (str(one.value).lower(), one.name.lower())), None)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is this member or its string."""
        return str(self.value).lower() == str(getattr(other, "value", other)).lower()

    def __hash__(self) -> int:
        """Return the hash of the name."""
        return hash(self.name)


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return None, a single value, several, or the values of a mapping, as a tuple."""
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray, torch.Tensor, np.ndarray)):
        return (x,)
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Iterable) else (x,)


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Return a list, tuple, mapping or single value with a function applied to each value."""
    if isinstance(collection, Mapping):
        return {name: map_fn(value) for name, value in collection.items()}
    if isinstance(collection, (list, tuple)):
        return type(collection)(map_fn(value) for value in collection)
    return map_fn(collection)


def get_free_tcp_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        port: int = bound.getsockname()[1]
    return port


def import_object(name: str) -> Any:
    """Return the object that `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Split a URI into backend, bucket and path; the first two are empty for a local path.

    A bucket's namespace, as in `oci://bucket@namespace/path`, is left out.
    """
    parts = urlsplit(uri)
    if not parts.scheme:
        return "", "", uri
    return parts.scheme, parts.netloc.partition("@")[0], parts.path.lstrip("/")


def get_device(device: Any = None) -> Device:
    """Return the device to train on: a GPU if there is one, unless another is asked for."""
    if isinstance(device, Device) and not isinstance(device, torch.device):
        return device
    chosen = choose_device(device)
    if chosen.type == "cuda":
        return DeviceGPU(chosen.index)
    return DeviceMPS() if chosen.type == "mps" else DeviceCPU()


@contextlib.contextmanager
def model_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode in a `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        restore_modes(modes)


def is_model_fsdp(model: nn.Module) -> bool:
    """Return whether a part of a model is sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules())
