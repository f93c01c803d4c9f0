"""The log queue: order, steps, dropped points, deadlines, errors, forks, and capture of values."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer.errors import LoggerError
from hocket.trainer.log.deferred_value import capture, read
from hocket.trainer.log.log_queue import LogQueue, LogReceiver


class Sink:
    """Keeps delivered points; blocks the thread while `gate` is closed."""

    def __init__(self, *, is_open=True):
        self.points = []
        self.threads = set()
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def __call__(self, numbers, step):
        self.gate.wait(20)
        self.threads.add(threading.current_thread().name)
        self.points.extend((step, name, number) for name, number in numbers.items())


class Arrives:
    """A handle whose value arrives later."""

    def __init__(self, value, after_s=0.0):
        self.value, self.after_s, self.num_waits = value, after_s, 0

    def wait(self):
        self.num_waits += 1
        time.sleep(self.after_s)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_points_are_delivered_in_order_with_their_steps_on_another_thread():
    sink = Sink()
    queue = LogQueue(LogReceiver(sink, "Sink"))
    loss = torch.zeros(())
    for step in range(500):
        loss.fill_(step)  # the same tensor each time; the logged values must not change with it
        queue.put(capture({"loss": loss, "double": Arrives(torch.tensor(2.0 * step))}), step)
    assert queue.flush(20)
    assert sink.points == [
        point for step in range(500) for point in ((step, "loss", step), (step, "double", 2 * step))
    ]
    assert sink.threads == {"hocket-metrics-Sink"}
    queue.close()
    assert threading.active_count() == 1 or "hocket-metrics-Sink" not in {
        t.name for t in threading.enumerate()
    }


def test_no_thread_starts_before_the_first_point():
    before = threading.active_count()
    queue = LogQueue(LogReceiver(Sink(), "Sink"))
    queue.close()
    assert threading.active_count() == before


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 10),
)
def test_a_full_queue_drops_only_droppable_points(history, capacity):
    sink = Sink(is_open=False)
    queue = LogQueue(LogReceiver(sink, "Sink"), capacity=capacity)
    logger = logging.getLogger("hocket.trainer.log.log_queue")
    logger.disabled = True
    put, kept = [], []
    for step, (names, keep) in enumerate(history):
        points = [(step, name, step) for name in sorted(names)]
        queue.put(dict.fromkeys(sorted(names), step), step, keep=keep)
        put += points
        kept += points if keep else []
    last = {name: step for step, name, _ in put}
    num_dropped = queue.num_dropped
    assert len(queue._entries) <= max(capacity, len(kept) + len(last) + 1)
    sink.gate.set()
    queue.close(20)
    logger.disabled = False
    assert sink.points == [point for point in put if point in set(sink.points)], "order"
    assert set(kept) <= set(sink.points)
    assert {(step, name, step) for name, step in last.items()} <= set(sink.points)
    assert num_dropped == len(put) - len(sink.points)
    if len(history) <= capacity:
        assert num_dropped == 0


def test_put_never_waits_for_a_blocked_destination_and_close_names_lost_points(caplog):
    sink = Sink(is_open=False)
    queue = LogQueue(LogReceiver(sink, "Stuck"), capacity=10)
    start = time.monotonic()
    for step in range(1000):
        queue.put({"loss": step}, step)
    assert not queue.flush(0.1)
    with caplog.at_level(logging.WARNING):
        queue.close(timeout_s=0.2)
    assert time.monotonic() - start < 10
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "`Stuck` did not take its last" in said
    assert "points of single steps were dropped" in said
    with pytest.raises(LoggerError, match="is closed"):
        queue.put({"loss": 1}, 1)
    sink.gate.set()


class LateInbox(deque):
    """A deque that calls `before` before it appends its first entry."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def append(self, entry):
        before, self.before = self.before, lambda: None
        before()
        super().append(entry)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_point_put_too_late_while_the_queue_closes_raises(is_started):
    sink = Sink()
    queue = LogQueue(LogReceiver(sink, "Sink"))
    if is_started:
        queue.put({"loss": 1}, 1)
        assert queue.flush(20)
    queue._inbox = LateInbox(lambda: queue.close(20))
    with pytest.raises(LoggerError, match="is closed"):
        queue.put({"loss": 2}, 2)
    assert sink.points == ([(1, "loss", 1)] if is_started else [])


def test_each_point_put_while_the_queue_closes_arrives_or_raises():
    for _ in range(40):
        sink = Sink()
        queue = LogQueue(LogReceiver(sink, "Sink"))
        accepted = []

        def put_until_refused(queue=queue, accepted=accepted):
            for step in range(100_000):
                try:
                    queue.put({"loss": step}, step, keep=True)
                except LoggerError:
                    return
                accepted.append((step, "loss", step))

        thread = threading.Thread(target=put_until_refused)
        thread.start()
        while not accepted:
            time.sleep(0)
        queue.close(20)
        thread.join(20)
        assert sink.points == accepted


def test_a_failing_destination_is_reported_once_and_raises_at_close(caplog):
    got = []

    def deliver(numbers, step):
        if step % 2:
            raise OSError(f"disk full at {step}")
        got.append(step)

    queue = LogQueue(LogReceiver(deliver, "Disk"))
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            queue.put({"loss": step}, step)
        assert queue.flush(20)
    assert got == [0, 2, 4, 6, 8], "later points must still arrive"
    assert [
        record.getMessage() for record in caplog.records if "`Disk` failed at step 1" in record.getMessage()
    ]
    assert len(caplog.records) == 1
    with pytest.raises(LoggerError, match="disk full at 1") as raised:
        queue.close()
    assert isinstance(raised.value.__cause__, OSError)
    queue.close()


