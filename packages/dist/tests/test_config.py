"""The config says what it means, refuses what it cannot do, and names what to use instead."""

import logging

import pytest
import torch

from hocket.dist import ConfigError, FSDPConfig, WorldError, legacy, provide
from hocket.dist.mesh import degrees

# Composer's own defaults for its FSDP1 config, but for the two that mean another layout or checkpoint.
COMPOSERS_DEFAULTS = {
    "activation_checkpointing": False,
    "activation_checkpointing_reentrant": True,
    "activation_cpu_offload": False,
    "auto_wrap": True,
    "te_checkpoint_wrapper": False,
    "te_shard_fp8_weight": False,
    "backward_prefetch": "BACKWARD_POST",
    "backward_prefetch_limit": 1,
    "forward_prefetch_limit": 1,
    "cpu_offload": False,
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "forward_prefetch": False,
    "ignored_modules": None,
    "keep_low_precision_grads": False,
    "limit_all_gathers": True,
    "load_monolith_rank0_only": False,
    "load_planner": None,
    "save_planner": None,
    "mixed_precision": "DEFAULT",
    "process_group": None,
    "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "sharded",
    "sync_module_states": False,
    "use_orig_params": True,
    "verbose": False,
}


def test_a_config_copied_from_composer_is_taken() -> None:
    assert FSDPConfig.from_mapping(COMPOSERS_DEFAULTS) == FSDPConfig(sync_module_states=False)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("reshard_after_foward", "reshard_after_forward"),
        ("mixed_precison", "mixed_precision"),
        ("shard_degree", "data_parallel_shard_degree"),
        ("sharding_stategy", "sharding_strategy"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"no key `{key}`. Did you mean `{nearest}`"):
        FSDPConfig.from_mapping({key: 1})


@pytest.mark.parametrize("key", sorted(legacy.NEEDLESS))
def test_a_needless_key_is_said_once_by_name(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "_said", set())
    monkeypatch.delenv("RANK", raising=False)
    rule = legacy.NEEDLESS[key]
    value = rule.values[0] if rule.values else True
    with caplog.at_level(logging.WARNING, "hocket.dist"):
        FSDPConfig.from_mapping({key: value})
        FSDPConfig.from_mapping({key: value})
    assert [key in record.getMessage() for record in caplog.records] == [True]
    if rule.values:
        with pytest.raises(ConfigError, match=f"'{key}'.*leave it out"):
            FSDPConfig.from_mapping({key: "something else"})


@pytest.mark.parametrize("key", sorted(legacy.REFUSED))
def test_what_cannot_be_honoured_is_refused_by_name(key: str) -> None:
    for silent in legacy.REFUSED[key].silent:
        FSDPConfig.from_mapping({key: silent})
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_mapping({key: "on"})
    assert f"'{key}'" in str(caught.value)
    assert legacy.REFUSED[key].instead in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "Leave `fsdp_config` out"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "data_parallel_replicate_degree"),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "full"}, "expected 'FULL_SHARD' or 'SHARD_GRAD_OP'"),
        ({"cpu_offload": True}, "`cpu_offload=True` is not supported yet"),
        ({"reshard_after_forward": 1}, "`reshard_after_forward` is 1"),
        ({"reshard_after_forward": "yes"}, "`reshard_after_forward` is 'yes'"),
        ({"reshard_after_forward": 2, "sharding_strategy": "SHARD_GRAD_OP"}, "leave one of them out"),
        ({"data_parallel_shard_degree": 0}, "`data_parallel_shard_degree` is 0"),
        ({"data_parallel_replicate_degree": 0}, "`data_parallel_replicate_degree` is 0"),
        ({"sync_module_states": "no"}, "`sync_module_states` is 'no'"),
        ({"mixed_precision": "HALF"}, "expected 'DEFAULT', 'PURE', 'FULL'"),
        ({"mixed_precision": "PURE"}, "set `amp_dtype='bf16'`"),
        ({"mixed_precision": {"param_dype": "bf16"}}, "Did you mean `param_dtype`"),
        ({"mixed_precision": {"param_dtype": "bf17"}}, "`param_dtype` is 'bf17'"),
        ({"mixed_precision": {"reduce_dtype": torch.int8}}, "floating-point"),
        ({"mixed_precision": {"buffer_dtype": "bf16"}}, "buffer_dtype"),
    ],
)
def test_a_wrong_value_is_named(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_mapping(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (None, torch.float32, None)),
        ({"amp_dtype": "bf16"}, (torch.bfloat16, torch.float32, None)),
        ({"amp_dtype": "amp_bf16"}, (torch.bfloat16, torch.float32, None)),
        ({"mixed_precision": "PURE", "amp_dtype": torch.bfloat16}, (torch.bfloat16, torch.bfloat16, None)),
        ({"mixed_precision": "FULL", "amp_dtype": "bf16"}, (None, torch.float32, None)),
        ({"mixed_precision": {"param_dtype": "bf16"}}, (torch.bfloat16, torch.float32, None)),
        (
            {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "output_dtype": "float32"}},
            (torch.float16, torch.float32, torch.float32),
        ),
    ],
)
def test_mixed_precision_always_states_how_gradients_are_summed(values: dict, expected: tuple) -> None:
    policy = FSDPConfig.from_mapping(values).policy_for([torch.zeros(1)])
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == expected


def test_double_precision_is_not_summed_in_single() -> None:
    assert FSDPConfig().policy_for([torch.zeros(1, dtype=torch.float64)]).reduce_dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "world_size", "expected"),
    [
        ({}, 4, (1, 4)),
        ({"data_parallel_replicate_degree": 2}, 4, (2, 2)),
        ({"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 4}, 8, (4, 2)),
    ],
)
def test_degrees_fill_the_ranks(values: dict, world_size: int, expected: tuple) -> None:
    assert degrees(FSDPConfig(**values), world_size) == expected


@pytest.mark.parametrize(
    ("values", "world_size"),
    [
        ({"data_parallel_shard_degree": 2}, 4),
        ({"data_parallel_replicate_degree": 3}, 4),
        ({"reshard_after_forward": 4}, 4),
        ({"reshard_after_forward": 3}, 4),
    ],
)
def test_degrees_that_do_not_fit_are_refused(values: dict, world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"ranks|divide"):
        degrees(FSDPConfig(**values), world_size)


def test_the_provider_checks_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks 1 to 3 are not there: an error about the config can only come from before the roll call.
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no key `shard`"):
        provide({"shard": 2}, device="cpu", timeout_s=30)
    with pytest.raises(ConfigError, match="4 ranks"):
        provide({"data_parallel_shard_degree": 3}, device="cpu", timeout_s=30)
    with pytest.raises(ConfigError, match="is a list"):
        provide(["fsdp"], device="cpu", timeout_s=30)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s"):
        provide(None, device="cpu", timeout_s=0)
    monkeypatch.delenv("RANK")
    with pytest.raises(WorldError, match="`RANK` is not"):
        provide({}, device="cpu", timeout_s=30)
