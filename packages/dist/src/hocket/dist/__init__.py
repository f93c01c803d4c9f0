"""FSDP2 layouts, gradient synchronisation and the launcher for Hocket's trainer.

- `provider`: the entry point by which the trainer finds this package
- `parallelism`: the two layouts as the trainer uses them, sharded and replicated
- `launch`: `hocket-launch`, its plan of memory, its report, and the launcher for notebooks
- `memory`: estimates of the memory on each rank, and advice when it runs out
- `layout`: wrapping, sharding and copying of a model, initial values, weights, optimizers and clipping
- `ranks`: the place of each rank, the device mesh, exchanges between ranks, and the diagnosis of failures
- `config`: the keys of FSDP, DeepSpeed and the mesh
- `errors`: the errors, one class for each way of handling it
"""

from hocket.dist.config.deepspeed import DeepSpeedSettings, translate_deepspeed
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.parallelism import ParallelismConfig
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
from hocket.dist.parallelism import FSDPParallelism, ReplicatedParallelism
from hocket.dist.provider import provide
from hocket.dist.ranks.process_group import ProcessGroup, Reduction, join
from hocket.dist.ranks.world import World, read_world

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
