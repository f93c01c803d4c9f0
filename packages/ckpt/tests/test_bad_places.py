"""Wrong paths, folders, manifests and models: each raises an error with a message of its own."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import _native

torch = pytest.importorskip("torch")


def call(capsys, *args):
    try:
        code = app([str(arg) for arg in args], standalone_mode=False)
    except SystemExit as end:
        code = end.code
    return code or 0, capsys.readouterr().out


def test_saving_below_a_dangling_link_or_a_file_raises(tmp_path):
    from hocket.ckpt.torch import save

    os.symlink(tmp_path / "gone", tmp_path / "link")
    for place in ("link/run/ep0", "link"):
        with pytest.raises(CheckpointNotFoundError, match=r"expected a folder.*dangling link"):
            save({"w": torch.ones(2)}, tmp_path / place)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError, match="a file"):
        save({"w": torch.ones(2)}, tmp_path / "file/ep0")
    # A single checkpoint needs no step.
    save({"w": torch.ones(2)}, tmp_path / "one").wait()
    assert hocket.ckpt.open(tmp_path / "one").manifest.step == 0


def test_a_missing_an_empty_and_a_foreign_folder_raise_different_messages(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    (tmp_path / "above/below").mkdir(parents=True)
    for name, message in {
        "nowhere": "there is no such file or folder",
        "empty": "this folder is empty",
        "other": "not a checkpoint",
        "above": "not a checkpoint",
    }.items():
        with pytest.raises(CheckpointNotFoundError, match=message):
            hocket.ckpt.open(tmp_path / name)


def crafted(folder, change):
    document = json.loads(_native.ckpt_manifest_decode((folder / "checkpoint.json.zst").read_bytes()))
    change(document)
    encoded = _native.ckpt_manifest_encode(json.dumps(document).encode())
    (folder / "checkpoint.json.zst").write_bytes(encoded)
    return hocket.ckpt.open(folder)


@pytest.mark.parametrize(
    "value", [{"$bytes": "!!"}, {"$unknown": 1}, {"$int": "x"}, {"$tuple": [], "more": 1}, {"$map": [[1]]}]
)
def test_invalid_values_in_a_manifest_are_corrupt(tmp_path, value):
    write_demo(str(tmp_path / "a"))

    def change(document):
        document["values"]["optimizer.param_groups.0.lr"]["value"] = value

    with pytest.raises(CheckpointCorruptError):
        crafted(tmp_path / "a", change)


def test_a_shape_with_too_many_items_is_corrupt(tmp_path):
    write_demo(str(tmp_path / "a"))

    def change(document):
        huge = 2**63 - 1
        document["tensors"]["model.embed.weight"] |= {"shape": [huge, 0, huge]}
        del document["tensors"]["model.embed.weight"]["chunks"]

    with pytest.raises(CheckpointCorruptError):
        crafted(tmp_path / "a", change)["model.embed.weight"]


def test_ls_shows_other_formats_and_unreadable_checkpoints(tmp_path, capsys):
    write_demo(str(tmp_path / "good"))
    (tmp_path / "bad/checkpoint.json.zst").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones(4, "f4")}, tmp_path / "model/model.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    code, out = call(capsys, "ls", tmp_path)
    assert code == 0
    rows = {line.split()[-1]: line.split()[:2] for line in out.splitlines()[1:]}
    assert rows["good"] == ["committed", "hocket"]
    assert rows["model"] == ["foreign", "safetensors"]
    assert rows["x.pt"] == ["foreign", "torch"]
    assert any("bad" in line and line.startswith("foreign") for line in out.splitlines())
    code, out = call(capsys, "ls", tmp_path, "--json")
    sizes = {entry["name"]: entry["num_bytes"] for entry in json.loads(out)}
    assert sizes["model"] == (tmp_path / "model/model.safetensors").stat().st_size


def test_verify_prints_the_verdict_and_ten_findings(tmp_path, capsys):
    state = {f"w{i:02}": np.full(1 << 18, i, "f4") for i in range(14)}
    save_file(state, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "a", to="hocket")
    [file] = hocket.ckpt.open(tmp_path / "a").manifest.files
    path = tmp_path / "a" / file["path"]
    path.write_bytes(
        path.read_bytes()[: file["data_start"]] + b"\xff" * (path.stat().st_size - file["data_start"])
    )
    code, out = call(capsys, "verify", tmp_path / "a")
    lines = out.splitlines()
    num_flaws = len(hocket.ckpt.verify(str(tmp_path / "a")).flaws)
    assert code == 1
    assert lines[0].startswith("corrupt: ")
    assert num_flaws > 10
    assert sum(line.startswith("BAD") for line in lines) == 10
    assert lines[-1].startswith(f"and {num_flaws - 10} more")


def test_sharded_bin_files_are_read_through_their_index(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shared = torch.arange(6.0)
    shards = [{"a.weight": torch.ones(2, 3), "tied": shared, "b": shared}, {"c": torch.arange(4)}]
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for place in (folder, index):
        checkpoint = hocket.ckpt.open(place)
        assert set(checkpoint) == {"a.weight", "tied", "b", "c"}
        for shard in shards:
            for name, tensor in shard.items():
                np.testing.assert_array_equal(checkpoint[name], tensor.numpy())
    convert(folder, tmp_path / "out", to="hocket")
    np.testing.assert_array_equal(hocket.ckpt.open(tmp_path / "out")["c"], np.arange(4))
    index.write_text(json.dumps({"weight_map": {**weight_map, "d": file}}))
    with pytest.raises(CheckpointCorruptError, match="`d`"):
        hocket.ckpt.open(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(CheckpointCorruptError, match="plain name"):
        hocket.ckpt.open(folder)


def test_a_converted_model_keeps_its_config_and_tokenizer(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones(4, "f4"), "v": np.ones(4, "f4")}, folder / "model.safetensors")
    for name, text in {
        "config.json": "{}",
        "tokenizer.json": '{"a": 1}',
        "vocab.txt": "a\n",
        "x.bin": "no",
    }.items():
        (folder / name).write_text(text)
    convert(folder, tmp_path / "half", to="safetensors", dtype="bf16", max_shard_bytes=8)
    names = {each.name for each in (tmp_path / "half").iterdir()}
    assert {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors.index.json"} <= names
    assert "x.bin" not in names
    assert (tmp_path / "half/tokenizer.json").read_text() == '{"a": 1}'
    assert hocket.ckpt.open(tmp_path / "half").record("w").dtype == "BF16"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_hocketwriter_raises_the_same_errors_as_the_store(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from hocket.ckpt.dcp import HocketWriter

    for state, message in (
        ({"w": torch.ones(2, dtype=torch.complex128)}, "`w` has dtype `torch.complex128`"),
        ({"w\ud800": torch.ones(2)}, "lone surrogate"),
    ):
        with pytest.raises(CheckpointException, match="CheckpointStateError") as caught:
            dcp.save(state, storage_writer=HocketWriter(tmp_path / "x"))
        assert message in str(caught.value)
    assert not (tmp_path / "x").exists()
