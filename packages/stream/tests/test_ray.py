"""`hocket.stream.ray` writes a Ray Dataset as `hocket-stream convert` writes the same rows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.stream import StreamingDataset
from hocket.stream.convert import from_parquet
from hocket.stream.errors import ConfigError
from hocket.stream.ray import MDSSink
from support.s3d import Server

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `uv sync --group ray`")

START = """
import json, os, signal, sys, time
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from hocket.stream.ray import MDSSink, infer_columns, write_mds

out = sys.argv[1]
folder = Path(sys.argv[2])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().execution_options.preserve_order = True
ray.data.DataContext.get_current().enable_progress_bars = False


def refused(dataset, message, **options):
    try:
        dataset.write_datasink(MDSSink(out, **options))
    except Exception as error:
        text = str(error)
        assert message in text, text
    else:
        raise AssertionError("not refused: " + message)

"""


def run(script: str, out: str, folder: Path, env: dict[str, str], **options: Any) -> Any:
    """Run a script that starts Ray with two workers."""
    path = folder / "job.py"
    path.write_text(START + script)
    command = [sys.executable, str(path), out, str(folder)]
    env = {**os.environ, **env, "HOME": str(folder), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=250, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def read(uri: str, cache: Path) -> list[dict[str, Any]]:
    return list(StreamingDataset(remote=uri, local=cache, batch_size=8))


SAME = """
rows = ray.data.range(400, override_num_blocks=5).map(lambda row: {
    "id": row["id"], "text": "row %d" % row["id"], "pair": [row["id"], -row["id"]], "half": row["id"] / 2,
    "raw": bytes([row["id"] % 256]), "some": row["id"] if row["id"] % 7 else None,
    "nested": {"a": row["id"], "b": ["x"]}, "flag": row["id"] % 3 == 0,
}).materialize()
report = write_mds(rows, out, size_limit=2000, compression="zstd")
rows.write_parquet(str(folder / "files"))
(folder / "columns.json").write_text(json.dumps(report.columns))
refused(rows, "exist_ok=True")
arrays = ray.data.range_tensor(12, shape=(2, 3), override_num_blocks=3)
arrays.write_datasink(sink := MDSSink(out + "-arrays", columns={"data": "ndarray:int64:2,3"}))
assert sink.report.num_samples == 12, sink
assert infer_columns(arrays) == {"data": "ndarray:int64:2,3"}
lists = ray.data.from_items([{"tokens": np.arange(n, dtype=np.uint16)} for n in range(1, 9)])
assert write_mds(lists, out + "-lists").columns == {"tokens": "ndarray:uint16"}
"""


@needs_ray
@pytest.mark.slow
def test_rows_and_encodings_are_those_of_convert(tmp_path: Path, s3d: Server, monkeypatch: Any) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    out = s3d.uri("ray")
    run(SAME, out, tmp_path, s3d.env)
    report = from_parquet(tmp_path / "files", tmp_path / "same", compression="zstd")
    assert json.loads((tmp_path / "columns.json").read_text()) == report.columns
    assert report.columns["some"] == "json"
    samples, same = read(out, tmp_path / "cache"), read(str(tmp_path / "same"), tmp_path / "other")
    assert [sample["id"] for sample in samples] == list(range(400))
    by_id = {int(sample["id"]): sample for sample in same}
    for sample in samples:
        assert all(np.array_equal(value, by_id[int(sample["id"])][name]) for name, value in sample.items())
    index = json.loads(Store(out).get("index.json"))
    files = {shard["zip_data"]["basename"] for shard in index["shards"]}
    assert len({name.split("/")[0] for name in files}) == 5
    assert {meta.key for meta in Store(out).list()} == {"index.json", *files}
    arrays = [sample["data"] for sample in read(f"{out}-arrays", tmp_path / "arrays")]
    assert np.array_equal(arrays, [np.full((2, 3), number) for number in range(12)])
    lists = [sample["tokens"] for sample in read(f"{out}-lists", tmp_path / "lists")]
    assert [tokens.tolist() for tokens in lists] == [list(range(number)) for number in range(1, 9)]


FAULTS = """
def dies(batch):
    if 200 in batch["id"] and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


