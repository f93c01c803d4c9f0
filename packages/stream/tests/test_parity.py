"""mosaicml-streaming and Hocket read each other's data sets, and write the same raw bytes.

Run with `uv run pytest -m parity`: the peer lives in an environment of its own, which `uv` makes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import (
    CSVWriter,
    JSONWriter,
    MDSWriter,
    StreamingDataset,
    TSVWriter,
    XSVWriter,
    merge_index,
)

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]

PEER = "mosaicml-streaming==0.13.0"
WRITERS: dict[str, Callable[..., Any]] = {
    "mds": MDSWriter,
    "json": JSONWriter,
    "csv": CSVWriter,
    "tsv": TSVWriter,
    "xsv": XSVWriter,
}


@pytest.fixture(scope="module")
def peer() -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import peer

        yield peer
    finally:
        sys.path.remove(str(Path(__file__).parent))


def run_peer(*arguments: str) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("`uv` was not found: it makes the peer's environment")
    python = ".".join(map(str, sys.version_info[:2]))
    # Both libraries use the same Pillow, because encoded images are compared byte for byte.
    needs = ["--with", PEER, "--with", f"pillow=={version('pillow')}", "--with", "setuptools<81"]
    command = [uv, "run", "--no-project", "--python", python, *needs, "python"]
    script = str(Path(__file__).with_name("peer.py"))
    done = subprocess.run(
        [*command, script, *arguments], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ours(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    peer.write(folder, WRITERS)
    return folder


@pytest.fixture(scope="module")
def theirs(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    run_peer("write", str(folder))
    return folder


def read_ours(peer: Any, folder: Path) -> list[dict[str, Any]]:
    dataset = StreamingDataset(local=folder, batch_size=4, allow_unsafe_types=True)
    return [{key: peer.shown(value) for key, value in sample.items()} for sample in dataset]


def test_raw_files_and_index_are_the_same_bytes(peer: Any, ours: Path, theirs: Path) -> None:
    for name, (_, compression, _) in peer.SETS.items():
        mine, other = (json.loads((side / name / "index.json").read_text()) for side in (ours, theirs))
        if compression is None:
            assert sorted(path.name for path in (ours / name).iterdir()) == sorted(
                path.name for path in (theirs / name).iterdir()
            )
            for path in (ours / name).iterdir():
                assert path.read_bytes() == (theirs / name / path.name).read_bytes(), path
        for index in (mine, other):
            for shard in index["shards"]:
                # Compressed bytes depend on the codec's build; the raw digests above them do not.
                for key in ("zip_data", "zip_meta"):
                    if shard.get(key):
                        shard[key] = shard[key]["basename"]
        assert mine == other, name


def test_each_side_reads_the_other(peer: Any, ours: Path, theirs: Path) -> None:
    run_peer("read", str(ours))
    read_by_them = json.loads((ours / "read.json").read_text())
    for name, (kind, _, _) in peer.SETS.items():
        mine = read_ours(peer, theirs / name)
        assert len(mine) == 20
        if kind == "mds":
            assert read_by_them[name] == mine, name
        else:
            # mosaicml-streaming returns Python's numbers, Hocket NumPy's: compare the values.
            dataset = StreamingDataset(local=ours / name, batch_size=4)
            texts = [
                {key: f"{type(value).__name__} {value!r}" for key, value in s.items()} for s in plain(dataset)
            ]
            assert read_by_them[name] == texts, name


def plain(dataset: StreamingDataset) -> list[dict[str, Any]]:
    samples = [
        {key: getattr(value, "item", lambda value=value: value)() for key, value in s.items()}
        for s in dataset
    ]
    return [dict(sorted(sample.items())) for sample in samples]


def test_each_side_reads_a_merged_index_of_the_other(peer: Any, tmp_path: Path) -> None:
    expected = [[number, "é" * number] for number in range(22)]
    mine, other = tmp_path / "mine", tmp_path / "other"
    peer.write_parts(mine, MDSWriter, peer.OUR_PARTS)
    merge_index(mine)
    run_peer("merge", str(other))
    folders = [
        {shard["raw_data"]["basename"].rpartition("/")[0] for shard in index["shards"]}
        for index in (json.loads((root / "index.json").read_text()) for root in (mine, other))
    ]
    assert folders == [set(peer.OUR_PARTS), set(peer.THEIR_PARTS)]
    assert [[s["id"], s["text"]] for s in StreamingDataset(local=other, batch_size=4)] == expected
    run_peer("read-merged", str(mine))
    assert json.loads((mine / "read.json").read_text()) == expected
