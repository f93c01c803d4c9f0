"""The snippets and commands of the documentation run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.stream import MDSWriter
from hocket.stream.cli.app import app
from support.hub import Hub
from support.parquet_files import make_table
from support.snippets import check_page

PACKAGE = Path(__file__).resolve().parents[1]


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 4
    names: dict[str, object] = {}
    exec("\n".join(snippets), names)
    assert names["state"]["epoch"] == 1  # type: ignore[index]


def test_the_page_of_the_format_reads_a_shard_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_page(PACKAGE / "docs" / "format.md")


def test_the_page_of_parquet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    check_page(PACKAGE / "docs" / "parquet.md")


def test_the_page_of_hubs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)

    def parquet(start: int, count: int) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(make_table(start, count), sink)
        return bytes(sink.getvalue())

    card = """---
configs:
- config_name: en
  data_files: [{split: train, path: en/train-*}, {split: test, path: en/test.parquet}]
---
"""
    names = {"en/train-0.parquet": (0, 20), "en/train-1.parquet": (20, 20), "en/test.parquet": (40, 5)}
    with Hub() as hub:
        for name, value in (hub.clean_env(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        files = {name: parquet(*rows) for name, rows in names.items()}
        hub.repository("datasets/owner/news").commit({"README.md": card.encode(), **files})
        check_page(PACKAGE / "docs" / "hub.md")


def test_the_page_of_lance_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lance")
    monkeypatch.chdir(tmp_path)
    check_page(PACKAGE / "docs" / "lance.md")


def test_the_page_of_packed_rows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_page(PACKAGE / "docs" / "packing.md")


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MDSWriter(columns={"text": "str", "tokens": "ndarray:uint16"}, out="data/train") as writer:
        for number in range(200):
            writer.write({"text": "x" * number, "tokens": np.arange(number + 1, dtype=np.uint16)})
    Path("corpus.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4]}\n')
    (shown,) = re.findall(r"```console\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    lines = [line.removeprefix("$ hocket-stream ") for line in shown.splitlines()]
    assert {line.split()[0] for line in lines} == {
        command.callback.__name__ for command in app.registered_commands
    }  # type: ignore[union-attr]
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            app(shlex.split(line))
        assert ended.value.code == 0, line


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(PACKAGE / "examples" / "resume_elsewhere.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "448 samples on 4 ranks, then 552 on 2" in done.stdout
    assert "same order as without the stop: True" in done.stdout
