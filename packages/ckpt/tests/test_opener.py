"""A checkpoint is opened once: its contents reach Python as they were written, its digests stay in Rust."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt import plain
from hocket.ckpt.document.boxes import whole
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.read.opener import open_hocket
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.reshard import reshard
from hocket.native import _native


@pytest.fixture(scope="module", params=[None, "zstd:1", "planes+zstd:1"])
def folder(request, tmp_path_factory):
    """Return a checkpoint with every part of a manifest; once with plain files, once with compressed ones."""
    folder = tmp_path_factory.mktemp("opened")
    write_demo(str(folder / "demo"))
    reshard(folder / "demo", folder / "copy", ranks=4, compression=request.param)
    return folder / "copy"


def test_a_command_in_a_message_quotes_the_path(tmp_path):
    path = tmp_path / "a b.safetensors"
    save_file({"x": np.zeros(2, np.float32)}, path)
    with pytest.raises(CheckpointIncompatibleError, match=f"convert '{path}' DST"):
        open_hocket(path)
    with pytest.raises(CheckpointIncompatibleError, match=f"convert '{path}' DST"):
        _ = hocket.ckpt.open(path).manifest


def test_an_opened_manifest_is_the_document_that_the_independent_reader_finds(folder):
    document = json.loads(_native.ckpt_manifest_decode((folder / "checkpoint.json.zst").read_bytes()))
    assert json.loads(Manifest.read(str(folder)).to_document()) == document == plain.read_manifest(folder)
    assert document["values"]
    assert any("data" in tensor for tensor in document["tensors"].values())
    assert any("same_as" in tensor for tensor in document["tensors"].values())


def test_a_checkpoint_says_what_it_is(folder, tmp_path):
    assert repr(hocket.ckpt.open(folder)) == f"<Checkpoint {str(folder)!r}: step 1000, 103 tensors>"
    weights = tmp_path / "weights.safetensors"
    save_file({"a": np.zeros(3), "b": np.ones(2)}, weights)
    assert repr(hocket.ckpt.open(weights)) == f"<Checkpoint {str(weights)!r}: safetensors, 2 tensors>"


def test_contents_are_taken_once_and_reads_do_not_need_them(folder):
    opened = _native.Checkpoint(str(folder))
    tensors = opened.take_contents()["tensors"]
    with pytest.raises(ValueError, match="taken before"):
        opened.take_contents()
    checkpoint = open_hocket(str(folder))
    for name, (_, shape, *_) in tensors.items():
        expected = checkpoint[name]
        read = np.empty_like(expected)
        opened.read_boxes([(name, [0] * len(shape), shape, read.ctypes.data, None)])
        assert read.tobytes() == expected.tobytes()


def test_digests_are_compared_unless_a_read_says_otherwise(folder, tmp_path):
    convert(folder, tmp_path / "spoiled", to="hocket")
    opened = _native.Checkpoint(str(tmp_path / "spoiled"))
    contents = opened.take_contents()
    [file] = contents["files"]
    path = tmp_path / "spoiled" / file["path"]
    whole = bytearray(path.read_bytes())
    whole[file["data_start"] + 9] ^= 1
    path.write_bytes(whole)
    [(name, _), *_] = opened.in_block(file["path"], 0)
    _, shape, *_, columns, _ = contents["tensors"][name]
    buffer = np.empty(columns.to_dict()["length"], np.uint8)
    reads = [(name, [0] * len(shape), shape, buffer.ctypes.data, None)]
    with pytest.raises(CheckpointCorruptError, match=f"^Tensor `{re.escape(name)}`: .*digest"):
        opened.read_boxes(reads)
    opened.read_boxes(reads, check=False)


@pytest.mark.parametrize(
    ("start", "size", "strides"),
    [
        ([0], [1], None),
        ([0, 0], [1], None),
        ([1, 0], [4, 4], None),
        ([2**64 - 1, 0], [2, 1], None),
        ([0, 0], [1, 1], [4]),
    ],
)
def test_a_box_that_is_not_inside_its_tensor_is_refused(tmp_path, start, size, strides):
    save_file({"w": np.zeros((4, 4), np.float32)}, str(tmp_path / "model.safetensors"))
    opened, target = _native.Checkpoint.open_foreign(str(tmp_path)), np.empty(16, np.float32)
    with pytest.raises(ValueError, match=r"is not inside `w` of shape \[4, 4\]"):
        opened.read_boxes([("w", start, size, target.ctypes.data, strides)])
    with pytest.raises(ValueError, match="there is no tensor `v`"):
        opened.read_boxes([("v", [0], [1], target.ctypes.data, None)])


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.float32),
        np.zeros((4, 4), np.int8),
        np.zeros((4, 4), np.float64),
        _read_only(np.zeros((4, 4), np.float32)),
        np.broadcast_to(np.zeros(4, np.float32), (4, 4)),
    ],
    ids=["shape", "narrow", "wide", "read-only", "broadcast"],
)
@pytest.mark.parametrize("form", ["hocket", "safetensors"])
def test_an_array_that_a_box_does_not_fit_into_is_refused(tmp_path, form, array):
    place = str(tmp_path / "model.safetensors")
    save_file({"w": np.ones((4, 4), np.float32)}, place)
    if form == "hocket":
        convert(place, place := str(tmp_path / "hocket"), to="hocket")
    with pytest.raises(
        ValueError, match=r"the array for `w` has the shape .*; expected \[4, 4\] of F32, writable"
    ):
        hocket.ckpt.open(place).read([("w", whole((4, 4)))], into=[array])
    assert not array.any()


def test_a_manifest_can_be_pickled_and_copied(folder):
    manifest = open_hocket(str(folder)).manifest
    for other in (pickle.loads(pickle.dumps(manifest)), copy.deepcopy(manifest)):
        assert other == manifest
        assert other.to_document() == manifest.to_document()


def test_other_formats_are_read_without_digests_and_are_no_checkpoint_of_hocket(tmp_path):
    tensor = np.arange(6, dtype=np.float32)
    path = str(tmp_path / "model.safetensors")
    save_file({"w": tensor}, path)
    opened = _native.Checkpoint.open_foreign(path)
    contents = opened.take_contents()
    read = np.empty(6, np.float32)
    opened.read_boxes([("w", [0], [6], read.ctypes.data, None)], check=True)
    assert np.array_equal(read, tensor)
    assert contents["digest"] == _native.Checkpoint.open_foreign(path).take_contents()["digest"]
    with pytest.raises(CheckpointIncompatibleError, match="safetensors"):
        open_hocket(path)
