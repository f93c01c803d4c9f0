"""The costs of a step: the number of its collectives, and no leaks over many steps."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from hocket.trainer import Algorithm, Callback, Event
from hocket.trainer.callbacks import LRMonitor, SpeedMonitor
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import FileLogger, InMemoryLogger, ProgressBarLogger
from hocket.trainer.process import process_settings
from hocket.trainer.ranks import step_sync
from support.ranks import run_ranks
from support.training import Watch, data, make, parameters


class Touches(Callback):
    def after_dataloader(self, state, logger):
        pass

    def before_train_batch(self, state, logger):
        pass


class Elsewhere(Algorithm):
    events = frozenset({Event.AFTER_LOSS})

    def match(self, event, state):
        return True

    def apply(self, event, state, logger):
        pass


class Here(Elsewhere):
    events = frozenset({Event.BATCH_START})


def batches(rank):
    """Return a list of batches, equally many for each of two ranks."""
    x, y = data().tensors
    return list(zip(x.split(2)[rank::2], y.split(2)[rank::2], strict=True))


def collectives():
    """Return how many collectives each process group has started."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def collectives_of_a_step(**arguments):
    counts = {}
    watch = Watch(lambda state: counts.__setitem__(state.counts.batch, collectives()))
    rank = int(os.environ["RANK"])
    callbacks = [watch, *arguments.pop("callbacks", ())]
    arguments["loop"] = {"auto_shard": False, **arguments.get("loop", {})}
    with make(
        train_dataloader=batches(rank), max_duration="5ba", callbacks=callbacks, **arguments
    ) as trainer:
        trainer.fit()
        return (counts[4] - counts[2]) / 2, parameters(trainer)


def count_on_a_rank():
    policies = {
        policy: collectives_of_a_step(device_train_microbatch_size=1, loop={"gradient_sync": policy})
        for policy in ("every", "last", "replicas_last", None)
    }
    cases = {
        "plain": {},
        "clipped": {"gradient_clipping": 1.0},
        "logged": {"loggers": InMemoryLogger()},
        "logged at times": {"loggers": InMemoryLogger(), "loop": {"log_every": 100}},
        "callbacks that may touch the batch": {"callbacks": [Touches()]},
        "an algorithm elsewhere": {"callbacks": [Touches()], "algorithms": Elsewhere()},
        "an algorithm at the batch": {"algorithms": Here()},
    }
    counts = {name: collectives_of_a_step(**arguments)[0] for name, arguments in cases.items()}
    # Without sockets, as on several hosts.
    step_sync.connect_ranks = lambda *ranks, **options: None
    for name in ("plain", "an algorithm at the batch"):
        counts[f"{name}, without sockets"] = collectives_of_a_step(**cases[name])[0]
    return policies, counts


def test_a_step_takes_the_expected_number_of_collectives():
    """Expect one for the gradients, which fit one bucket, and one for the exchange without sockets."""
    for policies, counts in run_ranks(count_on_a_rank, 2, timeout_s=240):
        assert counts == {
            "plain": 1,
            "clipped": 1,  # gradients are whole on each rank
            "logged": 2,  # the mean loss, which the step does not wait for
            "logged at times": 1,
            "callbacks that may touch the batch": 1,
            "an algorithm elsewhere": 1,
            "an algorithm at the batch": 1,
            "plain, without sockets": 2,
            "an algorithm at the batch, without sockets": 3,  # the batch's counts are exchanged again
        }
        steps = {policy: step for policy, (step, _) in policies.items()}
        assert steps == {"every": 2, "last": 1, "replicas_last": 1, None: 1}
        expected = policies["last"][1]
        for _, trained in policies.values():
            for name, value in expected.items():
                torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def test_an_unknown_gradient_sync_policy_raises():
    with pytest.raises(TrainerConfigError, match="`gradient_sync` is 'first'; expected one of `every`"):
        make(loop={"gradient_sync": "first"})


class Rates(LRMonitor):
    """A user's callback that inherits from one of Hocket's."""

    def batch_end(self, state, logger):
        assert state.outputs is not None


class AroundStandard:
    def __init__(self, inner):
        self.inner = inner

    def compute_gradients(self, batch):
        loss = self.inner.compute_gradients(batch)
        assert self.inner.context.state.outputs is not None
        return loss

    def update(self):
        self.inner.update()


