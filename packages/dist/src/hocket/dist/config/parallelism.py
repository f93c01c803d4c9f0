"""`ParallelismConfig`: the axes of the device mesh over which a model is spread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.key_table import names_keys, unknown_key
from hocket.dist.errors import ConfigError

_FUTURE_AXES = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "ep": "expert parallelism",
}


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig:
    """The axes of the device mesh. Only `fsdp` is implemented; the others are refused by name.

    Raises:
        ConfigError: An axis that is not implemented is set.
    """

    fsdp: FSDPConfig | None = None
    """Data parallelism with sharded parameters; a dict becomes an `FSDPConfig`, None replicates the model."""

    tp: Any = None
    """Tensor parallelism."""

    cp: Any = None
    """Context parallelism."""

    pp: Any = None
    """Pipeline parallelism."""

    ep: Any = None
    """Expert parallelism."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fsdp", as_fsdp_config(self.fsdp))
        for axis, name in _FUTURE_AXES.items():
            value = getattr(self, axis)
            if value is not None and not _is_degree_one(value):
                raise ConfigError(
                    f"`parallelism_config['{axis}']` is {value!r}: {name} is not implemented. Leave `{axis}` "
                    "out and shard with `fsdp`"
                )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict such as `{"fsdp": {...}}`; Composer's `fsdp2` is the same as `fsdp`.

        Raises:
            ConfigError: A key is unknown, an axis is given twice, or an axis is not implemented.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"`parallelism_config` is a {type(config).__name__}, expected a dict")
        axes: dict[str, Any] = {}
        for given, value in config.items():
            key = str(given).lower()
            if key in axes:
                raise ConfigError(f"`parallelism_config` has the axis `{key}` twice. Set it once")
            axes[key] = value
        if axes.get("fsdp") is not None and axes.get("fsdp2") is not None:
            raise ConfigError(
                "`parallelism_config` has both `fsdp` and `fsdp2`, which are the same. Set one of them"
            )
        fsdp2 = axes.pop("fsdp2", None)
        fsdp = fsdp2 if axes.get("fsdp") is None else axes["fsdp"]
        for key in axes:
            if key not in ("fsdp", *_FUTURE_AXES):
                raise ConfigError(unknown_key(key, ("fsdp", "fsdp2", *_FUTURE_AXES), "parallelism_config"))
        return cls(**{**axes, "fsdp": fsdp})


def as_fsdp_config(config: Any) -> FSDPConfig | None:
    """Return an `FSDPConfig` for a dict, an `FSDPConfig` or None.

    Raises:
        ConfigError: The value is something else, or a key of the dict is wrong.
    """
    if config is None or isinstance(config, FSDPConfig):
        return config
    if isinstance(config, Mapping):
        return FSDPConfig.from_mapping(config)
    raise ConfigError(f"`fsdp_config` is a {type(config).__name__}, expected a dict, an `FSDPConfig` or None")


def _is_degree_one(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value.values()) == {1}
        and all(str(key).endswith("degree") for key in value)
    )
