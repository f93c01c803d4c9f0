"""`rm` deletes one checkpoint, `gc` the files of unfinished saves, and neither anything else."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time

import boto3
import pytest
from botocore.config import Config

import hocket.ckpt
from hocket.ckpt import collect_garbage, remove
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import Store, _native


def call(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        app([str(arg) for arg in args])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def orphan(prefix, name, save="0badc0de", rank=0):
    path = f"data/{save}-r{rank:05d}-000.safetensors"
    Store(f"{prefix}/{name}").put(path, b"x" * 100)
    return path


def keys(prefix):
    return {found.key for found in Store(prefix).list()}


def test_rm_deletes_one_checkpoint_and_leaves_its_neighbours(prefix, capsys):
    for name in ("one", "two"):
        write_demo(f"{prefix}/{name}")
    orphan(prefix, "three")
    code, out, _ = call(capsys, "rm", f"{prefix}/one", "--dry-run")
    assert (code, "would remove" in out, "of step 1000, 4 files" in out) == (0, True, True)
    assert hocket.ckpt.verify(f"{prefix}/one").is_sound
    code, out, _ = call(capsys, "rm", f"{prefix}/one", "--json")
    document = json.loads(out)
    assert (code, document["status"], document["num_files"]) == (0, "committed", 4)
    assert remove(f"{prefix}/three").status == "partial"
    assert {key.partition("/")[0] for key in keys(prefix)} == {"two"}
    assert hocket.ckpt.verify(f"{prefix}/two").is_sound
    code, _, error = call(capsys, "rm", f"{prefix}/one")
    assert (code, "nothing found" in error) == (3, True)
    assert call(capsys, "rm", "s3://bucket")[0] == 2


def test_rm_deletes_only_files_of_checkpoints(prefix, capsys):
    theirs = {"model/data/model.safetensors", "model/data/model-r00000.safetensors"}
    for key in theirs:
        Store(prefix).put(key, b"somebody's weights")
    code, _, error = call(capsys, "rm", f"{prefix}/model")
    assert (code, "nothing found" in error) == (3, True)
    with pytest.raises(CheckpointNotFoundError):
        _native.ckpt_delete(prefix, "model")
    write_demo(f"{prefix}/mixed")
    Store(f"{prefix}/mixed").put("data/notes.safetensors", b"not ours")
    assert remove(f"{prefix}/mixed", dry_run=True).num_files == 4
    assert remove(f"{prefix}/mixed").num_files == 4
    assert keys(prefix) == theirs | {"mixed/data/notes.safetensors"}


def test_a_removal_of_one_save_leaves_another_of_the_same_name(prefix):
    write_demo(f"{prefix}/one")
    ours = hocket.ckpt.open(f"{prefix}/one").manifest.save_id
    remove(f"{prefix}/one")
    write_demo(f"{prefix}/one")
    with pytest.raises(CheckpointNotFoundError, match=f"of the save {ours}"):
        _native.ckpt_delete(prefix, "one", save_id=ours)
    theirs = hocket.ckpt.open(f"{prefix}/one").manifest.save_id
    _native.ckpt_delete(prefix, "one", save_id=theirs)
    assert keys(prefix) == set()


def test_rm_refuses_a_link_also_in_a_dry_run(tmp_path, capsys):
    write_demo(str(tmp_path / "runs/one"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "runs/one")
    told = [call(capsys, "rm", link, *options) for options in (["--dry-run"], [])]
    assert told[0] == told[1]
    code, out, error = told[0]
    assert (code, out, "symbolic link" in error) == (2, "", True)
    assert hocket.ckpt.verify(str(link)).is_sound


@pytest.mark.parametrize("with_manifest", [False, True])
def test_nothing_is_deleted_through_a_link_to_other_data(tmp_path, capsys, with_manifest):
    write_demo(str(tmp_path / "runs/one"))
    mirror = tmp_path / "mirrors/one"
    mirror.mkdir(parents=True)
    (mirror / "data").symlink_to(tmp_path / "runs/one/data")
    if with_manifest:
        shutil.copy(tmp_path / "runs/one/checkpoint.json.zst", mirror)
    assert collect_garbage(str(tmp_path / "mirrors"), min_age_s=0).garbage == ()
    for options in (["--dry-run"], []):
        code, out, error = call(capsys, "rm", mirror, *options)
        assert (code, out, "`data` is a symbolic link" in error.replace(f"{mirror}/", "")) == (2, "", True)
    path = f"data/{next((tmp_path / 'runs/one/data').iterdir()).name}"
    with pytest.raises(ValueError, match="symbolic link"):
        _native.ckpt_delete_files(str(mirror), [path])
    assert hocket.ckpt.verify(str(tmp_path / "runs/one")).is_sound
    assert (mirror / "checkpoint.json.zst").exists() == with_manifest


def test_gc_deletes_orphans_of_partial_and_of_committed_checkpoints(prefix, capsys):
    write_demo(f"{prefix}/good")
    committed = keys(f"{prefix}/good")
    paths = {("good", orphan(prefix, "good")), ("dead", orphan(prefix, "dead"))}
    Store(f"{prefix}/dead").put("notes.txt", b"not ours")
    assert collect_garbage(prefix).garbage == ()  # all files are younger than the minimum age
    found = collect_garbage(prefix, min_age_s=0, dry_run=True).garbage
    assert {(one.name, one.path) for one in found} == paths
    assert {one.waste for one in found} == {"file"}
    assert keys(f"{prefix}/good") > committed
    code, out, _ = call(capsys, "gc", prefix, "--min-age", "0s", "--json")
    assert (code, len(json.loads(out)["garbage"])) == (0, 2)
    assert keys(f"{prefix}/good") == committed
    assert keys(f"{prefix}/dead") == {"notes.txt"}
    assert hocket.ckpt.verify(f"{prefix}/good").is_sound
    code, out, _ = call(capsys, "gc", prefix)
    assert (code, "removed 0 leftovers" in out) == (0, True)
    code, _, error = call(capsys, "gc", prefix, "--min-age", "soon")
    assert (code, "24h" in error) == (2, True)


def test_gc_leaves_checkpoints_that_it_cannot_read(prefix, capsys):
    write_demo(f"{prefix}/later")
    orphan(prefix, "later")
    Store(f"{prefix}/later").put("checkpoint.json.zst", b"of a later format, or spoiled")
    before = keys(prefix)
    code, out, _ = call(capsys, "gc", prefix, "--min-age", "0s")
    assert (code, "left alone: later" in out) == (0, True)
    assert keys(prefix) == before
    assert remove(f"{prefix}/later").status == "foreign"
    with pytest.raises(CheckpointNotFoundError):
        remove(f"{prefix}/later")


def test_gc_deletes_files_of_a_killed_conversion_but_not_of_a_live_one(tmp_path, capsys):
    data = tmp_path / "one/data"
    data.mkdir(parents=True)
    whole, hidden = (
        data / "0badc0de-r00000-000.safetensors",
        data / ".0badc0de-r00000-001.safetensors.7.hocket-unfinished",
    )
    hidden.write_bytes(b"half")
    assert "partial" in call(capsys, "ls", tmp_path)[1]
    whole.write_bytes(b"whole")
    with hidden.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert collect_garbage(str(tmp_path), min_age_s=0).garbage == ()
    assert collect_garbage(str(tmp_path), min_age_s=3600).garbage == ()
    found = collect_garbage(str(tmp_path), min_age_s=0).garbage
    assert {one.path for one in found} == {f"data/{whole.name}", f"data/{hidden.name}"}
    assert list(tmp_path.iterdir()) == []
    data.mkdir(parents=True)
    hidden.write_bytes(b"half")
    assert call(capsys, "rm", tmp_path / "one")[0] == 0
    assert list(tmp_path.iterdir()) == []


CONVERSIONS = """
import os, sys, threading
from hocket.ckpt.verbs.convert import convert

