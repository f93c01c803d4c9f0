"""Checkpoints of others without torch: what is opened, and what is told of it."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt.converting import convert
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.formats import boxes
from hocket.ckpt.formats.boxes import Filling, pieces
from hocket.ckpt.formats.catalogue import ForeignChunk
from hocket.ckpt.planning import Box
from support.sampling import cases

TOOL = Path(__file__).parents[3] / "tools/old_checkpoints.py"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, TOOL, folder], timeout=60, check=True)
    return folder


@pytest.mark.parametrize("form", ["torch-2.2", "python-3.12", "python-3.13", "python-3.14", "windows"])
def test_distributed_checkpoints_of_every_age_are_read(old, form):
    checkpoint = hocket.ckpt.open(str(old / form))
    assert checkpoint.format == "dcp"
    np.testing.assert_array_equal(checkpoint["w"], np.arange(12, dtype="f4").reshape(3, 4))
    assert checkpoint.contents.values["lr"].value == 0.5
    assert hocket.ckpt.verify(str(old / form)).is_sound
    with pytest.raises(CheckpointIncompatibleError, match="convert"):
        _ = checkpoint.manifest


def test_a_bad_crc_names_the_tensor(old, tmp_path):
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for file in (old / "torch-2.2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(np.array([4, 5, 6, 7], "f4").tobytes())
    data[at] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    verdict = hocket.ckpt.verify(str(folder))
    [flaw] = verdict.flaws
    assert (flaw.tensors, verdict.bad_tensors) == (("w",), ["w"])
    assert "CRC-32" in flaw.problem


def arrays(rng):
    return {
        "model.a": rng.normal(size=(5, 3)).astype("f4"),
        "model.b": rng.normal(size=(4,)).astype(ml_dtypes.bfloat16),
        "model.c": np.arange(6, dtype="i8").reshape(1, 6, 1),
        "model.step": np.array(7, "i4"),
        "model.none": np.empty((0, 3), "f2"),
    }


def test_safetensors_single_and_by_the_index_alone(tmp_path):
    tensors = arrays(np.random.default_rng(0))
    save_file(tensors, tmp_path / "one.safetensors")
    single = hocket.ckpt.open(str(tmp_path / "one.safetensors"))
    assert single.format == "safetensors"
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    weight_map = {}
    (sharded / "more").mkdir()
    for number, (name, array) in enumerate(tensors.items()):
        # Names as some publishers choose them, and a tensor in the file that the index does not name.
        file = f"{'more/' * (number % 2)}model.safetensors-{number % 2}-of-2.safetensors"
        weight_map[name] = file
        held = {key: tensors[key] for key, value in weight_map.items() if value == file}
        # A note of somebody else's, where torch's distributed writer has one.
        save_file({**held, "stale": array}, sharded / file, {"DCP_SHARDING_INFO": "none"})
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for checkpoint in (single, hocket.ckpt.open(str(sharded)), hocket.ckpt.open(str(tmp_path))):
        assert set(checkpoint) == set(tensors)
        for name, array in tensors.items():
            assert checkpoint[name].dtype == array.dtype
            np.testing.assert_array_equal(checkpoint[name], array)
    # As transformers has it, a single file comes before an index that an earlier save may have left.
    save_file({"model.b": np.ones(2)}, sharded / "model.safetensors")
    assert set(hocket.ckpt.open(str(sharded))) == {"model.b"}


def by_hand(path, **tensors):
    """A safetensors file of `name=(dtype, shape, bytes)`."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return str(path)


def test_numbers_of_less_than_a_byte_are_told_and_stepped_over(tmp_path):
    numbers = np.arange(3, dtype="f4")
    uri = by_hand(
        tmp_path / "x.safetensors",
        four=("F4", [3, 2], b"abc"), six=("F6_E2M3", [4], b"abc"), other=("F6_E3M2", [2, 4], b"abcdef"),
        w=("F32", [3], numbers.tobytes()),
    )  # fmt: skip
    checkpoint = hocket.ckpt.open(uri)
    np.testing.assert_array_equal(checkpoint["w"], numbers)
    assert set(checkpoint) == {"w"}
    dtypes = {"four": "F4", "six": "F6_E2M3", "other": "F6_E3M2"}
    told = {name: f"a tensor of {dtype}, whose items are no whole bytes" for name, dtype in dtypes.items()}
    assert checkpoint.contents.opaque == told
    for name, why in told.items():
        with pytest.raises(CheckpointIncompatibleError, match=f"`{name}`, but .*{why}"):
            checkpoint[name]
    assert set(convert(uri, str(tmp_path / "x"), to="hocket").left_out) == set(told)
    assert hocket.ckpt.verify(uri).is_sound
    # Seven of four bits are no whole bytes; and eight are four bytes, not three.
    for shape in ([7], [8]):
        bad = by_hand(tmp_path / "bad.safetensors", four=("F4", shape, b"abc"))
        with pytest.raises(CheckpointCorruptError, match=r"`four`, F4 of shape \[[78]\], cannot stand"):
            hocket.ckpt.open(bad)


