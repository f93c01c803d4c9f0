"""The keys of a DeepSpeed configuration and their treatment."""

from hocket.dist.config.key_table import ConfigKey, mapped, no_effect, refused

_OTHER_ENGINE = "it tunes buffers of DeepSpeed's engine, which FSDP2 does not have."
_ONE_RANK_TENSORS = "compression of communication is not supported; leave the key out."
_CALLBACK = "use a callback or logger of the trainer instead."
_OPTIMIZER = "pass `optimizers=` or `schedulers=` to the trainer instead."

TOP_KEYS: dict[str, ConfigKey] = {
    "train_batch_size": mapped("The global batch size; must equal microbatch × accumulation steps × ranks."),
    "train_micro_batch_size_per_gpu": mapped("`device_train_microbatch_size`."),
    "gradient_accumulation_steps": mapped(
        "Microbatches of a rank's batch; verified against the batch sizes."
    ),
    "gradient_clipping": mapped("Clipping by the joint norm of all gradients."),
    "zero_optimization": mapped("A sharding strategy; see the keys of the block below."),
    "fp16": mapped("`precision='amp_fp16'`, with the loss scale as below."),
    "bf16": mapped("`precision='amp_bf16'`."),
    "bfloat16": mapped("The older name of `bf16`."),
    "torch_autocast": mapped("`precision` by its `dtype`."),
    "communication_data_type": mapped("The dtype in which gradients are reduced."),
    "data_types": mapped("`grad_accum_dtype`: the dtype in which gradients are reduced."),
    "activation_checkpointing": mapped("Activation checkpointing; see the keys of the block below."),
    "steps_per_print": no_effect("the progress bar shows every step."),
    "wall_clock_breakdown": no_effect("use the trainer's profiler.", silent=(None, False)),
    "dump_state": no_effect("the trainer prints the layout when it starts.", silent=(None, False)),
    "prescale_gradients": no_effect("gradients are averaged in the reduction.", silent=(None, False)),
    "gradient_predivide_factor": no_effect("gradients are averaged in the reduction.", silent=(None, 1, 1.0)),
    "zero_allow_untested_optimizer": no_effect(
        "any torch optimizer works on shards.", silent=(None, False, True)
    ),
    "zero_force_ds_cpu_optimizer": no_effect(
        "any torch optimizer works on shards.", silent=(None, False, True)
    ),
    "disable_allgather": no_effect(_OTHER_ENGINE, silent=(None, False)),
    "memory_breakdown": no_effect("`hocket-launch plan` shows the memory of a layout.", silent=(None, False)),
    "flops_profiler": no_effect(_CALLBACK, silent=(None, False, {"enabled": False})),
    "comms_logger": no_effect(_CALLBACK, silent=(None, False, {"enabled": False})),
    "tensorboard": no_effect(_CALLBACK, silent=(None, False, {"enabled": False})),
    "wandb": no_effect(_CALLBACK, silent=(None, False, {"enabled": False})),
    "csv_monitor": no_effect(_CALLBACK, silent=(None, False, {"enabled": False})),
    "amp": refused("apex is not supported; use `fp16` or `bf16`.", silent=(None, False, {"enabled": False})),
    "optimizer": refused(_OPTIMIZER),
    "scheduler": refused(_OPTIMIZER),
    "sparse_gradients": refused("gradients are dense; leave the key out."),
    "communication_dtype": refused("the key is `communication_data_type`."),
    "tensor_parallel": refused("tensor parallelism is not implemented; shard with ZeRO stage 3."),
    "sequence_parallel_size": refused("sequence parallelism is not implemented.", silent=(None, 1)),
    "autoep_size": refused("expert parallelism is not implemented.", silent=(None, 1)),
    "pipeline": refused("pipeline parallelism is not implemented.", silent=(None, False, {})),
    "elasticity": refused("start with `hocket-launch --nnodes MIN:MAX --max-restarts K` instead."),
    "autotuning": refused("use `hocket-launch plan` to compare layouts."),
    "curriculum_learning": refused("use an algorithm of the trainer."),
    "data_efficiency": refused("use an algorithm of the trainer."),
    "compression_training": refused("use an algorithm of the trainer."),
    "sparse_attention": refused("set it in the model."),
    "zenflow": refused("leave the key out."),
    "aio": refused("offload to files is not supported; offload to the CPU."),
    "checkpoint": refused("the trainer saves checkpoints; see its `save_*` arguments."),
    "local_rank": refused("the launcher sets it."),
}
"""Keys of the top level."""

