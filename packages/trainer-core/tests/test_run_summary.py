"""The summary that a run prints when it starts."""

from __future__ import annotations

from hocket.trainer.run_summary import print_summary
from support.training import make


def test_one_process_of_the_job_prints_the_summary(monkeypatch, capsys):
    with make() as trainer:
        for rank, is_printed in ((0, True), (1, False)):
            # Under tensor parallelism rank 1 is a data-parallel rank 0 as well.
            monkeypatch.setenv("RANK", str(rank))
            assert trainer.state.parallelism.data_parallel[0] == 0
            print_summary(trainer.state, data_source="one process", notices=["Seen."])
            assert ("Seen." in capsys.readouterr().err) == is_printed


def test_a_runs_name_is_printed_as_it_is(capsys):
    with make(run_name=":warning:") as trainer:
        print_summary(trainer.state, data_source="one process", notices=[])
    assert "run :warning:" in capsys.readouterr().err
