"""Every changed byte of a checkpoint raises an error that names the file and the tensors."""

import doctest
import importlib
import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import hocket.ckpt
from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointPartialError
from hocket.ckpt.verbs.demo import _tensors, write_demo
from hocket.native import _native


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "demo"
    write_demo(str(folder))
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "demo")


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def read_all(folder):
    checkpoint = hocket.ckpt.open(str(folder))
    return {name: checkpoint[name] for name in checkpoint}


def test_every_tensor_reads_back(sound):
    read = read_all(sound)
    expected = {join_path(path): array for path, array in _tensors(np.random.default_rng(0)).items()}
    expected["model.head.weight"] = expected["model.embed.weight"]
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes(), name


def test_a_tensor_split_along_its_last_dim_is_joined(tmp_path):
    whole = np.arange(35, dtype=np.float32).reshape(5, 7)
    left, right = np.ascontiguousarray(whole[:, :3]), np.ascontiguousarray(whole[:, 3:])
    written = _native.ckpt_write_file(
        str(tmp_path),
        "data/a.safetensors",
        entries=[
            (name, "F32", part.shape, part.ctypes.data, part.nbytes)
            for name, part in (("w@0,0", left), ("w@0,3", right))
        ],
        metadata={},
    )
    places = written["entries"]
    chunks = (
        Chunk(file=0, offset=places["w@0,0"][0], length=60, start=(0, 0), size=(5, 3)),
        Chunk(file=0, offset=places["w@0,3"][0], length=80, start=(0, 3), size=(5, 4)),
    )
    document = Manifest(
        save_id="0" * 32,
        step=0,
        created="2026-01-01T00:00:00.000000Z",
        version="0.1.0",
        writer="test",
        world_size=1,
        files=(written,),
        tensors={"w": TensorRecord(dtype="F32", shape=(5, 7), path=("w",), chunks=chunks)},
    ).to_document()
    _native.ckpt_commit(str(tmp_path), _native.ckpt_manifest_encode(document), "0" * 32)
    np.testing.assert_array_equal(hocket.ckpt.open(str(tmp_path))["w"], whole)


def test_any_safetensors_reader_reads_a_data_file(sound):
    manifest = hocket.ckpt.open(str(sound)).manifest
    seen = 0
    for number, file in enumerate(manifest.files):
        with safe_open(sound / file["path"], "np") as reader:
            assert reader.metadata()["save_id"] == manifest.save_id
            entries = set(reader.keys())
            for name, record in manifest.tensors.items():
                for chunk in record.chunks:
                    if chunk.file != number:
                        continue
                    entry = f"{name}@{','.join(map(str, chunk.start))}" if record.shape else name
                    assert entry in entries
                    assert tuple(reader.get_slice(entry).get_shape()) == chunk.size
                    seen += 1
        assert file["data_start"] % 4096 == 0
    assert seen == sum(len(record.chunks) for record in manifest.tensors.values())


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_in_a_data_file_is_found_with_its_tensors(folder, seed):
    rng = random.Random(seed)
    files = hocket.ckpt.open(str(folder)).manifest.files
    file = rng.choice(files)
    at = rng.randrange(file["data_start"], file["size"])
    flip(folder / file["path"], at, rng.randrange(8))
    verdict = hocket.ckpt.verify(str(folder))
    (flaw,) = verdict.flaws
    block = _native.CKPT_BLOCK_BYTES
    expected = (at - file["data_start"]) // block * block
    assert (flaw.file, flaw.offset) == (file["path"], expected)
    assert set(flaw.tensors) == set(verdict.bad_tensors) != set()
    with safe_open(folder / file["path"], "np") as reader:
        assert set(flaw.chunks) <= set(reader.keys())
    assert {chunk.partition("@")[0] for chunk in flaw.chunks} <= set(flaw.tensors)
    checkpoint = hocket.ckpt.open(str(folder))
    # Small tensors are read from the manifest, where they are stored, too; choose one that is not.
    read = next(name for name in flaw.tensors if checkpoint.record(name).data is None)
    chunk = next(chunk for chunk in flaw.chunks if chunk.partition("@")[0] == read)
    with pytest.raises(CheckpointCorruptError, match=f"`{read}`.*`{chunk}`.*`{file['path']}`") as caught:
        checkpoint[read]
    assert (caught.value.file, caught.value.offset) == (file["path"], expected)


