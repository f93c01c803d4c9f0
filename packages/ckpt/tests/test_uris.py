"""Places of checkpoints: `~` is the home folder, and a URI that `pathlib.Path` has changed is refused."""

import contextlib
from pathlib import Path

import pytest

from hocket import ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.dcp import HocketReader, HocketWriter
from hocket.ckpt.errors import CheckpointExistsError
from hocket.ckpt.torch import CheckpointStore, load, provide, save
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.diff import diff
from hocket.ckpt.verbs.remove import collect_garbage, remove
from hocket.ckpt.verbs.reshard import reshard
from hocket.ckpt.verbs.verify import verify
from hocket.native.errors import StoreConfigError

torch = pytest.importorskip("torch")

WEIGHTS = {"w": torch.ones(3)}

#: Every function that takes a place, by its name.
CALLS = {
    "open": ckpt.open,
    "list_checkpoints": ckpt.list_checkpoints,
    "verify": verify,
    "remove": remove,
    "collect_garbage": collect_garbage,
    "write_demo": write_demo,
    "save": lambda place: save(WEIGHTS, place),
    "load": lambda place: load(place, WEIGHTS),
    "CheckpointStore": CheckpointStore,
    "provide": lambda place: provide(place, for_saving=True),
    "CheckpointStore.load": lambda place: CheckpointStore("memory://uris").load(place, WEIGHTS),
    "convert from": lambda place: convert(place, "memory://uris/a", to="dcp"),
    "convert to": lambda place: convert(write("memory://uris/b"), place, to="dcp"),
    "reshard from": lambda place: reshard(place, "memory://uris/c", ranks=2),
    "reshard to": lambda place: reshard(write("memory://uris/d"), place, ranks=2),
    "diff": lambda place: diff(place, write("memory://uris/e")),
    "HocketWriter": HocketWriter,
    "HocketReader": lambda place: HocketReader(place).read_metadata(),
}


def write(place: str) -> str:
    with contextlib.suppress(CheckpointExistsError):
        write_demo(place, ranks=1)
    return place


@pytest.mark.parametrize("name", CALLS)
def test_a_uri_that_lost_a_slash_is_refused_wherever_a_place_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreConfigError, match=r"has one slash after `s3:`.*pass the text `s3://bucket/run`"):
        CALLS[name](Path("s3://bucket/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_place_that_is_not_utf_8_is_refused_by_name_wherever_one_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (Path("m\udcfc"), "s3://bucket/m\udcfc"):
        with pytest.raises(
            StoreConfigError, match=r"m\\xfc` is not UTF-8, which paths have to be: rename it"
        ):
            CALLS[name](place)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_place_below_a_folder_that_is_not_utf_8_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "m\udcfc").mkdir()
    monkeypatch.chdir(tmp_path / "m\udcfc")
    with pytest.raises(StoreConfigError, match=r"/m\\xfc/run` is not UTF-8"):
        save(WEIGHTS, "run/ep1")


def test_the_home_folder_is_expanded_as_by_pathlib(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    save(WEIGHTS, Path("~/run/ep1")).wait()
    store = CheckpointStore("~/run")
    store.save(WEIGHTS, step=2, name="ep2").wait()
    assert Path(store.uri) == Path("~/run").expanduser()
    store.close()
    write_demo("~/run/demo")
    assert sorted(path.name for path in (home / "run").iterdir()) == ["demo", "ep1", "ep2"]
    assert load("~/run/ep1", {"w": torch.zeros(3)}).state["w"].tolist() == [1, 1, 1]
    assert [entry.uri for entry in ckpt.list_checkpoints("~/run")] == [
        f"{home}/run/{name}" for name in ("ep1", "ep2", "demo")
    ]
    assert verify("~/run/demo").is_sound
    convert("~/run/demo", "~/run/other", to="dcp")
    assert ckpt.open("~/run/other").format == "dcp"
    assert remove("~/run/demo").num_files == 4
    assert list(here.iterdir()) == []


def test_the_command_refuses_it_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        app(["demo", "s3:/bucket/run"])
    assert "pass the text `s3://bucket/run`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_user_s_home_folder_is_refused_by_name():
    with pytest.raises(StoreConfigError, match=r"`~somebody/run`: only `~/` is expanded"):
        ckpt.open("~somebody/run")
