"""FSDP2 layouts, gradient synchronisation and the launcher for Hocket's trainer."""

from hocket.dist.clipping import clip_grad_norm_
from hocket.dist.config import FSDPConfig
from hocket.dist.deepspeed import DeepSpeedSettings, translate_deepspeed
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
from hocket.dist.notebook import notebook_launcher
from hocket.dist.parallelism import FSDPParallelism, ReplicatedParallelism
from hocket.dist.parallelism_config import ParallelismConfig
from hocket.dist.process_group import ProcessGroup, Reduction, join
from hocket.dist.provider import provide
from hocket.dist.safetensors_load import load_safetensors
from hocket.dist.world import World, read_world

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
