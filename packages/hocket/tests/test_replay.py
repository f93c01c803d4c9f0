"""Replays of single steps: the loss has the bits of the run, and the first bad tensor is named."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.recipes.config import trainer_from
from hocket.recipes.replay import Difference, Side, StepReport, find_difference, replay_step
from hocket.recipes.replay.command import compare_runs, without_ranks
from hocket.recipes.replay.difference import first_difference, not_repeated, show
from hocket.trainer.errors import ReplayError
from hocket.trainer.replay import StepRecord, TensorRecord, current_replay
from hocket.trainer.replay.tensor_record import measure
from support.ranks import run_ranks

SCRIPT = """
import argparse
import torch
from torch import nn
from hocket.algos import EMA
from hocket.trainer import Trainer
from hocket.trainer.loggers import InMemoryLogger

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="run")
parser.add_argument("--bad", type=int, default=-1)
parser.add_argument("--bad-from", type=int, default=99)
parser.add_argument("--place", default="batch")
parser.add_argument("--shift", type=float, default=0.0)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--microbatch", type=int)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--ema", action="store_true")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--duration", default="8ba")
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(61, 8)
y = (x.sum(1) > 0).long()
x[:, 1] += args.shift
num_steps = 0


class OwnOptimizer(torch.optim.SGD):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(args.dropout)
        self.last = nn.Linear(16, 2)

    def forward(self, batch):
        x = batch[0]
        return self.last(self.drop(torch.relu(self.first(x))))

    def loss(self, outputs, batch):
        loss = nn.functional.cross_entropy(outputs, batch[1])
        global num_steps
        if self.training:
            num_steps += 1
            if trainer.state.counts.batch + 1 >= args.bad_from:
                if args.place == "loss":
                    return loss * torch.log(loss * 0 - 1)
                if args.place == "gradient":
                    return loss + torch.sqrt(outputs.sum() * 0)
        return loss


net = Net()
data = torch.utils.data.TensorDataset(x, y)
options = {"fsdp_config": {}} if args.fsdp else {}
with Trainer(
    model=net,
    train_dataloader=torch.utils.data.DataLoader(data, batch_size=args.batch, shuffle=True),
    optimizers=OwnOptimizer(net.parameters(), lr=0.1, momentum=0.9),
    algorithms=[EMA(half_life="2ba")] if args.ema else [],
    max_duration=args.duration,
    seed=3,
    precision=args.precision,
    device_train_microbatch_size=args.microbatch,
    loop={"nonfinite_loss": "ignore"},
    gradient_clipping=1.0,
    loggers=[InMemoryLogger()],
    save_folder=args.folder,
    save_interval="3ba",
    progress_bar=False,
    **options,
) as trainer:
    trainer.fit()
open(args.folder + "-after-fit", "w").close()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the training script, in a folder of its own that is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def train_here(script: str, arguments: list[str]) -> None:
    """Run the training in this process."""
    argv, sys.argv = sys.argv, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = argv


@pytest.mark.parametrize(
    "arguments",
    [[], ["--microbatch", "3"], ["--precision", "amp_bf16"], ["--ema"]],
    ids=lambda one: "-".join(one),
)
def test_a_replayed_loss_has_the_bits_of_the_run(script: str, arguments: list[str]) -> None:
    train_here(script, arguments)
    Path("run-after-fit").unlink()
    before = sorted(str(path) for path in Path("run").rglob("*"))
    for step, start in ((4, 3), (6, 3), (8, 6)):
        report = replay_step(script, step, arguments)
        assert (report.verdict, report.checkpoint_step, report.nonfinite) == ("same", start, None)
        assert report.loss == report.recorded
        layers = {one.layer: one for one in report.layers}
        assert set(layers) == {"", "first", "drop", "last"}
        assert all(one.activation and one.activation_gradient for one in layers.values())
        assert layers["first"].gradient
        assert layers["last"].parameter
    # The replays have saved nothing, and ended with their step.
    assert sorted(str(path) for path in Path("run").rglob("*")) == before
    assert not Path("run-after-fit").exists()
    assert current_replay() is None