def stop(*_):
    os.write(1, b"writing\\n")
    threading.Event().wait()

source, *targets = sys.argv[1:]
for target in targets:
    destination, _, to = target.partition("=")
    options = {"to": to, "on_progress": stop}
    threading.Thread(target=convert, args=(source, destination), kwargs=options).start()
"""


def test_gc_deletes_unfinished_files_of_killed_conversions_and_no_similar_ones(tmp_path, capsys):
    write_demo(str(tmp_path / "demo"))
    runs = tmp_path / "runs"
    targets = {
        "dcp": "dcp", "sharded": "safetensors", "one.safetensors": "safetensors", "model.pt": "torch",
        "ours": "hocket",
    }  # fmt: skip
    (runs / "sharded").mkdir(parents=True)
    names = [".x.7.unfinished", ".x.hocket-unfinished", ".x.x7.hocket-unfinished", "x.7.hocket-unfinished"]
    theirs = [runs / folder / name for folder in (".", "sharded") for name in names]
    for path in theirs:
        path.write_bytes(b"not ours")
    theirs += [runs / f".{kind}.7.hocket-unfinished" for kind in ("link", "folder", "pipe")]
    theirs[-3].symlink_to(tmp_path / "demo/checkpoint.json.zst")
    theirs[-2].mkdir()
    os.mkfifo(theirs[-1])
    theirs += [runs / "else", runs / "else/data"]
    theirs[-2].mkdir()
    theirs[-1].write_bytes(b"where a checkpoint has a folder")
    arguments = [tmp_path / "demo", *(f"{runs / name}={to}" for name, to in targets.items())]
    with subprocess.Popen(
        [sys.executable, "-c", CONVERSIONS, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert [process.stdout.readline() for _ in targets] == ["writing\n"] * len(targets)
            assert collect_garbage(str(runs), min_age_s=0).garbage == ()
        finally:
            process.kill()
    hidden = {
        ("dcp", ".__0_0.distcp"), ("sharded", ".model.safetensors"), (".", ".one.safetensors"),
        (".", ".model.pt"),
    }  # fmt: skip
    ending = re.compile(rf"\.{process.pid}[0-9]{{9}}\.hocket-unfinished$")
    assert collect_garbage(str(runs), min_age_s=3600).garbage == ()
    found = collect_garbage(str(runs), min_age_s=0, dry_run=True).garbage
    unfinished = [one for one in found if one.waste == "unfinished"]
    assert all(ending.search(one.path) for one in unfinished)
    assert {(one.name, ending.sub("", one.path)) for one in unfinished} == hidden
    assert [one.name for one in found if one.waste != "unfinished"] == ["ours"]
    assert all((runs / one.name / one.path).is_file() for one in found)
    code, out, _ = call(capsys, "gc", runs, "--min-age", "0s")
    assert (code, out.count("a conversion was cut short"), "removed 5 leftovers" in out) == (0, 4, True)
    assert {path for path in runs.rglob("*") if path != runs / "sharded"} == set(theirs)
    assert hocket.ckpt.verify(str(tmp_path / "demo")).is_sound


def test_gc_keeps_all_files_of_a_save_with_one_young_file(tmp_path):
    paths = [orphan(str(tmp_path), "live", rank=rank) for rank in range(3)]
    paths.append(orphan(str(tmp_path), "live", save="11111111"))
    day_before = time.time() - 90_000
    for path in [paths[0], paths[1], paths[3]]:
        os.utime(tmp_path / "live" / path, (day_before, day_before))
    assert [one.path for one in collect_garbage(str(tmp_path)).garbage] == [paths[3]]
    assert keys(str(tmp_path)) == {f"live/{path}" for path in paths[:3]}


def test_gc_aborts_uploads_that_never_finished(server):
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )
    prefix = f"uploads/{time.monotonic_ns()}"
    ours = [f"{prefix}/run & co/data/0badc0de-r0000{rank}-000.safetensors" for rank in range(3)]
    theirs = f"{prefix}/run & co/data/model.bin"
    for key in [*ours, theirs]:
        begun = client.create_multipart_upload(Bucket=server.bucket, Key=key)
        client.upload_part(Bucket=server.bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x")

    def uploads():
        found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix).get("Uploads", [])
        return sorted(upload["Key"] for upload in found)

    uri = server.uri(prefix)
    assert collect_garbage(uri).garbage == ()
    found = collect_garbage(uri, min_age_s=0, dry_run=True).garbage
    assert [(one.waste, one.name) for one in found] == [("upload", "run & co")] * 3
    assert uploads() == sorted([*ours, theirs])
    collect_garbage(uri, min_age_s=0)
    assert uploads() == [theirs]
    client.close()


def test_gc_deletes_the_probe_objects_of_commits(server):
    uri = server.uri(f"probes/{time.monotonic_ns()}")
    write_demo(f"{uri}/one")
    store = Store(uri)
    for name in ("one", "two"):
        store.put(f"{name}/.hocket-probe-{'0badc0de' * 4}-77", b"probe")
    store.put("one/.hocket-probe-notes.txt", b"not ours")
    assert collect_garbage(uri).garbage == ()
    found = collect_garbage(uri, min_age_s=0).garbage
    assert [(one.waste, one.name) for one in found] == [("probe", "one"), ("probe", "two")]
    assert [key for key in keys(uri) if ".hocket" in key] == ["one/.hocket-probe-notes.txt"]
    assert hocket.ckpt.verify(f"{uri}/one").is_sound
    store.put(f"one/.hocket-probe-{'0badc0de' * 4}-77", b"probe")
    remove(f"{uri}/one")
    assert keys(uri) == {"one/.hocket-probe-notes.txt"}


def test_only_data_files_are_deleted_by_path(tmp_path):
    with pytest.raises(ValueError, match="below `data/`"):
        _native.ckpt_delete_files(str(tmp_path), ["../data/x.safetensors"])
