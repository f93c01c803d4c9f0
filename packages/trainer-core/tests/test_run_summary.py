"""The summary that a run prints at its start."""

from __future__ import annotations

import contextlib
import errno
import io

import pytest

from hocket.trainer.loggers import ProgressBarLogger
from hocket.trainer.run_summary import print_summary
from support.training import make


def test_one_process_of_the_job_prints_the_summary(monkeypatch, capsys):
    with make() as trainer:
        for rank, is_printed in ((0, True), (1, False)):
            # With tensor parallelism rank 1 is data-parallel rank 0, too.
            monkeypatch.setenv("RANK", str(rank))
            assert trainer.state.parallelism.data_parallel[0] == 0
            print_summary(trainer.state, data_source="one process", notices=["Seen."])
            assert ("Seen." in capsys.readouterr().err) == is_printed


@pytest.mark.parametrize("name", [":warning:", "x[/b]", "[red]"])
def test_a_run_name_is_printed_unchanged(capsys, name):
    with make(run_name=name) as trainer:
        print_summary(trainer.state, data_source=name, notices=[name])
    assert f"run {name}\n" in capsys.readouterr().err


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii", write_through=True)


@pytest.mark.parametrize("kind", ["none", "full", "closed", "ascii", "without isatty"])
def test_a_run_goes_on_where_nothing_can_be_shown(monkeypatch, kind):
    with contextlib.ExitStack() as opened:
        closed = io.StringIO()
        closed.close()
        stream = {
            "none": None,
            "full": Full(),
            "closed": closed,
            "ascii": opened.enter_context(Ascii()),
            "without isatty": type("Stream", (), {"write": len, "flush": lambda self: None})(),
        }[kind]
        monkeypatch.setattr("sys.stderr", stream)
        with make(run_name="größe", max_duration="2ba", loggers=ProgressBarLogger()) as trainer:
            trainer.fit()
        assert trainer.state.timestamp.counts.batch == 2
        monkeypatch.undo()
