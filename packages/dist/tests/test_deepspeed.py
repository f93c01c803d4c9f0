"""A DeepSpeed configuration becomes a layout and arguments of the trainer, or raises with the key's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.dist import ConfigError, FSDPConfig, translate_deepspeed
from hocket.dist.config import docs as config_docs
from hocket.dist.config import key_table
from hocket.dist.config.deepspeed_keys import DEEPSPEED_TABLES, REFUSED_KEYS

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"
# Keys of DeepSpeed's own engine, by block.
ENGINE_KEYS = {
    "deepspeed_config": (
        "steps_per_print wall_clock_breakdown dump_state prescale_gradients gradient_predivide_factor "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather memory_breakdown "
        "flops_profiler comms_logger tensorboard wandb csv_monitor"
    ),
    "zero_optimization": (
        "overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients "
        "allgather_bucket_size reduce_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold prefetch_bucket_size "
        "max_live_parameters max_reuse_distance param_persistence_threshold model_persistence_threshold "
        "load_from_fp32_weights memory_efficient_linear legacy_stage1 override_module_apply "
        "use_multi_rank_bucket_allreduce stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save elastic_checkpoint mics_hierarchical_params_gather "
        "log_trace_cache_warnings"
    ),
    "offload_param": (
        "pin_memory buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init nvme_path"
    ),
    "fp16": "hysteresis consecutive_hysteresis auto_cast",
    "bf16": "immediate_grad_update check_grad_overflow",
    "torch_autocast": "lower_precision_safe_modules",
    "expert_parallel": (
        "preset_model moe_layer_pattern expert_pattern router_pattern use_grouped_mm grouped_mm_backend "
        "expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern"
    ),
    "activation_checkpointing": (
        "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile"
    ),
}
ZERO_2 = {"zero_optimization": {"stage": 2}}
# A configuration as in DeepSpeed's tutorials, for ZeRO-3 with offload.
TUTORIAL = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "wall_clock_breakdown": False,
}


def test_a_tutorials_configuration_is_translated() -> None:
    settings = translate_deepspeed(TUTORIAL, world_size=4)
    assert settings.fsdp == FSDPConfig(
        sharding_strategy="FULL_SHARD",
        cpu_offload=True,
        amp_dtype=torch.bfloat16,
        gradient_sync="every",
    )
    assert settings.precision == "amp_bf16"
    assert (settings.train_batch_size, settings.device_train_microbatch_size) == (32, 2)
    assert settings.max_grad_norm == 1.0
    assert settings.loss_scale is None


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TUTORIAL))
    assert translate_deepspeed(path, world_size=4) == translate_deepspeed(TUTORIAL, world_size=4)
    with pytest.raises(ConfigError, match="not a readable JSON file"):
        translate_deepspeed(str(tmp_path / "absent.json"), world_size=4)


@pytest.mark.parametrize(
    ("stage", "strategy", "sync"),
    [
        (None, "NO_SHARD", "last"),
        (0, "NO_SHARD", "last"),
        (1, "SHARD_GRAD_OP", "last"),
        (2, "SHARD_GRAD_OP", "every"),
        (3, "FULL_SHARD", "every"),
    ],
)
def test_zero_stages_become_sharding_strategies(stage: int | None, strategy: str, sync: str) -> None:
    config = {} if stage is None else {"zero_optimization": {"stage": stage}}
    settings = translate_deepspeed(config, world_size=2)
    assert settings.fsdp.sharding_strategy == strategy
    assert settings.fsdp.gradient_sync == sync


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, {"reshard_after_forward": 8}),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
            {
                "sharding_strategy": "HYBRID_SHARD",
                "data_parallel_shard_degree": 4,
                "gradient_sync": "replicas_last",
            },
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}, {}),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8, "zero_hpz_partition_size": 4}},
            {
                "sharding_strategy": "HYBRID_SHARD",
                "data_parallel_shard_degree": 8,
                "gradient_sync": "replicas_last",
                "reshard_after_forward": 4,
            },
        ),
        ({"zero_optimization": {"stage": 3, "cpu_offload": True}}, {"cpu_offload": True}),
        (
            {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": True}},
            {"activation_checkpointing": True, "activation_cpu_offload": True},
        ),
        (
            {"zero_optimization": {"stage": 3}, "communication_data_type": "bf16"},
            {"mixed_precision": {"param_dtype": None, "reduce_dtype": torch.bfloat16}},
        ),
        (
            {
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            {
                "amp_dtype": torch.bfloat16,
                "mixed_precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
            },
        ),
    ],
)
def test_blocks_become_keys_of_fsdp_config(config: dict, expected: dict) -> None:
    found = translate_deepspeed(config, world_size=16).fsdp
    assert found == FSDPConfig(**{"gradient_sync": "every", **expected})


def test_the_loss_scale_settings_become_those_of_gradscaler() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 500}
    settings = translate_deepspeed({"fp16": fp16}, world_size=1)
    assert settings.precision == "amp_fp16"
    assert torch.amp.GradScaler("cpu", **settings.loss_scale).get_scale() == 2.0**10
    window = translate_deepspeed({"fp16": {"enabled": True, "loss_scale_window": 1e3}}, world_size=1)
    assert window.loss_scale == {"init_scale": 2.0**16, "growth_interval": 1000}
    fixed = translate_deepspeed({"fp16": {"enabled": True, "loss_scale": 128}}, world_size=1)
    assert torch.amp.GradScaler("cpu", **fixed.loss_scale).get_scale() == 128.0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 16}, (16, None)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, (16, 4)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, (12, 3)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, (12, 3)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, (None, 3)),
    ],
)
def test_batch_sizes_are_derived(sizes: dict, expected: tuple) -> None:
    settings = translate_deepspeed(sizes, world_size=2)
    assert (settings.train_batch_size, settings.device_train_microbatch_size) == expected


def test_accumulation_steps_divide_the_loaders_batch_into_microbatches() -> None:
    settings = translate_deepspeed({"gradient_accumulation_steps": 4}, world_size=2, train_batch_size=16)
    assert settings.device_train_microbatch_size == 2


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"zero_optimisation": {}}, {}, "no key `zero_optimisation`. Did you mean `zero_optimization`"),
        ({"zero_opt": {"stage": 3}}, {}, "no key `zero_opt`. Did you mean `zero_optimization`"),
        ({"zero_optimization": {"stag": 3}}, {}, "Did you mean `stage`"),
        ({"gradient_cliping": 1.0}, {}, "no key `gradient_cliping`. Did you mean `gradient_clipping`"),
        ({"grad_clipping": 1.0}, {}, "no key `grad_clipping`. Did you mean `gradient_clipping`"),
        ({"train_batchsize": 8}, {}, "no key `train_batchsize`. Did you mean `train_batch_size`"),
        ({"zero_optimization": {"stage": 4}}, {}, "is 4, expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, {}, "is 'auto', expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, {}, "is 'nvme'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "`fp16` (torch.float16) and `bf16`"),
        ({"bf16": {"enabled": True}}, {"precision": "amp_fp16"}, "`precision` is 'amp_fp16', but"),
        (
            {"train_micro_batch_size_per_gpu": 4},
            {"device_train_microbatch_size": 8},
            "`device_train_microbatch_size` is 8, but `deepspeed_config` says 4",
        ),
        (
            {"train_batch_size": 4},
            {"train_batch_size": 8},
            "global batch` is 8, but `deepspeed_config` says 4",
        ),
        (
            {"gradient_clipping": 0.5},
            {"gradient_clipping": 1.0},
            "`gradient_clipping` is 1.0, but `deepspeed_config` says 0.5",
        ),
        ({"gradient_accumulation_steps": 3}, {"train_batch_size": 8}, "2 ranks × 3 accumulation steps"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            {},
            "`train_batch_size` is 9, but microbatch 2 × accumulation steps 2 × 2 ranks is 8",
        ),
        ({"train_batch_size": 9}, {}, "is 9, which 2 ranks"),
        ({"train_batch_size": 0}, {}, "is 0, expected a whole number from 1"),
        ({"gradient_clipping": -1}, {}, "is -1, expected a number above 0"),
        ({"zero_optimization": 3}, {}, "is 3, expected a dict"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {}, "does not divide 2 ranks"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {}, "does not divide 2 ranks"),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
            {},
            "['zero_hpz_partition_size']` is 2, which needs ZeRO stage 3, but `stage` is 2",
        ),
        ({"zero_optimization": {"mics_shard_size": 2}}, {}, "['mics_shard_size']` is 2, which needs ZeRO"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": "2"}}, {}, "is '2', expected a whole number"),
        ({"zero_optimization": {"stage": 3, "cpu_offload": "no"}}, {}, "is 'no', expected true or false"),
        ({"bf16": {"enabled": "false"}}, {}, "is 'false', expected true or false"),
        (
            {"fp16": {"enabled": True, "loss_scale": "dynamic"}},
            {},
            "['loss_scale']` is 'dynamic', expected a",
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": "16"}}, {}, "is '16', expected a whole number"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 999}},
            {},
            "is 999, expected a whole number from 0",
        ),
        ({"fp16": {"enabled": True, "loss_scale_window": 0.5}}, {}, "is 0.5, expected a whole number from 1"),
        ({"gradient_clipping": float("nan")}, {}, "is nan, expected a number above 0"),
        ([], {}, "is a list, expected a dict"),
        (
            {"tensor_parallel": {"autotp_size": 3}},
            {},
            "asks for `tp` 3 ranks, which do not divide the 2 ranks",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 1}}},
            {},
            "has `tensor_parallel.autotp_size` (2) and `tp.tp_size` (1). Set only one",
        ),
        ({"tensor_parallel": {"autotp_size": -1}}, {}, "is -1, expected a whole number from 1"),
        ({"sequence_parallel_size": "two"}, {}, "is 'two', expected a whole number from 1"),
        ({"pipeline": {"stage": 2}}, {}, "has no key `stage`. Did you mean `stages`?"),
        ({"autoep_size": 2}, {}, "is 2, and ZeRO stage 0 shares nothing else between ranks. Set `stage` 1,"),
        (
            {"autoep_size": 3, "zero_optimization": {"stage": 2}},
            {},
            "is 3, which does not divide the 2 ranks that share parameters. Choose a divisor",
        ),
        (
            {"autoep_size": 2, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
            {},
            "is 2, which does not divide the 1 ranks that share parameters. Choose a divisor",
        ),
        ({"autoep_size": True}, {}, "is True, expected a whole number from 1"),
        ({"expert_parallel": {"autoep_size": 2}}, {}, "is 2 without `enabled` in the block"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 2}, "autoep_size": 4},
            {},
            "has `expert_parallel.autoep_size` (2) and `autoep_size` (4). Set only one",
        ),
        (
            {"expert_parallel": {"enabled": True, "top_k": 1}},
            {},
            "is 1 and cannot be honoured: the model routes",
        ),
    ],
)
def test_invalid_and_contradictory_configurations_raise(config: Any, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_deepspeed(config, world_size=2, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, {"tp": 2}),
        ({"tensor_parallel": {"tp_size": 2}, "sequence_parallel_size": 2}, {"tp": 2, "cp": 2}),
        ({"tensor_parallel": {"tp": {"tp_size": 4}, "autotp_size": 0}}, {"tp": 4}),
        ({"tensor_parallel": {"tp": {"autotp_size": 2, "tp_size": 0}}}, {"tp": 2}),
        ({"pipeline": {"stages": 4}, "tensor_parallel": {"autotp_size": 1}}, {"pp": 4}),
        ({"pipeline": {"stages": "auto"}, "sequence_parallel_size": 1}, {}),
        ({"autoep_size": 2, "zero_optimization": {"stage": 3}}, {"ep": 2, "dp_shard": -1}),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}} | ZERO_2,
            {"ep": 4, "dp_shard": -1},
        ),
        (
            {"autoep_size": 4, "zero_optimization": {"stage": 3, "mics_shard_size": 4}},
            {"ep": 4, "dp_replicate": -1},
        ),
        (
            {"autoep_size": 2, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
            {"pp": 2, "ep": 2, "dp_shard": -1},
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}, "autoep_size": 0}, {}),
    ],
)
def test_other_kinds_of_parallelism_become_axes(config: dict, axes: dict) -> None:
    assert translate_deepspeed(config, world_size=8).axes == axes


def test_ranks_that_share_their_data_count_once_in_the_global_batch() -> None:
    config = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 16, "gradient_accumulation_steps": 2}
    settings = translate_deepspeed(config, world_size=8, rank_batch_size=4)
    assert (settings.train_batch_size, settings.device_train_microbatch_size) == (16, 2)


def _nest(block: str, key: str, value: Any) -> dict[str, Any]:
    if block == "deepspeed_config":
        return {key: value}
    if block.startswith("offload"):
        return {"zero_optimization": {"stage": 3, "offload_param": {key: value}}}
    return {block: {key: value}}


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the configuration without a key, but with the blocks around the key."""
    kept = {name: value for name, value in config.items() if name != key}
    return {name: _without(value, key) if isinstance(value, dict) else value for name, value in kept.items()}


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_that_cannot_be_honoured_is_refused_by_name_in_every_block(key: str) -> None:
    for block in DEEPSPEED_TABLES:
        with pytest.raises(ConfigError, match=f"'{key}'.*cannot be honoured"):
            translate_deepspeed(_nest(block, key, {"on": True}), world_size=1)
        for silent in REFUSED_KEYS[key].silent:
            translate_deepspeed(_nest(block, key, silent), world_size=1)


@pytest.mark.parametrize(("block", "keys"), ENGINE_KEYS.items())
def test_keys_of_deepspeeds_engine_change_nothing_and_are_logged_once(
    block: str, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    key_table._logged.clear()
    for key in keys.split():
        caplog.clear()
        for _ in range(2):
            changed = translate_deepspeed(_nest(block, key, "anything"), world_size=1)
        assert changed == translate_deepspeed(_without(_nest(block, key, "anything"), key), world_size=1)
        (record,) = caplog.records
        assert f"['{key}'] = 'anything'` has no effect" in record.getMessage()
        caplog.clear()
        translate_deepspeed(_nest(block, key, False), world_size=1)
        assert not caplog.records


def test_the_docs_page_of_keys_is_generated_from_the_tables() -> None:
    assert DOCS.read_text() == config_docs.render(), f"run `python -m hocket.dist.config.docs {DOCS}`"
