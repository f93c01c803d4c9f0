"""Each logger and monitor, driven by the events of a small training."""

from __future__ import annotations

import io
import json
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import Callback
from hocket.trainer.callbacks import LRMonitor, SpeedMonitor
from hocket.trainer.errors import LoggerError, MissingExtraError
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers import (
    ConsoleLogger,
    FileLogger,
    InMemoryLogger,
    ProgressBarLogger,
    TensorboardLogger,
)
from hocket.trainer.loggers.file import _encode_points
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.process import extras
from hocket.trainer.time import Time, ensure_time
from hocket.trainer.timestamp import Timestamp
from support.training import Net, Watch, loader, make


@dataclass
class _State:
    """The attributes of a state that loggers and monitors read."""

    max_duration: Time | None = None
    dataloader_len: int | None = 5
    run_name: str = "calm-otter"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "fp32"
    optimizers: list = field(default_factory=list)
    timestamp: Timestamp = field(default_factory=Timestamp)
    previous_timestamp: Timestamp = field(default_factory=Timestamp)

    @property
    def counts(self):
        return self.timestamp.counts


def train(listeners, *, batches=12, tokens=70, step_s=0.5, max_duration=None, metrics=None, state=None):
    """Fire the events of a training of `batches` batches, five an epoch, to `listeners`."""
    state = state or _State()
    state.max_duration = ensure_time(max_duration or f"{batches}ba")
    logger = Logger(state, [one for one in listeners if isinstance(one, LoggerDestination)])

    def fire(name):
        for listener in sorted(listeners, key=lambda one: isinstance(one, LoggerDestination)):
            getattr(listener, name)(state, logger)

    fire("init")
    fire("fit_start")
    for _ in range(batches):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples=8, tokens=tokens, duration=step_s)
        loss = torch.tensor(1.0 / state.timestamp.counts.batch)
        logger.log_metrics(metrics(state) if metrics else {"loss/train/total": loss})
        fire("batch_end")
        if state.timestamp.counts.batch_in_epoch == state.dataloader_len:
            state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_epoch()
            fire("epoch_end")
    fire("fit_end")
    for listener in listeners:
        listener.close(state, logger)
    try:
        logger.close(20)
    finally:
        for listener in listeners:
            listener.post_close()
    return state


def test_in_memory_logger_keeps_points():
    memory = InMemoryLogger()
    state = _State()
    logger = Logger(state, [memory])
    logger.log_hyperparameters({"width": 8})
    for step in range(3):
        state.timestamp = Timestamp(batch=step)
        logger.log_metrics({"loss": torch.tensor(float(step)), "note": "x"})
    logger.log_metrics({"loss": 9}, step=7, keep=True)
    assert logger.flush(20)
    assert memory.get_timeseries("loss") == {"step": [0, 1, 2, 7], "loss": [0.0, 1.0, 2.0, 9]}
    assert memory.most_recent_values == {"loss": 9, "note": "x"}
    assert memory.hyperparameters == {"width": 8}
    with pytest.raises(KeyError, match="`loss`, `note`"):
        memory.get_timeseries("lost")
    logger.close()


def test_ranks_other_than_0_log_only_to_destinations_of_every_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    memory, console = InMemoryLogger(), ConsoleLogger(stream=io.StringIO())
    each, one = FileLogger(str(tmp_path / "{rank}.txt")), FileLogger(str(tmp_path / "one.txt"))
    logger = Logger(_State(), [memory, console, each, one])
    assert logger.destinations == (memory, each)
    logger.close()
    train([console, each, one], batches=2)
    assert [path.name for path in tmp_path.iterdir()] == ["3.txt"]


def test_fast_destinations_share_a_thread_and_their_subclasses_do_not():
    class Slow(InMemoryLogger):
        gate = threading.Event()

        def log_metrics(self, metrics, step):
            self.gate.wait(20)
            super().log_metrics(metrics, step)

    memory, other, slow = InMemoryLogger(), InMemoryLogger(), Slow()
    logger = Logger(_State(), [memory, slow, other])
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"only": 2.0}, 2, to=[other])
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("hocket-metrics-")}
    assert {"hocket-metrics-InMemoryLogger, InMemoryLogger", "hocket-metrics-Slow"} <= names
    assert logger.flush(20, to=memory)
    assert not logger.flush(0.05, to=slow)
    assert memory.data == {"loss": [(1, 1.0)]}
    assert other.data == {"loss": [(1, 1.0)], "only": [(2, 2.0)]}
    slow.gate.set()
    logger.close()
    assert slow.data == memory.data


