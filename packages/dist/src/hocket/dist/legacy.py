"""Composer's FSDP1 keys: which mean nothing under FSDP2, and which cannot be honoured.

A key with its old default asks for nothing and passes in silence, so that a config copied whole works.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.dist.errors import ConfigError

_log = logging.getLogger("hocket.dist")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class _Needless:
    """A key whose values in `values` change nothing; others are refused with `otherwise`."""

    why: str
    values: tuple[Any, ...] | None = None
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A key that is refused with `instead`, unless its value is one of `silent`, which ask for nothing."""

    instead: str
    silent: tuple[Any, ...] = (None, False)


REFUSED_STRATEGIES = {
    "NO_SHARD": "it shards nothing. Leave `fsdp_config` out: the model is then replicated.",
    "HYBRID_SHARD": "say `data_parallel_replicate_degree` (the number of copies) with 'FULL_SHARD' instead.",
    "_HYBRID_SHARD_ZERO2": "say `data_parallel_replicate_degree` (the number of copies) with "
    "'SHARD_GRAD_OP' instead.",
}

NEEDLESS: dict[str, _Needless] = {
    "activation_checkpointing_reentrant": _Needless("nothing is checkpointed by the layout"),
    "backward_prefetch": _Needless("FSDP2 always prefetches the next block in backward"),
    "backward_prefetch_limit": _Needless(
        "FSDP2 prefetches one block", (1,), "only 1 can be had; leave it out."
    ),
    "flatten_parameters": _Needless("FSDP2 has no flat parameters", (True,), "leave it out."),
    "forward_prefetch": _Needless("FSDP2 issues the gathers of forward in order by itself"),
    "forward_prefetch_limit": _Needless(
        "FSDP2 prefetches one block", (1,), "only 1 can be had; leave it out."
    ),
    "limit_all_gathers": _Needless("FSDP2 always limits the memory of its gathers"),
    "state_dict_type": _Needless(
        "checkpoints are sharded and open on any number of ranks",
        ("sharded",),
        "a checkpoint is always saved sharded, and opens on any number of ranks; leave it out.",
    ),
    "use_orig_params": _Needless(
        "FSDP2 always keeps the model's own parameters",
        (True,),
        "FSDP2 has no flat parameters; leave it out.",
    ),
    "verbose": _Needless("the trainer shows the layout when it starts"),
}

_TRANSFORMER_ENGINE = "float8 layers by Transformer Engine are not supported here; leave it out."
REFUSED: dict[str, _Refused] = {
    "activation_checkpointing": _Refused(
        "call `torch.utils.checkpoint.checkpoint` in the blocks' forward instead."
    ),
    "activation_cpu_offload": _Refused("use `torch.autograd.graph.save_on_cpu` around the forward instead."),
    "device_mesh": _Refused("say `data_parallel_shard_degree` and `data_parallel_replicate_degree` instead."),
    "ignored_modules": _Refused(
        "it would leave these modules' gradients unsynchronised; leave it out.", (None, False, [], ())
    ),
    "keep_low_precision_grads": _Refused("gradients have their parameters' dtype; leave it out."),
    "load_monolith_rank0_only": _Refused("every rank reads only its own part of a checkpoint; leave it out."),
    "load_planner": _Refused("planners belong to torch's own checkpoints; leave it out."),
    "min_params": _Refused("name the modules with `_fsdp_wrap` or `fsdp_wrap_fn` instead."),
    "param_init_fn": _Refused(
        "build the model with its values, by the same seed on each rank; leave it out."
    ),
    "process_group": _Refused(
        "say `data_parallel_shard_degree` and `data_parallel_replicate_degree` instead."
    ),
    "save_planner": _Refused("planners belong to torch's own checkpoints; leave it out."),
    "sharded_ckpt_prefix_dir": _Refused(
        "the trainer's `save_filename` names a checkpoint.", (None, "ep{epoch}-ba{batch}")
    ),
    "te_checkpoint_wrapper": _Refused(_TRANSFORMER_ENGINE),
    "te_shard_fp8_weight": _Refused(_TRANSFORMER_ENGINE),
}


def settle_legacy_keys(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return `config` without the keys that FSDP1 had and FSDP2 has no use for.

    Args:
        config: As the user wrote it.
        known: The keys that `FSDPConfig` has itself.

    Raises:
        ConfigError: A key cannot be honoured; it says what to use instead.
    """
    rest: dict[str, Any] = {}
    for key, value in config.items():
        if key in known:
            rest[key] = value
        elif key in NEEDLESS:
            rule = NEEDLESS[key]
            if rule.values is not None and value not in rule.values:
                raise ConfigError(f"`fsdp_config['{key}']` is {value!r}: {rule.otherwise}")
            _say_once(key, value, rule.why)
        elif key in REFUSED:
            if not any(value is silent or value == silent for silent in REFUSED[key].silent):
                raise ConfigError(
                    f"`fsdp_config['{key}']` is {value!r} and cannot be honoured: {REFUSED[key].instead}"
                )
        else:
            rest[key] = value
    return rest


def _say_once(key: str, value: object, why: str) -> None:
    if key in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add(key)
    _log.warning("`fsdp_config['%s'] = %r` has no effect: %s.", key, value, why)
