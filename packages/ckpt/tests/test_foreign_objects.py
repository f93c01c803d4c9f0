"""Files of `torch.save` with objects and tensors: tensors are read, objects are named, no code runs."""

import argparse
import collections
import datetime as dt
import decimal
import enum
import fractions
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hocket.ckpt  # noqa: E402
from hocket.ckpt.errors import CheckpointIncompatibleError  # noqa: E402
from hocket.ckpt.verbs.convert import convert  # noqa: E402


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: object
    b: object


class Settings:
    def __init__(self) -> None:
        self.rate, self.table = 0.5, torch.arange(3)


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.ones(2)


class Lookup(dict):
    pass


class Harmful:
    def __reduce__(self):
        return os.system, ("touch executed",)


OBJECTS = {
    "namespace": argparse.Namespace(lr=0.1),
    "path": pathlib.PurePosixPath("/data"),
    "datetime": dt.datetime(2026, 1, 1),
    "decimal": decimal.Decimal("0.1"),
    "fraction": fractions.Fraction(1, 3),
    "enum": Color.RED,
    "class": Settings,
    "harmful": Harmful(),
    "array": np.arange(4),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_are_named_and_tensors_are_read(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "objects": OBJECTS}
    torch.save(state, "file.pt", pickle_protocol=protocol)
    checkpoint = hocket.ckpt.open("file.pt")
    np.testing.assert_array_equal(checkpoint["w"], state["w"].numpy())
    assert checkpoint.contents.values["epoch"].value == 3
    left_out = checkpoint.contents.opaque
    assert left_out.keys() == {f"objects.{name}" for name in OBJECTS}
    assert "argparse.Namespace" in left_out["objects.namespace"]
    assert "system" in left_out["objects.harmful"]
    assert not pathlib.Path("executed").exists()
    done = convert("file.pt", "out.safetensors", to="safetensors")
    assert set(left_out) <= set(done.left_out)


def test_tensors_inside_objects_are_read_by_their_attributes(tmp_path):
    state = {
        "settings": Settings(),
        "slotted": Slotted(),
        "pair": Pair(torch.zeros(1), 2),
        "queue": collections.deque([torch.full((2,), 7.0)], maxlen=4),
        "default": collections.defaultdict(list, {"m": torch.ones(3)}),
        "lookup": Lookup(k=torch.ones(4), n=1),
    }
    torch.save(state, tmp_path / "file.pt")
    checkpoint = hocket.ckpt.open(tmp_path / "file.pt")
    assert set(checkpoint) == {
        "settings.table", "slotted.weight", "pair.0", "queue.0", "default.m", "lookup.k",
    }  # fmt: skip
    np.testing.assert_array_equal(checkpoint["queue.0"], [7, 7])
    assert checkpoint.contents.values["settings.rate"].value == 0.5
    # Objects are reported as left out; containers are read as their contents.
    assert set(checkpoint.contents.opaque) == {"settings", "slotted", "pair"}


def test_a_pickled_module_is_read_as_its_state_dict(tmp_path):
    deep = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.BatchNorm1d(4), deep))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    module[0].bias.requires_grad_(False)
    expected = module.state_dict()
    for name, saved in {"root": module, "inner": {"model": module}}.items():
        path = tmp_path / f"{name}.pt"
        torch.save(saved, path)
        checkpoint = hocket.ckpt.open(path)
        prefix = "model." if name == "inner" else ""
        assert list(checkpoint) == [prefix + key for key in expected]
        for key, value in expected.items():
            np.testing.assert_array_equal(checkpoint[prefix + key], value.numpy())
        assert any("Sequential" in reason for reason in checkpoint.contents.opaque.values())


def test_a_huge_expanded_view_raises_unless_allowed(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"w": torch.zeros(1).expand(1 << 40), "v": torch.ones(2)}, path)
    assert path.stat().st_size < 1 << 16
    checkpoint = hocket.ckpt.open(path)
    np.testing.assert_array_equal(checkpoint["v"], [1, 1])
    for attempt in (
        lambda: checkpoint["w"],
        lambda: convert(path, tmp_path / "out", to="hocket"),
        lambda: convert(path, tmp_path / "out", to="dcp"),
    ):
        with pytest.raises(CheckpointIncompatibleError, match=r"expanded view.*--allow-expand"):
            attempt()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bomb.pt"]
    done = convert(path, tmp_path / "out.safetensors", to="safetensors", exclude=["w"])
    assert done.tensors == 1
    # A view that is large for its storage but small is read; a huge one needs `allow_expand`.
    torch.save({"w": torch.arange(3.0)[:, None].expand(3, 1000)}, path)
    assert hocket.ckpt.open(path)["w"].shape == (3, 1000)
    torch.save({"w": torch.ones(1).expand(17 << 20)}, path)
    with pytest.raises(CheckpointIncompatibleError, match="71303168 are described"):
        _ = hocket.ckpt.open(path)["w"]
    assert hocket.ckpt.open(path, allow_expand=True)["w"].sum() == 17 << 20


def test_an_expanded_view_stays_a_view_in_a_torch_file(tmp_path):
    path, out = tmp_path / "bomb.pt", tmp_path / "out.pt"
    column = torch.arange(3.0)[:, None]
    view = column.expand(1 << 20, 3, 1 << 20)
    torch.save({"w": view, "again": view, "u": torch.arange(4.0)[1:].expand(2, 3)}, path)
    convert(path, out, to="torch", dtype="bf16")
    assert out.stat().st_size < 1 << 16
    loaded = torch.load(out, weights_only=True)
    assert loaded["w"].shape == view.shape
    assert loaded["w"].stride() == (0, 1, 0)
    assert loaded["w"].data_ptr() == loaded["again"].data_ptr()
    assert loaded["w"][5, :, 7].tolist() == [0, 1, 2]
    assert loaded["u"].tolist() == [[1, 2, 3], [1, 2, 3]]
    # Overlapping rows are not expanded by a stride of 0, so they still raise.
    torch.save({"w": torch.zeros(1 << 17).as_strided((4, 1 << 16, 1 << 16), (0, 1, 1))}, path)
    with pytest.raises(CheckpointIncompatibleError, match="expanded view"):
        convert(path, tmp_path / "other.pt", to="torch")


def test_convert_records_step_and_user_and_accepts_any_dtype_name(tmp_path):
    torch.save({"w": torch.arange(4.0)}, tmp_path / "file.pt")
    command = [
        sys.executable, "-m", "hocket.ckpt", "convert", "file.pt", "out", "--to", "hocket",
        "--step", "7", "--user", '{"run": "a"}', "--dtype", "bfloat16",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    checkpoint = hocket.ckpt.open(tmp_path / "out")
    assert (checkpoint.manifest.step, checkpoint.manifest.user) == (7, {"run": "a"})
    assert checkpoint.record("w").dtype == "BF16"
    with pytest.raises(ValueError, match="`hocket` only"):
        convert(tmp_path / "file.pt", tmp_path / "o.safetensors", to="safetensors", step=1)
    with pytest.raises(ValueError, match="'bf17'"):
        convert(tmp_path / "file.pt", tmp_path / "o", to="hocket", dtype="bf17")
    for step in (-1, 1 << 64, True):
        with pytest.raises(ValueError, match=rf"`step` is {step}; expected an integer from 0"):
            convert(tmp_path / "file.pt", tmp_path / "o", to="hocket", step=step)
    assert not (tmp_path / "o").exists()