@pytest.mark.parametrize(
    ("arguments", "are_kept"),
    [
        ({}, False),
        (
            {
                "loggers": ProgressBarLogger(),
                "callbacks": [LRMonitor(), SpeedMonitor()],
                "gradient_clipping": 1.0,
            },
            False,
        ),
        ({"loggers": InMemoryLogger(), "device_train_microbatch_size": 2}, False),
        ({"callbacks": [Callback()]}, True),
        ({"callbacks": [Rates()]}, True),
        ({"algorithms": Elsewhere()}, True),
        ({"train_step": AroundStandard}, True),
    ],
)
def test_outputs_are_freed_before_backward_unless_a_callback_may_read_them(arguments, are_kept, capsys):
    """Otherwise large outputs, such as logits, would stay in memory until after the update."""
    held = []
    with make(max_duration="2ba", **arguments) as trainer:
        state = trainer.state

        class Outputs(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                held.append(state.outputs is not None)
                return gradient

        forward = state.model.forward
        state.model.forward = lambda batch: Outputs.apply(forward(batch))
        trainer.fit()
        assert (state.outputs is not None) == are_kept
    assert set(held) == {are_kept}


@pytest.mark.slow
def test_many_steps_leak_no_objects_threads_or_files(tmp_path):
    """Measure the last 8,000 of 10,000 steps, with components that run in each step."""
    sizes = []

    def measure(state):
        if state.counts.batch in (2000, 10_000):
            trainer.logger.flush()
            gc.collect()
            sizes.append(
                (sys.getallocatedblocks(), threading.active_count(), len(os.listdir("/proc/self/fd")))
            )

    rows = list(zip(*(part.split(4) for part in data().tensors), strict=True))
    with make(
        train_dataloader=rows * 100,
        loggers=FileLogger(str(tmp_path / "log.jsonl")),
        callbacks=[Watch(measure), Touches()],
        gradient_clipping=1.0,
        max_duration="10000ba",
    ) as trainer:
        trainer.fit()
    (blocks, threads, files), (blocks_after, *others) = sizes
    assert others == [threads, files]
    # Fewer than one object in ten steps.
    assert blocks_after - blocks < 500


def test_existing_objects_are_frozen_in_the_first_fit_of_a_process(monkeypatch):
    monkeypatch.setattr(process_settings, "_has_frozen", False)
    frozen = []
    watch = Watch(lambda state: frozen.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    with make(callbacks=watch, max_duration="2ba") as trainer:
        trainer.fit()
        assert gc.get_freeze_count() == 0
        trainer.fit("1ba")
    assert frozen == [(True, True), (True, True), (True, False)]


def test_a_failed_fit_leaves_nothing_frozen(monkeypatch):
    monkeypatch.setattr(process_settings, "_has_frozen", False)
    frozen = []

    def fail(state):
        frozen.append(gc.get_freeze_count() > 0)
        raise ValueError("no further")

    watch = Watch(fail)
    with make(callbacks=watch, max_duration="2ba") as trainer, pytest.raises(ValueError, match="no further"):
        trainer.fit()
    assert frozen == [True]
    assert gc.get_freeze_count() == 0


class Frozen(torch.utils.data.Dataset):
    """Samples of zeros, which note whether the process that reads them has frozen its objects."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.notes.open("a") as notes:
            notes.write(f"{os.getpid()} {gc.get_freeze_count() > 1000}\n")
        return torch.zeros(5), torch.zeros(3)


@pytest.mark.parametrize("has_frozen", [False, True])
def test_the_objects_of_forked_workers_are_frozen_in_every_fit(has_frozen, monkeypatch, tmp_path):
    monkeypatch.setattr(process_settings, "_has_frozen", has_frozen)
    data = Frozen()
    data.notes = tmp_path / "notes"
    loader = torch.utils.data.DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
    own = gc.get_freeze_count()  # of Python 3.12 itself
    with make(train_dataloader=loader, max_duration="2ba") as trainer:
        trainer.fit()
        assert gc.get_freeze_count() <= own
    notes = {tuple(line.split()) for line in data.notes.read_text().splitlines()}
    assert len(notes) == 1
    assert [(int(pid) == os.getpid(), frozen) for pid, frozen in notes] == [(False, "True")]


@pytest.mark.parametrize("gc_interval", [None, 3])
def test_objects_that_the_caller_froze_stay_frozen(gc_interval, monkeypatch):
    monkeypatch.setattr(process_settings, "_has_frozen", False)
    with make(loop={"gc_interval": gc_interval}, max_duration="2ba") as trainer:
        gc.freeze()
        try:
            trainer.fit()
            assert gc.get_freeze_count()
        finally:
            gc.unfreeze()
    assert gc.isenabled()


def test_garbage_is_collected_at_agreed_batches():
    collected = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            collected.append(trainer.state.counts.batch)

    frozen = []
    watch = Watch(lambda state: frozen.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    with make(callbacks=watch, loop={"gc_interval": 3}, max_duration="8ba") as trainer:
        gc.callbacks.append(note)
        try:
            trainer.fit()
        finally:
            gc.callbacks.remove(note)
    assert [batch for batch in collected if batch] == [3, 6]
    assert frozen == [(False, True)] * 8
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with pytest.raises(TrainerConfigError, match="`gc_interval` is 0; expected a whole number from 1 on"):
        make(loop={"gc_interval": 0})
