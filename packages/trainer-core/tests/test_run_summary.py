"""The summary that a run prints at its start."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import time

import pytest
import torch
from torch import nn

from hocket.trainer import Algorithm, Callback, CheckpointSaver, Event, Time
from hocket.trainer.callbacks import LoadCheckpoint
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import ConsoleLogger, ProgressBarLogger
from hocket.trainer.optim import LinearWithWarmupScheduler, prepare_schedulers
from hocket.trainer.setup.run_summary import print_summary
from support.training import FileStore, Net, data, make


def test_one_process_of_the_job_prints_the_summary(monkeypatch, capsys):
    with make() as trainer:
        monkeypatch.setenv("WORLD_SIZE", "2")
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


class Hangup(io.StringIO):
    """A terminal that is gone after some writes."""

    def __init__(self, num_writes):
        super().__init__()
        self.num_left = num_writes

    def isatty(self):
        return True

    def write(self, text):
        self.num_left -= 1
        if self.num_left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return len(text)


KINDS = ["none", "full", "closed", "ascii", "without isatty", "no terminal left", "hangup"]


@pytest.mark.parametrize("kind", KINDS)
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
            "no terminal left": Hangup(0),
            "hangup": Hangup(6),
        }[kind]
        monkeypatch.setattr("sys.stderr", stream)
        loggers = [ProgressBarLogger(), ConsoleLogger()]
        with make(run_name="größe", max_duration="2ba", loggers=loggers) as trainer:
            trainer.trace(live=True)
            trainer.fit()
        assert trainer.state.timestamp.counts.batch == 2
        assert getattr(stream, "num_left", -1) < 0
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


class Method(Algorithm):
    events = frozenset({Event.BATCH_END})

    def apply(self, event, state, logger): ...


def test_a_long_path_is_told_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    folder = str(tmp_path / ("long" * 30))
    with make(save_folder=folder, max_duration="1ba") as trainer:
        trainer.fit()
    assert folder in "".join(capsys.readouterr().err.split())


def test_the_summary_says_what_was_chosen_for_the_user_and_what_the_run_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    model = Net()
    model.layers[0].requires_grad_(False)
    num = sum(one.numel() for one in model.parameters())
    num_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    with make(
        model=model,
        optimizers=None,
        schedulers=LinearWithWarmupScheduler("2ba"),
        algorithms=[Method()],
        save_folder=str(tmp_path),
        max_duration="3ba",
    ) as trainer:
        trainer.fit()
        default = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults["lr"]
        assert trainer.state.optimizers[0].defaults["lr"] == default
    lines = capsys.readouterr().err.replace("\n          ", "").splitlines()
    told = {name: text.strip() for name, _, text in (line.partition("  ") for line in lines)}
    assert told["model"] == f"Net, {num:,} parameters, {num_trained:,} of which train"
    assert told["optimizer"] == "AdamW, learning rate 0.001, the default"
    assert told["schedule"] == "LinearWithWarmupScheduler"
    assert told["methods"] == "Method"
    assert told["length"] == "3 batches"
    assert told["saves"] == str(tmp_path)


def test_the_summary_of_a_plain_run_says_what_it_does_not_do(capsys):
    model = Net()
    group = {"params": list(model.parameters()), "lr": 0.25}
    with make(model=model, optimizers=torch.optim.SGD([group], lr=0.1), max_duration="1ep") as trainer:
        trainer.fit()
    said = capsys.readouterr().err
    assert "optimizer  SGD, learning rate 0.25" in said
    assert "the default" not in said
    assert "none: the learning rate stays" in said
    assert "nothing, since no `save_folder` was given" in said
    assert "methods" not in said
    assert "length     1 epoch" in said


class Stop(Callback):
    def batch_end(self, state, logger):
        state.stop_training()


@pytest.mark.parametrize(("length", "is_told"), [(None, True), (Time(1, "ep"), False)])
def test_iterations_without_a_length_are_told(capsys, length, is_told):
    with make(max_duration="1iter", callbacks=Stop()) as trainer:
        trainer.state.iteration_length = length
        trainer.fit()
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "`max_duration` is `1iter`, and no iteration ends until `state.iteration_length`" in told
    ) == is_told


def summary(capsys, monkeypatch, **arguments):
    """Return the rows of the summary of a run."""
    monkeypatch.setenv("COLUMNS", "300")
    capsys.readouterr()
    with make(max_duration="1ba", **arguments) as trainer:
        trainer.fit()
    lines = capsys.readouterr().err.splitlines()
    return {name: text.strip() for name, _, text in (line.partition("  ") for line in lines)}


def test_the_summary_names_the_users_module_and_counts_what_its_optimizers_train(capsys, monkeypatch):
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    groups = [{"params": [one], "lr": 0.1 * 0.5**number} for number, one in enumerate(model[0].parameters())]
    told = summary(
        capsys,
        monkeypatch,
        model=model,
        loss_fn=nn.functional.cross_entropy,
        optimizers=[torch.optim.SGD(groups), torch.optim.Adam([model[1].bias], lr=torch.tensor(0.02))],
    )
    assert told["model"] == f"Sequential, {5 * 8 + 8 + 8 * 3 + 3} parameters, {5 * 8 + 8 + 3} of which train"
    assert told["optimizer"] == "SGD, learning rate 0.1, 0.05; Adam, learning rate 0.02"
    many = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.1 * 0.5**number} for number in range(9)]
    many[0]["params"] = list(model.parameters())
    told = summary(
        capsys,
        monkeypatch,
        model=model,
        loss_fn=nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(many),
    )
    assert told["optimizer"] == "SGD, learning rate from 0.000390625 to 0.1 in 9 groups"


def test_the_summary_names_every_place_that_is_saved_to(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    savers = [CheckpointSaver("a"), CheckpointSaver(tmp_path / "{run_name}", weights_only=True)]
    told = summary(capsys, monkeypatch, callbacks=savers, run_name="b")
    assert told["saves"] == f"{tmp_path}/a, {tmp_path}/b (weights alone)"
    told = summary(capsys, monkeypatch, checkpointing={"store": FileStore(tmp_path / "c")})
    assert told["saves"] == "in a `FileStore`"
    told = summary(capsys, monkeypatch, save_folder="d", loop={"fast_dev_run": True})
    assert told["saves"] == "nothing, in a trial run"
    assert any("at most 1 batch of training and" in text for text in (*told, *told.values()))


def test_a_schedule_of_an_optimizer_without_a_rate_is_refused():
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(TrainerConfigError, match="`SGD` has a group of parameters without one, `lr`"):
        prepare_schedulers([LinearWithWarmupScheduler("2ba")], [optimizer], ratio=1.0)


def test_a_resumed_run_says_times_as_a_person_does(tmp_path, capsys):
    with make(save_folder=str(tmp_path), max_duration="2ba") as trainer:
        trainer.fit()
    capsys.readouterr()
    with make(save_folder=str(tmp_path), max_duration="1ep", autoresume=True) as trainer:
        trainer.fit()
    said = capsys.readouterr().err
    assert "1 epoch, from epoch 0, batch 2" in said
    assert "what was trained on in this epoch, 2 batches, was fetched again" in " ".join(said.split())
    assert "going on from `ep0-ba2`, after 2 batches" in said
    with make(save_folder=str(tmp_path), max_duration="1ep", autoresume=True) as trainer:
        trainer.fit()
    assert "has trained for 1 epoch of 1 epoch: it is finished" in capsys.readouterr().err


def test_a_restarted_rank_prints_its_phases_once(monkeypatch, capsys):
    found_at = time.time() - 7
    times = {"found": found_at, "ended": found_at + 0.2, "started": found_at + 0.5}
    monkeypatch.setenv("HOCKET_FAILURE", json.dumps(times))
    with make(max_duration="3ba") as trainer:
        trainer.fit()
    found = re.findall(r"note: seconds since the launcher found a failed rank: (.*)", capsys.readouterr().err)
    assert len(found) == 1
    phases = dict(phase.rsplit(" ", 1) for phase in found[0].split(", "))
    assert list(phases) == ["ended", "started", "joined", "loaded", "first step"]
    assert (phases["ended"], phases["started"]) == ("0.2", "0.5")
    seconds = [float(phases[name]) for name in ("joined", "loaded", "first step")]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 7
    with make(max_duration="1ba") as trainer:
        trainer.fit()
    assert "failed rank" not in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_read_is_not_passed_over_in_silence(tmp_path, capsys):
    with make(save_folder=str(tmp_path), save_interval="1ba", max_duration="2ba") as trainer:
        trainer.fit()
    [manifest] = (tmp_path / "ep0-ba2").glob("checkpoint.json*")
    manifest.write_bytes(b"no manifest")
    capsys.readouterr()
    latest = str(tmp_path / "latest")
    for options, is_resumed in (
        ({"load_path": latest, "save_folder": None}, True),
        ({"callbacks": LoadCheckpoint(latest), "save_folder": None}, False),
        ({"autoresume": True, "save_folder": str(tmp_path)}, True),
    ):
        with make(save_interval="1ep", max_duration="3ba", **options) as trainer:
            trainer.fit()
        said = capsys.readouterr().err.replace("\n", " ")
        assert ("going on from `" in said) == is_resumed
        assert "the checkpoint `ep0-ba2` cannot be read and is passed over" in said
        assert "the newest that can be read is `ep0-ba1`" in said
