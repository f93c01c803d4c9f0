"""`PipelineConfig`: the degree of pipeline parallelism, its schedule and the first blocks of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from hocket.dist.config.key_table import names_keys, unknown_key
from hocket.dist.errors import ConfigError

SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""The schedules of `torch.distributed.pipelining`."""
ONE_STAGE = ("1F1B", "GPipe")
"""Those that give a rank one stage."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Those that give a rank two stages, so that the first rank has the first and the last one."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""Those that compute the gradients of the weights later than those of the activations."""


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """The settings of pipeline parallelism.

    Raises:
        ConfigError: The schedule is unknown or does not give a rank `stages_per_rank`, or `split` does not
            begin one stage fewer than there are.
    """

    degree: int = 1
    """Ranks that share the blocks; -1 uses all ranks that the other axes leave."""

    schedule: str = "1F1B"
    """The schedule of the microbatches, by torch's name: `1F1B` and `GPipe` give a rank one stage,
    `LoopedBFS`, `Interleaved1F1B` and `InterleavedZeroBubble` two or more, `ZBVZeroBubble` and `DualPipeV`
    two."""

    stages_per_rank: int = 0
    """The stages of a rank; 0 takes as few as the schedule allows, 1 or 2."""

    split: Sequence[str] | None = None
    """The names of the blocks at which the second and each later stage begins, such as `["blocks.2"]`. None
    cuts the blocks so that the largest stage is as small as possible."""

    def __post_init__(self) -> None:
        known = {name.lower(): name for name in SCHEDULES}
        name = known.get(self.schedule.lower()) if isinstance(self.schedule, str) else None
        if name is None:
            raise ConfigError(
                f"`parallelism_config['pp']['schedule']` is {self.schedule!r}, which is unknown. Use '1F1B', "
                "which holds the activations of as many microbatches as there are stages, or one of "
                f"{', '.join(repr(one) for one in SCHEDULES[1:])}"
            )
        object.__setattr__(self, "schedule", name)
        least = 1 if name in ONE_STAGE else 2
        stages = self.stages_per_rank
        is_count = isinstance(stages, int) and not isinstance(stages, bool)
        is_exact = name in (*ONE_STAGE, *V_SHAPED)
        if not is_count or (stages and (stages < least or (is_exact and stages != least))):
            expected = f"{least}{'' if is_exact else ' or more'}"
            raise ConfigError(
                f"`parallelism_config['pp']['stages_per_rank']` is {stages!r}, and the schedule '{name}' "
                f"needs {expected}"
            )
        object.__setattr__(self, "stages_per_rank", stages or least)
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

    @property
    def num_stages(self) -> int:
        """The stages of all ranks; `degree` is a number of ranks."""
        return self.degree * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that has a stage."""
        turn, place = divmod(stage, self.degree)
        return self.degree - 1 - place if self.schedule in V_SHAPED and turn else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank of the pipeline, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def check_split(self, degree: int) -> None:
        """Refuse a list of blocks that does not make as many stages as the ranks have.

        Raises:
            ConfigError: It does not.
        """
        stages = degree * self.stages_per_rank if isinstance(degree, int) else 0
        if self.split is not None and stages and len(self.split) != stages - 1:
            per_rank = f" with {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
            raise ConfigError(
                f"`parallelism_config['pp']['split']` names {len(self.split)} blocks, which make "
                f"{len(self.split) + 1} stages, and `degree` is {degree}{per_rank}. Name the {stages - 1} "
                "blocks at which a further stage begins"
            )
