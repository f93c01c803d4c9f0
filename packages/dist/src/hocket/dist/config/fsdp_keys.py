"""The keys of Composer's `fsdp_config` (FSDP1 and FSDP2) and their treatment."""

from hocket.dist.config.key_table import ConfigKey, honoured, mapped, no_effect, refused

_TRANSFORMER_ENGINE = "float8 layers of Transformer Engine are not supported; leave the key out."

FSDP_KEYS: dict[str, ConfigKey] = {
    "sharding_strategy": honoured(
        "`FULL_SHARD`: 1-D mesh, re-sharded after forward. `SHARD_GRAD_OP`: not re-sharded. `NO_SHARD`: a "
        "mesh of copies. `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2`: shard within a node, replicate across "
        "nodes, unless the degrees say otherwise."
    ),
    "reshard_after_forward": honoured("As `fully_shard` has it; a number re-shards over that many ranks."),
    "mixed_precision": honoured(
        "`DEFAULT`: parameters in the trainer's low precision, gradients reduced in float32. `PURE`: both in "
        "low precision. `FULL`: no cast. A dict sets `param_dtype`, `reduce_dtype`, `output_dtype`; "
        "`buffer_dtype` is refused."
    ),
    "amp_dtype": honoured(
        "The low precision, such as `bf16`. Derived from the trainer's `precision` if absent."
    ),
    "data_parallel_shard_degree": honoured("Ranks that share one copy; -1 uses all that are left."),
    "data_parallel_replicate_degree": honoured("Copies of the sharded model (HSDP)."),
    "process_group": mapped(
        "Becomes sizes of the mesh: `self` shards over 1 rank, `node` within a node, `setK` over K "
        "consecutive ranks, `modK` and `local_rank_across_nodes` over ranks that are equal modulo K or "
        "modulo the node's size. Gradients are averaged over all ranks. Lists of ranks are refused."
    ),
    "sync_module_states": mapped(
        "Rank 0's values are broadcast before sharding; if only rank 0 has values, tensor by tensor into "
        "shards."
    ),
    "auto_wrap": honoured("`False` makes one group of the whole model."),
    "cpu_offload": honoured(
        "Parameters, gradients and optimizer state stay in host memory; the optimizer steps there."
    ),
    "activation_checkpointing": honoured(
        "Modules with `_activation_checkpointing = True`, those that `activation_checkpointing_fn(module)` "
        "of the model selects, else every wrapped block. Non-reentrant."
    ),
    "activation_checkpointing_every": honoured("Checkpoint or offload every n-th of those modules only."),
    "activation_checkpointing_save_ops": honoured(
        'Operators whose results are kept: `"matmul"`, `"attention"`, or aten names such as `"mm"`.'
    ),
    "activation_cpu_offload": honoured(
        "Saved activations of those modules move to host memory until backward."
    ),
    "forward_prefetch": mapped("Explicit prefetch lists in the order in which the blocks are defined."),
    "forward_prefetch_limit": mapped("The length of those lists, with `forward_prefetch`."),
    "backward_prefetch_limit": mapped("Explicit prefetch lists of that length; 1 is FSDP2's own behaviour."),
    "gradient_sync": honoured(
        "Which microbatches reduce gradients: `every`, `last` (needs memory for whole gradients), "
        "`replicas_last` (within a copy always, across copies with the last)."
    ),
    "ignored_modules": honoured(
        "Modules or their names: whole on every rank. Their gradients are averaged after each backward. "
        "Scalars and complex parameters are always whole."
    ),
    "param_init_fn": honoured(
        "Called for each module built on the meta device, with its own parameters and buffers whole on the "
        "CPU. Without it: `model.param_init_fn`; else `reset_parameters()` of each module, and "
        "`_init_weights(module)` of the nearest module above that has it, as in a build on a real device."
    ),
    "initial_weights": honoured(
        "A folder of safetensors files, by its path or URI, read straight into shards."
    ),
    "find_unused_parameters": honoured(
        "Ranks exchange in every backward pass which parameters they used. Without it they stop after a "
        "first pass that used all, and a later pass that leaves one out is an error."
    ),
    "verbose": honoured("Print module, size, dtypes, re-sharding and prefetch of every group on rank 0."),
    "activation_checkpointing_reentrant": no_effect(
        "checkpointing is always non-reentrant, which FSDP2 and torch.compile need.",
        silent=(None, False, True),
    ),
    "backward_prefetch": no_effect(
        "FSDP2 always gathers the next block ahead in backward.",
        silent=(None, "BACKWARD_PRE", "BACKWARD_POST"),
        accepted=("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
    ),
    "flatten_parameters": no_effect("FSDP2 has no flat parameters.", silent=(None, True), accepted=(True,)),
    "limit_all_gathers": no_effect("FSDP2 always limits the memory of its all-gathers.", silent=(None, True)),
    "load_monolith_rank0_only": no_effect(
        "every rank reads only its own part of a checkpoint, also of a monolithic one.", silent=(None, False)
    ),
    "state_dict_type": no_effect(
        "checkpoints are saved sharded and open on any number of ranks; `hocket-ckpt convert` makes one "
        "file.",
        silent=(None, "sharded"),
        accepted=("sharded", "full"),
    ),
    "use_orig_params": no_effect(
        "FSDP2 keeps the model's own parameters and has no flat ones.", silent=(None, True), accepted=(True,)
    ),
    "device_mesh": refused("set `data_parallel_shard_degree` and `data_parallel_replicate_degree` instead."),
    "keep_low_precision_grads": refused("gradients have the dtype of their parameters; leave the key out."),
    "load_planner": refused("planners belong to torch's own checkpoints; leave the key out."),
    "save_planner": refused("planners belong to torch's own checkpoints; leave the key out."),
    "min_params": refused("select modules with `_fsdp_wrap` or `fsdp_wrap_fn` instead."),
    "sharded_ckpt_prefix_dir": refused(
        "the trainer's `save_filename` names a checkpoint.", silent=(None, "ep{epoch}-ba{batch}")
    ),
    "te_checkpoint_wrapper": refused(_TRANSFORMER_ENGINE),
    "te_shard_fp8_weight": refused(_TRANSFORMER_ENGINE),
}
"""Every key of `fsdp_config`, ours and Composer's."""
