"""FSDP2 layouts, gradient synchronisation and the launcher for Hocket's trainer."""

from hocket.dist.clipping import clip_grad_norm_
from hocket.dist.config import FSDPConfig
from hocket.dist.errors import (
    AbsentRanksError,
    CollectiveError,
    ConfigError,
    DistError,
    ModelError,
    OptimizerError,
    WorldError,
    WrapError,
)
from hocket.dist.parallelism import FSDPParallelism, ReplicatedParallelism
from hocket.dist.process_group import ProcessGroup, Reduction, join
from hocket.dist.provider import provide
from hocket.dist.world import World, read_world

__all__ = [
    "AbsentRanksError",
    "CollectiveError",
    "ConfigError",
    "DistError",
    "FSDPConfig",
    "FSDPParallelism",
    "ModelError",
    "OptimizerError",
    "ProcessGroup",
    "Reduction",
    "ReplicatedParallelism",
    "World",
    "WorldError",
    "WrapError",
    "clip_grad_norm_",
    "join",
    "provide",
    "read_world",
]
