"""`ParallelismConfig`: the axes of the device mesh over which a model is spread."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from hocket.dist.config.axes import (
    AXES,
    CP,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    PP,
    TP,
    describe_degrees,
    nearest_layout,
    nearest_layout_of_experts,
)
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.key_table import names_keys, unknown_key
from hocket.dist.config.pipeline import SPLIT_BACKWARD, PipelineConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ConfigError

CONFIG_KEYS = frozenset({*AXES, "fsdp", "fsdp2"})
"""The keys of a `parallelism_config`."""


_BESIDE_STAGES = {
    "cpu_offload": False,
    "ignored_modules": (),
    "param_init_fn": None,
    "initial_weights": None,
    "process_group": None,
    "reshard_after_forward": True,
    "activation_checkpointing": False,
    "activation_cpu_offload": False,
    "sync_module_states": True,
}
"""The keys of FSDP that do not work beside `pp`, and their defaults."""


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig:
    """The axes of the device mesh, each with its degree, the number of ranks along it.

    Example:
        >>> config = ParallelismConfig.from_mapping({"dp_replicate": 2, "tp": 2})
        >>> config.degrees(8)
        {'dp_replicate': 2, 'dp_shard': 2, 'cp': 1, 'tp': 2}

    Raises:
        ConfigError: A degree is no number of ranks, or contradicts the dict of its axis, or the axis is not
            implemented.
    """

    dp_replicate: int | None = None
    """Copies of the sharded model; None for 1, or the degree in `fsdp`."""

    dp_shard: int | None = None
    """Ranks that share one copy of the parameters; -1 or None uses all that the other axes leave."""

    fsdp: FSDPConfig | None = None
    """The sharding over `dp_shard`; a dict becomes an `FSDPConfig`. None replicates the model if no axis has
    a degree, and is the default config otherwise."""

    tp: TensorParallelConfig | None = None
    """Tensor parallelism: a degree, a dict of `degree` and `plan`, or a `TensorParallelConfig`."""

    cp: ContextParallelConfig | None = None
    """Context parallelism, ranks that share each sequence by positions: a degree, a dict of `degree`,
    `method` and `rotate_method`, or a `ContextParallelConfig`."""

    pp: PipelineConfig | None = None
    """Pipeline parallelism: a degree, a dict of `degree`, `schedule`, `stages_per_rank` and `split`, or a
    `PipelineConfig`."""

    ep: Any = None
    """Expert parallelism: so many ranks of `dp_shard` × `cp` share the experts, and -1 all of them; a number,
    or a dict of `degree`. Without `dp_shard` there are only as many as `ep` needs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fsdp", as_fsdp_config(self.fsdp))
        object.__setattr__(self, "tp", _as_tensor_parallel(self.tp))
        object.__setattr__(self, "cp", _as_context_parallel(self.cp))
        object.__setattr__(self, "pp", _as_pipeline(self.pp))
        object.__setattr__(self, "ep", _as_degree(self.ep, EP))
        _check_degrees({EP: self.ep, CP: self._context_degree})
        _check_degrees(self._given())
        self._check_fsdp()

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict such as `{"dp_shard": 4, "tp": 2}` or `{"fsdp": {...}}`.

        Composer's `fsdp2` is the same as `fsdp`.

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
            if key not in CONFIG_KEYS:
                raise ConfigError(unknown_key(key, CONFIG_KEYS, "parallelism_config"))
        return cls(**{**axes, "fsdp": fsdp})

    @property
    def is_replicated(self) -> bool:
        """Whether nothing asks for a mesh, so that each rank has a copy of the model."""
        return (
            self.fsdp is None
            and not self._has_degrees
            and self._context_degree == self._tensor_degree == self.pipeline.degree == (self.ep or 1) == 1
        )

    def degrees(self, world_size: int) -> dict[str, int]:
        """Return the number of ranks along each axis that is not refused, for this many ranks in all.

        Raises:
            ConfigError: The degrees do not multiply to the number of ranks; the nearest layout is named.
        """
        given = self._given()
        filled = [axis for axis, degree in given.items() if degree == -1]
        if given[DP_SHARD] is None and not filled:
            filled = [DP_SHARD]
        if len(filled) > 1:
            raise ConfigError(
                f"`parallelism_config` has -1 for {' and '.join(f'`{axis}`' for axis in filled)}. Only one "
                "axis can take all ranks that are left: state the degrees of the others"
            )
        degrees = {axis: 1 if degree in (None, -1) else int(degree) for axis, degree in given.items()}
        product = math.prod(degrees.values())
        if filled and world_size % product == 0:
            degrees[filled[0]] = world_size // product
        elif product != world_size and self.shares_experts:
            why = f"which does not multiply to the {world_size} ranks of the job"
            raise self._wrong_experts(degrees, world_size, why)
        elif product != world_size:
            told = " × ".join(
                f"`{axis}` {'-1' if axis in filled else degree}"
                for axis, degree in degrees.items()
                if axis != CP or degree > 1 or axis in filled
            )
            raise ConfigError(
                f"`parallelism_config` is {told}, which does not multiply to the {world_size} ranks of the "
                f"job. The nearest layout that does is {nearest_layout(degrees, world_size)}"
            )
        self._check_experts(degrees, world_size)
        return degrees

    @property
    def shares_experts(self) -> bool:
        """Whether ranks share the experts."""
        return self.ep not in (None, 1)

    def expert_degree(self, world_size: int) -> int:
        """Return the ranks that share the experts, for this many ranks in all.

        Raises:
            ConfigError: The degrees do not multiply to the number of ranks, or `ep` does not fit them.
        """
        if not self.shares_experts:
            return 1
        degrees = self.degrees(world_size)
        return degrees[DP_SHARD] * degrees[CP] if self.ep == -1 else int(self.ep)

    def _check_experts(self, degrees: Mapping[str, int], world_size: int) -> None:
        """Refuse a degree of `ep` that the other axes do not fit."""
        if not self.shares_experts:
            return
        if self.ep != -1 and degrees[DP_SHARD] * degrees[CP] % self.ep:
            why = (
                f"and `{EP}` of the ranks of `{DP_SHARD}` × `{CP}` share the experts, so that it divides them"
            )
            raise self._wrong_experts(degrees, world_size, why)

    def _wrong_experts(self, degrees: Mapping[str, int], world_size: int, why: str) -> ConfigError:
        """Return the error of a degree of `ep` that the other axes or the ranks do not fit."""
        wanted = degrees[DP_SHARD] * degrees[CP] if self.ep == -1 else int(self.ep)
        layout = nearest_layout_of_experts(degrees, world_size, wanted)
        return ConfigError(
            f"`parallelism_config` is {describe_degrees({**degrees, EP: wanted})}, {why}. The nearest "
            f"layout of {world_size} ranks is {layout or 'one without `ep`'}"
        )

    @property
    def pipeline(self) -> PipelineConfig:
        """The settings of pipeline parallelism, of degree 1 if there are none."""
        return self.pp or PipelineConfig()

    def pipeline_of(self, world_size: int) -> PipelineConfig | None:
        """Return the pipeline with the degree of this many ranks; None for one stage.

        Raises:
            ConfigError: The degrees do not multiply to the number of ranks.
        """
        if self.pipeline.degree == 1:
            return None
        degrees = self.degrees(world_size)
        self.pipeline.check_split(degrees[PP])
        return None if degrees[PP] == 1 else replace(self.pipeline, degree=degrees[PP])

    def sharding_of_stages(self, world_size: int) -> FSDPConfig | None:
        """Return the config of the sharding of each stage; None if each of its ranks has all of the stage.

        Raises:
            ConfigError: A key of `fsdp` or the schedule does not work beside the axes of the stage.
        """
        degrees = self.degrees(world_size)
        if self.fsdp is None and all(degrees[axis] == 1 for axis in (DP_SHARD, CP, TP)):
            return None
        config = self.sharding(world_size)
        for name, default in _BESIDE_STAGES.items():
            if (value := getattr(config, name)) != default:
                raise ConfigError(
                    f"`parallelism_config` has `{PP}`, and `{name}` in `fsdp` is {value!r}, which does not "
                    f"work beside it. Leave `{name}` out, or leave `{PP}` out"
                )
        if self.pipeline.schedule in SPLIT_BACKWARD:
            asked = {EP: self.expert_degree(world_size), **degrees}
            inner = [axis for axis in (EP, DP_SHARD, CP, TP) if asked[axis] > 1] or ["fsdp"]
            raise ConfigError(
                f"`parallelism_config['pp']['schedule']` is '{self.pipeline.schedule}' with `{inner[0]}`: it "
                "computes the gradients of weights later than the backward pass, at whose end shards reduce "
                f"them. Use 'Interleaved1F1B', or `{DP_REPLICATE}` alone beside `{PP}`"
            )
        # Gathered once a batch, and reduced with its last microbatch.
        strategy = config.sharding_strategy
        kept: Any = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "_HYBRID_SHARD_ZERO2"}
        return replace(config, sharding_strategy=kept.get(strategy, strategy), gradient_sync="last")

    def inner_degrees(self, world_size: int) -> tuple[int, int]:
        """Return the degrees of context and of tensor parallelism for this many ranks.

        Raises:
            ConfigError: The degrees do not multiply to the number of ranks; the nearest layout is named.
        """
        context, tensor = self._context_degree, self._tensor_degree
        if self.shares_experts or self.pipeline.degree != 1:
            degrees = self.degrees(world_size)
            return degrees[CP], degrees[TP]
        if -1 in (context, tensor) or self._has_degrees or world_size % (context * tensor):
            degrees = self.degrees(world_size)
            return degrees[CP], degrees[TP]
        return context, tensor  # the keys of `fsdp`, such as its strategy, divide the ranks that are left

    def sharding(self, world_size: int) -> FSDPConfig:
        """Return the config of the sharding, with the degrees of this many ranks.

        Raises:
            ConfigError: The degrees do not multiply to the number of ranks.
        """
        fsdp = self.fsdp or FSDPConfig()
        if not self._has_degrees and not self.shares_experts:
            return fsdp
        degrees = self.degrees(world_size)
        return replace(
            fsdp,
            data_parallel_shard_degree=degrees[DP_SHARD],
            data_parallel_replicate_degree=degrees[DP_REPLICATE],
        )

    @property
    def _has_degrees(self) -> bool:
        return self.dp_replicate is not None or self.dp_shard is not None

    @property
    def _context_degree(self) -> int:
        return 1 if self.cp is None else self.cp.degree

    @property
    def _tensor_degree(self) -> int:
        return 1 if self.tp is None else self.tp.degree

    def _given(self) -> dict[str, int | None]:
        """Return the degree of each axis as it was given, on the axis or in the dict of FSDP."""
        fsdp = self.fsdp
        shard, replicate = self.dp_shard, self.dp_replicate
        if fsdp is not None and shard is None and fsdp.data_parallel_shard_degree != -1:
            shard = fsdp.data_parallel_shard_degree
        if fsdp is not None and replicate is None:
            replicate = fsdp.data_parallel_replicate_degree
        stages = self.pipeline.degree
        if self.shares_experts and self.ep != -1 and shard is None:
            context = max(self._context_degree, 1)
            shard = math.lcm(self.ep, context) // context
            is_filled = -1 in (self._context_degree, self._tensor_degree, stages)
            replicate = -1 if replicate is None and not is_filled else replicate
        return {
            **({} if stages == 1 and not isinstance(stages, bool) else {PP: stages}),
            DP_REPLICATE: replicate,
            DP_SHARD: shard,
            CP: self._context_degree,
            TP: self._tensor_degree,
        }

    def _check_fsdp(self) -> None:
        """Refuse a degree that is another one in the dict of FSDP."""
        if self.fsdp is None or not self._has_degrees:
            return
        for axis, name, unset in (
            (DP_SHARD, "data_parallel_shard_degree", -1),
            (DP_REPLICATE, "data_parallel_replicate_degree", None),
        ):
            degree, other = getattr(self, axis), getattr(self.fsdp, name)
            if degree not in (None, other) and other != unset:
                raise ConfigError(
                    f"`parallelism_config['{axis}']` is {degree}, and `{name}` in `fsdp` is {other}. Set one "
                    "of them"
                )
        if self.fsdp.process_group is not None:
            raise ConfigError(
                f"`process_group` in `fsdp` is {self.fsdp.process_group!r}, and the degrees "
                f"(`dp_replicate` {self.dp_replicate}, `dp_shard` {self.dp_shard}) are set too. Set only "
                "one of them"
            )


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


