"""SIGTERM during `fit`: the run saves at a step boundary, exits with 143 and resumes with the same bits."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from hocket.trainer import Callback
from hocket.trainer.loop.preemption import SigtermStop
from hocket.trainer.ranks.stop_signal import StopSignal
from support.ranks import run_ranks
from support.training import FileStore, Watch, loader, make


def train(folder, losses, *, signalled_at=None, **arguments):
    def note(state):
        losses[state.timestamp.counts.batch] = float(state.loss)
        if state.timestamp.counts.batch == signalled_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with make(
        train_dataloader=loader(shuffle=True),
        callbacks=[Watch(note)],
        checkpointing={"store": None if folder is None else FileStore(folder)},
        max_duration="9ba",
        **arguments,
    ) as trainer:
        trainer.fit()


def test_a_signalled_run_saves_exits_and_resumes_with_the_same_bits(tmp_path):
    whole, parts = {}, {}
    train(None, whole)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, parts, signalled_at=3)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    last = max(parts)
    assert 3 <= last <= 5  # prefetched batches are trained on
    assert [entry.step for entry in FileStore(tmp_path).list()][-1] == last
    train(tmp_path, parts, autoresume=True)
    assert parts == whole


def test_the_save_comes_before_the_end_of_the_fit_and_in_place_of_an_evaluation(tmp_path):
    order = []

    class Order(Callback):
        def fit_end(self, state, logger):
            order.append(("fit_end", [entry.step for entry in FileStore(tmp_path).list()]))

        def eval_start(self, state, logger):
            order.append("eval")

    def note(state):
        if state.timestamp.counts.batch == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        pytest.raises(SystemExit),
        make(
            train_dataloader=loader(),
            eval_dataloader=loader(),
            callbacks=[Watch(note), Order()],
            checkpointing={"store": FileStore(tmp_path)},
            max_duration="9ba",
        ) as trainer,
    ):
        trainer.fit()
    last = trainer.state.timestamp.counts.batch
    assert order == [("fit_end", [last])]


def test_a_users_own_handler_is_kept():
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        losses = {}
        train(None, losses, signalled_at=3)
        assert (received, max(losses)) == ([1], 9)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_only_ends_the_process_is_replaced():
    class EndsLater:
        ends_process = True

        def __call__(self, number, frame):
            raise AssertionError("the run was to stop at a step boundary")

    handler = EndsLater()
    signal.signal(signal.SIGTERM, handler)
    try:
        losses = {}
        with pytest.raises(SystemExit):
            train(None, losses, signalled_at=3)
        assert max(losses) < 9
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_second_signal_ends_the_process_at_once():
    pid = os.fork()
    if pid == 0:
        with SigtermStop(StopSignal()):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def signalled_on_rank_1():
    seen = []

    def note(state):
        seen.append(state.timestamp.counts.batch)
        if dist.get_rank() == 1 and seen[-1] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with make(callbacks=[Watch(note)], max_duration="9ba") as trainer:
            trainer.fit()
    except SystemExit as ended:
        return ended.code, seen[-1]
    return 0, seen[-1]


def test_all_ranks_end_after_the_same_batch():
    first, second = run_ranks(signalled_on_rank_1, 2, init="gloo", timeout_s=60)
    assert first == second
    assert first[0] == 143
    assert 3 <= first[1] <= 5
