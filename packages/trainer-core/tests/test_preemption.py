"""Notices during `fit`, such as SIGTERM: the run saves at a step boundary, exits, and resumes exactly."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from hocket.trainer import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loop import preemption
from hocket.trainer.loop.preemption import StopNotice
from hocket.trainer.ranks.stop_signal import StopSignal
from support.ranks import run_ranks
from support.training import FileStore, Watch, loader, make


def train(folder, losses, *, signalled_at=None, numbers=(signal.SIGTERM,), **arguments):
    def note(state):
        losses[state.timestamp.counts.batch] = float(state.loss)
        if state.timestamp.counts.batch == signalled_at:
            for number in numbers:
                os.kill(os.getpid(), number)

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


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGUSR1,),
        (signal.SIGHUP, signal.SIGHUP),
        # Slurm's warning, then the end of the job to all its processes, and once more from the launcher.
        (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM),
        # Ctrl-C reaches a rank from the terminal and from the launcher.
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_notice_saves_however_many_copies_of_it_arrive(tmp_path, capfd, monkeypatch, numbers):
    # On a loaded machine this process may wait longer than that between two signals, and then end.
    monkeypatch.setattr(preemption, "_COPY_S", 60.0)
    losses = {}
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, losses, signalled_at=3, numbers=numbers)
    assert ended.value.code == 128 + numbers[0]
    assert [entry.step for entry in FileStore(tmp_path).list()][-1] == max(losses) < 9
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hocket: ")]
    assert len(said) == 1
    assert said[0].startswith(f"hocket: {numbers[0].name}: the run saves and stops after the present step")


class Again(Callback):
    """Gets one more copy of the notice while the trainer is closed."""

    is_closed = False

    def batch_end(self, state, logger):
        if state.timestamp.counts.batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, state, logger):
        os.kill(os.getpid(), signal.SIGTERM)
        self.is_closed = True


def test_copies_are_ignored_until_the_trainer_is_closed(tmp_path):
    again, store = Again(), {"store": FileStore(tmp_path)}
    with (
        pytest.raises(SystemExit),
        make(checkpointing=store, callbacks=[again], max_duration="9ba") as trainer,
    ):
        trainer.fit()
    assert again.is_closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stops_at_a_step_boundary_without_saves_too(capfd):
    losses = {}
    with pytest.raises(KeyboardInterrupt) as ended:
        train(None, losses, signalled_at=3, numbers=[signal.SIGINT])
    assert isinstance(ended.value, SystemExit)  # quiet where nothing catches it
    assert ended.value.code == 128 + signal.SIGINT
    assert 3 <= max(losses) <= 5
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hocket: ")]
    assert len(said) == 1
    assert said[0].startswith("hocket: SIGINT: the run stops without a save, since it makes none, after the")
    assert said[0].endswith("; Ctrl-C again ends it at once")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("saves", [True, False])
def test_a_second_ctrl_c_ends_at_once(saves):
    notice = StopNotice()
    notice.install(StopSignal(), saves=saves)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)  # from then on it is no copy of the first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        notice.restore()


def test_a_copy_of_ctrl_c_is_one_although_the_terminal_stalls():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(1 << 16)):
            pass
    os.set_blocking(writer, True)
    drain = threading.Timer(1.2, os.read, (reader, 1 << 20))
    stderr = os.dup(2)
    notice = StopNotice()
    notice.install(StopSignal(), saves=True)
    os.dup2(writer, 2)
    try:
        drain.start()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.dup2(stderr, 2)
        notice.restore()
        drain.join()
        for number in (reader, writer, stderr):
            os.close(number)
    assert notice.received == signal.SIGINT


@pytest.mark.parametrize(("grace", "is_killed"), [("0", True), ("60", False)])
def test_a_second_sigterm_ends_the_process_after_the_grace_period(monkeypatch, grace, is_killed):
    monkeypatch.setenv("HOCKET_GRACE_S", grace)
    pid = os.fork()
    if pid == 0:
        StopNotice().install(StopSignal(), saves=True)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) == is_killed


def test_the_deadline_is_that_of_slurm_where_it_tells(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    notice = StopNotice()
    notice.install(StopSignal(), saves=True)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        notice.restore()
    assert 125 < notice.deadline - time.monotonic() < 131
    assert notice.killed_at == notice.deadline


def test_the_signals_are_configurable_and_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("HOCKET_SAVE_SIGNALS", "SIGUSR2")
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, {}, signalled_at=3, numbers=[signal.SIGUSR2])
    assert ended.value.code == 128 + signal.SIGUSR2
    for text, words in (("SIGFOO", "`SIGFOO` is no signal"), ("SIGKILL", "`SIGKILL` is no signal")):
        monkeypatch.setenv("HOCKET_SAVE_SIGNALS", text)
        with pytest.raises(TrainerConfigError, match=words):
            train(None, {})
    monkeypatch.delenv("HOCKET_SAVE_SIGNALS")
    monkeypatch.setenv("HOCKET_GRACE_S", "soon")
    with pytest.raises(TrainerConfigError, match="`HOCKET_GRACE_S` is 'soon'"):
        train(None, {})


def test_a_handler_in_c_is_left_alone(tmp_path):
    with (tmp_path / "traces").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            losses = {}
            train(None, losses, signalled_at=3, numbers=[signal.SIGUSR1])
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert max(losses) == 9
    assert "test_preemption" in (tmp_path / "traces").read_text()


def signalled_with_workers(folder, method):
    """Send a notice to all processes of this one's group, as Slurm does; return the saved steps."""

    def note(state):
        if state.timestamp.counts.batch == 3:
            # Not this process itself: its SIGTERM ends a worker.
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], check=False, timeout=20)
            time.sleep(0.5)

    one = loader()
    data = DataLoader(one.dataset, batch_size=one.batch_size, num_workers=2, multiprocessing_context=method)
    with make(
        train_dataloader=data,
        callbacks=[Watch(note)],
        checkpointing={"store": FileStore(folder)},
        max_duration="9ba",
    ) as trainer:
        try:
            trainer.fit()
        except SystemExit as ended:
            return ended.code, [entry.step for entry in FileStore(folder).list()]
    return None