@pytest.mark.parametrize(("place", "kind"), [("loss", "loss"), ("gradient", "gradient of activation")])
def test_the_first_tensor_that_is_not_finite_is_named(script: str, place: str, kind: str) -> None:
    train_here(script, ["--bad-from", "5", "--place", place])
    fine = replay_step(script, 4, ["--bad-from", "5", "--place", place])
    assert fine.nonfinite is None
    bad = replay_step(script, 5, ["--bad-from", "5", "--place", place])
    assert bad.nonfinite is not None
    assert (bad.nonfinite.kind, bad.nonfinite_rank, bad.verdict) == (kind, 0, "same")
    # Afterwards the parameters are not finite either, which is the first thing that a step can see.
    later = replay_step(script, 6, ["--bad-from", "5", "--place", place])
    assert later.nonfinite is not None
    assert (later.checkpoint_step, later.nonfinite.kind) == (3, "parameter")
    assert later.nonfinite.name == "first.weight"


def test_other_data_than_the_runs_are_noticed(script: str) -> None:
    train_here(script, [])
    report = replay_step(script, 6, ["--shift", "0.5"])
    assert report.verdict == "different"
    assert report.reason.startswith("the loss of step 4 differs already")
    assert report.recorded is not None
    assert report.loss != report.recorded


def test_what_cannot_be_replayed_is_refused_by_name(script: str) -> None:
    train_here(script, [])
    with pytest.raises(
        ReplayError, match="no whole checkpoint before step 3: the first ones there are of steps 3, 6"
    ):
        replay_step(script, 3)
    report = replay_step(script, 3, from_start=True)
    assert (report.verdict, report.checkpoint) == ("same", None)
    with pytest.raises(ReplayError, match="ended after step 8, before step 9"):
        replay_step(script, 9)
    with pytest.raises(ReplayError, match=r"there is no file `other\.py`"):
        replay_step("other.py", 4)
    with pytest.raises(ReplayError, match="expected an integer from 1 on"):
        replay_step(script, 0)
    with pytest.raises(ReplayError, match=r"`.*elsewhere` has no whole checkpoint .* none at all"):
        replay_step(script, 4, run="elsewhere")
    Path("none.py").write_text("from hocket.trainer import Trainer\nprint('no training')")
    with pytest.raises(ReplayError, match=r"made no `hocket\.trainer\.Trainer`"):
        replay_step("none.py", 4)


def test_a_run_that_ended_by_a_bad_loss_has_no_record_of_it(script: str) -> None:
    Path(script).write_text(SCRIPT.replace('loop={"nonfinite_loss": "ignore"},', ""))
    arguments = ["--bad-from", "5", "--place", "loss"]
    with pytest.raises(FloatingPointError):
        train_here(script, arguments)
    report = replay_step(script, 5, arguments)
    assert report.loss is not None
    assert math.isnan(report.loss)
    assert (report.verdict, str(report.nonfinite)) == ("unknown", "the loss")
    assert "no checkpoint" in report.reason


