"""Checkpoints in other formats, read without torch: which ones open, and which errors name their faults."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.verbs.convert import convert

TOOL = Path(__file__).parents[3] / "tools/old_checkpoints.py"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, TOOL, folder], timeout=60, check=True)
    return folder


@pytest.mark.parametrize("form", ["torch-2.2", "python-3.12", "python-3.13", "python-3.14", "windows"])
def test_distributed_checkpoints_of_all_torch_and_python_versions_are_read(old, form):
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


def test_safetensors_are_read_from_a_single_file_and_through_an_index(tmp_path):
    tensors = arrays(np.random.default_rng(0))
    save_file(tensors, tmp_path / "one.safetensors")
    single = hocket.ckpt.open(str(tmp_path / "one.safetensors"))
    assert single.format == "safetensors"
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    weight_map = {}
    (sharded / "more").mkdir()
    for number, (name, array) in enumerate(tensors.items()):
        # File names that some publishers use, and a tensor that both files hold and the index does not name.
        file = f"{'more/' * (number % 2)}model.safetensors-{number % 2}-of-2.safetensors"
        weight_map[name] = file
        held = {key: tensors[key] for key, value in weight_map.items() if value == file}
        # Another program's note under the key that torch's distributed writer uses.
        save_file({**held, "stale": array}, sharded / file, {"DCP_SHARDING_INFO": "none"})
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for checkpoint in (single, hocket.ckpt.open(str(sharded)), hocket.ckpt.open(str(tmp_path))):
        assert set(checkpoint) == set(tensors)
        for name, array in tensors.items():
            assert checkpoint[name].dtype == array.dtype
            np.testing.assert_array_equal(checkpoint[name], array)
    assert set(hocket.ckpt.open(str(sharded)).contents.opaque) == {"stale"}
    # As in transformers, a single file takes precedence over an index, which an earlier save may have left.
    save_file({"model.b": np.ones(2)}, sharded / "model.safetensors")
    assert set(hocket.ckpt.open(str(sharded))) == {"model.b"}


def by_hand(path, **tensors):
    """Write a safetensors file of `name=(dtype, shape, bytes)`; return its path."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return str(path)


def test_dtypes_smaller_than_a_byte_are_named_and_skipped(tmp_path):
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
    told = {
        name: f"a tensor of {dtype}, whose elements are not whole bytes" for name, dtype in dtypes.items()
    }
    assert checkpoint.contents.opaque == told
    for name, why in told.items():
        with pytest.raises(CheckpointIncompatibleError, match=f"`{name}`, but .*{why}"):
            checkpoint[name]
    assert set(convert(uri, str(tmp_path / "x"), to="hocket").left_out) == set(told)
    assert hocket.ckpt.verify(uri).is_sound
    # Seven items of four bits are no whole number of bytes; eight are four bytes, but the file has three.
    for shape in ([7], [8]):
        bad = by_hand(tmp_path / "bad.safetensors", four=("F4", shape, b"abc"))
        with pytest.raises(CheckpointCorruptError, match=r"`four`, F4 of shape \[[78]\], cannot stand"):
            hocket.ckpt.open(bad)


@pytest.mark.parametrize("to", ["safetensors", "hocket"])
def test_a_tensor_named_metadata_is_not_written_to_safetensors(old, tmp_path, to):
    with pytest.raises(CheckpointIncompatibleError, match="--rename __metadata__=NAME"):
        convert(str(old / "torch-2.2"), str(tmp_path / "x"), to=to, rename={"w": "__metadata__"})
    assert not (tmp_path / "x").exists()


def test_strict_verification_reports_what_readers_tolerate(tmp_path):
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}'
    header = f' {{"a":{entry},"a":{entry},"__metadata__":null}}'.encode()
    file = tmp_path / "lax.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert hocket.ckpt.verify(str(file)).is_sound
    problems = " ".join(flaw.problem for flaw in hocket.ckpt.verify(str(file), strict=True).flaws)
    assert "does not begin with" in problems
    assert "is listed twice" in problems
    assert "`more`" in problems
    assert "`__metadata__` is null" in problems