def _as_context_parallel(value: Any) -> ContextParallelConfig | None:
    if value is None or isinstance(value, ContextParallelConfig):
        return value
    if isinstance(value, Mapping):
        return ContextParallelConfig.from_mapping(value)
    return ContextParallelConfig(degree=value)


def _as_tensor_parallel(value: Any) -> TensorParallelConfig | None:
    if value is None or isinstance(value, TensorParallelConfig):
        return value
    if isinstance(value, Mapping):
        return TensorParallelConfig.from_mapping(value)
    return TensorParallelConfig(degree=value)


def _as_pipeline(value: Any) -> PipelineConfig | None:
    if value is None or isinstance(value, PipelineConfig):
        return value
    if isinstance(value, Mapping):
        return PipelineConfig.from_mapping(value)
    return PipelineConfig(degree=value)


def _as_degree(value: Any, axis: str) -> Any:
    """Return the degree of an axis that is given as a dict of it, or as it is."""
    if isinstance(value, Mapping):
        for key in value:
            if key != "degree":
                raise ConfigError(unknown_key(key, ("degree",), f"parallelism_config['{axis}']"))
        return value.get("degree")
    return value


def _check_degrees(degrees: Mapping[str, Any]) -> None:
    for axis, degree in degrees.items():
        is_number = isinstance(degree, int) and not isinstance(degree, bool)
        if degree is not None and not (is_number and degree >= -1 and degree):
            raise ConfigError(
                f"`parallelism_config['{axis}']` is {degree!r}, expected a number of ranks from 1, or -1 for "
                "all that the other axes leave"
            )
