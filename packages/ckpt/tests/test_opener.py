"""A checkpoint is opened once: its contents reach Python as they were written, its digests stay in Rust."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hocket.ckpt import plain
from hocket.ckpt.converting import convert
from hocket.ckpt.demo import write_demo
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.manifest import Manifest
from hocket.ckpt.opener import open_hocket
from hocket.ckpt.resharding import reshard
from hocket.native import _native


@pytest.fixture(scope="module", params=[None, "zstd:1"])
def folder(request, tmp_path_factory):
    """Return a checkpoint with every part of a manifest; once with plain files, once with compressed ones."""
    folder = tmp_path_factory.mktemp("opened")
    write_demo(str(folder / "demo"))
    reshard(folder / "demo", folder / "copy", ranks=4, compression=request.param)
    return folder / "copy"


def test_an_opened_manifest_is_the_document_that_the_independent_reader_finds(folder):
    document = json.loads(_native.ckpt_manifest_decode((folder / "checkpoint.json.zst").read_bytes()))
    assert json.loads(Manifest.read(str(folder)).to_document()) == document == plain.read_manifest(folder)
    assert document["values"]
    assert any("data" in tensor for tensor in document["tensors"].values())
    assert any("same_as" in tensor for tensor in document["tensors"].values())


def test_contents_are_taken_once_and_reads_do_not_need_them(folder):
    opened = _native.Checkpoint(str(folder))
    files = opened.take_contents()["files"]
    with pytest.raises(ValueError, match="taken before"):
        opened.take_contents()
    buffer = np.empty((len(files), 4), np.uint8)
    opened.read([(number, 0, 4, buffer[number].ctypes.data) for number in range(len(files))])


def test_digests_are_compared_unless_a_read_says_otherwise(folder, tmp_path):
    convert(folder, tmp_path / "spoiled", to="hocket")
    opened, buffer = _native.Checkpoint(str(tmp_path / "spoiled")), np.empty(4, np.uint8)
    [file] = opened.take_contents()["files"]
    path = tmp_path / "spoiled" / file["path"]
    whole = bytearray(path.read_bytes())
    whole[file["data_start"] + 9] ^= 1
    path.write_bytes(whole)
    reads = [(0, 0, 4, buffer.ctypes.data)]
    with pytest.raises(CheckpointCorruptError, match="digest"):
        opened.read(reads)
    opened.read(reads, check=False)


def test_other_formats_are_read_without_digests_and_are_no_checkpoint_of_hocket(tmp_path):
    tensor = np.arange(6, dtype=np.float32)
    path = str(tmp_path / "model.safetensors")
    save_file({"w": tensor}, path)
    opened = _native.Checkpoint.open_foreign(path)
    contents = opened.take_contents()
    [chunk] = contents["tensors"]["w"]["chunks"]
    read = np.empty(6, np.float32)
    opened.read([(0, chunk["offset"], chunk["length"], read.ctypes.data)], check=True)
    assert np.array_equal(read, tensor)
    assert contents["digest"] == _native.Checkpoint.open_foreign(path).take_contents()["digest"]
    with pytest.raises(CheckpointIncompatibleError, match="safetensors"):
        open_hocket(path)
