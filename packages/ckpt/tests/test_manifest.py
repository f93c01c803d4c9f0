"""A save's summary has the fields of its manifest; a missing or damaged manifest raises."""

import json

import pytest

from hocket.ckpt.document.manifest import Manifest, SaveSummary
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import _native


@pytest.fixture
def demo(tmp_path):
    write_demo(str(tmp_path / "demo"))
    return tmp_path / "demo"


def test_a_summary_has_the_fields_of_the_manifest(demo):
    summary, manifest = SaveSummary.read(str(demo)), Manifest.read(str(demo))
    assert (summary.save_id, summary.step, summary.user) == (manifest.save_id, manifest.step, manifest.user)
    assert summary.paths == tuple(file["path"] for file in manifest.files)
    assert summary.user


def test_a_summary_is_read_before_the_contents_are_taken(demo):
    opened = _native.Checkpoint(str(demo))
    assert opened.summary()["step"] == opened.take_contents()["step"]
    with pytest.raises(ValueError, match="taken before"):
        opened.summary()


def test_a_missing_or_damaged_manifest_raises(demo):
    path = demo / "checkpoint.json.zst"
    document = json.loads(_native.ckpt_manifest_decode(path.read_bytes()))
    document["user"] = {"$bytes": "!!"}
    path.write_bytes(_native.ckpt_manifest_encode(json.dumps(document).encode()))
    with pytest.raises(CheckpointCorruptError, match="cannot be decoded"):
        SaveSummary.read(str(demo))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="digest"):
        SaveSummary.read(str(demo))
    path.unlink()
    with pytest.raises(CheckpointNotFoundError):
        SaveSummary.read(str(demo))


def test_a_commit_refuses_bytes_without_their_digest_and_another_saves_manifest(demo, tmp_path):
    content = (demo / "checkpoint.json.zst").read_bytes()
    save_id = SaveSummary.read(str(demo)).save_id
    for bad in (content[:-1], content[:40] + bytes([content[40] ^ 1]) + content[41:]):
        with pytest.raises(CheckpointCorruptError):
            _native.ckpt_commit(str(tmp_path / "out"), bad, save_id)
    with pytest.raises(ValueError, match="is of save"):
        _native.ckpt_commit(str(tmp_path / "out"), content, "0" * 32)
    assert not (tmp_path / "out/checkpoint.json.zst").exists()
