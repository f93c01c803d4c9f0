"""The summary that a run prints at its start."""

from __future__ import annotations

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


def test_a_run_name_is_printed_unchanged(capsys):
    with make(run_name=":warning:") as trainer:
        print_summary(trainer.state, data_source="one process", notices=[])
    assert "run :warning:" in capsys.readouterr().err
