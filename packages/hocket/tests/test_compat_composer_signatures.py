"""Arguments by position and by Composer's names, where Hocket's names differ."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import hocket.trainer.metrics as own_metrics
import hocket.trainer.optim as own_optim
from hocket.compat.composer import functional, loss, metrics, optim, utils
from hocket.compat.composer.core import ensure_time
from hocket.compat.composer.utils import map_collection
from hocket.compat.composer.utils.module_surgery import replace_module_classes
from hocket.dist import FSDPConfig
from hocket.dist.errors import ConfigError
from hocket.trainer import Time


def test_functions_accept_arguments_by_position_and_by_composers_names():
    logits, targets = torch.randn(6, 4), torch.arange(6) % 4
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    smoothed = functional.smooth_labels(logits, targets, 0.4)
    torch.testing.assert_close(smoothed[0], torch.tensor([0.7, 0.1, 0.1, 0.1]))
    expected = nn.functional.cross_entropy(logits, targets, weight, ignore_index=2, reduction="sum")
    torch.testing.assert_close(loss.soft_cross_entropy(logits, targets, weight, 2, "sum"), expected)
    torch.testing.assert_close(
        loss.soft_cross_entropy(input=logits, target=targets, weight=weight, ignore_index=2, reduction="sum"),
        expected,
    )
    assert ensure_time(maybe_time=3, int_unit="ba") == ensure_time(3, "ba") == Time(3, "ba")
    assert map_collection([1, 2], map_fn=str) == ["1", "2"]
    model = nn.Sequential(nn.ReLU())
    old = model[0]
    replaced = replace_module_classes(module=model, policies={nn.ReLU: lambda module, index: nn.GELU()})
    assert type(model[0]) is nn.GELU
    assert replaced == {old: model[0]}
    with pytest.raises(TypeError, match="`smooth_labels` got `smoothing` by position and by name"):
        functional.smooth_labels(logits, targets, 0.4, smoothing=0.1)
    with pytest.raises(TypeError, match="takes 3 arguments by position, and 4 were given"):
        functional.smooth_labels(logits, targets, 0.4, 1)


def test_schedules_accept_all_arguments_by_position():
    made = optim.LinearWithWarmupScheduler("2ba", 1.0, 0.1, "8ba", True)
    named = own_optim.LinearWithWarmupScheduler(
        t_warmup="2ba", alpha_i=1.0, alpha_f=0.1, t_max="8ba", scale_warmup=True
    )
    assert isinstance(made, own_optim.LinearWithWarmupScheduler)
    assert vars(made) == vars(named)
    assert vars(optim.PolynomialScheduler(2, "8ba", 0.5)) == vars(
        own_optim.PolynomialScheduler(2, "8ba", alpha_f=0.5)
    )
    assert type(pickle.loads(pickle.dumps(made))) is optim.LinearWithWarmupScheduler


def test_the_first_argument_of_a_language_metric_is_not_ignore_index():
    # Taken as `ignore_index`, `False` would ignore token 0.
    metric = metrics.LanguageCrossEntropy(False, -1)
    assert (metric.ignore_index, metric.dist_sync_on_step) == (-1, False)
    assert metrics.LanguagePerplexity(dist_sync_on_step=False).ignore_index == -100
    assert isinstance(metric, own_metrics.LanguageCrossEntropy)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, -1], [2, 3, 4]])
    metric.update(logits, targets)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(metric.compute(), expected)
    assert type(pickle.loads(pickle.dumps(metric))) is metrics.LanguageCrossEntropy


def test_sharding_configurations_accept_composers_keys():
    # `FSDPConfig(use_orig_params=True)` must not raise a `TypeError`.
    config = utils.FSDPConfig(sharding_strategy="SHARD_GRAD_OP", use_orig_params=True, limit_all_gathers=True)
    assert isinstance(config, FSDPConfig)
    assert not config.should_reshard
    for name in ("fsdp", "fsdp2"):
        layout = utils.ParallelismConfig(**{name: config})
        assert layout.fsdp is layout.fsdp2 is config
    assert utils.FSDP2Config(state_dict_type="sharded", verbose=True).verbose
    with pytest.raises(ConfigError, match="`sharding_stratgy`"):
        utils.FSDPConfig(sharding_stratgy="FULL_SHARD")


def test_collectives_and_samplers_accept_composers_arguments():
    tensor = torch.ones(2)
    assert utils.dist.all_gather(tensor, group=None) == [tensor]
    assert utils.dist.all_gather_object("a", group=None) == ["a"]
    utils.dist.all_reduce(tensor, "SUM", group=None)
    utils.dist.broadcast(tensor, 0, group=None)
    utils.dist.broadcast_object_list([tensor], 0, group=None)
    utils.dist.barrier(group=None)
    assert utils.dist.get_global_rank(group=None) == 0
    orders = [list(utils.dist.get_sampler(range(99), shuffle=True, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert utils.ensure_tuple(x=3) == (3,)


def test_targets_of_losses_are_recognized_and_converted_to_dense_ones():
    logits, indices = torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]])
    dense = loss.ensure_targets_one_hot(logits, indices)
    assert (dense.shape, dense.dtype) == (logits.shape, torch.float32)
    assert torch.equal(dense.argmax(1), indices)
    assert loss.ensure_targets_one_hot(logits, indices, num_classes=5).shape == (2, 5, 4)
    assert loss.infer_target_type(logits, indices) == "indices"
    assert loss.infer_target_type(logits, dense) == "one_hot"
    assert loss.check_for_index_targets(indices)
    assert not loss.check_for_index_targets(dense)
    with pytest.raises(ValueError, match=r"`targets` has the shape \(2,\) beside logits of \(2, 3, 4\)"):
        loss.infer_target_type(logits, torch.tensor([0, 1]))


def test_the_dice_loss_reduces_by_its_reduction_argument():
    outputs, targets = torch.rand(2, 3, 5), torch.tensor([[0, 1, 1, 0, 1], [2, 0, 0, 1, 1]])
    single = loss.DiceLoss(reduction="none")(outputs, targets)
    assert single.shape == (2, 3)
    assert loss.DiceLoss(False, True, reduction="mean").softmax
    torch.testing.assert_close(loss.DiceLoss()(outputs, targets), single.mean())
    torch.testing.assert_close(loss.DiceLoss(reduction="sum")(outputs, targets), single.sum())
    present = loss.DiceLoss(ignore_absent_classes=True, reduction="none")(outputs, targets)
    assert present[0, 2] == 0 != single[0, 2]
    with pytest.raises(ValueError, match="`reduction` is 'max'"):
        loss.DiceLoss(reduction="max")