def test_workers_of_the_loader_outlive_a_notice_to_all_processes(tmp_path):
    ((code, steps),) = run_ranks(signalled_with_workers, 1, tmp_path, "fork", timeout_s=60)
    assert code == 143
    assert 3 <= steps[-1] <= 5


ORPHANS = """
import os, signal, sys, time
from torch.utils.data import DataLoader
from hocket.trainer.loop.preemption import sparing_workers

with sparing_workers():
    batches = iter(DataLoader(range(100), num_workers=2))
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
batches._workers[0].terminate()
batches._workers[0].join(5)
print(batches._workers[0].exitcode)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_spared_workers_end_with_their_parent_or_by_its_hand(how):
    done = subprocess.run([sys.executable, "-c", ORPHANS, how], capture_output=True, text=True, timeout=60)
    pids, *code = done.stdout.splitlines()
    assert code == ([] if how == "killed" else ["0"])
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids.split()):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


class SlowStore(FileStore):
    """A store whose saves take half a second."""

    def save(self, *arguments, **options):
        time.sleep(0.5)
        return super().save(*arguments, **options)


@pytest.mark.parametrize(
    ("grace", "interval", "is_saved"),
    [("0.3", "5ba", False), ("0.3", "100ba", True), ("0", "100ba", True), ("60", "5ba", True)],
)
def test_a_save_that_cannot_end_in_time_is_not_begun(monkeypatch, tmp_path, capfd, grace, interval, is_saved):
    """Without an earlier save of the run there is nothing to lose by trying."""
    monkeypatch.setenv("HOCKET_GRACE_S", grace)
    batches = []

    def note(state):
        batches.append(state.timestamp.counts.batch)
        if batches[-1] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    store = SlowStore(tmp_path)
    with (
        pytest.raises(SystemExit) as ended,
        make(
            callbacks=[Watch(note)],
            checkpointing={"store": store},
            save_interval=interval,
            max_duration="99ba",
        ) as trainer,
    ):
        trainer.fit()
    assert ended.value.code == 143
    assert 6 <= batches[-1] < 10
    steps = [entry.step for entry in store.list()]
    assert steps[-1] == (batches[-1] if is_saved else 5)
    told = capfd.readouterr().err
    assert ("is not saved: " in told) == (not is_saved)
    if not is_saved:
        assert re.search(r"the shortest save of this run took \d\.\d s\. The last checkpoint is \S", told)


@pytest.mark.parametrize(("grace_s", "is_saved"), [(0.3, False), (60, True), (None, True)])
def test_an_engine_gives_its_notice_where_no_signal_can_be_handled(tmp_path, grace_s, is_saved):
    """Ray calls training functions in a thread, and tells them the deadline."""
    batches, ends, states, store = [], [], [], SlowStore(tmp_path)

    def note(state):
        batches.append(state.timestamp.counts.batch)
        if batches[-1] in (6, 7):
            state.give_notice(grace_s)
            states.append(state)

    def fit():
        arguments = {"checkpointing": {"store": store}, "save_interval": "5ba", "max_duration": "99ba"}
        try:
            with make(callbacks=[Watch(note)], **arguments) as trainer:
                trainer.fit()
        except SystemExit as ended:
            ends.append(ended.code)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(60)
    assert ends == [143]
    assert 6 <= batches[-1] < 10
    assert [entry.step for entry in store.list()][-1] == (batches[-1] if is_saved else 5)
    states[0].give_notice()  # after the fit
    assert states[0].stop.notify is None


def signalled_on_rank_1(folder=None):
    seen, checkpointing = [], {}
    if folder is not None:
        os.environ["HOCKET_GRACE_S"] = "0.3"
        store = SlowStore(folder / str(dist.get_rank()))
        checkpointing = {"checkpointing": {"store": store}, "save_interval": "2ba"}

    def note(state):
        seen.append(state.timestamp.counts.batch)
        if dist.get_rank() == 1 and seen[-1] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with make(callbacks=[Watch(note)], max_duration="9ba", **checkpointing) as trainer:
            trainer.fit()
    except SystemExit as ended:
        return ended.code, seen[-1], [entry.step for entry in store.list()] if checkpointing else []
    return 0, seen[-1], []


def test_all_ranks_end_after_the_same_batch():
    first, second = run_ranks(signalled_on_rank_1, 2, init="gloo", timeout_s=60)
    assert first == second
    assert first[0] == 143
    assert 3 <= first[1] <= 5


def test_all_ranks_leave_out_a_save_for_which_one_has_no_time(tmp_path):
    first, second = run_ranks(signalled_on_rank_1, 2, tmp_path, init="gloo", timeout_s=60)
    assert first == second
    assert first[2] == [2, 4][: first[1] // 2], "another save than those that were due"
