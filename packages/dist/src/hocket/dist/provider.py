"""Where the trainer finds `hocket.dist`: the entry point `parallelism` of the group `hocket.providers`."""

from collections.abc import Mapping
from typing import Any

import torch

from hocket.dist.config import FSDPConfig
from hocket.dist.errors import ConfigError
from hocket.dist.mesh import degrees
from hocket.dist.parallelism import FSDPParallelism, ReplicatedParallelism
from hocket.dist.process_group import join
from hocket.dist.world import read_world


def provide(
    config: Mapping[str, Any] | FSDPConfig | None = None,
    *,
    device: torch.device | str,
    timeout_s: float = 600.0,
) -> FSDPParallelism | ReplicatedParallelism:
    """Join the other ranks and return the layout that `config` asks for.

    Collective: the first thing any rank does with the others, so a rank that is absent is named here. The
    config is checked before anything is waited for.

    Args:
        config: None replicates the model; a config or a dict of its keys shards it with FSDP2.
        device: Where to train, "cpu" or "cuda".
        timeout_s: Seconds to wait for absent ranks, and for each collective afterwards.

    Returns:
        A layout whose `close()` leaves the process group if it was made here.

    Raises:
        ConfigError: The config has an unknown key or a value that cannot be honoured.
        WorldError: The launcher's environment is incomplete or contradicts itself.
        AbsentRanksError: Ranks did not appear in time.
    """
    if isinstance(config, Mapping):
        config = FSDPConfig.from_mapping(config)
    if config is not None and not isinstance(config, FSDPConfig):
        raise ConfigError(
            f"`fsdp_config` is a {type(config).__name__}, expected a dict, an `FSDPConfig` or None."
        )
    if not timeout_s > 0:
        raise ConfigError(f"`timeout_s` is {timeout_s!r}, expected seconds above 0.")
    if config is not None:
        degrees(config, read_world().world_size)
    group = join(device=torch.device(device), timeout_s=timeout_s, needs_group=config is not None)
    try:
        return ReplicatedParallelism(group) if config is None else FSDPParallelism(config, group)
    except BaseException:
        group.close()
        raise