numbers = ray.data.range(400, override_num_blocks=4)
numbers.map_batches(dies, batch_size=20).write_datasink(MDSSink(out, size_limit=300))
assert (folder / "died").exists()
names = {path.name for path in Path(out).iterdir()}
assert len(names) == 5 and "index.json" in names, names
index = json.loads(Path(out, "index.json").read_text())
files = {shard["raw_data"]["basename"] for shard in index["shards"]}
assert files == {str(path.relative_to(out)) for path in Path(out).glob("*/*")}

out = out + "-bad"
mixed = numbers.map(lambda row: {"id": row["id"], "text": None if row["id"] == 399 else "a"})
refused(mixed, "`text` has nulls, and is `str` by its type")
kinds = numbers.map(lambda row: {"id": row["id"] if row["id"] < 300 else row["id"] / 3})
refused(kinds, "`id` is ")
refused(numbers, "sample 0 of part", columns={"id": "str"})
refused(numbers.filter(lambda row: False), "no rows to write")
objects = ray.data.from_items([{"shape": np.zeros((n, 2))} for n in (1, 2)]).repartition(1)
refused(objects, "`shape` has arrays of 2 dims and different shapes")
for options in ({"min_rows_per_part": 0}, {"append": True}, {"columns": {"id": "nothing"}}):
    refused(numbers, "expected", **options)
refused(numbers, "did you mean `compression`", compresion="zstd")
assert list(Path(out).iterdir()) == []
numbers.write_datasink(sink := MDSSink(out, min_rows_per_part=200))
assert len(list(Path(out).iterdir())) == 3 and sink.report.num_samples == 400
"""


@needs_ray
@pytest.mark.slow
def test_workers_that_die_and_jobs_that_fail_leave_nothing(tmp_path: Path) -> None:
    run(FAULTS, str(tmp_path / "out"), tmp_path, {})
    samples = read(str(tmp_path / "out"), tmp_path / "cache")
    assert sorted(sample["id"] for sample in samples) == list(range(400))


KILLED = """
def slow(batch):
    time.sleep(1)
    return batch


options = {"exist_ok": True} if (folder / "again").exists() else {}
rows = ray.data.range(400, override_num_blocks=8)
if not options:
    rows = rows.map_batches(slow, batch_size=10)
rows.write_datasink(MDSSink(out, size_limit=300, **options))
"""


@needs_ray
@pytest.mark.slow
def test_a_killed_driver_leaves_no_index_and_is_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = tmp_path / "job.py"
    path.write_text(START + KILLED)
    env = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        [sys.executable, str(path), str(out), str(tmp_path)], env=env, stderr=subprocess.DEVNULL
    ) as job:
        deadline = time.monotonic() + 120
        while not list(out.glob("part-*/*")):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.kill()
        job.wait(30)
    assert not list(out.glob("**/index.json"))
    (tmp_path / "again").touch()
    run(KILLED, str(out), tmp_path, {})
    assert sorted(sample["id"] for sample in read(str(out), tmp_path / "cache")) == list(range(400))
    assert len(list(out.iterdir())) == 9


@needs_ray
@pytest.mark.slow
def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "ray_spark.md").read_text()
    snippet, _ = re.findall(r"```python\n(.*?)```", page, re.S)
    run(snippet, str(tmp_path / "out"), tmp_path, {}, cwd=tmp_path)
    for name in ("ray-train", "ray-again"):
        samples = read(str(tmp_path / name), tmp_path / f"cache-{name}")
        assert [sample["tokens"].tolist() for sample in samples] == [[number] * 8 for number in range(1000)]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_ray_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`pip install 'hocket-stream\[ray\]'`"):
        MDSSink(tmp_path)
