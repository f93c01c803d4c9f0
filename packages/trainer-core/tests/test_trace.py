"""`trainer.trace()`: the components that ran at each event, their changes and their times."""

from __future__ import annotations

import io
import time

from hocket.trainer import Algorithm, Callback, Event
from hocket.trainer.loggers import InMemoryLogger
from support.training import make


class Halve(Algorithm):
    """Halves the inputs of every second batch."""

    def match(self, event, state):
        return event is Event.AFTER_DATALOADER and state.timestamp.counts.batch % 2 == 0

    def apply(self, event, state, logger):
        state.batch = [state.batch[0] / 2, state.batch[1]]


class Slow(Callback):
    """Zeroes a parameter in place, slowly."""

    def batch_end(self, state, logger):
        time.sleep(0.1)
        next(state.model.parameters()).data.zero_()


class Idle(Callback):
    def batch_end(self, state, logger):
        pass


def test_a_trace_lists_calls_changes_and_times():
    with make(algorithms=Halve(), callbacks=[Slow(), Idle()], max_duration="4ba") as trainer:
        trainer.fit("1ba")
        trace = trainer.trace()
        trainer.fit("3ba")
        rows = {(row.event, row.name): row for row in trace.rows}
        halve = rows[Event.AFTER_DATALOADER, "Halve"]
        assert (halve.kind, halve.num_calls, halve.num_applied, halve.changes) == (
            "algorithm",
            3,
            1,
            {"batch": 1},
        )
        slow, idle = rows[Event.BATCH_END, "Slow"], rows[Event.BATCH_END, "Idle"]
        assert slow.num_calls == 3
        assert slow.seconds >= 0.3 > idle.seconds
        assert idle.changes == {}
        table = str(trace)
        assert "AFTER_DATALOADER" in table
        assert "batch ×1" in table
        trace.stop()
        trace.stop()
        trainer.fit("1ba")
        assert slow.num_calls == 3


def test_changes_of_parameters_and_settings_are_traced():
    class Scale(Callback):
        def after_train_batch(self, state, logger):
            for parameter in state.model.parameters():
                parameter.grad.mul_(0.5)

        def batch_start(self, state, logger):
            state.device_train_microbatch_size = 2
            state.optimizers[0].param_groups[0]["lr"] = 0.5

    with make(callbacks=Scale(), max_duration="1ba") as trainer:
        trace = trainer.trace()
        trainer.fit()
        changes = {row.event: set(row.changes) for row in trace.rows}
        assert changes[Event.AFTER_TRAIN_BATCH] == {"gradients"}
        assert changes[Event.BATCH_START] == {"device_train_microbatch_size", "learning rate"}


def test_a_live_trace_prints_changes():
    stream = io.StringIO()
    with make(algorithms=Halve(), callbacks=Idle(), max_duration="2ba") as trainer:
        trainer.trace(live=stream)
        trainer.fit()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("[0ba] AFTER_DATALOADER: Halve (algorithm) changed batch, ")


def test_applications_of_algorithms_are_logged_on_request(capsys):
    for log_traces in (True, False):
        logger = InMemoryLogger()
        with make(
            algorithms=Halve(),
            loggers=logger,
            max_duration="3ba",
            log_traces=log_traces,
            log_to_console=True,
            console_stream="stdout",
        ) as trainer:
            trainer.fit()
        told = [line for line in capsys.readouterr().out.splitlines() if "algorithm_traces" in line]
        expected = [f"algorithm_traces/AFTER_DATALOADER/Halve: {batch}ba" for batch in (0, 2)]
        assert told == (expected if log_traces else [])
