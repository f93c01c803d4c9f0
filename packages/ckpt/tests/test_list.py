"""The newest checkpoint is the committed one of the highest step, then the latest one; no pointer file."""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

import hocket.ckpt
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import PerRank
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.torch import CheckpointStore, load
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.list import list_checkpoints
from hocket.ckpt.verbs.remove import collect_garbage
from hocket.native import Store, _native


def commit(uri, number, step, created, **fields):
    save_id = f"{number:032x}"
    manifest = Manifest(
        save_id=save_id, step=step, created=f"{created}-01-01T00:00:00.000000Z", version="0.1.0",
        writer="test", world_size=2, **fields,
    )  # fmt: skip
    _native.ckpt_commit(uri, _native.ckpt_manifest_encode(manifest.to_document()), save_id)


def test_the_newest_is_found_by_step_before_time_and_name(prefix):
    commit(f"{prefix}/zz", 1, 5, 2031)  # written by a node whose clock is years ahead
    commit(f"{prefix}/step-9", 2, 7, 2001)
    commit(f"{prefix}/aa", 3, 7, 2002)
    Store(f"{prefix}/latest").put("data/00000004-r00000-000.safetensors", b"of a save that never finished")
    found = [(entry.name, entry.status) for entry in list_checkpoints(prefix)]
    assert found == [("latest", "partial"), *((name, "committed") for name in ("zz", "step-9", "aa"))]
    # No pointer file, which could become stale, was written.
    keys = {found.key for found in Store(prefix).list()}
    assert {key.partition("/")[2] for key in keys} == {
        "checkpoint.json.zst", "data/00000004-r00000-000.safetensors"
    }  # fmt: skip


def test_per_rank_values_load_with_the_same_number_of_ranks_only(tmp_path):
    for number, policy in enumerate(("reseed", "drop", "require")):
        own = PerRank(policy=policy, ranks=({"seed": 0}, {"seed": 1}))
        commit(str(tmp_path / policy), number, 1, 2026, per_rank=own)
    store = CheckpointStore(str(tmp_path))
    assert store.load("reseed", {}).per_rank is None
    assert store.load("drop", {}).per_rank is None
    with pytest.raises(CheckpointIncompatibleError, match="2"):
        store.load("require", {})
    store.close()


def folder_in_its_place(path):
    path.mkdir()


def pipe_in_its_place(path):
    os.mkfifo(path)


def link_to_nothing(path):
    path.symlink_to("nowhere")


def link_to_itself(path):  # ELOOP, for any user
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [folder_in_its_place, pipe_in_its_place, link_to_nothing, link_to_itself])
def test_one_checkpoint_that_cannot_be_read_does_not_end_the_listing_nor_the_collection(tmp_path, put):
    commit(str(tmp_path / "sound"), 1, 1, 2031)
    (tmp_path / "other" / "data").mkdir(parents=True)
    put(tmp_path / "other" / "checkpoint.json.zst")
    (tmp_path / "other" / "data" / "00000001-r00000-000.safetensors").write_bytes(b"of some save")
    listed = {entry.name: entry for entry in list_checkpoints(tmp_path)}
    assert listed["sound"].status == "committed"
    assert listed["other"].status == "foreign"
    assert "checkpoint.json.zst" in listed["other"].problem
    report = collect_garbage(tmp_path, min_age_s=0)
    assert report.garbage == ()
    assert list(report.skipped) == ["other"]
    assert "checkpoint.json.zst" in report.skipped["other"]
    assert (tmp_path / "other" / "data" / "00000001-r00000-000.safetensors").exists()


