"""`PipelineConfig`: the degree of pipeline parallelism, its schedule and the first blocks of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from hocket.dist.config.key_table import names_keys, unknown_key
from hocket.dist.errors import ConfigError

SCHEDULES = ("1F1B", "GPipe")
_SEVERAL_STAGES = (
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""Schedules of torch that give a rank several stages."""


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """The settings of pipeline parallelism.

    Raises:
        ConfigError: The schedule is unknown, or `split` does not begin one stage fewer than the degree.
    """

    degree: int = 1
    """Stages, each on a rank of its own; -1 uses all ranks that the other axes leave."""

    schedule: str = "1F1B"
    """The schedule of the microbatches, by torch's name: `1F1B` or `GPipe`."""

    split: Sequence[str] | None = None
    """The names of the blocks at which the second and each later stage begins, such as `["blocks.2"]`. None
    cuts the blocks so that the largest stage is as small as possible."""

    def __post_init__(self) -> None:
        known = {name.lower(): name for name in (*SCHEDULES, *_SEVERAL_STAGES)}
        name = known.get(self.schedule.lower()) if isinstance(self.schedule, str) else None
        if name not in SCHEDULES:
            why = "which gives a rank several stages and is not implemented" if name else "which is unknown"
            raise ConfigError(
                f"`parallelism_config['pp']['schedule']` is {self.schedule!r}, {why}. Use '1F1B', which "
                "holds the activations of as many microbatches as there are stages, or 'GPipe', which holds "
                "all of them"
            )
        object.__setattr__(self, "schedule", name)
        if self.split is None:
            return
        if isinstance(self.split, str) or not all(isinstance(one, str) for one in self.split):
            raise ConfigError(
                f"`parallelism_config['pp']['split']` is {self.split!r}, expected a list of names of blocks"
            )
        object.__setattr__(self, "split", tuple(self.split))
        if self.degree != -1:
            self.check_split(self.degree)

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict.

        Raises:
            ConfigError: A key is unknown, or a value cannot be honoured.
        """
        names = [field.name for field in fields(cls)]
        for key in config:
            if key not in names:
                raise ConfigError(unknown_key(str(key), names, "parallelism_config['pp']"))
        return cls(**config)

    def check_split(self, degree: int) -> None:
        """Refuse a list of blocks that does not make as many stages as there are ranks.

        Raises:
            ConfigError: It does not.
        """
        if self.split is not None and isinstance(degree, int) and len(self.split) != degree - 1:
            raise ConfigError(
                f"`parallelism_config['pp']['split']` names {len(self.split)} blocks, which make "
                f"{len(self.split) + 1} stages, and `degree` is {degree}. Name the {degree - 1} blocks at "
                "which a further stage begins"
            )