@pytest.mark.parametrize("to", ["safetensors", "hocket"])
def test_a_tensor_with_the_name_that_safetensors_keeps_is_not_written(old, tmp_path, to):
    with pytest.raises(CheckpointIncompatibleError, match="--rename __metadata__=NAME"):
        convert(str(old / "torch-2.2"), str(tmp_path / "x"), to=to, rename={"w": "__metadata__"})
    assert not (tmp_path / "x").exists()


def test_strict_counts_what_readers_let_pass(tmp_path):
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}'
    header = f' {{"a":{entry},"a":{entry},"__metadata__":null}}'.encode()
    file = tmp_path / "lax.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert hocket.ckpt.verify(str(file)).is_sound
    problems = " ".join(flaw.problem for flaw in hocket.ckpt.verify(str(file), strict=True).flaws)
    assert "does not begin with" in problems
    assert "stands twice" in problems
    assert "`more`" in problems
    assert "`__metadata__` is null" in problems


@st.composite
def strided_chunk(draw, shape):
    """Those of a view of a larger array, its dims in any order; or any, so that items lie over each other."""
    if draw(st.booleans()):
        return tuple(draw(st.integers(0, 40)) for _ in shape)
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for dim in order:
        strides[dim] = step
        step *= shape[dim] + draw(st.sampled_from([0, 0, 1, 7]))
    return tuple(strides)


def test_items_that_lie_over_each_other_may_span_as_many_as_they_are():
    file = np.arange(9, dtype=np.uint8)
    chunk = ForeignChunk(file=0, offset=0, length=9, start=(0, 0), size=(3, 3), strides=(2, 2))
    target, filling = np.zeros((3, 3), np.uint8), Filling()
    filling.add(target, Box((0, 0), (3, 3)), [chunk])
    filling.run(lambda reads: [ctypes.memmove(to, file.ctypes.data + at, n) for _, at, n, to in reads])
    assert target.tolist() == [[0, 2, 4], [2, 4, 6], [4, 6, 8]]


@settings(max_examples=cases(full=5000, sample=150), deadline=None)
@given(st.data())
def test_any_part_of_any_strided_chunks_is_read(data):
    """Boxes filled from bytes in memory, slice by slice, are what NumPy's slicing gives."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "i4", "c8", ml_dtypes.bfloat16])))
    whole = np.empty(shape, dtype)
    cut = data.draw(st.integers(0, shape[0] - 1)) if shape else 0
    chunks, files = [], []
    for low, high in [(0, cut), (cut, shape[0])] if shape else [(0, 0)]:
        part = whole[low:high] if shape else whole
        if not part.size:
            continue
        strides = data.draw(strided_chunk(part.shape))
        before = data.draw(st.integers(0, 9))
        span = sum((n - 1) * step for n, step in zip(part.shape, strides, strict=True)) + 1
        file = np.random.default_rng(span).integers(0, 256, before + span * dtype.itemsize, np.uint8)
        steps = [step * dtype.itemsize for step in strides]
        part[...] = np.ndarray(part.shape, dtype, file, before, steps)
        start = (low, *[0] * (len(shape) - 1)) if shape else ()
        length = span * dtype.itemsize
        chunks.append(
            ForeignChunk(
                file=len(files), offset=before, length=length, start=start, size=part.shape, strides=strides
            )
        )
        files.append(file)
    if shape and data.draw(st.booleans()):
        # One part of it, from anywhere.
        start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
        size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
        wanted = [Box(start, size)]
    else:
        # All of it, in pieces.
        wanted = list(pieces(shape, dtype.itemsize, data.draw(st.integers(1, 300))))
        assert sum(box.num_items for box in wanted) == whole.size
    least, largest, hole, long_run = (data.draw(st.integers(8, 300)) for _ in range(4))
    filling, targets = (
        Filling(is_remote=data.draw(st.booleans())),
        [np.full(box.size, 99, dtype) for box in wanted],
    )
    at_once = []

    def read(reads):
        taken = np.zeros(0, np.int64)
        for file, offset, num_bytes, address in reads:
            assert 0 <= offset <= offset + num_bytes <= len(files[file])
            ctypes.memmove(address, files[file].ctypes.data + offset, num_bytes)
            taken = np.append(taken, np.arange(address, address + num_bytes))
        assert len(np.unique(taken)) == len(taken), "destinations lie over each other"
        own = [(array.ctypes.data, array.nbytes) for array in targets]
        at_once.append(sum(not any(a <= byte < a + n for a, n in own) for byte in taken))

    limits = {"_LEAST_SLICE_BYTES": least, "_LARGEST_SLICE_BYTES": max(least, largest)}
    limits |= {
        "_HOLE_BYTES": hole,
        "_STORE_HOLE_BYTES": 2 * hole,
        "_LONG_RUN_BYTES": long_run,
        "_READ_BYTES": data.draw(st.integers(0, 40)),
    }
    with mock.patch.multiple(boxes, **limits):
        for box, target in zip(wanted, targets, strict=True):
            filling.add(target, box, chunks)
        filling.run(read)
    for box, target in zip(wanted, targets, strict=True):
        index = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
        assert target.tobytes() == whole[(*index, ...)].tobytes()
    assert max(at_once) <= min(max(least, whole.nbytes), max(least, largest))
