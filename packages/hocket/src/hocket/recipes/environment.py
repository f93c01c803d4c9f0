"""A description of the machine and the installation, for reports: versions, devices, stores, variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["describe", "lines"]

_LIBRARIES = (
    "torch",
    "numpy",
    "safetensors",
    "torchmetrics",
    "transformers",
    "peft",
    "torchao",
    "bitsandbytes",
    "triton",
    "mosaicml",
    "mosaicml-streaming",
)
_FLAGS = re.compile(
    r"(HOCKET|TORCH|PYTORCH|NCCL|CUDA|OMP|MKL|GLOO|RANK$|WORLD_SIZE$|LOCAL_|NODE_RANK$|MASTER_|SLURM_N|HF_HUB_OFFLINE)"
)
_STORES = {
    "s3": re.compile(r"(AWS|S3)_"),
    "gs": re.compile(r"(GOOGLE|GCS)_|STORAGE_EMULATOR_HOST$"),
    "az": re.compile(r"AZURE_"),
}
_FILES = {
    "s3": "~/.aws/config",
    "gs": "~/.config/gcloud/application_default_credentials.json",
    "az": "~/.azure",
}
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING")


def describe() -> dict[str, Any]:
    """Return the description, without secrets: of variables of stores the names, of endpoints the host."""
    return {
        "packages": dict(_packages()),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": _torch(),
        "stores": {name: _store(name, pattern) for name, pattern in _STORES.items()},
        "variables": {
            name: "(not shown)" if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _FLAGS.match(name)
        },
    }


def lines(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a description as text."""
    for title, content in description.items():
        if isinstance(content, Mapping) and content:
            yield f"{title}:"
            for name, value in content.items():
                shown = ", ".join(map(str, value)) if isinstance(value, list) else value
                yield f"  {name}: {shown if shown not in (None, '') else '-'}"
        else:
            yield f"{title}: {content or '-'}"


def _packages() -> Iterator[tuple[str, str]]:
    names = {
        found.name: found.version
        for found in importlib.metadata.distributions()
        if found.name and found.name.startswith("hocket")
    }
    yield from sorted(names.items())
    for name in _LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _torch() -> dict[str, Any]:
    # Imported here so that `hocket --help` does not wait for it.
    import torch
    from torch import distributed

    devices = [
        f"{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        for index in range(torch.cuda.device_count())
        for found in [torch.cuda.get_device_properties(index)]
    ]
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if devices else None,  # type: ignore[no-untyped-call]
        "devices": devices or ["cpu, and mps" if torch.backends.mps.is_available() else "cpu alone"],
        "bf16": torch.cuda.is_bf16_supported() if devices else None,
        "backends": [name for name in backends if distributed.is_backend_available(name)]
        if distributed.is_available()
        else [],
        "threads": torch.get_num_threads(),
    }


def _store(name: str, pattern: re.Pattern[str]) -> str:
    shown = []
    for variable, value in sorted(os.environ.items()):
        if pattern.match(variable):
            # An address may carry a password.
            is_address = "ENDPOINT" in variable or variable.endswith("_HOST")
            host = (urlsplit(value if "//" in value else f"//{value}").hostname or "?") if is_address else ""
            shown.append(f"{variable} is set" + f" ({host})" * is_address)
    if Path(_FILES[name]).expanduser().exists():
        shown.append(f"{_FILES[name]} exists")
    return "; ".join(shown) or "nothing is set"
