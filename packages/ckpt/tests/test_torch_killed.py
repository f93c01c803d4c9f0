"""Ranks killed or stopped during a save, and failing disks: commits remain, and the next save works."""

import contextlib
import errno
import functools
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import torch
from botocore.config import Config

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointExistsError, CheckpointPartialError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.verbs.remove import collect_garbage, remove
from support.sampling import cases, plan
from support.workers import worker

SCRIPT = Path(__file__).with_name("mortal_ranks.py")
NUM_ITEMS = 2 << 20  # 4 MiB a rank, whose writing takes about as long as the messages between the ranks


def script():
    spec = importlib.util.spec_from_file_location("mortal_ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """Saves with two ranks through `mortal_ranks.py`, the process that forks them."""

    def __init__(self, ask):
        self._ask = ask
        self.took_s = 0.0

    def save(
        self, folder, *, step, mode="sync", num_items=NUM_ITEMS,
        victim=None, delay_s=0.0, stopped=None, env=None,
    ):  # fmt: skip
        request = {"folder": str(folder), "step": step, "mode": mode, "num_items": num_items}
        request |= {"victim": victim, "delay_s": delay_s, "stopped": stopped, "env": dict(env or {})}
        heard, self.took_s = self._ask(request)
        return heard


@pytest.fixture
def fault(shim):
    """Return a function that makes variables under which a rank's data-file call fails or stops the rank."""
    if shim is None:
        pytest.skip("failing calls need `cc`, which is not installed")
    return lambda call, number, rank=1: {
        "FAULT_CALL": call, "FAULT_FILE": f"-r{rank:05}-", "FAULT_ERRNO": str(number)
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks(shim):
    with worker(sys.executable, str(SCRIPT), env={"LD_PRELOAD": shim} if shim else None) as ask:
        yield Ranks(ask)


def check(folder, step, num_items=NUM_ITEMS):
    """Load a step and compare it bit for bit."""
    expected = script().state(step, num_items)
    store = CheckpointStore(str(folder))
    into = {"w": torch.zeros(num_items), "small": torch.zeros(3, dtype=torch.int64), "step": 0}
    loaded = store.load(f"step-{step}", into)
    assert loaded.state["step"] == step
    assert torch.equal(loaded.state["w"], expected["w"])
    assert torch.equal(loaded.state["small"], expected["small"])


def listed(folder, capsys):
    """Return the status of each checkpoint that `hocket-ckpt ls` prints, by name."""
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
            # Folders without files: none was written before the kill, or the survivor has removed its files.
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


# 12 MiB a rank, an upload of two parts; 8 KiB, one request.
LARGE, SMALL = 6 << 20, 4 << 10


class Bucket:
    """Lists the objects and uploads under a prefix with a client of another library."""

    def __init__(self, server, prefix):
        self.uri = server.uri(prefix)
        self._server, self._prefix = server, prefix
        config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1})
        self._client = boto3.client("s3", endpoint_url=server.endpoint, config=config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.close()

    def objects(self):
        """Return the ETag of each object, by key."""
        found = self._client.list_objects_v2(Bucket=self._server.bucket, Prefix=f"{self._prefix}/")
        return {one["Key"].removeprefix(f"{self._prefix}/"): one["ETag"] for one in found.get("Contents", [])}

    def uploads(self):
        """Return the keys of unfinished multipart uploads."""
        found = self._client.list_multipart_uploads(Bucket=self._server.bucket, Prefix=f"{self._prefix}/")
        return [one["Key"] for one in found.get("Uploads", [])]

    def committed(self):
        """Return those objects that belong to committed checkpoints."""
        keys = set()
        for listing in hocket.ckpt.list_checkpoints(self.uri):
            if listing.status == "committed":
                paths = [file["path"] for file in Manifest.read(f"{self.uri}/{listing.name}").files]
                keys |= {f"{listing.name}/{path}" for path in [*paths, "checkpoint.json.zst"]}
        return {key: tag for key, tag in self.objects().items() if key in keys}


def collect(bucket):
    """Collect garbage, and check that exactly the objects of committed checkpoints remain, unchanged."""
    before = bucket.committed()
    collect_garbage(bucket.uri, min_age_s=0)
    assert bucket.committed() == before
    assert bucket.objects() == before
    assert bucket.uploads() == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_killed_at_any_point_of_a_save_to_a_store_harms_nothing(
    s3d_faults, ranks, monkeypatch, capsys, mode
):
    trials = cases(full=100, sample=2)
    rng = random.Random(plan().seed)
    # The latency makes requests take about as long as the transfer of data.
    server = s3d_faults(latency_ms=20)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    assert ranks.save(server.uri("first"), step=2, mode=mode, num_items=LARGE, env=server.env) == [None, None]
    longest_s = 1.2 * ranks.took_s
    seen = set()
    with contextlib.ExitStack() as stack:
        for trial in range(trials):
            bucket = stack.enter_context(Bucket(server, f"trial-{trial}"))
            save = functools.partial(ranks.save, bucket.uri, env=server.env)
            assert save(step=1, num_items=SMALL) == [None, None]
            begun = bucket.committed()
            victim, delay_s = rng.randrange(2), rng.uniform(0, longest_s)
            heard = save(step=2, mode=mode, num_items=LARGE, victim=victim, delay_s=delay_s)
            context = f"rank {victim} killed after {delay_s} s: {heard}"
            server.await_idle()
            found = listed(bucket.uri, capsys)
            status = found.pop("step-2", "nothing")
            assert found == {"step-1": "committed"}, context
            newest = hocket.ckpt.list_checkpoints(bucket.uri)[-1]
            assert newest.step == (2 if status == "committed" else 1), context
            check(bucket.uri, newest.step, LARGE if newest.step == 2 else SMALL)
            if status == "partial":
                with pytest.raises(CheckpointPartialError, match="step-2"):
                    hocket.ckpt.open(f"{bucket.uri}/step-2")
            if status != "committed":
                assert None not in heard, context
            seen |= {status, *(["upload"] if bucket.uploads() else [])}
            if rng.random() < 0.5:
                collect(bucket)
            again = save(step=2, mode=mode, num_items=LARGE)
            if status == "committed":
                assert all(CheckpointExistsError.__name__ in said for said in again), context
            else:
                assert again == [None, None], context
            collect(bucket)
            check(bucket.uri, 2, LARGE)
            assert begun.items() <= bucket.committed().items(), context
            for name in ("step-1", "step-2"):
                remove(f"{bucket.uri}/{name}")
    if trials >= 100:
        assert {"committed", "partial", "nothing", "upload"} <= seen


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of 6 MiB."""
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


def test_a_full_disk_raises_on_every_rank_and_leaves_no_files(small_disk, ranks):
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


def files_of(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("call", ["header", "data", "fsync"])
def test_a_failing_disk_raises_on_every_rank_and_leaves_no_files(tmp_path, ranks, fault, call):
    for mode, number in (("sync", errno.EIO), ("async", errno.EDQUOT)):
        heard = ranks.save(tmp_path, step=2, mode=mode, env=fault(call, number))
        assert "failed on rank 1: StoreIOError" in heard[0], heard
        assert heard[1].startswith("StoreIOError"), heard
        assert all("-r00001-" in each and f"(os error {number})" in each for each in heard), heard
        assert files_of(tmp_path) == []
    assert ranks.save(tmp_path, step=2) == [None, None]
    check(tmp_path, 2)


def test_a_late_rank_is_named_and_commits_nothing_afterwards(tmp_path, ranks, fault):
    assert ranks.save(tmp_path, step=1, num_items=1 << 18) == [None, None]
    kept = files_of(tmp_path)
    for mode in ("sync", "async"):
        # Rank 1 has written its data, and is stopped at `fsync`.
        heard = ranks.save(tmp_path, step=2, mode=mode, stopped=1, env=fault("fsync", 0))
        for each in heard:
            assert each.startswith("CheckpointTimeoutError"), heard
            assert "rank 1 did not report its part" in each, heard
        assert files_of(tmp_path) == kept
    assert ranks.save(tmp_path, step=2, num_items=1 << 18) == [None, None]
    check(tmp_path, 2, 1 << 18)


def test_a_stopped_coordinator_does_not_block_the_other_rank(tmp_path, ranks, fault):
    assert ranks.save(tmp_path, step=1) == [None, None]
    for step, mode in ((2, "sync"), (3, "async")):
        heard = ranks.save(tmp_path, step=step, mode=mode, stopped=0, env=fault("fsync", 0, rank=0))
        # Rank 1 cannot know whether rank 0 commits; rank 0 does, once it continues.
        assert "has no outcome" in heard[1], heard
        assert "rank 0, through which the ranks hear of each other, did not answer" in heard[1], heard
        assert heard[0] is None, heard
        check(tmp_path, step)