def write_shards(folder, shards, listed, **metadata):
    """Write safetensors files by number, with an index that lists the names in `listed`."""
    folder.mkdir()
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata.get(name[6:11].lstrip("0"), {"format": "pt"}))
    owners = {key: name for name, shard in zip(names, shards, strict=True) for key in shard if key in listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    return [folder / name for name in names]


@pytest.mark.parametrize("to", ["safetensors", "hocket"])
def test_tensors_that_the_index_does_not_list_are_converted_or_named(tmp_path, to):
    a, b, c = (np.full((2, 2), number, "f4") for number in range(3))
    shards = [{"a": a, "unlisted": c, "both": a}, {"b": b, "a": c, "both": b}]
    first, second = write_shards(tmp_path / "source", shards, set())
    index = {"weight_map": {"a": first.name, "b": second.name}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    outcome = convert(str(tmp_path / "source"), str(tmp_path / "out"), to=to)
    assert outcome.left_out == ("both",)
    written = hocket.ckpt.open(str(tmp_path / "out"))
    assert set(written) == {"a", "b", "unlisted"}
    for name, expected in {"a": a, "b": b, "unlisted": c}.items():  # `a` is the listed one, of the first file
        np.testing.assert_array_equal(written[name], expected)


def test_one_file_of_several_is_not_converted_as_the_whole(tmp_path):
    tensor = np.ones(2, "f4")
    first, _ = write_shards(tmp_path / "model", [{"a": tensor}, {"b": tensor}], {"a", "b"})
    assert list(hocket.ckpt.open(str(first))) == ["a"]
    with pytest.raises(CheckpointIncompatibleError, match=f"`{first.name}` is one of the 2 files"):
        convert(str(first), str(tmp_path / "out"), to="hocket")
    lone = tmp_path / "lone"
    lone.mkdir()
    save_file({"a": tensor}, lone / first.name)
    with pytest.raises(CheckpointIncompatibleError, match="is one of the 2 files"):
        hocket.ckpt.open(str(lone))
    for suffix in ("safetensors", "bin"):  # names that say nothing, in an index that says it
        other = tmp_path / suffix
        other.mkdir()
        save_file({"a": tensor}, other / f"a.{suffix}")
        index = {"weight_map": {"a": f"a.{suffix}", "b": f"b.{suffix}", "c": f"c.{suffix}"}}
        (other / f"x.{suffix}.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointIncompatibleError, match=rf"`a.{suffix}` is one of the 3 files"):
            convert(str(other / f"a.{suffix}"), str(tmp_path / "out"), to="hocket")
    for name in ("consolidated.00.pth", "consolidated.01.pth"):  # as Llama's, here with safetensors in it
        save_file({"a": tensor}, tmp_path / name)
    with pytest.raises(CheckpointIncompatibleError, match=r"`consolidated.01.pth` is one of the 2 files"):
        convert(str(tmp_path / "consolidated.01.pth"), str(tmp_path / "out"), to="hocket")
    whole = tmp_path / "whole-1-of-1.safetensors"
    save_file({"a": tensor}, whole)
    assert convert(str(whole), str(tmp_path / "out"), to="hocket").tensors == 1


def test_the_metadata_of_safetensors_is_kept_or_named(tmp_path):
    notes = {"format": "flax", "ss_network_alpha": "8", "modelspec.title": "ü"}
    tensors = {"a": np.ones((4, 4), "f4"), "b": np.ones((4, 4), "f4")}
    save_file(tensors, tmp_path / "one.safetensors", notes)
    convert(str(tmp_path / "one.safetensors"), str(tmp_path / "same.safetensors"), to="safetensors")
    convert(str(tmp_path / "one.safetensors"), str(tmp_path / "shards"), to="safetensors", max_shard_bytes=64)
    written = [tmp_path / "same.safetensors", *(tmp_path / "shards").glob("*.safetensors")]
    assert len(written) == 3
    for path in written:
        with safe_open(path, "numpy") as file:
            assert file.metadata() == notes
    convert(str(tmp_path / "shards"), str(tmp_path / "joined"), to="safetensors")
    with safe_open(tmp_path / "joined" / "model.safetensors", "numpy") as file:
        assert file.metadata() == notes
    convert(str(tmp_path / "one.safetensors"), str(tmp_path / "hocket"), to="hocket")
    assert hocket.ckpt.open(str(tmp_path / "hocket")).manifest.user == notes
    outcome = convert(str(tmp_path / "one.safetensors"), str(tmp_path / "x.pt"), to="torch")
    assert outcome.left_out == ("__metadata__",)
    save_file(tensors, tmp_path / "plain.safetensors", {"format": "pt"})
    for to, out in (("hocket", "plain"), ("torch", "plain.pt")):
        assert convert(str(tmp_path / "plain.safetensors"), str(tmp_path / out), to=to).left_out == ()
    assert hocket.ckpt.open(str(tmp_path / "plain")).manifest.user is None
    shards = [{name: array} for name, array in tensors.items()]
    own = {"1": {"note": "x", "same": "s"}, "2": {"note": "y", "same": "s"}}
    write_shards(tmp_path / "differ", shards, set(tensors), **own)
    outcome = convert(str(tmp_path / "differ"), str(tmp_path / "differs"), to="safetensors")
    assert outcome.left_out == ("__metadata__.note",)
    with safe_open(tmp_path / "differs" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "same": "s"}
