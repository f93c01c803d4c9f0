"""Models on a hub of Hugging Face, on a local server of its API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.native.errors import StoreConfigError, StoreNotFoundError, StorePermissionError
from support.hub import Hub

save = pytest.importorskip("safetensors.numpy").save
NAME = "models/owner/model"
PLACE = "hf://owner/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Run a hub with one model in two files."""
    with Hub() as hub:
        for name, value in hub.clean_env(tmp_path).items():
            monkeypatch.setenv(name, value)
        hub.repository(NAME).commit(make_files(1.0))
        yield hub


def make_files(scale: float) -> dict[str, bytes]:
    """Return the files of a model of two tensors."""
    weights = {"a": np.arange(12, dtype=np.float32).reshape(3, 4) * scale, "b": np.full(2, scale, np.float32)}
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(weights, 1)}
    index = json.dumps({"metadata": {"total_size": 56}, "weight_map": names})
    files = {names[name]: save({name: value}) for name, value in weights.items()}
    return files | {"model.safetensors.index.json": index.encode(), "config.json": b"{}", "README.md": b"# m"}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Return `call(*args)`, which runs the command in this process: its exit code and what it prints."""

    def call(*args: object) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            app([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    return call


def test_a_model_is_opened_in_place_at_one_commit(hub: Hub) -> None:
    opened = hocket.ckpt.open(PLACE)
    hub.repository(NAME).commit(make_files(2.0))
    np.testing.assert_array_equal(opened["a"], np.arange(12, dtype=np.float32).reshape(3, 4))
    assert hocket.ckpt.open(PLACE)["b"].tolist() == [2.0, 2.0]
    first = next(iter(hub.repository(NAME).commits))
    assert hocket.ckpt.open(f"{PLACE}@{first}")["b"].tolist() == [1.0, 1.0]
    one_file = hocket.ckpt.open(f"{PLACE}@{first}/model-00002-of-00002.safetensors")
    assert one_file["b"].tolist() == [1.0, 1.0]


def test_the_command_reads_a_model(hub: Hub, call: Callable[..., tuple[object, str]], tmp_path: Path) -> None:
    code, printed = call("inspect", PLACE)
    assert (code, "model-00001-of-00002" in printed or "safetensors" in printed) == (0, True), printed
    assert call("verify", PLACE)[0] == 0
    code, printed = call("convert", PLACE, tmp_path / "out", "--to", "hocket")
    assert code == 0, printed
    assert hocket.ckpt.open(tmp_path / "out")["b"].tolist() == [1.0, 1.0]
    assert call("diff", PLACE, tmp_path / "out")[0] == 0


def test_a_model_is_not_written(hub: Hub, call: Callable[..., tuple[object, str]], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name, data in make_files(1.0).items():
        (tmp_path / "model" / name).write_bytes(data)
    with pytest.raises(StoreConfigError, match="is written with `hf upload`"):
        hocket.ckpt.convert(str(tmp_path / "model"), "hf://owner/other", to="hocket")
    code, printed = call("convert", tmp_path / "model", "hf://owner/other", "--to", "safetensors")
    assert code != 0
    assert "`hf upload`" in printed


def test_each_refusal_has_its_message(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, call: Callable[..., tuple[object, str]]
) -> None:
    with pytest.raises(StorePermissionError, match="does not exist, or is private"):
        hocket.ckpt.open("hf://owner/absent")
    with pytest.raises(StoreNotFoundError, match="no revision `nowhere`"):
        hocket.ckpt.open(f"{PLACE}@nowhere")
    with pytest.raises(CheckpointNotFoundError, match=r"owner/model@.*/absent"):
        hocket.ckpt.open(f"{PLACE}/absent")
    hub.repository(NAME).is_gated = True
    code, printed = call("inspect", PLACE)
    assert code != 0
    assert "ask for access at" in printed
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    hub.accepted.add("hf_accepted")
    assert call("inspect", PLACE)[0] == 0
