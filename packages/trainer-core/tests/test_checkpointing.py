"""When the loop saves: quick recognition of batches without a save, and ends that were not foreseen."""

from __future__ import annotations

import time

import pytest
import torch

from hocket.ckpt.torch import CheckpointStore
from hocket.trainer.checkpoint import checkpointing
from hocket.trainer.checkpoint.save_times import SaveTimes
from hocket.trainer.ranks.step_sync import StepSync
from support.training import FileStore, Net, Watch, loader, make


@pytest.mark.parametrize("interval", ["3ba", "20sp", "1ep", "1iter", "0.3dur", "1000sec"])
def test_batches_without_a_due_save_are_recognized_by_plain_numbers(interval, tmp_path, monkeypatch):
    """Most batches end without building `Time` objects, and the saves are the same as with them."""
    asked = []

    class Foreseen(checkpointing._Foreseen):
        def __init__(self, state, after):
            asked.append(after.batch)
            super().__init__(state, after)

    monkeypatch.setattr(checkpointing, "_Foreseen", Foreseen)
    saved = []
    for name in ("quick", "asked"):
        with make(
            checkpointing={"store": FileStore(tmp_path / name)}, save_interval=interval, max_duration="13ba"
        ) as trainer:
            trainer.fit()
        saved.append([entry.step for entry in FileStore(tmp_path / name).list()])
        if name == "quick":
            assert len(asked) <= (13 if interval == "0.3dur" else 8), asked
        monkeypatch.setattr(checkpointing.Checkpointer, "_is_quiet", lambda self, before, now: False)
    assert saved[0] == saved[1]


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize("at", [3, 5])
def test_a_run_that_a_callback_ends_early_resumes_without_losing_a_batch(tmp_path, kind, at):
    """The batch that is ahead when `max_duration` is shortened is trained on, or left to the resumed run."""
    arguments = {"global_train_batch_size": 4} if kind == "stateful" else {}

    def run(store=None, *, end=None):
        losses = {}

        def watch(state):
            losses[state.timestamp.counts.batch] = float(state.loss)
            if state.timestamp.counts.batch == end:
                state.max_duration = state.timestamp.batch

        store = {} if store is None else {"checkpointing": {"store": store}, "autoresume": True}
        model = Net(dropout=0.3)
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1)
        with make(
            model=model,
            optimizers=optimizers,
            train_dataloader=loader(shuffle=True),
            callbacks=Watch(watch),
            max_duration="2ep",
            **arguments,
            **store,
        ) as trainer:
            trainer.fit()
        return losses

    whole, store = run(), FileStore(tmp_path)
    first = run(store, end=at)
    assert max(first) == (4 if at == 3 else 5)  # 5 batches are an epoch
    assert first | run(store) == whole
    assert [entry.step for entry in store.list()][:1] == [max(first)]


def test_a_save_takes_the_time_to_its_end_and_not_to_the_batch_that_learns_of_it(tmp_path):
    """A notice leaves some seconds, and batches may be longer than the saves beside them."""
    store, times = CheckpointStore(tmp_path), SaveTimes(str(tmp_path))
    times.begin(1)
    handle = store.save({"x": torch.ones(3)}, step=1, mode="async")
    handle.wait()
    time.sleep(3)
    times.commit(handle)
    store.close()
    with make(max_duration="1ba") as trainer:
        sync = StepSync(trainer.state.parallelism)
        assert times.too_late_for_save(sync, time.monotonic() + 2.5) is None
        assert "of this run took" in str(times.too_late_for_save(sync, time.monotonic() - 1))
