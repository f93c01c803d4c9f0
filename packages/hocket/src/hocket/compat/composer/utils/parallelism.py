"""Composer's configurations of sharding, over those of `hocket.dist`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

import hocket.dist as _dist
from hocket.compat.composer.utils.string_enum import StringEnum
from hocket.trainer.errors import TrainerConfigError


class ParallelismType(StringEnum):
    """Names of the axes of `parallelism_config`."""

    FSDP = "fsdp"
    FSDP2 = "fsdp2"
    TP = "tp"


class FSDPConfig(_dist.FSDPConfig):
    """`hocket.dist.FSDPConfig`, made of the keys that `Trainer(fsdp_config=…)` takes.

    Args:
        **keys: As `hocket.dist.FSDPConfig.from_mapping`; those without an effect under FSDP2 are accepted.

    Raises:
        ConfigError: If a key is unknown or cannot be honoured.
    """

    __slots__ = ()

    def __init__(self, **keys: Any) -> None:
        _take_fields(self, _dist.FSDPConfig.from_mapping(keys))


class ParallelismConfig(_dist.ParallelismConfig):
    """`hocket.dist.ParallelismConfig` with Composer's arguments.

    Args:
        fsdp: The sharding of the model; a dict becomes an `FSDPConfig`.
        tp: Tensor parallelism: a `TPConfig`, or a dict of its arguments.
        fsdp2: Another name of `fsdp`.

    Raises:
        ConfigError: If both names are given.
    """

    __slots__ = ()

    def __init__(self, fsdp: Any = None, tp: Any = None, fsdp2: Any = None) -> None:
        _take_fields(self, _dist.ParallelismConfig.from_mapping({"fsdp": fsdp, "tp": tp, "fsdp2": fsdp2}))

    @property
    def fsdp2(self) -> _dist.FSDPConfig | None:
        """The same as `fsdp`: every sharding is FSDP2's here."""
        return self.fsdp


class TPConfig(_dist.TensorParallelConfig):
    """`hocket.dist.TensorParallelConfig` with Composer's arguments.

    Args:
        device_mesh: Not taken; the degrees make the mesh.
        tensor_parallel_degree: Ranks that share each cut matrix.
        layer_plan: The style of each module by its name: a name of a style, or a `ParallelStyle` of torch.

    Raises:
        ConfigError: If there is a mesh, or the plan has an unknown style.
    """

    __slots__ = ()

    def __init__(
        self, device_mesh: Any = None, tensor_parallel_degree: int = 1, layer_plan: Any = None
    ) -> None:
        keys = {"device_mesh": device_mesh, "degree": tensor_parallel_degree, "plan": layer_plan}
        _take_fields(self, _dist.TensorParallelConfig.from_mapping(keys))


def _take_fields(config: Any, made: Any) -> None:
    for field in fields(made):
        object.__setattr__(config, field.name, getattr(made, field.name))


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
    return FSDPConfig(**keys)


__all__ = ["FSDP2Config", "FSDPConfig", "ParallelismConfig", "ParallelismType"]


def is_model_fsdp(model: nn.Module) -> bool:
    """Return whether a part of a model is sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules())