def test_slow_and_broken_destinations_do_not_affect_the_others():
    class Broken(LoggerDestination):
        def log_metrics(self, metrics, step):
            raise ConnectionError("no route")

    memory = InMemoryLogger()
    with pytest.raises(LoggerError, match="`Broken` raised `ConnectionError`: no route"):
        train([Broken(), memory])
    assert len(memory.data["loss/train/total"]) == 12


def test_a_destination_has_all_values_when_it_is_closed(tmp_path):
    class Lines(LoggerDestination):
        def __init__(self):
            self.file = (tmp_path / "lines").open("w")

        def log_metrics(self, metrics, step):
            self.file.write("".join(f"{name}\n" for name in metrics))

        def close(self, state, logger):
            self.file.close()

    class Last(Callback):
        def close(self, state, logger):
            logger.log_metrics({"last": 1})

    with make(loggers=Lines(), callbacks=Last(), max_duration="1ba") as trainer:
        trainer.fit()
        trainer.logger.log_metrics({f"after {number}": number for number in range(100)})
    assert (tmp_path / "lines").read_text().split("\n")[-4:] == ["after 98", "after 99", "last", ""]


@given(
    st.lists(
        st.dictionaries(
            st.text(min_size=1, max_size=8).filter(lambda name: name != "step"),
            st.one_of(
                st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8)
            ),
            min_size=1,
            max_size=4,
        ),
        max_size=8,
    )
)
def test_lines_of_a_file_logger_read_back(tmp_path_factory, points):
    file = FileLogger(str(tmp_path_factory.mktemp("logs") / "{run_name}" / "log-{rank}.jsonl"))
    state = _State()
    logger = Logger(state, [file])
    file.init(state, logger)
    for step, metrics in enumerate(points):
        logger.log_metrics(metrics, step)
    logger.close(20)
    file.post_close()
    lines = [json.loads(line) for line in file.path.read_text("utf-8").split("\n")[:-1]]
    assert lines == [{"step": step, **metrics} for step, metrics in enumerate(points)]
    assert file.path.parent.name == "calm-otter"


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.floats() | st.integers() | st.booleans() | st.text() | st.lists(st.floats(), max_size=3),
        max_size=4,
    )
)
@example({"step": 0.5, "loss": float("inf"), "é": 1e-5})
def test_lines_of_a_file_logger_equal_those_of_json_dumps(points):
    assert _encode_points(3, points) == json.dumps({"step": 3, **points})


