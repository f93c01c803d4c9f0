"""`steps_to_skip`: the given steps read their data without training on it."""

from __future__ import annotations

import pytest
import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.step.skipped_steps import step_ranges
from support.training import Net, Watch, loader, make, parameters


def trained(steps_to_skip=None, *, spoil=None, **options):
    batches = [[x.clone(), y.clone()] for x, y in loader()]
    if spoil is not None:
        batches[spoil][0].fill_(float("nan"))
    logger, at = InMemoryLogger(), {}
    watch = Watch(lambda state: at.__setitem__(state.timestamp.counts.batch, parameters(trainer)))
    model = Net()
    trainer = make(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        loop={"steps_to_skip": steps_to_skip},
        loggers=logger,
        callbacks=watch,
        max_duration="5ba",
        **options,
    )
    with trainer:
        trainer.fit()
    return trainer, at, dict(logger.data["loss/train/total"])


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_a_skipped_step_changes_only_the_time(precision):
    trainer, at, losses = trained([2, "4-4"], spoil=1, precision=precision)
    assert trainer.state.timestamp.batch == 5
    assert trainer.state.timestamp.sample == 20
    assert losses.keys() == {1, 3, 5}
    for skipped in (2, 4):
        assert all(torch.equal(at[skipped][name], value) for name, value in at[skipped - 1].items())
    assert not torch.equal(at[3]["layers.0.weight"], at[2]["layers.0.weight"])
    (state,) = {int(slots["step"]) for slots in trainer.state.optimizers[0].state.values()}
    assert state == 3


def test_bad_data_ends_a_run_unless_its_step_is_skipped():
    with pytest.raises(FloatingPointError, match="batch 2"):
        trained(spoil=1)


def test_step_ranges_are_parsed_and_invalid_ones_raise():
    assert step_ranges(None) == ()
    assert step_ranges(7) == (range(7, 8),)
    assert step_ranges(["3-5", range(8, 9)]) == (range(3, 6), range(8, 9))
    for given in (0, "5-3", "x", 1.5, [True], range(1, 9, 2)):
        with pytest.raises(TrainerConfigError, match=r"`steps_to_skip` has .*'1200-1250'"):
            step_ranges(given)