@pytest.mark.parametrize("at", [0, 7, 8, 200, 4095])
def test_a_flipped_bit_in_a_header_is_found(folder, at):
    file = hocket.ckpt.open(str(folder)).manifest.files[1]
    flip(folder / file["path"], at)
    (flaw,) = hocket.ckpt.verify(str(folder)).flaws
    assert flaw.file == file["path"]
    assert flaw.offset is None
    assert "header" in flaw.problem


def test_truncated_extended_swapped_and_missing_files_are_found(folder):
    paths = [folder / file["path"] for file in hocket.ckpt.open(str(folder)).manifest.files]
    whole = [path.read_bytes() for path in paths]

    def problems():
        return {flaw.file: flaw.problem for flaw in hocket.ckpt.verify(str(folder)).flaws}

    names = [f"data/{path.name}" for path in paths]
    paths[0].write_bytes(whole[0][:-1])
    paths[1].write_bytes(whole[1] + b"\0")
    paths[2].unlink()
    assert problems().keys() == set(names[:3])
    assert f"{len(whole[0]) - 1} bytes, {len(whole[0])} were written" in problems()[names[0]]
    assert problems()[names[2]] == "the file is missing"
    for name, error in zip(names, [CheckpointCorruptError] * 2 + [CheckpointNotFoundError], strict=False):
        with pytest.raises(error, match=name):
            read_all_of_file(folder, name)
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
    assert problems() == {}
    paths[0].write_bytes(whole[2])
    paths[2].write_bytes(whole[0])
    assert problems().keys() == {names[0], names[2]}


def read_all_of_file(folder, name):
    checkpoint = hocket.ckpt.open(str(folder))
    number = [file["path"] for file in checkpoint.manifest.files].index(name)
    stored = [
        (name, chunk) for name, record in checkpoint.manifest.tensors.items() for chunk in record.chunks
    ]
    tensor, chunk = next((tensor, chunk) for tensor, chunk in stored if chunk.file == number)
    checkpoint.part(tensor, Box(chunk.start, tuple(1 for _ in chunk.size)))


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_corrupt_manifest_raises(sound, position, bit, cut):
    manifest = bytearray((sound / "checkpoint.json.zst").read_bytes())
    at = int(position * len(manifest))
    if cut:
        del manifest[at:]
    else:
        manifest[at] ^= 1 << bit
    with pytest.raises(CheckpointCorruptError):
        _native.ckpt_manifest_decode(bytes(manifest))


def test_a_checkpoint_without_manifest_raises_that_it_was_never_committed(folder):
    (folder / "checkpoint.json.zst").unlink()
    with pytest.raises(CheckpointPartialError, match=r"never committed.*earlier checkpoint"):
        hocket.ckpt.open(str(folder))
    with pytest.raises(CheckpointNotFoundError, match="expected a checkpoint"):
        hocket.ckpt.open(str(folder / "data"))


def test_values_in_an_unknown_encoding_raise(sound, tmp_path):
    document = _native.ckpt_manifest_decode((sound / "checkpoint.json.zst").read_bytes())
    spoiled = document.replace(b'{"$tuple":[0.9,0.95]}', b'{"$bytes":["no"]}')
    assert spoiled != document
    (tmp_path / "checkpoint.json.zst").write_bytes(_native.ckpt_manifest_encode(spoiled))
    with pytest.raises(CheckpointCorruptError, match="cannot be decoded"):
        hocket.ckpt.open(tmp_path)


def test_an_unknown_tensor_name_raises_with_similar_names(sound):
    checkpoint = hocket.ckpt.open(str(sound))
    with pytest.raises(CheckpointNotFoundError, match=r"`model.embed.weights`.*`model.embed.weight`"):
        checkpoint["model.embed.weights"]


@pytest.mark.parametrize(
    "module", ["verbs.list", "read.opener", "verbs.remove", "verbs.reshard", "verbs.verify"]
)
def test_the_examples_in_docstrings_run(folder, module):
    names = {
        "folder": str(folder.parent),
        "hocket": hocket,
        "list_checkpoints": hocket.ckpt.list_checkpoints,
        "remove": hocket.ckpt.remove,
        "reshard": hocket.ckpt.reshard,
        "verify": hocket.ckpt.verify,
    }
    ran = doctest.testmod(importlib.import_module(f"hocket.ckpt.{module}"), globs=names)
    assert ran.attempted >= 1
    assert ran.failed == 0