def test_a_file_logger_continues_a_file_with_an_incomplete_line(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    train([FileLogger(str(path))], batches=2)
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1, "loss": 0.5}', '{"step": 2, "lo']
    assert [json.loads(line)["step"] for line in lines[2:]] == [1, 2]
    train([FileLogger(str(path), overwrite=True)], batches=1)
    assert path.read_text() == '{"step": 1, "loss/train/total": 1.0}\n'


def test_a_file_logger_keeps_the_exception_that_ends_the_run(tmp_path):
    def fail(state):
        raise ValueError("no such batch")

    path = tmp_path / "log.jsonl"
    trainer = make(loggers=[FileLogger(path)], callbacks=[Watch(fail)], max_duration="1ep")
    with pytest.raises(ValueError, match="no such batch"):
        trainer.fit()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert "in fail\n" in lines[-1]["error"]
    assert "ValueError: no such batch" in lines[-1]["error"]


def test_console_logger_prints_at_intervals():
    stream = io.StringIO()
    train([ConsoleLogger("5ba", stream)], batches=12)
    assert stream.getvalue().splitlines() == [
        "[epoch 0, batch 5] loss/train/total: 0.2",
        "[epoch 1, batch 10] loss/train/total: 0.1",
        "[epoch 2, batch 12] loss/train/total: 0.08333",
    ]
    with pytest.raises(ValueError, match="`stdlog`"):
        ConsoleLogger(stream="stdlog")


def test_console_streams_are_looked_up_when_used(monkeypatch):
    console = ConsoleLogger("1ep")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    train([console], batches=5)
    assert stream.getvalue() == "[epoch 0, batch 5] loss/train/total: 0.2\n"


def test_progress_bar_prints_lines_without_a_terminal():
    stream = io.StringIO()
    train([ProgressBarLogger(stream, line_interval_s=0.0)], batches=10)
    lines = stream.getvalue().splitlines()
    assert lines[4] == "[train  50%] epoch 0 batch 5 of 10ba  loss 0.2  16 samples/s  0:02 left"
    assert lines[-1].startswith("[train 100%] epoch 2 batch 10 of 10ba  loss 0.1")
    stream = io.StringIO()
    train([ProgressBarLogger(stream, line_interval_s=1000)], batches=12)
    assert [line.split("]")[0] for line in stream.getvalue().splitlines()] == [
        "[train   8%",
        "[train  42%",
        "[train  83%",
        "[train 100%",
    ]


def test_progress_bar_works_without_a_known_length():
    stream = io.StringIO()
    state = _State(dataloader_len=None)
    train([ProgressBarLogger(stream, line_interval_s=0.0)], batches=3, max_duration="2ep", state=state)
    assert stream.getvalue().splitlines()[-1] == "[train] epoch 0 batch 3 of 2ep  loss 0.3333  16 samples/s"


def test_a_resumed_progress_bar_estimates_the_time_from_its_start():
    stream = io.StringIO()
    state = _State(timestamp=Timestamp(batch=90, total_wct=1000.0))
    train([ProgressBarLogger(stream, line_interval_s=0.0)], batches=5, max_duration="101ba", state=state)
    assert "94%] epoch 1 batch 95 of 101ba" in stream.getvalue().splitlines()[-1]
    assert stream.getvalue().splitlines()[-1].endswith("0:03 left")


def test_mfu_is_of_all_devices(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    memory, state = InMemoryLogger(), _State()
    state.model = SimpleNamespace(flops_per_batch=1000.0)  # of one rank's batch
    state.parallelism = SimpleNamespace(data_parallel=(0, 4))
    speed = SpeedMonitor(gpu_flops_available=1e4, time_unit="seconds")
    train([speed, memory], step_s=0.25, state=state)
    last = memory.most_recent_values
    assert last["throughput/flops_per_sec"] == pytest.approx(4 * 4000)
    assert last["throughput/device/flops_per_sec"] == pytest.approx(4000)
    assert last["throughput/device/mfu"] == pytest.approx(16_000 / (4 * 1e4))


def test_steps_do_not_wait_for_a_blocked_destination():
    opened, num_delivered = threading.Event(), []

    class Blocked(InMemoryLogger):
        def log_metrics(self, metrics, step):
            opened.wait(30)
            super().log_metrics(metrics, step)

    def note(state):
        if state.timestamp.batch == "5ba":
            num_delivered.append(len(blocked.data))
            opened.set()

    blocked = Blocked()
    with make(loggers=blocked, callbacks=Watch(note), max_duration="5ba") as trainer:
        trainer.fit()
    assert num_delivered == [0]  # five steps ended before the first point was delivered
    assert len(blocked.data["loss/train/total"]) == 5


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_redraws_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = _Terminal()
    train([ProgressBarLogger(stream)], batches=10)
    shown = stream.getvalue()
    assert "100%" in shown
    assert "loss 0.1" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor must be shown again"


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard", reason="needs `uv sync --group loggers`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train([TensorboardLogger(tmp_path)], batches=4)
    events = EventAccumulator(str(tmp_path / "calm-otter"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("loss/train/total")]
    assert points == [(batch, pytest.approx(1 / batch)) for batch in range(1, 5)]


def test_a_missing_extra_raises_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError) as raised:
        TensorboardLogger()
    assert "`TensorboardLogger` needs `tensorboard`" in str(raised.value)
    assert "pip install 'hocket-trainer-core[tensorboard]'" in str(raised.value)
    assert extras.import_extra("json", "json", needed_by="this test") is json


@pytest.mark.parametrize("window_size", [1, 3, 100])
def test_speed_monitor_logs_throughput(monkeypatch, window_size):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    memory = InMemoryLogger()
    train([SpeedMonitor(window_size, time_unit="seconds"), memory], step_s=0.25)
    rates = {name: number for name, number in memory.most_recent_values.items() if "/" in name}
    del rates["loss/train/total"]
    assert rates == pytest.approx(
        {
            "throughput/batches_per_sec": 4.0,
            "throughput/samples_per_sec": 32.0,
            "throughput/tokens_per_sec": 280.0,
            "throughput/device/batches_per_sec": 1.0,
            "throughput/device/samples_per_sec": 8.0,
            "throughput/device/tokens_per_sec": 70.0,
            "time/train": 3.0,
            "time/val": 0.0,
            "time/total": 3.0,
        }
    )
    assert memory.get_timeseries("throughput/batches_per_sec")["step"][0] == 2


def test_speed_monitor_uses_only_its_window():
    memory = InMemoryLogger()
    speed, state = SpeedMonitor(window_size=2), _State()
    train([speed, memory], batches=3, step_s=1.0, state=state, tokens=0)
    train([speed, memory], batches=3, step_s=0.1, state=state, tokens=0)
    assert memory.most_recent_values["throughput/batches_per_sec"] == pytest.approx(10.0)
    assert "throughput/tokens_per_sec" not in memory.data
    state.timestamp = Timestamp()
    train([speed, memory], batches=2, step_s=1.0, state=state)
    assert memory.most_recent_values["throughput/batches_per_sec"] == pytest.approx(1.0)


def test_lr_monitor_logs_learning_rates():
    parameters = [torch.zeros(1) for _ in range(3)]
    tensor_rate = torch.tensor(0.25)
    state = _State(
        optimizers=[
            torch.optim.SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:2]}], lr=0.1),
            torch.optim.SGD(parameters[2:], lr=tensor_rate),
        ]
    )
    memory = InMemoryLogger()
    train([LRMonitor(), memory], batches=2, state=state)
    assert {name: number for name, number in memory.most_recent_values.items() if name.startswith("lr")} == {
        "lr-SGD/group0": 0.5,
        "lr-SGD/group1": 0.1,
        "lr-SGD-1/group0": 0.25,
    }