ZERO_KEYS: dict[str, ConfigKey] = {
    "stage": mapped(
        "0: `NO_SHARD`. 1: `SHARD_GRAD_OP`, gradients reduced with the last microbatch only. "
        "2: `SHARD_GRAD_OP`. 3: `FULL_SHARD`."
    ),
    "offload_optimizer": mapped("`cpu_offload`: FSDP2 offloads parameters, gradients and state together."),
    "offload_param": mapped("`cpu_offload`."),
    "cpu_offload": mapped("The older name of `offload_optimizer`."),
    "cpu_offload_params": mapped("The older name of `offload_param`."),
    "zero_hpz_partition_size": mapped("`reshard_after_forward` over that many ranks."),
    "mics_shard_size": mapped("`data_parallel_shard_degree`, with copies (HSDP)."),
    "ignore_unused_parameters": mapped("`find_unused_parameters`."),
    **{
        key: no_effect(_OTHER_ENGINE)
        for key in (
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "allgather_partitions",
            "round_robin_gradients",
            "allgather_bucket_size",
            "reduce_bucket_size",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "prefetch_bucket_size",
            "max_live_parameters",
            "max_reuse_distance",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "load_from_fp32_weights",
            "memory_efficient_linear",
            "legacy_stage1",
            "override_module_apply",
            "use_multi_rank_bucket_allreduce",
        )
    },
    "stage3_gather_16bit_weights_on_model_save": no_effect(
        "`hocket-ckpt convert` exports whole weights from a sharded checkpoint.", silent=(None, False)
    ),
    "stage3_gather_fp16_weights_on_model_save": no_effect(
        "`hocket-ckpt convert` exports whole weights from a sharded checkpoint.", silent=(None, False)
    ),
    "elastic_checkpoint": no_effect(
        "every checkpoint opens on any number of ranks.", silent=(None, False, True)
    ),
    "mics_hierarchical_params_gather": no_effect(_OTHER_ENGINE, silent=(None, False)),
    "zero_quantized_weights": refused(_ONE_RANK_TENSORS),
    "zero_quantized_nontrainable_weights": refused(_ONE_RANK_TENSORS),
    "zero_quantized_gradients": refused(_ONE_RANK_TENSORS),
    "zeropp_loco_param": refused(_ONE_RANK_TENSORS),
    "log_trace_cache_warnings": no_effect(_OTHER_ENGINE, silent=(None, False)),
}
"""Keys of the block `zero_optimization`."""

OFFLOAD_KEYS: dict[str, ConfigKey] = {
    "device": mapped("`cpu` or `none`; `nvme` is refused."),
    "pin_memory": no_effect("memory is pinned where there is a GPU.", silent=(None, True, False)),
    **{
        key: no_effect(_OTHER_ENGINE)
        for key in (
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "pipeline_read",
            "pipeline_write",
            "fast_init",
        )
    },
    "nvme_path": no_effect("offload to files is not supported."),
    "ratio": refused("the whole optimizer state is offloaded; leave the key out.", silent=(None, 1, 1.0)),
}
"""Keys of the blocks `offload_optimizer` and `offload_param`."""

FP16_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("`precision='amp_fp16'`."),
    "loss_scale": mapped("0 scales dynamically; another number is a constant loss scale."),
    "initial_scale_power": mapped("The first loss scale, 2 to this power."),
    "loss_scale_window": mapped("`growth_interval` of the gradient scaler."),
    "min_loss_scale": no_effect("the gradient scaler of torch has no least scale.", silent=(None, 1, 1.0)),
    "hysteresis": no_effect("the gradient scaler of torch halves at the first overflow."),
    "consecutive_hysteresis": no_effect(
        "the gradient scaler of torch has no hysteresis.", silent=(None, False)
    ),
    "auto_cast": no_effect("inputs are always cast.", silent=(None, False, True)),
    "fp16_master_weights_and_grads": refused("parameters and gradients are kept in float32."),
}
"""Keys of the block `fp16`."""

BF16_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("`precision='amp_bf16'`."),
    "immediate_grad_update": no_effect(
        "gradients are always reduced during backward.", silent=(None, True, False)
    ),
    "check_grad_overflow": no_effect("bfloat16 needs no loss scale.", silent=(None, False)),
    "bf16_master_weights_and_grads": refused("parameters and gradients are kept in float32."),
    "bf16_optimizer_states": refused("optimizer state has the dtype of the parameters."),
}
"""Keys of the block `bf16`."""

AUTOCAST_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("Whether the block counts."),
    "dtype": mapped("`bfloat16` or `float16`: the trainer's precision."),
    "lower_precision_safe_modules": no_effect("autocast selects operators, not modules."),
}
"""Keys of the block `torch_autocast`."""

CHECKPOINTING_KEYS: dict[str, ConfigKey] = {
    "cpu_checkpointing": mapped("`activation_cpu_offload`."),
    "number_checkpoints": no_effect("set `activation_checkpointing_every` in `fsdp_config` instead."),
    "contiguous_memory_optimization": no_effect(_OTHER_ENGINE, silent=(None, False)),
    "synchronize_checkpoint_boundary": no_effect(_OTHER_ENGINE, silent=(None, False)),
    "profile": no_effect("use the trainer's profiler.", silent=(None, False)),
    "partition_activations": refused(
        "partitioned activations need tensor parallelism, which is not implemented."
    ),
}
"""Keys of the block `activation_checkpointing`; the block turns checkpointing on."""

DATA_TYPE_KEYS: dict[str, ConfigKey] = {
    "grad_accum_dtype": mapped("The dtype in which gradients are reduced."),
}
"""Keys of the block `data_types`."""

DEEPSPEED_TABLES: dict[str, dict[str, ConfigKey]] = {
    "deepspeed_config": TOP_KEYS,
    "zero_optimization": ZERO_KEYS,
    "offload_optimizer and offload_param": OFFLOAD_KEYS,
    "fp16": FP16_KEYS,
    "bf16": BF16_KEYS,
    "torch_autocast": AUTOCAST_KEYS,
    "activation_checkpointing": CHECKPOINTING_KEYS,
    "data_types": DATA_TYPE_KEYS,
}
"""The tables of all blocks, by name."""
