"""`FSDPConfig`: the sharding of a model, validated before any rank waits for another."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hocket.dist.config.dtypes import dtype_name, parse_dtype
from hocket.dist.config.fsdp_keys import FSDP_KEYS
from hocket.dist.config.key_table import names_keys, resolve_keys, unknown_key
from hocket.dist.errors import ConfigError

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
STRATEGIES: tuple[Strategy, ...] = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
)
_MIXED_PRECISION_KEYS = ("param_dtype", "reduce_dtype", "output_dtype")


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPConfig:
    """The layout of a model by `fully_shard`. Every value is validated when the config is made.

    Example:
        >>> FSDPConfig.from_mapping({"sharding_strategy": "shard_grad_op"}).should_reshard
        False
    """

    sharding_strategy: Strategy = "FULL_SHARD"
    """FULL_SHARD frees each block's parameters after its forward (ZeRO-3), SHARD_GRAD_OP keeps them (ZeRO-2),
    NO_SHARD keeps a whole copy on every rank, HYBRID_SHARD shards within a node and replicates across nodes
    (`_HYBRID_SHARD_ZERO2` with SHARD_GRAD_OP inside)."""

    reshard_after_forward: bool | int = True
    """An int re-shards after forward over that many ranks only: a divisor below the shard degree."""

    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """`DEFAULT`: parameters in `amp_dtype`, gradients reduced in float32. `PURE`: both in `amp_dtype`.
    `FULL`: no cast. A mapping sets `param_dtype`, `reduce_dtype` and `output_dtype`."""

    amp_dtype: torch.dtype | str | None = None
    """The low precision of DEFAULT and PURE, such as "bf16"; derived from the trainer's precision if None."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the parameters; -1 uses all that are left."""

    data_parallel_replicate_degree: int | None = None
    """Copies of the sharded model (HSDP); None or 1 is one copy."""

    process_group: str | None = None
    """Composer's names of the shard group: `self`, `node`, `local_rank_across_nodes`, `setK`, `modK`."""

    sync_module_states: bool = True
    """Whether to broadcast the values of rank 0 before sharding; if False, all ranks must build the same."""

    auto_wrap: bool = True
    """Whether blocks become groups of their own; False makes the whole model one group, gathered at once."""

    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state stay in host memory; the optimizer steps there."""

    activation_checkpointing: bool = False
    """Whether to recompute activations in backward: of modules with `_activation_checkpointing` and of those
    that `activation_checkpointing_fn(module)` selects; if there are none, of every wrapped block."""

    activation_checkpointing_every: int = 1
    """The interval: only every n-th of the selected modules is checkpointed or offloaded."""

    activation_checkpointing_save_ops: Sequence[str] = ()
    """Operators whose results are kept, not recomputed, such as ("matmul", "attention") or aten names."""

    activation_cpu_offload: bool = False
    """Whether to keep the activations that backward needs in host memory between forward and backward."""

    forward_prefetch: bool = False
    """Whether to start the all-gathers of the next `forward_prefetch_limit` blocks while a block computes."""

    forward_prefetch_limit: int = 1
    """Blocks gathered ahead in forward, with `forward_prefetch`."""

    backward_prefetch_limit: int = 1
    """Blocks gathered ahead in backward."""

    gradient_sync: Literal["every", "last", "replicas_last"] | None = None
    """The microbatches that reduce gradients. `every`: each one. `last`: the last one, at the cost of memory
    for whole gradients. `replicas_last`: each one within a copy, the last one across copies. None: `last`
    with NO_SHARD, `replicas_last` with HYBRID_SHARD, else `every`."""

    ignored_modules: Sequence[nn.Module | str] = ()
    """Modules, or their names, that stay whole on every rank; their gradients are averaged all the same."""

    param_init_fn: Callable[[nn.Module], None] | None = None
    """The initialiser of a module built on the meta device, for its own parameters and buffers only."""

    initial_weights: str | os.PathLike[str] | None = None
    """A folder of safetensors files (as `save_pretrained` writes), by its path or a URI such as
    `hf://owner/name`; each rank reads only its shards."""

    find_unused_parameters: bool = False
    """Whether backward passes may leave parameters unused that the first one used.

    Ranks then exchange in every pass which parameters they used, and not only until a pass uses all of them.
    """

    verbose: bool = False
    """Whether rank 0 prints the layout of every group."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "sharding_strategy", _strategy(self.sharding_strategy))
        if isinstance(self.mixed_precision, str):
            set_field(self, "mixed_precision", self.mixed_precision.upper())
        for name in ("ignored_modules", "activation_checkpointing_save_ops"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable | None):
                raise ConfigError(f"`{name}` is {value!r}, expected a list")
            set_field(self, name, tuple(value or ()))
        self._check_types()
        self._check_reshard()
        self._check_levers()
        self._check_dtypes()

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict as Composer's users pass it, with keys in any letter case.

        Keys of Composer's configs that have no effect under FSDP2 are accepted and logged once on rank 0.

        Raises:
            ConfigError: A key is unknown (the nearest is suggested), or cannot be honoured (the message names
                the alternative).
        """
        return cls(**resolve_keys(config, FSDP_KEYS, {field.name for field in fields(cls)}, "fsdp_config"))

    def with_precision(self, low_precision: torch.dtype | None) -> Self:
        """Return this config with the trainer's low precision, unless the config sets dtypes itself."""
        has_own = self.amp_dtype is not None or isinstance(self.mixed_precision, Mapping)
        return self if has_own else replace(self, amp_dtype=low_precision)

    @property
    def should_reshard(self) -> bool | int:
        """The `reshard_after_forward` argument of `fully_shard` for every module but the root."""
        keeps = self.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
        return False if keeps else self.reshard_after_forward

    @property
    def sync_policy(self) -> str:
        """The gradient synchronisation in effect, derived from the strategy if it is not set."""
        if self.gradient_sync is not None:
            return self.gradient_sync
        if self.sharding_strategy == "NO_SHARD":
            return "last"
        return "replicas_last" if "HYBRID" in self.sharding_strategy else "every"

    def policy_for(self, parameters: Iterable[torch.Tensor], *, is_root: bool = True) -> MixedPrecisionPolicy:
        """Return torch's mixed-precision policy for one group of parameters.

        Only the root casts its output to `output_dtype`: modules after a block expect `param_dtype`.

        `reduce_dtype` is always explicit: its default changed between versions of torch (2.15 no longer
        follows `param_dtype`), and gradients must not change with it.
        """
        param_dtype, reduce_dtype, output_dtype = self._dtypes()
        if reduce_dtype is None:
            has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
            reduce_dtype = torch.float64 if has_double else torch.float32
        return MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype if is_root else None
        )

    def _dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]:
        """Return (param, reduce, output) dtypes; None leaves values as they are."""
        amp = parse_dtype("amp_dtype", self.amp_dtype)
        if isinstance(self.mixed_precision, Mapping):
            dtype_names = {str(key).lower(): value for key, value in self.mixed_precision.items()}
            if dtype_names.pop("buffer_dtype", None) is not None:
                raise ConfigError(
                    "`mixed_precision['buffer_dtype']` has no counterpart in FSDP2. Cast the buffers once, "
                    "when the model is built"
                )
            for key in dtype_names:
                if key not in _MIXED_PRECISION_KEYS:
                    raise ConfigError(unknown_key(key, _MIXED_PRECISION_KEYS, "mixed_precision"))
            param, reduce, output = (parse_dtype(key, dtype_names.get(key)) for key in _MIXED_PRECISION_KEYS)
            return param, reduce, output
        match self.mixed_precision:
            case "DEFAULT":
                return amp, None, None
            case "FULL":
                return None, None, None
            case "PURE":
                return amp, amp, None
        raise ConfigError(
            f"`mixed_precision` is {self.mixed_precision!r}, expected 'DEFAULT', 'PURE', 'FULL' or a mapping "
            "of `param_dtype`, `reduce_dtype` and `output_dtype`"
        )

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ConfigError(f"`{field.name}` is {value!r}, expected True or False")
        for name, least in (
            ("activation_checkpointing_every", 1),
            ("forward_prefetch_limit", 1),
            ("backward_prefetch_limit", 1),
            ("data_parallel_replicate_degree", 1),
            ("data_parallel_shard_degree", -1),
        ):
            value = getattr(self, name)
            is_absent = name == "data_parallel_replicate_degree" and value is None
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_absent and (not is_number or value < least or value == 0):
                expected = "-1 or a number of ranks from 1" if least == -1 else "a whole number from 1"
                raise ConfigError(f"`{name}` is {value!r}, expected {expected}")
        if self.gradient_sync not in (None, "every", "last", "replicas_last"):
            raise ConfigError(
                f"`gradient_sync` is {self.gradient_sync!r}, expected 'every', 'last', 'replicas_last' or "
                "None"
            )
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ConfigError(f"`param_init_fn` is {self.param_init_fn!r}, expected a function of a module")
        if not isinstance(self.initial_weights, str | os.PathLike | None):
            raise ConfigError(f"`initial_weights` is {self.initial_weights!r}, expected the path of a folder")

    def _check_levers(self) -> None:
        """Refuse options of levers that are off, which would have no effect."""
        for operator in self.activation_checkpointing_save_ops:
            if not isinstance(operator, str):
                raise ConfigError(
                    f"`activation_checkpointing_save_ops` has {operator!r}, expected names such as 'matmul' "
                    "or 'mm'"
                )
        if self.activation_checkpointing_save_ops and not self.activation_checkpointing:
            raise ConfigError(
                f"`activation_checkpointing_save_ops` is {self.activation_checkpointing_save_ops!r} without "
                "`activation_checkpointing`. Set `activation_checkpointing=True`, or leave the operators out"
            )
        is_on = self.activation_checkpointing or self.activation_cpu_offload
        if self.activation_checkpointing_every > 1 and not is_on:
            raise ConfigError(
                f"`activation_checkpointing_every` is {self.activation_checkpointing_every} without "
                "`activation_checkpointing`. Set `activation_checkpointing=True`, or leave the number out"
            )

    def _check_dtypes(self) -> None:
        param = self._dtypes()[0]
        amp = parse_dtype("amp_dtype", self.amp_dtype)
        if isinstance(self.mixed_precision, Mapping) and amp not in (None, param):
            raise ConfigError(
                f"`amp_dtype` is {dtype_name(amp)}, and `mixed_precision` says `param_dtype` "
                f"{dtype_name(param)}. Set the dtype in `mixed_precision` only"
            )

    def _check_reshard(self) -> None:
        value = self.reshard_after_forward
        if isinstance(value, bool):
            return
        if not isinstance(value, int) or value < 2:
            raise ConfigError(
                f"`reshard_after_forward` is {value!r}, expected True, False or a number of ranks from 2"
            )
        if self.sharding_strategy not in ("FULL_SHARD", "HYBRID_SHARD"):
            raise ConfigError(
                f"`reshard_after_forward={value}` re-shards after forward and "
                f"`sharding_strategy={self.sharding_strategy!r}` does not. Set only one of them"
            )


def _strategy(value: object) -> Strategy:
    name = (value.name if isinstance(value, Enum) else str(value)).upper()
    for strategy in STRATEGIES:
        if name == strategy:
            return strategy
    raise ConfigError(
        f"`sharding_strategy` is {value!r}, expected {', '.join(map(repr, STRATEGIES[:-1]))} or "
        f"{STRATEGIES[-1]!r}"
    )