def test_lr_monitor_logs_groups_and_optimizers_added_later():
    first, other = (torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in (0.5, 0.125))
    logged = []
    monitor, logger = LRMonitor(), SimpleNamespace(log_metrics=logged.append)
    for change in (
        lambda: [first],
        lambda: first.add_param_group({"params": [torch.zeros(1)], "lr": 0.25}) or [first],
        lambda: [other],
    ):
        monitor.batch_end(_State(optimizers=change()), logger)
    assert logged == [
        {"lr-SGD/group0": 0.5},
        {"lr-SGD/group0": 0.5, "lr-SGD/group1": 0.25},
        {"lr-SGD/group0": 0.125},
    ]


def test_monitors_read_no_tensor(monkeypatch):
    """Patch the functions through which any read of a device goes."""

    def refuse(*_):
        raise AssertionError("a tensor was read on the training's thread")

    class Recorder:
        def __init__(self):
            self.metrics = {}

        def log_metrics(self, metrics):
            self.metrics.update(metrics)

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.25))
    state, logger = _State(optimizers=[optimizer]), Recorder()
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for monitor in (SpeedMonitor(), LRMonitor()):
        for batch in range(3):
            state.timestamp = Timestamp(batch=batch, total_wct=float(batch))
            monitor.batch_end(state, logger)
    assert logger.metrics["lr-SGD/group0"] is optimizer.param_groups[0]["lr"]


def test_progress_bar_shows_metrics_and_evaluation_results():
    class Measured(Net):
        def get_metrics(self, is_train=False):
            return {"Accuracy": MulticlassAccuracy(3)}

        def update_metric(self, batch, outputs, metric):
            metric.update(outputs, batch[1])

    stream = io.StringIO()
    with make(
        model=Measured(),
        loggers=ProgressBarLogger(stream, line_interval_s=0.0),
        eval_dataloader=loader(8),
        eval_interval="1ep",
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
    lines = stream.getvalue().splitlines()
    assert [line[:24] for line in lines if line.startswith("[eval]")] == [
        "[eval] epoch 1 batch 5  ",
        "[eval] epoch 2 batch 10 ",
    ]
    assert all("Accuracy 0." in line or "Accuracy 1" in line for line in lines if line.startswith("[eval]"))


def test_file_logger_writes_tables_traces_and_captured_output(tmp_path, capsys):
    path = tmp_path / "log.txt"
    file = FileLogger(str(path), capture_stdout=True)
    state = _State()
    logger = Logger(state, [file])
    file.init(state, logger)
    print("hello", end="")
    print(" there")
    logger.log_table(["a"], [[1], ["x"]], "rows", step=3)
    logger.log_traces({"MixUp": "lam 0.3"})
    file.close(state, logger)
    print("not this")
    logger.close(20)
    file.post_close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"stdout": "hello there"} in lines
    assert {"step": 3, "table": "rows", "columns": ["a"], "rows": [[1], ["x"]]} in lines
    assert {"traces": {"MixUp": "lam 0.3"}} in lines
    assert len(lines) == 3
    assert capsys.readouterr().out == "hello there\nnot this\n"


def test_tensorboard_logger_writes_images_and_tables(tmp_path):
    pytest.importorskip("tensorboard", reason="needs `uv sync --group loggers`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, state = TensorboardLogger(tmp_path), _State()
    logger = Logger(state, [board])
    board.init(state, logger)
    logger.log_images(torch.rand(2, 3, 4, 4), "x", masks={"truth": torch.ones(2, 4, 4)})
    logger.log_table(["a", "b"], [[1, "x|y"]], "rows")
    logger.close(20)
    board.post_close()
    events = EventAccumulator(str(tmp_path / "calm-otter"))
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["x/0", "x/0/truth", "x/1", "x/1/truth"]
    assert events.Tags()["tensors"] == ["rows/text_summary"]
