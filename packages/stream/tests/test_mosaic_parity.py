"""`order="mosaic"` gives mosaicml-streaming's batches, from the start and after a resume.

Run with `uv run pytest -m parity`: the peer lives in an environment of its own, which `uv` makes.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import Stream, StreamingDataset
from hocket.stream.errors import ConfigError
from hocket.stream.mosaic.shuffles import ALGORITHMS

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]

PEER = "mosaicml-streaming==0.13.0"
#: The peer keeps its data sets open, so more cases in one process would reach the limit of open files.
CASES_A_PROCESS = 25


def ask(cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return the output of mosaicml-streaming."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("`uv` was not found: it makes the peer's environment")
    python = ".".join(map(str, sys.version_info[:2]))
    needs = ["--with", PEER, "--with", "setuptools<81"]
    answers = []
    for start in range(0, len(cases), CASES_A_PROCESS):
        (folder / "cases.json").write_text(json.dumps(cases[start : start + CASES_A_PROCESS]))
        script = str(Path(__file__).with_name("mosaic_peer.py"))
        files = [str(folder / "cases.json"), str(folder / "answers.json")]
        done = subprocess.run(
            [uv, "run", "--no-project", "--python", python, *needs, "python", script, *files],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        answers += json.loads((folder / "answers.json").read_text())
    return answers


def make(case: dict[str, Any], **options: Any) -> StreamingDataset:
    streams = [Stream(**stream) for stream in case["streams"]]
    return StreamingDataset(
        streams=streams, batch_size=case["batch_size"], order="mosaic", **case["options"], **options
    )


def plan(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Return each rank's batches, starting from the state of a case."""
    world_size = case["nodes"] * case["ranks"]
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(case["ranks"]))
    read = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        dataset = make(case)
        dataset.load_state_dict(case["state"])
        batches = []
        for batch in dataset.batches():
            batches.append(batch["id"].tolist()[: dataset.batch_share()[0]])
        read.append(batches)
    return read


def draw_case(rng: random.Random, folders: dict[str, int]) -> dict[str, Any]:
    nodes, ranks, size = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4]), rng.randint(1, 6)
    first = rng.choice([nodes, 1, 2])
    if nodes * size % first:
        first = nodes
    method = rng.choice(["random", "stratified", "per_stream", "device_per_stream"])
    names = rng.sample(sorted(folders), rng.choice([1, 1, 2] if method == "random" else [1, 2, 2, 3]))
    weights: Callable[[], dict[str, Any]] = rng.choice(
        [
            dict,
            lambda: {"choose": rng.randint(40, 90)},
            lambda: {"repeat": rng.choice([0.7, 1.3, 2])},
            lambda: {"proportion": rng.choice([1, 2, 5])},
        ]
    )
    shuffle = rng.random() < 0.8
    options = {
        "shuffle": shuffle,
        "shuffle_algo": rng.choice(sorted(ALGORITHMS)),
        "partition_algo": "relaxed" if nodes != first else rng.choice(["orig", "relaxed"]),
        "shuffle_seed": rng.randrange(1 << 20),
        "shuffle_block_size": rng.choice([30, 100]) if method != "random" else rng.choice([8, 30, 100]),
        "batching_method": method,
        "sampling_method": rng.choice(["balanced", "fixed"]),
        "sampling_granularity": rng.choice([1, 4]),
    }
    done = rng.choice([0, 1, 2]) * size * nodes * ranks
    if method != "random":
        done += rng.choice([0, 0, 1])
    return {
        "streams": [{"local": name} | weights() for name in names],
        "batch_size": size,
        "nodes": nodes,
        "ranks": ranks,
        "workers": rng.choice([1, 2, 3]),
        "options": options,
        "state": {
            "epoch": rng.choice([0, 1, 4]),
            "sample_in_epoch": done if done < 40 else 0,
            "num_canonical_nodes": first * rng.choice([1, 2, 4]),
            "shuffle_seed": options["shuffle_seed"],
            "initial_physical_nodes": first,
        },
    }


def test_batches_equal_mosaicml_streamings_from_any_state(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {write(count, f"d{count}"): count for count in (61, 128, 203)}
    rng = random.Random(11)
    cases = [draw_case(rng, folders) for _ in range(150)]
    num_refused = 0
    for case, theirs in zip(cases, ask(cases, tmp_path), strict=True):
        if theirs is None:
            num_refused += 1
            with pytest.raises(ConfigError):
                plan(case, monkeypatch)
            continue
        # mosaicml-streaming numbers samples over all streams, and adds empty batches to even out workers.
        ids = list(
            itertools.chain.from_iterable(range(folders[stream["local"]]) for stream in case["streams"])
        )
        filled = (number + 1 for rank in theirs for number, batch in enumerate(rank) if batch)
        length = max(filled, default=0)
        if not length and case["state"]["sample_in_epoch"] < case["batch_size"] * len(theirs):
            num_refused += 1
            with pytest.raises(ConfigError, match="expected at least one batch"):
                plan(case, monkeypatch)
            continue
        expected = [[[ids[number] for number in batch] for batch in rank[:length]] for rank in theirs]
        assert plan(case, monkeypatch) == expected, case
    assert 0 < num_refused < 30


def test_a_run_started_with_mosaicml_streaming_resumes_with_hocket(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write(203)
    cases = [
        {
            "streams": [{"local": folder}],
            "batch_size": 8,
            "stop": 11,
            "options": {"shuffle": True, "shuffle_algo": algo, "shuffle_block_size": 64},
        }
        for algo in sorted(ALGORITHMS)
    ]
    for case, theirs in zip(cases, ask(cases, tmp_path), strict=True):
        dataset = make(case)
        batches = dataset.batches()
        assert [next(batches)["id"].tolist() for _ in range(11)] == theirs["done"]
        assert dataset.state_dict() == theirs["state"]
        second = make(case)
        second.load_state_dict(theirs["state"])
        assert [batch["id"].tolist() for batch in second.batches()] == theirs["rest"]