def test_receivers_of_one_queue_get_all_points_even_if_others_raise():
    first, second, calls, written = Sink(), Sink(), [], []

    def fail(numbers, step):
        raise OSError(f"disk full at {step}")

    def call():
        calls.append(len(second.points))
        raise ValueError("no terminal")

    receivers = [LogReceiver(first, "First", lambda: written.append(len(first.points)))]
    receivers += [LogReceiver(fail, "Disk"), LogReceiver(second, "Second")]
    queue = LogQueue(*receivers)
    queue.put({"loss": 1}, 1)
    queue.put({"only": 2}, 2, to=receivers[:1])
    queue.call(call, receivers[2])
    queue.put({"loss": 3}, 3)
    assert queue.flush(20)
    assert first.points == [(1, "loss", 1), (2, "only", 2), (3, "loss", 3)]
    assert second.points == [(1, "loss", 1), (3, "loss", 3)]
    assert calls == [1], "the call must run in order"
    assert written[-1] == 3
    assert first.threads == second.threads == {"hocket-metrics-First, Disk, Second"}
    with pytest.raises(LoggerError, match="`Disk` raised `OSError`: disk full at 1") as raised:
        queue.close()
    assert raised.value.__notes__[1:] == ["`Second` raised `ValueError`: no terminal"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), min_size=1, max_size=40))
def test_a_full_queue_keeps_the_last_point_of_each_receiver(history):
    sinks = [Sink(is_open=False), Sink()]
    receivers = [LogReceiver(sinks[0], "A"), LogReceiver(sinks[1], "B")]
    queue = LogQueue(*receivers, capacity=2)
    logger = logging.getLogger("hocket.trainer.log.log_queue")
    logger.disabled = True
    last = [{}, {}]
    for step, (name, which) in enumerate(history):
        queue.put({name: step}, step, to=None if which == 2 else receivers[which : which + 1])
        for index in (0, 1) if which == 2 else (which,):
            last[index][name] = step
    sinks[0].gate.set()
    queue.close(20)
    logger.disabled = False
    for sink, expected in zip(sinks, last, strict=True):
        assert {(step, name, step) for name, step in expected.items()} <= set(sink.points)


def test_an_unreadable_value_does_not_affect_the_others(caplog):
    sink = Sink()
    queue = LogQueue(LogReceiver(sink, "Sink"))
    queue.put(capture({"lost": Arrives(ConnectionError("rank 1 is gone")), "loss": 1.5}), 3)
    queue.flush(20)
    assert sink.points == [(3, "loss", 1.5)]
    with pytest.raises(LoggerError, match="rank 1 is gone"):
        queue.close()


def test_calls_run_in_order_with_the_points():
    seen = []
    queue = LogQueue(LogReceiver(lambda numbers, step: seen.append(step), "Sink"))
    queue.put({"a": 1}, 1)
    queue.call(lambda: seen.append("call"))
    queue.put({"a": 1}, 2)
    queue.close()
    assert seen == [1, "call", 2]


def test_a_slow_destination_does_not_slow_the_loop():
    queue = LogQueue(LogReceiver(lambda numbers, step: time.sleep(0.05), "Slow"), capacity=20)
    start = time.monotonic()
    for step in range(200):
        queue.put({"loss": step}, step)
    spent = time.monotonic() - start
    queue.close(20)
    assert spent < 200 * 0.05 / 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs `os.fork`")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_with_an_empty_queue():
    sink = Sink(is_open=False)
    queue = LogQueue(LogReceiver(sink, "Sink"))
    queue.put({"loss": 1}, 1)
    time.sleep(0.3)  # let the thread take the point, so that the child inherits a busy queue
    queue._changed.acquire()  # fork while the queue's lock is held, the worst moment
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sink.gate.set()
            queue.put({"loss": 2}, 2)
            queue.close(5)
            code = 0 if sink.points == [(2, "loss", 2)] else 2
        finally:
            os._exit(code)
    queue._changed.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sink.gate.set()
    queue.close(20)
    assert sink.points == [(1, "loss", 1)]


def test_supported_values_are_captured_and_others_raise():
    values = {
        "float": 0.5,
        "int": 3,
        "text": "warm",
        "numpy": np.float32(0.25),
        "half": torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True) * 2,
        "vector": torch.arange(3),
        "handle": Arrives(torch.tensor(4.0)),
        "handle of a number": Arrives(7),
    }
    captured = capture(values)
    values["vector"].zero_()
    assert {name: read(value) for name, value in captured.items()} == {
        "float": 0.5,
        "int": 3,
        "text": "warm",
        "numpy": 0.25,
        "half": 3.0,
        "vector": [0, 1, 2],
        "handle": 4.0,
        "handle of a number": 7,
    }
    with pytest.raises(TypeError, match="`bad` is a `object`"):
        capture({"bad": object()})


def test_several_readers_of_a_handle_wait_for_it_once():
    handle = Arrives(torch.tensor(2.0), after_s=0.05)
    captured = capture({"value": handle})["value"]
    got = []
    threads = [threading.Thread(target=lambda: got.append(read(captured))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == [2.0] * 4
    assert handle.num_waits == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_capturing_a_device_value_does_not_wait():
    value = torch.ones((), device="cuda")
    torch.cuda._sleep(int(2e9))
    start = time.monotonic()
    captured = capture({"value": value * 3})
    spent = time.monotonic() - start
    value.zero_()
    assert read(captured["value"]) == 3.0
    assert spent < (time.monotonic() - start) / 2
