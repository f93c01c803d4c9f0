"""An output location, an encoding or a setting that cannot be used is refused before the source is read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hocket.native.errors import StoreConfigError
from hocket.stream import MDSWriter, convert
from hocket.stream.cli.app import app
from hocket.stream.errors import (
    ConfigError,
    DatasetExistsError,
    IndexNotFoundError,
    SourceNotFoundError,
    StreamIOError,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    os.symlink(tmp_path / "gone", tmp_path / "link")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").touch()
    with MDSWriter(columns={"n": "int"}, out=tmp_path / "set") as writer:
        writer.write({"n": 1})
    return tmp_path


# The output, the settings, the error and its message.
REFUSED: dict[str, tuple[str, Mapping[str, Any], type[Exception], str]] = {
    "a data set": ("set", {}, DatasetExistsError, "holds a data set and is not empty"),
    "another folder": ("used", {}, DatasetExistsError, "is not empty"),
    "no data set": ("new", {"append": True}, IndexNotFoundError, "expected a data set to append to"),
    "a file": ("file", {}, StreamIOError, "`.*/file` is a file or a dangling link"),
    "below a file": ("file/x", {"exist_ok": True}, StreamIOError, "`.*/file` is a file or a dangling link"),
    "below a link": ("link/x", {}, StreamIOError, "`.*/link` is a file or a dangling link"),
    "plain HTTP": ("https://host/x", {}, ConfigError, "cannot be written to: plain HTTP"),
    "a hub": ("hf://datasets/owner/name", {}, ConfigError, "cannot be written to: a repository of a hub"),
    "a scheme": ("ftp://host/x", {}, StoreConfigError, "unknown scheme `ftp`"),
    "a slash": ("s3:/host/x", {}, StoreConfigError, "one slash after `s3:`"),
    "compression": ("new", {"compression": "zip"}, ConfigError, "compression `zip` is not supported"),
    "a level": ("new", {"compression": "zstd:99"}, ConfigError, "`zstd:99` is not supported"),
    "a hash": ("new", {"hashes": ["crc"]}, ConfigError, "hash `crc` is not supported"),
    "a size": ("new", {"size_limit": "x"}, ConfigError, "`size_limit` is 'x'"),
    "threads": ("new", {"max_workers": 0}, ConfigError, "`max_workers` is 0"),
    "an encoding": ("new", {"columns": {"n": "int3"}}, ConfigError, "encoding `int3` is not supported"),
    "a dtype": ("new", {"columns": {"n": "ndarray:int3"}}, ConfigError, "int3"),
    "a name": ("new", {"sise_limit": 1}, TypeError, "`MDSWriter` has no argument `sise_limit`"),
    "both": (
        "new",
        {"append": True, "exist_ok": True},
        ConfigError,
        "`append` and `exist_ok` are both given",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_output_is_refused_before_a_source_that_does_not_exist(folder: Path, case: str) -> None:
    name, settings, error, message = REFUSED[case]
    out = name if ":/" in name else folder / name
    before = sorted(folder.rglob("*"))
    for converter in (convert.convert, convert.from_csv):
        with pytest.raises(error, match=message):
            converter(folder / "no source", out, **settings)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", convert.FORMATS)
def test_every_format_refuses_its_output_first_and_changes_nothing(folder: Path, kind: str) -> None:
    if kind in ("parquet", "arrow", "datasets"):
        pytest.importorskip("datasets", reason="needs `uv sync --group datasets`")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(DatasetExistsError, match="holds a data set"):
        convert.convert(folder / "no source", folder / "set", format=kind)
    # Neither the data set that is to be replaced, nor that to be extended, is touched.
    for settings in ({"exist_ok": True}, {"append": True}):
        with pytest.raises(SourceNotFoundError):
            convert.convert(folder / "no source", folder / "set", format=kind, **settings)
    with pytest.raises(SourceNotFoundError):
        convert.convert(folder / "no source", folder / "new", empty_as_nan=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_written_to_is_refused_first(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        for out in (locked / "a/b", (locked / "a/b", "memory://remote")):
            with pytest.raises(StreamIOError, match=f"`{locked}/a/b`: the folder `.*` cannot be written to"):
                convert.convert(folder / "no source", out, keep_local=True)
            with pytest.raises(StreamIOError, match="cannot be written to"):
                MDSWriter(columns={"n": "int"}, out=out, keep_local=True)
    finally:
        if is_root:
            os.seteuid(0)


def test_the_command_names_the_output_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["convert", str(folder / "no source"), str(folder / "set")])
    assert ended.value.code == 4
    assert "give `--exist-ok` to replace it" in capsys.readouterr().err


#: A process that writes with as many more threads as it is told, as a user that runs nothing else: the
#: superuser has no such limit.
FEW = """
import json, os, resource, sys
from hocket.stream import MDSWriter
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(54322, 54322, 54322)
    os.setresuid(54322, 54322, 54322)
tasks = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in os.listdir("/proc")
            if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == os.getuid())
most = tasks + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
with MDSWriter(columns={"x": "int64"}, out=sys.argv[2], size_limit=4096) as out:
    for number in range(2000):
        out.write({"x": number})
print(sum(shard["samples"] for shard in json.load(open(f"{sys.argv[2]}/index.json"))["shards"]))
"""


@pytest.mark.parametrize(("spare", "told"), [(2, "`ulimit -u`"), (6, "2000")])
def test_few_threads_write_all_shards_or_name_the_limit(spare, told):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", FEW, str(spare), f"{folder}/out"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert told in done.stdout + done.stderr
    assert "panicked" not in done.stderr
