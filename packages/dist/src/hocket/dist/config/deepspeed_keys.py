"""The keys of a DeepSpeed configuration: those of each block that are mapped, those refused, and the rest."""

from hocket.dist.config.key_table import ConfigKey, mapped, no_effect, refused

_ONE_RANK_TENSORS = "compression of communication is not supported; leave the key out."
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
    "tensor_parallel": mapped("The axis `tp`; see the keys of the block below."),
    "sequence_parallel_size": mapped("The axis `cp`: that many ranks share each sequence."),
    "pipeline": mapped("The axis `pp`; see the keys of the block below."),
    "expert_parallel": mapped("The axis `ep`; see the keys of the block below."),
    "autoep_size": mapped("The axis `ep`, as in the block `expert_parallel`; 0 and 1 leave it out."),
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
}
"""Keys of the block `zero_optimization`."""

OFFLOAD_KEYS: dict[str, ConfigKey] = {
    "device": mapped("`cpu` or `none`; `nvme` is refused."),
}
"""Keys of the blocks `offload_optimizer` and `offload_param`."""

FP16_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("`precision='amp_fp16'`."),
    "loss_scale": mapped("0 scales dynamically; another number is a constant loss scale."),
    "initial_scale_power": mapped("The first loss scale, 2 to this power."),
    "loss_scale_window": mapped("`growth_interval` of the gradient scaler."),
}
"""Keys of the block `fp16`."""

BF16_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("`precision='amp_bf16'`."),
}
"""Keys of the block `bf16`."""

AUTOCAST_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("Whether the block counts."),
    "dtype": mapped("`bfloat16` or `float16`: the trainer's precision."),
}
"""Keys of the block `torch_autocast`."""

CHECKPOINTING_KEYS: dict[str, ConfigKey] = {
    "cpu_checkpointing": mapped("`activation_cpu_offload`."),
}
"""Keys of the block `activation_checkpointing`; the block turns checkpointing on."""

DATA_TYPE_KEYS: dict[str, ConfigKey] = {
    "grad_accum_dtype": mapped("The dtype in which gradients are reduced."),
}
"""Keys of the block `data_types`."""

TENSOR_KEYS: dict[str, ConfigKey] = {
    "autotp_size": mapped("The degree of the axis `tp`; 0 and 1 leave it out."),
    "tp_size": mapped("The same as `autotp_size`."),
    "tp": mapped("A block whose `tp_size` or `autotp_size` is the same."),
}
"""Keys of the block `tensor_parallel`."""

PIPELINE_KEYS: dict[str, ConfigKey] = {
    "stages": mapped("The degree of the axis `pp`."),
}
"""Keys of the block `pipeline`."""

EXPERT_KEYS: dict[str, ConfigKey] = {
    "enabled": mapped("Whether the block counts."),
    "autoep_size": mapped("The degree of the axis `ep`: that many ranks of ZeRO share the experts."),
}
"""Keys of the block `expert_parallel`."""

_ROUTING = "the model routes rows to experts; set it in the model."

REFUSED_KEYS: dict[str, ConfigKey] = {
    "amp": refused("apex is not supported; use `fp16` or `bf16`.", silent=(None, False, {"enabled": False})),
    "optimizer": refused(_OPTIMIZER),
    "scheduler": refused(_OPTIMIZER),
    "sparse_gradients": refused("gradients are dense; leave the key out."),
    "communication_dtype": refused("the key is `communication_data_type`."),
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
    "zero_quantized_weights": refused(_ONE_RANK_TENSORS),
    "zero_quantized_nontrainable_weights": refused(_ONE_RANK_TENSORS),
    "zero_quantized_gradients": refused(_ONE_RANK_TENSORS),
    "zeropp_loco_param": refused(_ONE_RANK_TENSORS),
    "ratio": refused("the whole optimizer state is offloaded; leave the key out.", silent=(None, 1, 1.0)),
    "fp16_master_weights_and_grads": refused("parameters and gradients are kept in float32."),
    "bf16_master_weights_and_grads": refused("parameters and gradients are kept in float32."),
    "bf16_optimizer_states": refused("optimizer state has the dtype of the parameters."),
    "partition_activations": refused(
        "set `sequence_parallel` of the axis `tp` in `parallelism_config`, without DeepSpeed's config."
    ),
    "route_norm": refused(_ROUTING, silent=(None,)),
    "route_scale": refused(_ROUTING, silent=(None, 1, 1.0)),
    "score_apply": refused(_ROUTING, silent=(None,)),
    "score_func": refused(_ROUTING, silent=(None,)),
    "top_k": refused(_ROUTING, silent=(None,)),
    "routed_scaling_factor": refused(_ROUTING, silent=(None,)),
    "num_expert_groups": refused(_ROUTING, silent=(None,)),
    "num_limited_groups": refused(_ROUTING, silent=(None,)),
    "load_balance_coeff": refused(
        "balance the experts in the model, or by the callback `ExpertBalance` of `hocket.recipes.mixture`.",
        silent=(None, 0, 0.0),
    ),
    "min_loss_scale": refused(
        "the gradient scaler of torch has no least scale; leave the key out.", silent=(None, 1, 1.0)
    ),
}
"""Keys that are refused in every block, unless the value asks for nothing."""

OTHER_KEY = no_effect(
    "it belongs to DeepSpeed's own engine; the trainer has arguments, callbacks and loggers of its own.",
    silent=(None, False, {"enabled": False}),
)
"""The row of all other keys: they tune DeepSpeed's own engine."""

DEEPSPEED_TABLES: dict[str, dict[str, ConfigKey]] = {
    "deepspeed_config": TOP_KEYS,
    "zero_optimization": ZERO_KEYS,
    "offload_optimizer and offload_param": OFFLOAD_KEYS,
    "fp16": FP16_KEYS,
    "bf16": BF16_KEYS,
    "torch_autocast": AUTOCAST_KEYS,
    "activation_checkpointing": CHECKPOINTING_KEYS,
    "data_types": DATA_TYPE_KEYS,
    "tensor_parallel": TENSOR_KEYS,
    "pipeline": PIPELINE_KEYS,
    "expert_parallel": EXPERT_KEYS,
}
"""The mapped keys of all blocks, by name."""
