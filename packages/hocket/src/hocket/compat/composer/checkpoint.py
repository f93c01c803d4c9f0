"""The states of a model, an optimizer and a run as dicts, as `composer.checkpoint`."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.optim import Optimizer

from hocket.compat.composer.utils import dist
from hocket.compat.composer.utils.environment import STR_TO_DTYPE, get_composer_env_dict
from hocket.compat.composer.utils.names import format_name_with_dist_and_time, parse_uri
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.compat.composer.utils.object_store import get_file, maybe_create_object_store_from_uri
from hocket.compat.composer.utils.reproducibility import get_rng_state
from hocket.trainer import State
from hocket.trainer.checkpoint.registry import states_of
from hocket.trainer.errors import TrainerConfigError

Keys = str | Sequence[str] | None


def get_model_state_dict(
    model: nn.Module,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Keys = None,
    ignore_keys: Keys = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return a model's state by name. Collective where the model is sharded.

    Args:
        model: Any module.
        sharded_state_dict: Whether tensors stay sharded; otherwise only rank 0 has them, whole.
        precision: The type of its floating-point tensors.
        include_keys: Globs of names to return; None for all.
        ignore_keys: Globs of names to leave out.
        cpu_offload: Whether tensors are moved to the CPU; by default whole tensors are.

    Raises:
        ValueError: If both kinds of keys are given.
    """
    options = _options(sharded_state_dict, cpu_offload)
    state = torch_states.get_model_state_dict(model, options=options)
    return {
        name: _cast(value, precision) for name, value in _chosen(state, include_keys, ignore_keys).items()
    }


def get_optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    sharded_state_dict: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Keys = None,
    ignore_keys: Keys = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state, by the names of its parameters; arguments as `get_model_state_dict`."""
    options = _options(sharded_state_dict, cpu_offload)
    state_dict: Any = torch_states.get_optimizer_state_dict(model, optimizer, options=options)
    states: Any = _chosen(state_dict.get("state", {}), include_keys, ignore_keys)
    cast = {
        name: {field: _cast(value, precision) for field, value in fields.items()}
        for name, fields in states.items()
    }
    return {**state_dict, "state": cast}


def get_metadata_state_dict(
    model: nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: str | torch.dtype | None = None,
    device: Any = None,
    device_train_microbatch_size: float | None = None,
) -> dict[str, Any]:
    """Return the environment and settings of a run, as plain values."""
    environment = get_composer_env_dict()
    metadata: dict[str, Any] = {
        "composer_version": environment["composer_version"],
        "composer_commit_hash": environment["composer_commit_hash"],
        "torch_version": environment["torch_version"],
        "python_version": environment["python_version"],
        "num_nodes": environment["node_world_size"],
        "num_gpus_per_node": environment["accelerators_per_node"],
        "num_gpus": dist.get_world_size(),
        "gpu_model": environment["accelerator_model_name"],
        "cpu_model": environment["cpu_model_name"],
        "cpu_core_count": environment["cpu_core_count"],
    }
    if model is not None:
        inner = getattr(model, "model", None)
        metadata["model_name"] = type(model).__name__ if inner is None else type(inner).__name__
    settings = {
        "sharded_state_dict": sharded_state_dict,
        "precision": None if precision is None else str(precision).removeprefix("torch."),
        "device": None if device is None else str(device),
        "device_train_microbatch_size": device_train_microbatch_size,
    }
    return metadata | {name: value for name, value in settings.items() if value is not None}


def get_resumption_state_dict(state: State) -> dict[str, Any]:
    """Return the state that a run needs to resume, without its model and optimizer. Collective."""
    return {
        "run_name": state.run_name,
        "seed": state.seed,
        "timestamp": state.timestamp.state_dict(),
        "callbacks": states_of(state.callbacks),
        "algorithms": states_of(state.algorithms),
        "schedulers": states_of(state.schedulers),
        "rng": get_rng_state(),
    }


def download_monolithic_checkpoint(
    source_uri: str,
    destination_path: str | os.PathLike[str],
    global_rank_zero_only: bool = True,
) -> None:
    """Fetch a checkpoint of one file: on rank 0, or on the first rank of each node. Collective."""
    rank = dist.get_global_rank() if global_rank_zero_only else dist.get_local_rank()
    if rank == 0:
        Path(destination_path).parent.mkdir(parents=True, exist_ok=True)
        get_file(source_uri, destination_path, overwrite=True)
    dist.barrier()


def upload_file(
    dest_dir: str,
    source_path: str | os.PathLike[str],
    *,
    async_upload: bool = True,
    state: State | None = None,
    overwrite: bool = False,
) -> Future[None]:
    """Store a file under a URI, on a thread of its own unless `async_upload` is False.

    Args:
        dest_dir: The URI of its folder, with fields if `state` is given.
        source_path: The file.
        async_upload: Whether to return before the file is stored; the future then raises the upload's error.
        state: Fills in the fields.
        overwrite: Whether to replace an object that is there.
    """
    path = Path(source_path)
    if state is not None:
        dest_dir = format_name_with_dist_and_time(dest_dir, state.run_name, state.timestamp)
    store = maybe_create_object_store_from_uri(dest_dir)
    if store is None:
        raise TrainerConfigError(f"`dest_dir` is `{dest_dir}`; expected a URI such as `s3://bucket/folder`")
    name = f"{parse_uri(dest_dir)[2].rstrip('/')}/{path.name}".lstrip("/")

    def send() -> None:
        if not overwrite and name in store.list_objects(name):
            raise FileExistsError(f"`{store.get_uri(name)}` is there; give `overwrite=True`")
        store.upload_object(name, path)

    threads = ThreadPoolExecutor(1, thread_name_prefix="hocket-upload")
    sent = threads.submit(send)
    threads.shutdown(wait=not async_upload)
    if not async_upload:
        sent.result()
    return sent


def _options(is_sharded: bool, cpu_offload: bool | None) -> torch_states.StateDictOptions:
    is_offloaded = not is_sharded if cpu_offload is None else cpu_offload
    return torch_states.StateDictOptions(full_state_dict=not is_sharded, cpu_offload=is_offloaded)


def _chosen(state: Mapping[str, Any], include: Keys, ignore: Keys) -> dict[str, Any]:
    if include is not None and ignore is not None:
        raise ValueError("`include_keys` and `ignore_keys` are both given; leave one of them out")
    wanted, unwanted = ensure_tuple(include), ensure_tuple(ignore)

    def fits(name: str, globs: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, glob) for glob in globs)

    return {
        name: value
        for name, value in state.items()
        if (include is None or fits(name, wanted)) and not fits(name, unwanted)
    }


def _cast(value: Any, precision: str | torch.dtype) -> Any:
    dtype = precision if isinstance(precision, torch.dtype) else STR_TO_DTYPE[str(precision)]
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


__all__ = [
    "download_monolithic_checkpoint",
    "get_metadata_state_dict",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_resumption_state_dict",
    "upload_file",
]