@pytest.mark.parametrize("num_tensors", [1, 200])
def test_a_manifest_that_was_cut_behind_its_head_is_listed_as_damaged_and_its_data_are_kept(
    prefix, num_tensors
):
    tensors = {f"w{number:04}": torch.randn(64) for number in range(num_tensors)}  # in the manifest itself
    tensors["large"] = torch.zeros(1000)
    with closing(CheckpointStore(prefix)) as store:
        store.save(tensors, step=1).wait()
        store.save(tensors, step=2).wait()
    place = Store(f"{prefix}/step-2")
    whole = place.get("checkpoint.json.zst")
    assert (len(whole) > 4096) == (num_tensors > 1), (
        "one manifest is as long as what a listing reads, or longer"
    )
    data = [found.key for found in place.list("data")]
    for end in (len(whole) - 1, len(whole) - 24, len(whole) * 3 // 4, 4096 + 12):
        damaged = whole[:end] if end < len(whole) else whole + b"x"
        place.put("checkpoint.json.zst", damaged)
        listed = {entry.name: entry for entry in list_checkpoints(prefix)}
        assert (listed["step-1"].status, listed["step-1"].step) == ("committed", 1)
        assert (listed["step-2"].status, listed["step-2"].step) == ("foreign", None)
        with pytest.raises(CheckpointCorruptError) as refused:
            hocket.ckpt.open(f"{prefix}/step-2")
        assert listed["step-2"].problem in str(refused.value)
        report = collect_garbage(prefix, min_age_s=0)
        assert (report.garbage, list(report.skipped)) == ((), ["step-2"])
    assert [found.key for found in place.list("data")] == data
    place.put("checkpoint.json.zst", whole)
    assert [entry.status for entry in list_checkpoints(prefix)] == ["committed", "committed"]


def test_a_checkpoint_of_a_later_format_is_named_with_the_version_to_install_by_all_that_read_it(tmp_path):
    write_demo(tmp_path / "own")
    (tmp_path / "later" / "data").mkdir(parents=True)
    (tmp_path / "later" / "data" / "00000001-r00000-000.safetensors").write_bytes(b"of a later format")
    head = json.dumps({"format": 5, "version": "9.9.0", "more": [1]}).encode()
    pa = pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")
    manifest = pa.Codec("zstd").compress(head, asbytes=True) + b"which may have other frames"
    (tmp_path / "later" / "checkpoint.json.zst").write_bytes(manifest)
    own, later, out = (str(tmp_path / name) for name in ("own", "later", "out"))
    told = r"has format 5, this build reads up to 4\. Hocket 9\.9\.0 wrote it: install hocket-ckpt>=9\.9\.0"
    for use in (
        lambda: hocket.ckpt.open(later),
        lambda: hocket.ckpt.verify(later),
        lambda: hocket.ckpt.diff(own, later),
        lambda: hocket.ckpt.merge([own, later], out),
        lambda: hocket.ckpt.convert(later, out, to="dcp"),
        lambda: hocket.ckpt.reshard(later, out, ranks=2),
        lambda: load(later, {"w": torch.zeros(1)}),
    ):
        with pytest.raises(CheckpointIncompatibleError, match=told):
            use()
    listed = {entry.name: entry for entry in list_checkpoints(tmp_path)}
    assert (listed["later"].status, re.search(told, listed["later"].problem) is not None) == ("foreign", True)
    report = collect_garbage(tmp_path, min_age_s=0)
    assert (report.garbage, list(report.skipped)) == ((), ["later"])
    assert re.search(told, report.skipped["later"])


#: A collection by a user without privileges, since modes do not hold for the superuser.
COLLECT = """
import os, sys
from hocket.ckpt.verbs.remove import collect_garbage
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
report = collect_garbage(sys.argv[1], min_age_s=0)
print([item.name for item in report.garbage], list(report.skipped))
"""


def test_a_checkpoint_that_cannot_be_changed_does_not_end_the_collection():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        for child in ("a", "b"):
            data = Path(name, child, "data")
            data.mkdir(parents=True)
            (data / "00000001-r00000-000.safetensors").write_bytes(b"of a save that never finished")
        if os.getuid() == 0:
            for path in (name, *Path(name).rglob("*")):
                os.chown(path, 54321, 54321)
        Path(name, "a", "data").chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", COLLECT, name], capture_output=True, text=True, timeout=60, check=False
        )
        Path(name, "a", "data").chmod(0o755)
        assert done.stdout == "['b'] ['a']\n", done.stderr