def test_a_step_of_a_configuration_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from hocket.trainer import ComposerClassifier\n"
        "def model():\n"
        "    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))\n"
        "    return ComposerClassifier(net, num_classes=2)\n"
        "def data():\n"
        "    x = torch.arange(96.0).reshape(24, 4) / 96\n"
        "    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0.5).long())\n"
    )
    Path("run.yaml").write_text(
        "model: {name: 'parts:model'}\n"
        "data: {train: {name: 'parts:data'}, batch_size: 4, shuffle: true}\n"
        "training: {max_duration: 6ba, seed: 1}\n"
        "checkpoint: {save_folder: run, save_interval: 2ba}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with trainer_from("run.yaml") as trainer:
        trainer.fit()
    report = replay_step("run.yaml", 4)
    sys.modules.pop("parts")
    assert (report.verdict, report.checkpoint_step) == ("same", 2)


OF_RANKS = ["--batch", "4", "--dropout", "0"]


def train_and_replay(folder: str) -> StepReport:
    """Train on the ranks of this job, and replay a step on them."""
    os.chdir(folder)
    train_here("train.py", [*OF_RANKS, "--fsdp"])
    return replay_step("train.py", 5, [*OF_RANKS, "--fsdp"])


@pytest.mark.slow
def test_ranks_replay_their_step_and_one_process_joins_their_samples(script: str, tmp_path: Path) -> None:
    reports = run_ranks(train_and_replay, 2, str(tmp_path), timeout_s=180)
    assert [one.verdict for one in reports] == ["same", "same"]
    assert [one.num_ranks for one in reports] == [2, 2]
    alone = replay_step(script, 5, OF_RANKS)
    assert (alone.verdict, alone.num_ranks) == ("unknown", 1)
    assert "another number of ranks" in alone.reason
    assert alone.loss is not None
    torch.testing.assert_close(alone.loss, alone.recorded, rtol=1e-6, atol=0)
    # Step 8 is the last one of its epoch, and has fewer samples.
    short = replay_step(script, 8, OF_RANKS)
    assert short.loss is not None
    torch.testing.assert_close(short.loss, short.recorded, rtol=1e-5, atol=0)
    of_ranks = {one.layer: (one.gradient, one.parameter) for one in reports[0].layers}
    for one in alone.layers:
        if one.parameter is not None:
            torch.testing.assert_close((one.gradient, one.parameter), of_ranks[one.layer], rtol=1e-5, atol=0)


def test_only_the_commands_own_ranks_are_left_out() -> None:
    given = ["replay", "-n", "2", "train.py", "--step", "4", "--", "-n", "7", "--nproc=3"]
    assert without_ranks(given) == ["replay", "train.py", "--step", "4", "--", "-n", "7", "--nproc=3"]
    assert without_ranks(["replay", "--nproc=2", "-n3", "a.py"]) == ["replay", "a.py"]


def record(step: int, *tensors: tuple[str, str, int]) -> StepRecord:
    """Return the record of a step, from the kinds, names and digests of its tensors."""
    rest = {"norm": 1.0, "num_nan": 0, "num_inf": 0, "num": 4}
    made = [
        TensorRecord(kind=kind, name=name, digest=digest, **rest)  # type: ignore[arg-type]
        for kind, name, digest in tensors
    ]
    return StepRecord(step=step, rank=0, tensors=made)


@pytest.mark.parametrize("kind", ["gradient", "gradient of activation"])
def test_a_loss_that_is_not_finite_comes_before_its_gradients(kind: str) -> None:
    # A compiled model has no gradients of activations.
    found = record(5, (kind, "w", 1), ("loss", "", 2), ("updated parameter", "w", 3))
    found.tensors[:] = [replace(one, num_nan=1) for one in found.tensors]
    first = found.first_nonfinite()
    assert first is not None
    assert first[1].kind == "loss"


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize(
    ("view", "same"),
    [
        (COMPLEX.conj(), torch.tensor([1 - 2j, 3 + 4j])),
        (COMPLEX.conj().imag, torch.tensor([-2.0, 4.0])),
        (
            torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
            torch.ones(3, 3),
        ),
        (torch.eye(2).to_sparse(), torch.ones(2)),
    ],
    ids=["conjugated", "negated", "jagged", "sparse"],
)
def test_every_kind_of_tensor_is_measured_as_its_values(view: torch.Tensor, same: torch.Tensor) -> None:
    assert measure("activation", "a", view) == measure("activation", "a", same)


BEFORE = (("batch", "[0]", 1), ("parameter", "w", 2))


@pytest.mark.parametrize(
    ("one", "other", "kind", "hint"),
    [
        ((("batch", "[0]", 3),), (("batch", "[0]", 4),), "batch", "other samples"),
        ((("activation", "a", 3),), (("activation", "a", 4),), "activation", "the computation differs"),
        (
            (("gradient of activation", "a", 3), ("loss", "", 5)),
            (("gradient of activation", "a", 4), ("loss", "", 6)),
            "loss",
            "",
        ),
        ((("gradient", "w", 3), ("loss", "", 5)), (("gradient", "w", 4), ("loss", "", 6)), "loss", ""),
        (
            (("gradient", "w", 3), ("updated parameter", "w", 5)),
            (("gradient", "w", 3), ("updated parameter", "w", 6)),
            "updated parameter",
            "the update differs",
        ),
        ((("activation", "a", 3),), (("activation", "b", 3),), "activation", "other tensors"),
        ((("activation", "a", 3),), (), "activation", "other tensors"),
    ],
)
def test_the_first_difference_of_records_is_named(
    one: tuple[tuple[str, str, int], ...], other: tuple[tuple[str, str, int], ...], kind: str, hint: str
) -> None:
    equal = record(4, *BEFORE)
    found = first_difference([equal, record(5, *BEFORE, *one)], [equal, record(5, *BEFORE, *other)], 0)
    assert found is not None
    assert (found.step, found.tensors[0] and found.tensors[0].kind) == (5, kind)
    assert hint in found.hint
    assert found.num_equal >= 4
    assert first_difference([equal], [equal], 0) is None


def test_a_difference_that_is_not_finite_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    left, right = (replace(record(5, ("loss", "", 1)).tensors[0], norm=norm) for norm in (0.5, math.nan))
    show(Difference(start=3, until=7, step=5, rank=0, tensors=(left, right)), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["norm"] for one in found["tensors"]] == [0.5, "nan"]
    show(Difference(start=3, until=7), as_json=True)
    assert json.loads(capsys.readouterr().out)["tensors"] == [None, None]


def side(arguments: list[str], *, run: str | None = None) -> Side:
    """Return a run of the training script."""
    return Side(script="train.py", arguments=arguments, run=run, is_module=False, num_ranks=1)


GOOD = ["--folder", "good"]
BAD = ["--folder", "bad", "--bad-from", "5", "--place", "loss"]


def test_another_run_that_is_not_there_is_not_the_same_run(script: str) -> None:
    # A misspelt script would be a folder without checkpoints, and the script would be compared with itself.
    options: dict[str, Any] = dict.fromkeys(("run", "other_arguments"))
    options |= {"is_module": False, "num_ranks": 1, "as_json": False}
    with pytest.raises(ReplayError, match=r"there is no file or folder `tarin\.py`"):
        compare_runs(script, "tarin.py", [], step=4, **options)
    with pytest.raises(ReplayError, match="`step` is 0: expected an integer from 1 on"):
        compare_runs(script, script, [], step=0, **options)


@pytest.mark.parametrize(
    ("parted", "unlike", "told"),
    [
        (5, None, "the recorded losses differ from step 5 on, which the replays do not repeat"),
        (8, 3, "the checkpoints of step 3 differ, which the replays do not repeat"),
        (8, None, ""),
        (None, None, ""),
    ],
)
def test_a_difference_that_replays_do_not_repeat_is_told(
    parted: int | None, unlike: int | None, told: str
) -> None:
    assert not_repeated(parted, 7, unlike)[: len(told) or None] == told


@pytest.mark.slow
def test_two_runs_are_replayed_up_to_the_tensor_at_which_they_part(script: str) -> None:
    train_here(script, GOOD)
    train_here(script, BAD)
    # The checkpoints of step 6 differ already, so those of step 3 are taken.
    found = find_difference(side(GOOD), side(BAD), step=7)
    assert (found.start, found.step, found.until) == (3, 5, 7)
    assert found.tensors[0] is not None
    assert found.tensors[0].kind == "loss"


@pytest.mark.slow
def test_recorded_losses_that_replays_do_not_repeat_are_told(script: str) -> None:
    train_here(script, GOOD)
    train_here(script, BAD)
    # The script and arguments of the first run, with the checkpoints of the second.
    found = find_difference(side(GOOD), side(GOOD, run="bad"))
    assert (found.step, found.start, found.until) == (None, 3, 5)
    assert "the recorded losses differ from step 5 on" in found.hint
    Path("bad.py").write_text("raise SystemExit(3)")
    with pytest.raises(ReplayError, match=r"the replay of `bad\.py` failed: the script ended .* exit code 3"):
        find_difference(replace(side([]), script="bad.py"), side(GOOD))
