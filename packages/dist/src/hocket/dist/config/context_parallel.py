"""`ContextParallelConfig`: the degree of context parallelism, and how ranks attend over all positions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from hocket.dist.config.key_table import names_keys, unknown_key
from hocket.dist.errors import ConfigError

METHODS = ("ulysses", "ring")
ROTATIONS = ("allgather", "alltoall")
"""The ways in which keys and values reach the ranks of a ring, by torch's names."""
RING_ADVICE = "set `method` to 'ring' in `parallelism_config['cp']`, which shares no heads"


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallelConfig:
    """The settings of context parallelism.

    Raises:
        ConfigError: A value is unknown, or has no effect with the method.
    """

    degree: int = 1
    """Ranks that share each sequence; -1 uses all ranks that the other axes leave."""

    method: str = "ulysses"
    """How a rank attends over the positions of the others: `ulysses` exchanges positions for heads, so that
    the degree divides the heads of queries and of keys; `ring` sends keys and values around the ranks, for
    any number of heads, and takes no dropout in attention."""

    rotate_method: str | None = None
    """How keys and values reach the other ranks of `ring`: `allgather`, the default, all at once, or
    `alltoall`, which holds those of one other rank at a time and sends them on."""

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("rotate_method", (None, *ROTATIONS))):
            if (value := getattr(self, name)) not in known:
                listed = " or ".join(repr(one) for one in known if one)
                raise ConfigError(f"`parallelism_config['cp']['{name}']` is {value!r}, expected {listed}")
        if self.rotate_method is not None and self.method != "ring":
            raise ConfigError(
                f"`parallelism_config['cp']['rotate_method']` is {self.rotate_method!r}, which belongs to "
                f"the method 'ring', and the method is {self.method!r}. Leave it out, or set 'ring'"
            )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict.

        Raises:
            ConfigError: A key is unknown, or a value cannot be honoured.
        """
        names = [field.name for field in fields(cls)]
        for key in config:
            if key not in names:
                raise ConfigError(unknown_key(str(key), names, "parallelism_config['cp']"))
        return cls(**{key: value for key, value in config.items() if value is not None})

    @property
    def is_ring(self) -> bool:
        """Whether keys and values travel around the ranks."""
        return self.method == "ring"

    @property
    def rotation(self) -> str:
        """How keys and values reach the other ranks of a ring."""
        return self.rotate_method or ROTATIONS[0]
