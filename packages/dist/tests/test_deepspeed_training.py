"""`Trainer(deepspeed_config=…)` trains with FSDP2 as the DeepSpeed configuration specifies."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.dist import ConfigError
from hocket.trainer.errors import TrainerConfigError
from support.training import Net, make

CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}


def train_sharded():
    with make(max_duration="2ba", deepspeed_config=CONFIG) as trainer:
        trainer.fit()
        state = trainer.state
        sharded = all(isinstance(parameter, DTensor) for parameter in state.module.parameters())
        return state.precision, sharded, bool(torch.isfinite(state.loss))


def train_replicated():
    with make(max_duration="2ba", deepspeed_config={}) as trainer:
        trainer.fit()
        # Stage 0 keeps a whole copy on every rank.
        return all(one.to_local().shape == one.shape for one in trainer.state.module.parameters())


def count_collectives(zero):
    """Return the gathers and reductions of two microbatches, and whether parameters are offloaded."""
    config = {"zero_optimization": zero, "gradient_accumulation_steps": 2}
    with make(max_duration="1ba", deepspeed_config=config) as trainer:
        with Collectives() as seen:
            trainer.fit()
        groups = [one for one in trainer.state.module.modules() if isinstance(one, FSDPModule)]
        sharded = [group for each in groups if (group := each._get_fsdp_state()._fsdp_param_group)]
        held = [one for group in sharded for one in group.fsdp_params]
        return seen.gathers, seen.reductions, all(one.offload_to_cpu for one in held)


class Collectives(TorchDispatchMode):
    """Counts the gathers and reductions of sharded layers."""

    gathers = reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += "allgather" in str(func)
        self.reductions += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def test_each_stage_gathers_and_reduces_as_deepspeed_does(two_ranks):
    """Stage 1 reduces once a step, stage 2 after each microbatch, and stage 3 gathers again in backward."""
    by_stage = {stage: two_ranks.run(count_collectives, {"stage": stage})[0] for stage in (1, 2, 3)}
    gathers, reductions, _ = by_stage[1]
    assert reductions > 0
    assert by_stage[2][1] == 2 * reductions
    assert by_stage[3][0] > by_stage[2][0] >= gathers
    assert not any(is_offloaded for _, _, is_offloaded in by_stage.values())
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    assert two_ranks.run(count_collectives, zero) == [(*by_stage[3][:2], True)] * 2


class Sizes(TorchDispatchMode):
    """Records the number of ranks of each parameter gather, and the reductions of gradients."""

    def __init__(self):
        super().__init__()
        self.gathered_over = []
        self.reduced = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d._allgather_base_"):
            self.gathered_over.append(args[0].numel() // args[1].numel())
        elif name.startswith("c10d._reduce_scatter_base_"):
            ranks = args[1].numel() // args[0].numel()
            self.reduced["scattered over", ranks, args[0].dtype] += (
                ranks > 1
            )  # torch 2.9 reduces over one rank, too
        # Sums in float64 are the trainer's own and not of gradients.
        elif name.startswith("c10d.allreduce_") and args[0][0].dtype != torch.float64:
            self.reduced["summed over copies", args[0][0].dtype] += 1
        return func(*args, **(kwargs or {}))


def note_sizes(config):
    with make(max_duration="1ba", deepspeed_config={**config, "gradient_accumulation_steps": 2}) as trainer:
        with Sizes() as seen:
            trainer.fit()
        return seen.gathered_over, dict(+seen.reduced)


GROUPS = 2
"""Number of FSDP groups, one per layer of the model; each is gathered in forward and in backward."""
OF_FOUR = {
    "hpZ": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        ([4] * GROUPS + [2] * GROUPS) * 2,
        {("scattered over", 4, torch.float32): 2 * GROUPS},
    ),
    "hpZ over all ranks": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
        [4] * GROUPS * 4,
        {("scattered over", 4, torch.float32): 2 * GROUPS},
    ),
    "MiCS": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        [2] * GROUPS * 4,
        # Replicas are summed at the end of gradient accumulation only.
        {
            ("scattered over", 2, torch.float32): 2 * GROUPS,
            ("summed over copies", torch.float32): GROUPS,
        },
    ),
    "MiCS, gradients in bfloat16": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "communication_data_type": "bf16"},
        [2] * GROUPS * 4,
        {
            ("scattered over", 2, torch.bfloat16): 2 * GROUPS,
            ("summed over copies", torch.bfloat16): GROUPS,
        },
    ),
    "stage 2, gradients in float16": (
        {"zero_optimization": {"stage": 2}, "communication_data_type": "fp16"},
        [4] * GROUPS * 2,
        {("scattered over", 4, torch.float16): 2 * GROUPS},
    ),
    "bfloat16, gradients in float32": (
        {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        [4] * GROUPS * 4,
        {("scattered over", 4, torch.float32): 2 * GROUPS},
    ),
    "bfloat16, gradients in bfloat16": (
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        [4] * GROUPS * 4,
        {("scattered over", 4, torch.bfloat16): 2 * GROUPS},
    ),
    "stage 0, gradients in float16": (
        {"communication_data_type": "fp16"},
        [],
        {("summed over copies", torch.float16): GROUPS},
    ),
}


@pytest.mark.parametrize("name", OF_FOUR)
def test_partitions_and_reduce_dtypes_are_those_of_the_configuration(four_ranks, name):
    config, gathered_over, reduced = OF_FOUR[name]
    assert four_ranks.run(note_sizes, config) == [(gathered_over, reduced)] * 4


def test_stages_train_on_two_ranks(two_ranks):
    assert two_ranks.run(train_sharded) == [("amp_bf16", True, True)] * 2
    assert all(two_ranks.run(train_replicated))


def test_contradictions_name_both_values():
    with pytest.raises(ConfigError, match=r"fp32.*amp_bf16|amp_bf16.*fp32"):
        make(precision="fp32", deepspeed_config={"bf16": {"enabled": True}})
    with pytest.raises(TrainerConfigError, match="`deepspeed_config` and `fsdp_config` are both set"):
        make(deepspeed_config={}, fsdp_config={})
    with pytest.raises(ConfigError, match=r"global batch` is 4, but .* 32 \(train_batch_size\)"):
        make(deepspeed_config={"train_batch_size": 32})
    with pytest.raises(ConfigError, match=r"`gradient_clipping` is 1\.0, but .* 0\.5"):
        make(gradient_clipping=1.0, deepspeed_config={"gradient_clipping": 0.5})


def test_batch_sizes_and_clipping_take_effect(one_rank):
    """The norm of an SGD step is the clipped gradient's norm times the learning rate."""
    model = Net()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    sizes = []
    model.layers.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    config = {"gradient_clipping": 1e-3, "gradient_accumulation_steps": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    with make(model=model, optimizers=optimizer, deepspeed_config=config, max_duration="1ba") as trainer:
        trainer.fit()
        whole = [parameter.full_tensor() for parameter in model.parameters()]
    assert sizes == [2, 2]
    assert (nn.utils.parameters_to_vector(whole) - before).norm().item() == pytest.approx(2e-3, rel=1e-3)


def test_the_configured_loss_scale_takes_effect(one_rank):
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7}
    with make(deepspeed_config={"fp16": fp16}, max_duration="1ba") as trainer:
        trainer.fit()
        scale = trainer._run.precision.state_dict()
    assert (scale["scale"], scale["growth_interval"]) == (32.0, 7)
