"""A drill: the verdict names the rank and its line, and the job goes on with equal values."""

import re
from pathlib import Path

import pytest

from hocket.dist import ConfigError
from hocket.dist.drill.faults import FAULTS, select
from hocket.dist.drill.job import Outcome
from hocket.dist.drill.table import Row, run_drill, table
from support import launches

JOB = """
import json, os, pathlib, sys
import torch
from torch import nn
from hocket.dist import provide

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with provide({}, device="cpu", timeout_s=60) as parallelism:
    model = parallelism.lay_out(model, [optimizer])
    path = folder / f"state-{parallelism.global_rank}"
    first = 0
    if path.exists():
        first, state = torch.load(path)
        for parameter, values in zip(model.parameters(), state, strict=True):
            parameter.data.to_local().copy_(values)
    for step in range(first, 8):
        if step == 4:
            local = [parameter.data.to_local().clone() for parameter in model.parameters()]
            torch.save((step, local), path)
            parallelism.reduce_async(torch.ones(1)).wait()
        model(torch.full((2, 4), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def start(arguments, env, log):
    return launches.fork_launcher(*arguments, env=env, log=log)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_a_job_survives_a_fault_of_a_rank(tmp_path: Path, name: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    (row,) = run_drill(
        [str(script), "{run}"], select(name), steps=8, timeout_s=2, folder=tmp_path, start=start
    )
    (verdict,) = row.verdicts
    assert re.search(row.fault.verdict, verdict), verdict
    assert row.is_survived, verdict
    assert verdict.endswith("; all ranks start again, restart 1 of 1")
    assert (row.steps_again, row.is_equal) == (1, True)
    assert row.next_step_s is not None


def test_the_table_has_a_row_for_each_fault() -> None:
    rows = [Row(fault=fault, problem="" if fault.name != "link" else "not allowed") for fault in FAULTS]
    lines = table(rows)
    assert len(lines) == 14
    assert "| link of a host cut | not injected: not allowed | | | |" in lines


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="`ranks` is 3, expected an even number"):
        run_drill(["job.py"], [], ranks=3)
    with pytest.raises(ValueError, match="no fault `kiled`; known are killed, "):
        select("kiled")
    assert Outcome(codes=[0], logs=["hocket-launch: a\nb\n"], began_at=0.0, ended_s=[0.0]).verdicts() == [
        "hocket-launch: a"
    ]
