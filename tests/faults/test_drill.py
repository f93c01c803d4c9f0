"""The faults of a drill, each on two hosts: one paragraph on every host, within the deadline and 5 s.

`pytest -m slow tests/faults/test_drill.py -k every_host` runs all of them, in 8 minutes on two quiet cores.
With `HOCKET_DRILL_RESULTS=tests/bench/results/dist.md` it adds the table of the seconds to that file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.dist import DistError
from hocket.dist.drill.faults import FAULTS, Fault
from hocket.dist.drill.job import Plan, run_job, start_launcher
from hocket.dist.drill.table import run_drill
from support.sampling import cases

TIMEOUT_S = 8.0
PREFLIGHT_S = 60.0
SLACK_S = cases(full=8, sample=15)
"""Time for processes that a loaded machine runs late; beside a plain run other tests and compilers run."""

JOB = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hocket.trainer import ComposerModel, Trainer

class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

def main():
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(512, 8, generator=numbers), torch.randn(512, 4, generator=numbers))
    model = Model()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        max_duration="30ba",
        optimizers=torch.optim.AdamW(model.parameters()),
        fsdp_config={},
        save_folder=sys.argv[1],
        save_interval="5ba",
        autoresume=True,
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, str]]]:
    """The seconds by fault, with a fixed number of hosts and with one that changes; a table in the end."""
    rows: dict[str, dict[str, str]] = {}
    loads = [os.getloadavg()[0]]
    yield rows
    if "HOCKET_DRILL_RESULTS" in os.environ and rows:
        loads.append(os.getloadavg()[0])
        with Path(os.environ["HOCKET_DRILL_RESULTS"]).open("a") as file:
            print(
                "\nSeconds from a fault until the later of two hosts has ended with the verdict; – is a test "
                f"that failed or was skipped. The deadline is {TIMEOUT_S:g} s, at a launch {PREFLIGHT_S:g}. "
                f"Load {loads[0]:.1f} to {loads[1]:.1f}.\n\n| fault | static | elastic |\n|---|---|---|",
                file=file,
            )
            for name, row in rows.items():
                print(f"| {name} | {row.get('static', '–')} | {row.get('elastic', '–')} |", file=file)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_host_prints_the_verdict_in_time(
    tmp_path: Path, script: Path, fault: Fault, table: dict[str, dict[str, str]]
) -> None:
    row = table.setdefault(fault.name, {})
    row["static"] = f"{check_verdict(tmp_path, script, fault, elastic=False):.1f}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_host_prints_the_verdict_where_hosts_may_come_and_go(
    tmp_path: Path, script: Path, fault: Fault, table: dict[str, dict[str, str]]
) -> None:
    if not cases(full=1, sample=0):
        pytest.skip(
            "of the drills over two hosts, a sample has one with a fixed number of them; all: `-m slow`"
        )
    row = table.setdefault(fault.name, {})
    row["elastic"] = f"{check_verdict(tmp_path, script, fault, elastic=True):.1f}"


def check_verdict(tmp_path: Path, script: Path, fault: Fault, *, elastic: bool) -> float:
    """Run a job on two hosts, and check how it ends; return the seconds until the later one has."""
    plan = Plan(
        script=[str(script), "{run}"],
        folder=tmp_path,
        ranks=2,
        hosts=2,
        restarts=0,
        timeout_s=TIMEOUT_S,
        elastic=elastic,
        start=start_launcher,
    )
    deadline_s = PREFLIGHT_S if fault.place == "launch" else TIMEOUT_S
    try:
        outcome = run_job(plan, fault, step=8, limit_s=deadline_s + 60)
    except OSError as error:
        pytest.skip(str(error))
    print(fault.name, [f"{seconds:.1f} s" for seconds in outcome.ended_s], *outcome.verdicts(), sep="\n")
    assert None not in outcome.codes, outcome.logs
    assert 0 not in outcome.codes
    assert max(outcome.ended_s) < deadline_s + 5 + SLACK_S
    for verdict, log in zip(outcome.verdicts(), outcome.logs, strict=True):
        assert re.search(fault.verdict, verdict), log
    return max(outcome.ended_s)


@pytest.mark.slow
def test_a_trainer_goes_on_with_equal_values_after_each_fault_of_a_rank(tmp_path: Path, script: Path) -> None:
    if not cases(full=1, sample=0):
        pytest.skip("a drill of one fault runs in `packages/dist/tests/test_drill.py`; of all: `-m slow`")
    faults = [fault for fault in FAULTS if fault.place == "rank"]
    rows = run_drill([str(script), "{run}"], faults, timeout_s=TIMEOUT_S, folder=tmp_path / "drill")
    for row in rows:
        assert row.is_survived, row
        # After an out-of-memory error the trainer halves the microbatch, which adds in another order.
        assert row.is_equal or row.fault.name == "memory", row
        assert row.steps_again in (2, 3), row  # the step of the fault may end on the other rank
        assert re.search(row.fault.verdict, row.verdicts[0]), row


@pytest.mark.slow
def test_a_job_that_fails_without_a_fault_or_begins_otherwise_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise ValueError('no data')")
    with pytest.raises(DistError, match=r"fails without a fault, with exit code 1 after 0[\s\S]*no data"):
        run_drill([str(script)], [], folder=tmp_path / "fails")
    script.write_text(JOB)
    with pytest.raises(DistError, match="began with other values than the run without a fault"):
        run_drill([str(script), str(tmp_path / "shared")], FAULTS[:1], folder=tmp_path / "shares")
