"""Copies in memory between checkpoints: made, found by the next attempt, removed at the end, and refused."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hocket.trainer import Callback
from hocket.trainer.checkpoint import ephemeral
from hocket.trainer.checkpoint.ephemeral import MEMORY_FOLDERS
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.event import Event
from support.ranks import run_ranks
from support.training import FileStore, Watch, make


class Failure(Callback):
    """Raises at a batch, and records the copies at each batch."""

    def __init__(self, memory: Path, batch: int | None = None) -> None:
        self.memory = memory
        self.batch = batch
        self.seen: list[list[str]] = []

    def batch_start(self, state, logger):
        self.run_name = state.run_name
        self.seen.append(names(self.memory))
        if state.timestamp.batch.value == self.batch:
            raise RuntimeError("a failure")


def names(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("*/*"))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's folder for copies."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(MEMORY_FOLDERS, str(folder))
    return folder


def fit(tmp_path: Path, callback: Callback | None = None, **arguments: object) -> object:
    """Train for 8 batches, with a copy every 2."""
    given = {
        "max_duration": "8ba",
        "save_folder": tmp_path / "run",
        "save_interval": "4ba",
        "autoresume": True,
        "checkpointing": {"ephemeral": "2ba"},
        "seed": 3,
        **arguments,
    }
    with make(callbacks=callback, **given) as trainer:
        start = trainer.state.timestamp.batch.value
        run_name = trainer.state.run_name
        trainer.fit()
        return start, run_name, trainer.saved_checkpoints, trainer.state.model.state_dict()


def fail(tmp_path: Path, memory: Path, batch: int, **arguments: object) -> Failure:
    callback = Failure(memory, batch)
    with pytest.raises(RuntimeError, match="a failure"):
        fit(tmp_path, callback, **arguments)
    return callback


def test_the_next_attempt_goes_on_from_the_newest_copy(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, _, expected = fit(tmp_path / "undisturbed")
    assert names(memory) == [], "removed at the end of a fit"
    failed = fail(tmp_path, memory, 7)
    assert failed.seen == [[], [], ["ba2"], ["ba2"], ["ba4"], ["ba4"], ["ba6"], ["ba6"]]
    capsys.readouterr()
    start, _, saved, weights = fit(tmp_path)
    assert start == 6
    assert "note: `ba6` is a copy in memory" in capsys.readouterr().err
    assert len(saved) == 2, "the checkpoints of batches 4 and 8"
    assert names(memory) == []
    assert all(weights[name].equal(value) for name, value in expected.items())


def test_each_fit_of_a_trainer_makes_copies_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a fit removes the copies and gives their memory back; the next fit makes them anew."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no shared memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hocket-test-") as folder:
        monkeypatch.setenv(MEMORY_FOLDERS, folder)
        callback = Failure(Path(folder))
        options = {
            "max_duration": "8ba",
            "save_folder": tmp_path / "run",
            "save_interval": "100ba",
            "autoresume": True,
            "checkpointing": {"ephemeral": "2ba"},
        }
        with make(callbacks=callback, **options) as trainer:
            for last in (8, 16):
                trainer.fit() if last == 8 else trainer.fit(duration="8ba")
                assert trainer.state.timestamp.batch.value == last
                assert names(Path(folder)) == []
                assert folder not in Path("/proc/self/maps").read_text()
        options |= {"max_duration": "24ba"}
        with (
            pytest.raises(RuntimeError, match="a failure"),
            make(callbacks=Failure(Path(folder), 23), **options) as trainer,
        ):
            trainer.fit()
        assert names(Path(folder)) == ["ba22"]
        assert folder not in Path("/proc/self/maps").read_text(), "a closed trainer keeps no memory"
    copied = [int(name[2:]) for seen in callback.seen for name in seen if name.startswith("ba")]
    assert min(copied) < 8 < max(copied)


def test_a_checkpoint_that_is_later_is_taken(tmp_path: Path, memory: Path) -> None:
    fail(tmp_path, memory, 5, checkpointing={"ephemeral": "3ba"})
    assert names(memory) == ["ba3"]
    start, *_ = fit(tmp_path)
    assert start == 4


def test_a_run_without_a_checkpoint_keeps_its_name(tmp_path: Path, memory: Path) -> None:
    failed = fail(tmp_path, memory, 3)
    start, run_name, *_ = fit(tmp_path)
    assert (start, run_name) == (2, failed.run_name)


def test_the_end_is_saved_from_a_copy_of_the_last_batch(tmp_path: Path, memory: Path) -> None:
    class LastFailure(Callback):
        def fit_end(self, state, logger):
            raise RuntimeError("a failure")

    options = {"save_interval": "100ba"}
    with pytest.raises(RuntimeError, match="a failure"):
        fit(tmp_path, LastFailure(), **options)
    assert names(memory) == ["ba8"]
    start, _, saved, _ = fit(tmp_path, **options)
    assert start == 8
    assert [name.rpartition("-")[2] for name in saved] == ["ba8"]
    assert names(memory) == []


def test_what_an_attempt_did_not_finish_is_removed(tmp_path: Path, memory: Path) -> None:
    fail(tmp_path, memory, 3)
    (run,) = memory.iterdir()
    (run / "ba4" / "data").mkdir(parents=True)
    (run / "ba4" / "data" / "part").write_bytes(bytes(1000))
    callback = Failure(memory)
    start, *_ = fit(tmp_path, callback)
    assert start == 2
    assert callback.seen[0] == ["ba2"]


def test_an_empty_folder_hides_no_copies_in_the_next_one(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(tmp_path, memory, 7)
    (run,) = memory.iterdir()
    second = tmp_path / "second"
    second.mkdir()
    run.rename(second / run.name)
    run.mkdir()
    monkeypatch.setenv(MEMORY_FOLDERS, f"{memory}{os.pathsep}{second}")
    start, *_ = fit(tmp_path)
    assert start == 6
    assert names(second) == []


def damage(memory: Path) -> None:
    for path in memory.glob("*/*/data/*"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)


def test_a_damaged_copy_is_refused_and_the_checkpoint_taken(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, memory, 7)
    damage(memory)
    callback = Failure(memory)
    start, *_ = fit(tmp_path, callback)
    assert start == 4
    assert callback.seen[0] == []
    told = capsys.readouterr().err
    assert "note: the copy `ba6` in memory cannot be used, and is removed: " in told
    assert "digest" in told


def test_a_damaged_copy_without_a_checkpoint_ends_the_attempt(tmp_path: Path, memory: Path) -> None:
    fail(tmp_path, memory, 3)
    damage(memory)
    with pytest.raises(ResumeError, match=r"`ba2` in memory cannot be used.*There is no checkpoint yet"):
        fit(tmp_path)
    start, *_ = fit(tmp_path)
    assert start == 0


class SlowStore(FileStore):
    """A store whose saves take longer than the ranks below have."""

    def save(self, *arguments, **options):
        time.sleep(4)
        return super().save(*arguments, **options)


def is_batch_2(state, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and state.timestamp.batch.value == 2


def noticed(folder: Path, is_apart: bool) -> tuple[object, int, list[str], list[int]]:
    """Train with a checkpoint and a copy at batch 2, and give rank 1 a notice at batch 3."""
    rank = dist.get_rank()
    # Each launcher has a folder of its own.
    memory = folder / f"memory-{rank if is_apart else 0}"
    memory.mkdir(exist_ok=True)
    os.environ |= {MEMORY_FOLDERS: str(memory), "HOCKET_GRACE_S": "3"}
    store, seen = SlowStore(folder / str(rank)), []

    def note(state):
        seen.append(state.timestamp.batch.value)
        if rank == 1 and seen[-1] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    code: object = 0
    try:
        fit(
            folder,
            Watch(note),
            max_duration="99ba",
            save_folder=None,
            save_interval=is_batch_2,
            checkpointing={"store": store, "ephemeral": is_batch_2},
        )
    except SystemExit as ended:
        code = ended.code
    return code, seen[-1], names(memory), [entry.step for entry in store.list()]


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [True, False], ids=["two machines", "one machine"])
def test_a_copy_takes_the_place_of_a_save_that_cannot_end_in_time(tmp_path: Path, is_apart: bool) -> None:
    """On one machine nobody is left who could go on from it."""
    first, second = run_ranks(noticed, 2, tmp_path, is_apart, init="gloo", timeout_s=100)
    assert first == second
    code, batch, copies, saved = first
    assert (code, saved) == (143, [2])
    assert copies == ([f"ba{batch}"] if is_apart else ["ba2"])


def test_copies_without_a_launcher_or_autoresume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(MEMORY_FOLDERS, raising=False)
    fit(tmp_path)
    assert "note: no `ephemeral` copies are made: they serve a job" in capsys.readouterr().err
    with pytest.raises(TrainerConfigError, match="set `autoresume=True` and `save_folder`"):
        make(save_folder=tmp_path, checkpointing={"ephemeral": "2ba"})
    with pytest.raises(
        TrainerConfigError, match="`ephemeral` is '2bas'; expected an interval such as '10ba'"
    ):
        make(save_folder=tmp_path, autoresume=True, checkpointing={"ephemeral": "2bas"})


def test_the_room_of_a_folder_in_memory_is_at_most_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ephemeral, "_free_memory", lambda: iter([5.0]))
    assert ephemeral._free_bytes(Path("/dev/shm")) == 5
    assert not ephemeral._is_in_memory(Path("/proc"))
