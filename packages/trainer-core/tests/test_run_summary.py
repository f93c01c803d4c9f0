"""The summary that a run prints at its start."""

from __future__ import annotations

import contextlib
import errno
import io

import pytest
import torch
from torch import nn

from hocket.trainer.loggers import ProgressBarLogger
from hocket.trainer.setup.run_summary import print_summary
from support.training import data, make


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


def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


def test_lazy_modules_are_trained_as_torch_trains_them(capsys):
    batches = list(zip(*(part.split(4) for part in data(12).tensors), strict=True))
    expected = lazy()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    torch.manual_seed(5)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    model = lazy()
    with make(
        model=model,
        loss_fn=nn.functional.cross_entropy,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        seed=5,
        max_duration="3ba",
    ) as trainer:
        trainer.fit()
    assert "0 parameters, 6 tensors without a shape yet" in capsys.readouterr().err
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
