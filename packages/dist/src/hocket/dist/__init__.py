"""FSDP2 layouts, gradient synchronisation and the launcher for Hocket's trainer.

- `provider`: the entry point by which the trainer finds this package
- `parallelism`: the sharded layout as the trainer uses it, and the base of all layouts
- `replicated_parallelism`: the whole model on every rank
- `pipeline_parallelism`: the same for a model that is cut into stages
- `drill`: faults that are injected into a user's own job, and the table of how it takes them
- `launch`: `hocket-launch`, its plan of memory, its verdict and report, and the launcher for notebooks
- `memory`: estimates of the memory on each rank, and advice when it runs out
- `layout`: wrapping, cutting, sharding and copying of a model, its values, optimizers and clipping
- `given_parallelism`: a model that arrives laid out
- `ranks`: the place of each rank, the device mesh, exchanges, diagnosis of failures, injected faults
- `config`: the keys of FSDP, tensor parallelism, DeepSpeed and the mesh
- `ray`: training functions for Ray's `TorchTrainer`
- `errors`: the errors, one class for each way of handling it

Names are imported on first use, so that the launcher can prepare its process before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.dist.config.deepspeed import DeepSpeedSettings, translate_deepspeed
    from hocket.dist.config.fsdp import FSDPConfig
    from hocket.dist.config.parallelism import ParallelismConfig
    from hocket.dist.config.tensor_parallel import TensorParallelConfig
    from hocket.dist.errors import (
        AbsentRanksError,
        CollectiveError,
        ConfigError,
        DistError,
        ModelError,
        OptimizerError,
        PreflightError,
        RankFailedError,
        WeightsError,
        WorldError,
        WrapError,
    )
    from hocket.dist.launch.notebook import notebook_launcher
    from hocket.dist.layout.clipping import clip_grad_norm_
    from hocket.dist.layout.safetensors_load import load_safetensors
    from hocket.dist.parallelism import FSDPParallelism
    from hocket.dist.provider import provide
    from hocket.dist.ranks.process_group import ProcessGroup, Reduction, join
    from hocket.dist.ranks.world import World, read_world
    from hocket.dist.replicated_parallelism import ReplicatedParallelism

__all__ = [
    "AbsentRanksError",
    "CollectiveError",
    "ConfigError",
    "DeepSpeedSettings",
    "DistError",
    "FSDPConfig",
    "FSDPParallelism",
    "ModelError",
    "OptimizerError",
    "ParallelismConfig",
    "PreflightError",
    "ProcessGroup",
    "RankFailedError",
    "Reduction",
    "ReplicatedParallelism",
    "TensorParallelConfig",
    "WeightsError",
    "World",
    "WorldError",
    "WrapError",
    "clip_grad_norm_",
    "join",
    "load_safetensors",
    "notebook_launcher",
    "provide",
    "read_world",
    "translate_deepspeed",
]

_MODULES = {
    "AbsentRanksError": "errors",
    "CollectiveError": "errors",
    "ConfigError": "errors",
    "DeepSpeedSettings": "config.deepspeed",
    "DistError": "errors",
    "FSDPConfig": "config.fsdp",
    "FSDPParallelism": "parallelism",
    "ModelError": "errors",
    "OptimizerError": "errors",
    "ParallelismConfig": "config.parallelism",
    "PreflightError": "errors",
    "ProcessGroup": "ranks.process_group",
    "RankFailedError": "errors",
    "Reduction": "ranks.process_group",
    "ReplicatedParallelism": "replicated_parallelism",
    "TensorParallelConfig": "config.tensor_parallel",
    "WeightsError": "errors",
    "World": "ranks.world",
    "WorldError": "errors",
    "WrapError": "errors",
    "clip_grad_norm_": "layout.clipping",
    "join": "ranks.process_group",
    "load_safetensors": "layout.safetensors_load",
    "notebook_launcher": "launch.notebook",
    "provide": "provider",
    "read_world": "ranks.world",
    "translate_deepspeed": "config.deepspeed",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
