"""`FSDPConfig`: how a model is sharded, typed and checked before any process waits for another."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from hocket.dist.errors import ConfigError
from hocket.dist.legacy import REFUSED_STRATEGIES, settle_legacy_keys

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
_MIXED_PRECISION_KEYS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPConfig:
    """How `fully_shard` lays a model out. Every value is checked when the config is made.

    Example:
        >>> FSDPConfig.from_mapping({"sharding_strategy": "SHARD_GRAD_OP"}).should_reshard
        False
    """

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    """FULL_SHARD frees each block's parameters after its forward (ZeRO-3), SHARD_GRAD_OP keeps them
    (ZeRO-2)."""

    reshard_after_forward: bool | int = True
    """An int re-shards after forward over that many ranks only; it divides the shard degree, 1 and itself
    apart."""

    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """`DEFAULT`: parameters in `amp_dtype`, gradients summed in float32. `PURE`: both in `amp_dtype`.
    `FULL`: nothing is cast. A mapping sets `param_dtype`, `reduce_dtype` and `output_dtype` by hand."""

    amp_dtype: torch.dtype | str | None = None
    """The low precision that DEFAULT and PURE mean, such as "bf16"; the trainer fills in its own. None: no
    cast."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the parameters; -1 is as many as there are."""

    data_parallel_replicate_degree: int | None = None
    """Copies of the sharded model (HSDP); None or 1 is one copy."""

    sync_module_states: bool = True
    """Give every rank the values of rank 0 before sharding. False trusts that all were built alike."""

    auto_wrap: bool = True
    """False makes the whole model one group, gathered at once."""

    cpu_offload: bool = False
    """Not honoured yet; True is refused."""

    def __post_init__(self) -> None:
        if self.sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ConfigError(_strategy_refusal(self.sharding_strategy))
        self._check_reshard()
        self._check_degrees()
        for name in ("sync_module_states", "auto_wrap", "cpu_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}` is {getattr(self, name)!r}, expected True or False.")
        if self.cpu_offload:
            raise ConfigError(
                "`cpu_offload=True` is not supported yet. Shard over more ranks, or leave it out."
            )
        self._dtypes()

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict as Composer's users pass it.

        Keys of Composer's FSDP1 config that mean nothing here are accepted, and said once on rank 0's log.

        Raises:
            ConfigError: A key is unknown (the nearest is suggested), or cannot be honoured (what to use is
            said).
        """
        known = {field.name for field in fields(cls)}
        rest = settle_legacy_keys(config, known)
        for key in rest:
            if key not in known:
                raise ConfigError(unknown_key(key, known, "fsdp_config"))
        return cls(**rest)

    @property
    def should_reshard(self) -> bool | int:
        """What `fully_shard` is told as `reshard_after_forward` for every module but the root."""
        return False if self.sharding_strategy == "SHARD_GRAD_OP" else self.reshard_after_forward

    def policy_for(self, parameters: Iterable[torch.Tensor], *, is_root: bool = True) -> MixedPrecisionPolicy:
        """Return torch's policy for one group of parameters.

        Only the root casts its output to `output_dtype`: what follows a block inside expects `param_dtype`.

        `reduce_dtype` is always given: its default has changed between versions of torch (2.15 no longer
        follows `param_dtype`), and gradients should not.
        """
        param_dtype, reduce_dtype, output_dtype = self._dtypes()
        if reduce_dtype is None:
            has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
            reduce_dtype = torch.float64 if has_double else torch.float32
        return MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype if is_root else None
        )

    def _dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]:
        """Return (param, reduce, output) dtypes; None is "as it is"."""
        amp = _dtype("amp_dtype", self.amp_dtype)
        if isinstance(self.mixed_precision, Mapping):
            chosen = dict(self.mixed_precision)
            if chosen.pop("buffer_dtype", None) is not None:
                raise ConfigError(
                    "`mixed_precision['buffer_dtype']` has no counterpart in FSDP2: cast the buffers once, "
                    "when the model is built."
                )
            for key in chosen:
                if key not in _MIXED_PRECISION_KEYS:
                    raise ConfigError(unknown_key(key, _MIXED_PRECISION_KEYS, "mixed_precision"))
            param, reduce, output = (_dtype(key, chosen.get(key)) for key in _MIXED_PRECISION_KEYS)
            return param, reduce, output
        match self.mixed_precision:
            case "DEFAULT":
                return amp, None, None
            case "FULL":
                return None, None, None
            case "PURE":
                if amp is None:
                    raise ConfigError(
                        "`mixed_precision='PURE'` needs to know the low precision: set `amp_dtype='bf16'`, "
                        "or write "
                        "`mixed_precision={'param_dtype': 'bf16', 'reduce_dtype': 'bf16'}`."
                    )
                return amp, amp, None
        raise ConfigError(
            f"`mixed_precision` is {self.mixed_precision!r}, expected 'DEFAULT', 'PURE', 'FULL', or a dict "
            f"of {', '.join(f'`{key}`' for key in _MIXED_PRECISION_KEYS)}."
        )

    def _check_reshard(self) -> None:
        value = self.reshard_after_forward
        if not isinstance(value, int) or (not isinstance(value, bool) and value < 2):
            raise ConfigError(
                f"`reshard_after_forward` is {value!r}, expected True, False, or a number of ranks from 2."
            )
        if not isinstance(value, bool) and self.sharding_strategy == "SHARD_GRAD_OP":
            raise ConfigError(
                f"`reshard_after_forward={value}` re-shards after forward and "
                "`sharding_strategy='SHARD_GRAD_OP'` does not: "
                "leave one of them out."
            )

    def _check_degrees(self) -> None:
        shard, replicate = self.data_parallel_shard_degree, self.data_parallel_replicate_degree
        if not isinstance(shard, int) or isinstance(shard, bool) or (shard != -1 and shard < 1):
            raise ConfigError(
                f"`data_parallel_shard_degree` is {shard!r}, expected -1 or a number of ranks from 1."
            )
        if replicate is not None and (
            not isinstance(replicate, int) or isinstance(replicate, bool) or replicate < 1
        ):
            raise ConfigError(
                f"`data_parallel_replicate_degree` is {replicate!r}, expected None or a number from 1."
            )


def unknown_key(key: object, known: Iterable[str], where: str) -> str:
    """Return the message for a key that nobody knows, with the nearest one that somebody does."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    hint = (
        f"Did you mean `{nearest[0]}`?"
        if nearest
        else f"Known are {', '.join(f'`{name}`' for name in names)}."
    )
    return f"`{where}` has no key `{key}`. {hint}"


def _dtype(name: str, value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        dtype = value
    elif isinstance(value, str) and value.removeprefix("torch.").removeprefix("amp_").lower() in _DTYPES:
        dtype = _DTYPES[value.removeprefix("torch.").removeprefix("amp_").lower()]
    else:
        raise ConfigError(
            f"`{name}` is {value!r}, expected a torch.dtype, None, or one of {', '.join(map(repr, _DTYPES))}."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"`{name}` is {dtype}, expected a floating-point dtype.")
    return dtype


def _strategy_refusal(strategy: object) -> str:
    name = str(strategy).rpartition(".")[2]
    reason = REFUSED_STRATEGIES.get(name, "expected 'FULL_SHARD' or 'SHARD_GRAD_OP'.")
    return f"`sharding_strategy` is {strategy!r}: {reason}"
