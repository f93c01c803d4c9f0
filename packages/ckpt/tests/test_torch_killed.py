"""Killed at any point of a save, or out of room: what was committed stays, and the next save works."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointExistsError, CheckpointPartialError
from hocket.ckpt.torch import CheckpointStore
from support.sampling import cases, plan

SCRIPT = Path(__file__).with_name("mortal_ranks.py")
NUM_ITEMS = 2 << 20  # 4 MiB a rank: what is written takes as long as what is told


def script():
    spec = importlib.util.spec_from_file_location("mortal_ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """The process that forks ranks."""

    def __init__(self, process):
        self._process = process
        self.took_s = 0.0

    def save(self, folder, *, step, mode="sync", num_items=NUM_ITEMS, victim=None, delay_s=0.0):
        request = {"folder": str(folder), "step": step, "mode": mode, "num_items": num_items}
        request |= {"victim": victim, "delay_s": delay_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks the ranks has ended"
        heard, self.took_s = json.loads(line)
        return heard


@pytest.fixture
def ranks():
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield Ranks(process)
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def check(folder, step):
    """Loads a step, bit for bit."""
    expected = script().state(step, NUM_ITEMS)
    store = CheckpointStore(str(folder))
    into = {"w": torch.zeros(NUM_ITEMS), "small": torch.zeros(3, dtype=torch.int64), "step": 0}
    loaded = store.load(f"step-{step}", into)
    assert loaded.state["step"] == step
    assert torch.equal(loaded.state["w"], expected["w"])
    assert torch.equal(loaded.state["small"], expected["small"])


def listed(folder, capsys):
    """What `hocket-ckpt ls` says, by name."""
    with pytest.raises(SystemExit) as ended:
        app(["ls", str(folder), "--json"])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out)
    found = said if isinstance(said, list) else said["checkpoints"]
    return {each["name"]: each["status"] for each in found}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_killed_at_any_point_of_a_save_harms_nothing(tmp_path, ranks, capsys, mode):
    trials = cases(full=100, sample=2)
    rng = random.Random(plan().seed)
    template = tmp_path / "template"
    assert ranks.save(template, step=1) == [None, None]
    assert ranks.save(template, step=2, mode=mode) == [None, None]
    longest_s = 1.2 * ranks.took_s
    shutil.rmtree(template / "step-2")
    seen = set()
    for trial in range(trials):
        folder = tmp_path / f"trial-{trial}"
        shutil.copytree(template, folder)
        victim, delay_s = rng.randrange(2), rng.uniform(0, longest_s)
        heard = ranks.save(folder, step=2, mode=mode, victim=victim, delay_s=delay_s)
        context = f"rank {victim} killed after {delay_s} s: {heard}"
        found = listed(folder, capsys)
        assert found.pop("step-1") == "committed", context
        if found.get("step-2") == "foreign":
            # Folders without a file: killed before there was one, or the survivor has removed its own.
            assert [path for path in (folder / "step-2").rglob("*") if path.is_file()] == [], context
            del found["step-2"]
        assert set(found.values()) <= {"committed", "partial"}, context
        newest = hocket.ckpt.list_checkpoints(str(folder))[-1]
        check(folder, newest.step)
        status = found.get("step-2", "nothing")
        if status == "partial":
            with pytest.raises(CheckpointPartialError, match="step-2"):
                hocket.ckpt.open(str(folder / "step-2"))
        if status != "committed":
            assert None not in heard, context
        again = ranks.save(folder, step=2, mode=mode)
        if status == "committed":
            assert all(CheckpointExistsError.__name__ in said for said in again), context
        else:
            assert again == [None, None], context
        check(folder, 2)
        seen.add(status)
        shutil.rmtree(folder)
    if trials >= 100:
        assert {"committed", "partial"} <= seen


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30, check=True)


def test_a_full_disk_is_told_on_every_rank_and_leaves_nothing(small_disk, ranks):
    assert ranks.save(small_disk, step=1, num_items=1 << 18) == [None, None]
    before = sorted(small_disk.rglob("*"))
    for mode in ("sync", "async"):
        heard = ranks.save(small_disk, step=2, mode=mode)  # 4 MiB a rank: one or both have no room
        assert all(said is not None for said in heard), heard
        assert any("StoreIOError" in said and "space" in said.lower() for said in heard), heard
        left = [path for path in sorted(small_disk.rglob("*")) if path not in before and path.is_file()]
        assert left == [], heard
        found = [listing.name for listing in hocket.ckpt.list_checkpoints(str(small_disk))]
        assert "step-1" in found
        statuses = {listing.status for listing in hocket.ckpt.list_checkpoints(str(small_disk))}
        assert "partial" not in statuses
    assert ranks.save(small_disk, step=2, num_items=1 << 18) == [None, None]
    assert hocket.ckpt.verify(str(small_disk / "step-2")).is_sound
