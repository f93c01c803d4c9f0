"""`Trainer(deepspeed_config=…)`: a configuration of DeepSpeed trains over FSDP2."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from hocket.dist import ConfigError
from hocket.trainer.errors import TrainerConfigError
from support.training import make

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


def test_stages_train_on_two_ranks(two_ranks):
    assert two_ranks.run(train_sharded) == [("amp_bf16", True, True)] * 2
    assert all(two_ranks.run(train_replicated))


def test_contradictions_name_both_values():
    with pytest.raises(ConfigError, match=r"fp32.*amp_bf16|amp_bf16.*fp32"):
        make(precision="fp32", deepspeed_config={"bf16": {"enabled": True}})
    with pytest.raises(TrainerConfigError, match="`deepspeed_config` and `fsdp_config` are both set"):
        make(deepspeed_config={}, fsdp_config={})


def test_the_loss_scale_is_that_of_the_configuration(one_rank):
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7}
    with make(deepspeed_config={"fp16": fp16}, max_duration="1ba") as trainer:
        trainer.fit()
        scale = trainer._parts.precision.state_dict()
    assert (scale["scale"], scale["growth_interval"]) == (32.0, 7)
