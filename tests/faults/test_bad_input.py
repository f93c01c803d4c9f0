"""Invalid input to jobs of two ranks raises typed errors on every rank before a deadline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.stream import MDSWriter

LAUNCH = Path(sys.executable).with_name("hocket-launch")
JOB = Path(__file__).with_name("job.py")
DEADLINE_S = 180.0  # a rank that waits in vain would wait for torch's half hour
# Requests for a checkpoint are tried eleven times, with pauses of at most 43 s in total.
TRIES_S = 43.0
NOWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # the discard port, on which no server listens
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
# Large enough to be stored in data files and not in the manifest.
MODEL = {"width": 256, "depth": 3}


@dataclass(frozen=True)
class Ended:
    """The outcome of a job."""

    returncode: int
    stderr: str
    ranks: list[list[dict[str, Any]]]
    """The outcomes of each rank's attempts; empty for a rank that was ended before its first outcome."""

    def check(self, rank: int, attempt: int, error: str, *words: str) -> None:
        outcome = self.ranks[rank][attempt]
        assert outcome.get("class") == f"hocket.{error}", (rank, attempt, outcome)
        for word in words:
            assert word in outcome["message"], (rank, attempt, outcome)


@contextmanager
def started(out: Path, *attempts: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[Any]:
    """Start a job; yield a function that waits for its end, which must come before a deadline."""
    out.mkdir()
    began = time.monotonic()
    command = [str(LAUNCH), "-n", "2", "--log-dir", str(out / "logs"), str(JOB)]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--attempts", json.dumps(attempts)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )

    def finish(deadline_s: float = DEADLINE_S) -> Ended:
        _, stderr = process.communicate(timeout=max(60.0, deadline_s - (time.monotonic() - began)))
        alive = [path.name for path in out.glob("pid*") if is_alive(int(path.read_text()))]
        assert not alive, f"{alive} outlive the launcher"
        found = [out / f"rank{rank}.json" for rank in range(2)]
        ranks = [json.loads(path.read_text()) if path.exists() else [] for path in found]
        return Ended(process.returncode, stderr, ranks)

    with process:
        try:
            yield finish
        finally:
            process.terminate()  # the launcher passes SIGTERM on to its ranks


def run(out: Path, *attempts: dict[str, Any], env: dict[str, str] | None = None) -> Ended:
    with started(out, *attempts, env=env) as finish:
        return finish()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def write_data(folder: Path, *, size: int = 16) -> str:
    """Write one sample a shard: rank 0 reads the first two shards of a batch of four, rank 1 the others."""
    with MDSWriter(
        columns={"x": "ndarray:float32:4"}, out=str(folder), size_limit=1, hashes=["xxh3_64"]
    ) as writer:
        for number in range(size):
            writer.write({"x": np.full(4, number / size, np.float32)})
    return str(folder)


def shard_of(folder: Path | str, sample: int) -> Path:
    shards = json.loads(Path(folder, "index.json").read_text())["shards"]
    full = [shard["raw_data"]["basename"] for shard in shards if shard["samples"]]
    return Path(folder, full[sample])


def truncate(path: Path, by: int = 10) -> None:
    os.truncate(path, path.stat().st_size - by)


def alter(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module", autouse=True)
def unreachable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a job that loads from an unreachable store, before all others, because it mostly waits."""
    folder = tmp_path_factory.mktemp("unreachable")
    data = write_data(folder / "data")
    with started(
        folder / "out", {"local": data, "load_path": "s3://bucket/saved/ep0-ba1", "env": NOWHERE}
    ) as finish:
        yield finish


def test_invalid_data_and_arguments_raise_on_every_rank(tmp_path: Path, s3d) -> None:
    data, altered, missing = (write_data(tmp_path / name) for name in ("data", "altered", "missing"))
    for sample in range(4):
        alter(shard_of(altered, sample))
    for sample in range(4):
        shard_of(missing, sample).unlink()
    (tmp_path / "empty").mkdir()
    one = write_data(tmp_path / "one", size=1)
    bad_index = tmp_path / "bad-index"
    bad_index.mkdir()
    (bad_index / "index.json").write_text(Path(data, "index.json").read_text()[:-40])
    cache = str(tmp_path / "cache")
    no_keys = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    cases: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
        (
            {"remote": "s3://bucket/nowhere", "local": cache, "download_timeout": 0.1, "env": NOWHERE},
            "native.errors.StoreTransientError",
            ("`s3://bucket/nowhere/index.json`", "Connection refused", "check that the store is running"),
        ),
        (
            {"remote": s3d.uri("keyless"), "local": cache, "env": no_keys},
            "native.errors.StorePermissionError",
            (f"`s3://{s3d.bucket}`", "no credentials", "set `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`"),
        ),
        (
            {"remote": s3d.uri("unknown"), "local": cache, "env": {"AWS_SECRET_ACCESS_KEY": "wrong"}},
            "native.errors.StorePermissionError",
            (s3d.uri("unknown/index.json"), "HTTP 403", "check the keys (`AWS_ACCESS_KEY_ID`"),
        ),
        (
            {"remote": s3d.uri("nothing"), "local": cache},
            "stream.errors.IndexNotFoundError",
            (s3d.uri("nothing/index.json"), "expected the `index.json`", "check the location and `split`"),
        ),
        (
            {"local": str(tmp_path / "empty")},
            "stream.errors.IndexNotFoundError",
            (f"`{tmp_path}/empty/index.json`", "expected the `index.json`", "check the location"),
        ),
        (
            {"local": str(bad_index)},
            "stream.errors.IndexCorruptError",
            (f"`{bad_index}/index.json`", "not valid: EOF", "restore it"),
        ),
        (
            {"local": one},
            "stream.errors.ConfigError",
            (f"`{one}` has 1 samples for 2 data-parallel ranks", "expected at least one", "use fewer ranks"),
        ),
        (
            {"local": data, "fsdp_config": {"sharding_stategy": "FULL_SHARD"}},
            "dist.errors.ConfigError",
            ("`fsdp_config` has no key `sharding_stategy`", "Did you mean `sharding_strategy`?"),
        ),
        (
            {"local": data, "parallelism_config": {"tensor": 2}},
            "trainer.errors.TrainerConfigError",
            (
                "`parallelism_config` has the unknown keys ['tensor']",
                "expected some of ['cp', 'dp_replicate', 'dp_shard', 'ep', 'fsdp'",
            ),
        ),
        (
            {"local": missing},
            "stream.errors.ShardNotFoundError",
            ("was not found at `", f"{missing}/", "restore the missing file"),
        ),
        (
            {"local": altered},
            "stream.errors.ShardCorruptError",
            (f"`{altered}/shard.", "has xxh3_64 ", "expected xxh3_64 ", "restore it from its source"),
        ),
    ]
    ended = run(tmp_path / "out", *(attempt for attempt, _, _ in cases), env=s3d.env)
    assert ended.returncode == 1, ended.stderr
    for rank in range(2):
        assert len(ended.ranks[rank]) == len(cases), ended.stderr
        for number, (_, error, words) in enumerate(cases):
            ended.check(rank, number, error, *words)
    assert "ShardCorruptError" in ended.stderr


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Run a job that saves after each batch, and whose third batch needs a truncated shard of rank 1."""
    folder = tmp_path_factory.mktemp("cut-short")
    data = write_data(folder / "data")
    truncate(shard_of(data, 10))
    attempt = {"local": data, "save_folder": str(folder / "saved"), "save_interval": "1ba", **MODEL}
    return folder, run(folder / "out", attempt)


def test_a_shard_that_one_rank_cannot_read_ends_all_ranks_and_is_named(cut_short: tuple[Path, Ended]) -> None:
    folder, ended = cut_short
    assert ended.returncode == 1, ended.stderr
    shard = shard_of(folder / "data", 10)
    ended.check(
        1, 0, "stream.errors.ShardCorruptError", f"`{shard}`", "expected", "restore it from its source"
    )
    # Both ranks end at the same step, unless the launcher ended rank 0 first.
    if ended.ranks[0]:
        ended.check(
            0, 0, "trainer.errors.RankFailedError", "rank 1 failed before batch", "its own error says why"
        )
    # The terminal shows the cause, whichever rank ended first.
    assert "hocket.stream.errors.ShardCorruptError" in ended.stderr
    assert str(shard) in ended.stderr
    assert (folder / "saved" / "ep0-ba1" / "checkpoint.json.zst").exists(), "an earlier checkpoint is missing"


def test_a_store_that_one_rank_cannot_reach_ends_all_ranks(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    elsewhere = {
        "remote": "s3://bucket/p",
        "local": str(tmp_path / "c"),
        "download_timeout": 0.1,
        "env": NOWHERE,
    }
    ended = run(tmp_path / "out", {"local": data, "rank1": elsewhere})
    assert ended.returncode == 1
    ended.check(
        1,
        0,
        "native.errors.StoreTransientError",
        "`s3://bucket/p/index.json`",
        "check that the store is running",
    )
    assert "rank 1 (pid" in ended.stderr
    assert "hocket.native.errors.StoreTransientError" in ended.stderr


def test_an_invalid_checkpoint_raises_on_every_rank(cut_short: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = cut_short
    good = folder / "saved" / "ep0-ba1"
    spoiled = {name: tmp_path / name for name in ("half", "truncated", "altered", "manifest")}
    for copy in spoiled.values():
        shutil.copytree(good, copy)
    (spoiled["half"] / "checkpoint.json.zst").unlink()
    # The file that rank 1 wrote, and that only rank 1 reads.
    (of_rank_1,) = (path.relative_to(good) for path in good.glob("data/*-r00001-*"))
    truncate(spoiled["truncated"] / of_rank_1)
    alter(spoiled["altered"] / of_rank_1)
    truncate(spoiled["manifest"] / "checkpoint.json.zst")
    data = write_data(tmp_path / "data")
    other_data = write_data(tmp_path / "other", size=12)
    absent, full = tmp_path / "absent", tmp_path / "full"
    corrupt = "ckpt.errors.CheckpointCorruptError"
    remedy = "restore it from a copy, or load an earlier checkpoint"
    misfit = "ckpt.errors.CheckpointIncompatibleError"
    cases: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
        (
            {"load_path": str(spoiled["half"])},
            "ckpt.errors.CheckpointPartialError",
            (f"`{spoiled['half']}` was never committed", "Load an earlier checkpoint"),
        ),
        ({"load_path": str(spoiled["truncated"])}, corrupt, (f"`{of_rank_1}`", "were written", remedy)),
        ({"load_path": str(spoiled["altered"])}, corrupt, (f"`{of_rank_1}`", "digest", remedy)),
        ({"load_path": str(spoiled["manifest"])}, corrupt, (f"`{spoiled['manifest']}`", remedy)),
        (
            {"load_path": str(absent)},
            "ckpt.errors.CheckpointNotFoundError",
            (f"`{absent}`", "expected a checkpoint"),
        ),
        (
            {"load_path": str(good), "width": 200},
            misfit,
            (
                "`model.layers.0.weight`: shape [256, 4] in the checkpoint, [200, 4] here",
                "Load it into the model",
            ),
        ),
        (
            {"load_path": str(good), "depth": 2},
            misfit,
            ("Only in the checkpoint: `model.layers.2.weight`", "Load it into the model"),
        ),
        (
            {"load_path": str(good), "local": other_data},
            "stream.errors.StateMismatchError",
            ("`fingerprint` is '", "expected", "order of samples depends", "point `remote` or `local` at"),
        ),
    ]
    attempts = [{"local": data, **MODEL, **attempt} for attempt, _, _ in cases]
    on_full_disk = {"local": data, **MODEL, "save_folder": str(full), "rank1": {"file_limit": 100_000}}
    ended = run(tmp_path / "out", *attempts, on_full_disk)
    assert ended.returncode == 1, ended.stderr
    for rank in range(2):
        assert len(ended.ranks[rank]) == len(cases) + 1, ended.stderr
        for number, (_, error, words) in enumerate(cases):
            ended.check(rank, number, error, *words)
    ended.check(
        0, -1, "ckpt.errors.CheckpointError", "failed on rank 1", f"`{full}/ep0-ba4", "File too large"
    )
    ended.check(1, -1, "native.errors.StoreIOError", f"`{full}/ep0-ba4", "File too large", "free space there")
    assert not [path for path in full.rglob("*") if path.is_file()], "the failed save left files"


def test_loading_from_an_unreachable_store_fails(unreachable: Any) -> None:
    ended = unreachable(DEADLINE_S + TRIES_S)
    assert ended.returncode == 1
    words = (
        "`s3://bucket/saved/ep0-ba1/checkpoint.json.zst`",
        "Connection refused",
        "check that the store is running",
    )
    # Both ranks raise at once; the launcher may end the second one before it has written its error.
    told = [rank for rank in range(2) if ended.ranks[rank]]
    assert told, ended.stderr
    for rank in told:
        ended.check(rank, 0, "native.errors.StoreTransientError", *words)
    assert "hocket.native.errors.StoreTransientError" in ended.stderr
