"""Composer's configurations of sharding, over those of `hocket.dist`."""

from __future__ import annotations

from typing import Any

from hocket.compat.composer.utils.small import StringEnum
from hocket.dist import FSDPConfig
from hocket.trainer.errors import TrainerConfigError


class ParallelismType(StringEnum):
    """Names of the axes of `parallelism_config`."""

    FSDP = "fsdp"
    FSDP2 = "fsdp2"
    TP = "tp"


def FSDP2Config(device_mesh: Any = None, **keys: Any) -> FSDPConfig:  # noqa: N802 - Composer's name
    """Return an `FSDPConfig`: every sharding is FSDP2's here.

    Args:
        device_mesh: Not taken; the degrees of the configuration make the mesh.
        **keys: As `FSDPConfig.from_mapping`.

    Raises:
        TrainerConfigError: If there is a mesh.
    """
    if device_mesh is not None:
        raise TrainerConfigError(
            "`device_mesh` is given to `FSDP2Config`; expected `data_parallel_shard_degree` and "
            "`data_parallel_replicate_degree`, of which the mesh is made"
        )
    return FSDPConfig.from_mapping(keys)
