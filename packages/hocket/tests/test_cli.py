from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hocket.recipes.demo.run import MARKER, DemoError, DemoOptions, run_demo, show_command
from hocket.recipes.environment import describe, lines


def test_version_and_help_do_not_import_torch() -> None:
    script = """
import sys
from hocket.recipes.cli import app
try:
    app(["--version"] if sys.argv[1] == "version" else ["--help"])
except SystemExit as ended:
    assert not ended.code
assert "torch" not in sys.modules
"""
    said = {
        what: subprocess.run(
            [sys.executable, "-c", script, what], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for what in ("version", "help")
    }
    assert said["version"] == f"hocket {importlib.metadata.version('hocket')}\n"
    assert "--install-completion" in said["help"]
    # A flag takes no value, so the help shows no type behind it, as typer's tables do.
    assert "-v, --verbose  " in said["help"]
    assert "<int>" not in said["help"]
    command = [sys.executable, "-m", "hocket.recipes", "--version"]
    module = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert module.stdout == said["version"]


def run(*arguments: str, code: int = 0, **variables: str) -> str:
    command = [sys.executable, "-m", "hocket.recipes", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **variables}
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_commands_of_checkpoints_and_data_sets_are_reached_through_the_front_door(tmp_path: Path) -> None:
    run("ckpt", "demo", str(tmp_path / "first"))
    assert "committed" in run("ckpt", "ls", str(tmp_path))
    assert "[HKT-ST02]" in run("stream", "inspect", str(tmp_path), code=3)


def test_the_demo_refuses_a_uri_in_place_of_its_folder(tmp_path: Path) -> None:
    options = DemoOptions(out=Path("~/demo"))
    assert options.out == Path.home() / "demo"
    with pytest.raises(DemoError, match=r"`--out` expects a local folder.*`s3:/bucket/x` has one slash"):
        DemoOptions(out=Path("s3://bucket/x"))


def test_the_demo_shows_a_checkpoint_where_the_command_is_not_beside_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ckpt", "demo", str(tmp_path / "runs/first"))
    # A module in the current folder, as one of a stranger's own, must not take the place of a library's.
    (tmp_path / "rich.py").write_text("raise AssertionError('imported from the current folder')")
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    console = Console(file=io.StringIO(), width=100)
    show_command(console, "ls", str(tmp_path / "runs"))
    assert "committed" in console.file.getvalue()


def test_the_demo_refuses_a_folder_that_it_cannot_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        with pytest.raises(
            DemoError, match=r"`--out .*file.* is no folder that can be written to \(Not a dir"
        ):
            run_demo(DemoOptions(out=tmp_path / out), Console())
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / MARKER).touch()
    (tmp_path / "link").symlink_to(earlier)
    with pytest.raises(DemoError, match=r"`--out .*link` is a symbolic link .*: name the folder itself"):
        run_demo(DemoOptions(out=tmp_path / "link"), Console())
    assert (earlier / MARKER).exists()


def test_a_drill_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    said = run("drill", "--faults", "kiled", "train.py", "{run}", code=2)
    assert "there is no fault `kiled`" in " ".join(said.replace("│", " ").split())
    (tmp_path / "old").touch()
    said = run("drill", "--out", str(tmp_path), "train.py", code=2)
    assert "not empty" in " ".join(said.replace("│", " ").split())
    assert "`ranks` is 3, expected an even number" in run("drill", "-n", "3", "train.py", code=1)


def test_the_shell_completes_commands_and_options_without_torch() -> None:
    script = """
import sys
from hocket.recipes.cli import app
try:
    app(prog_name="hocket")
finally:
    assert "torch" not in sys.modules
"""
    for words, expected in (
        ("hocket ", {"demo", "drill", "train", "samples", "replay", "env", "explain", "ckpt", "stream"}),
        ("hocket ckpt ver", {"verify"}),
        ("hocket train --re", {"--resume"}),
    ):
        asked = {
            "_HOCKET_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        command = [sys.executable, "-c", script]
        env = {**os.environ, **asked}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
        assert set(done.stdout.split()) == expected, done.stderr


def test_env_tells_versions_devices_stores_and_flags_without_secrets() -> None:
    given = {
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "AWS_ENDPOINT_URL": "http://user:s3cr3t@store.example:9000",
        "NCCL_DEBUG": "INFO",
        "HOCKET_TOKEN": "s3cr3t",
    }
    said = run("env", "--json", **given)
    assert "s3cr3t" not in said
    found = json.loads(said)
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["packages"]["hocket-ckpt"] == importlib.metadata.version("hocket-ckpt")
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["cuda"] == torch.version.cuda
    assert len(found["torch"]["devices"]) == max(torch.cuda.device_count(), 1)
    assert "gloo" in found["torch"]["backends"]
    assert "AWS_SECRET_ACCESS_KEY is set" in found["stores"]["s3"]
    assert "(store.example)" in found["stores"]["s3"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["variables"]["HOCKET_TOKEN"] == "(not shown)"


def test_a_description_is_lines_of_text() -> None:
    assert list(lines({"variables": {}, "libc": ""})) == ["variables: -", "libc: -"]
    text = list(lines(describe()))
    assert f"  version: {torch.__version__}" in text
    assert any(line.startswith("python: 3.") for line in text)


def test_v_shows_the_log_of_the_packages_from_info_on() -> None:
    script = """
import logging, sys
from hocket.recipes.cli import app
try:
    app([*sys.argv[1:], "explain", "CK03"])
except SystemExit:
    pass
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("hocket.stream.read").log(level, "level %d", level)
"""
    for options, shown in (([], [30]), (["-v"], [20, 30]), (["-vv"], [10, 20, 30])):
        command = [sys.executable, "-c", script, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert [int(line.split()[-1]) for line in done.stderr.splitlines()] == shown, done.stderr
