"""`simulate` counts the shards and bytes that real readers fetch; `bench` reads the data set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.cli.app import app
from hocket.stream.errors import ConfigError
from hocket.stream.simulate import Cluster, _fetches, _uniform_shards, simulate
from support.sampling import cases


@pytest.mark.parametrize(("shuffle", "compression"), [(True, None), (False, "zstd")])
def test_each_node_fetches_the_simulated_shards(
    write: Callable[..., str], tmp_path: Path, shuffle: bool, compression: str | None
) -> None:
    folder = write(601, size_limit=1000, compression=compression)
    cluster = Cluster(
        num_nodes=3,
        ranks_per_node=2,
        batch_size=4,
        shuffle=shuffle,
        shuffle_block_size=32,
        num_canonical_nodes=6,
    )
    found = simulate(folder, cluster, epoch=1)
    assert found.is_whole
    index = json.loads((Path(folder) / "index.json").read_text())["shards"]
    for number, node in enumerate(found.nodes):
        kept, num_samples = tmp_path / f"node {number}", 0
        for rank in (2 * number, 2 * number + 1):
            dataset = StreamingDataset(
                remote=folder,
                local=kept,
                batch_size=4,
                shuffle=shuffle,
                shuffle_block_size=32,
                num_canonical_nodes=6,
                rank=rank,
                world_size=6,
                prefetch_next_epoch=False,
            )
            dataset.set_epoch(1)
            num_samples += sum(dataset.batch_share()[0] for _ in dataset.batches())
        names = {path.name for path in kept.glob("*.mds")}
        read = [shard for shard in index if shard["raw_data"]["basename"] in names]
        stored = sum((shard["zip_data"] or shard["raw_data"])["bytes"] for shard in read)
        assert (node.num_samples, node.num_shards, node.num_fetches) == (num_samples, len(read), len(read))
        assert node.fetched_bytes == stored
        assert 0 < node.cache_bytes <= sum(shard["raw_data"]["bytes"] for shard in read)
    assert sum(node.num_samples for node in found.nodes) == 601


def test_shuffle_quality_grows_with_the_block_size(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "int"}, out=tmp_path, size_limit=1 << 10) as writer:
        for number in range(4000):
            writer.write({"x": number})

    def distance(**settings: Any) -> float:
        found = simulate(str(tmp_path), Cluster(batch_size=50, num_canonical_nodes=1, **settings))
        assert found.neighbour_distance is not None
        return found.neighbour_distance

    assert distance(shuffle=False) == 0
    blocks = [distance(shuffle_block_size=size) for size in (10, 100, 1000, 4000)]
    assert blocks == sorted(set(blocks))
    # Neighbours within a block are as far apart as in a uniform permutation of that block.
    for size, found in zip((10, 100, 1000), blocks, strict=False):
        assert 0.9 < found / (size / 4000) < 1.1
    assert 0.9 < blocks[-1] < 1.1


def test_a_cache_smaller_than_the_working_set_costs_downloads(write: Callable[..., str]) -> None:
    folder = write(600, size_limit=1000)
    free, large, small = (
        simulate(folder, Cluster(batch_size=8, num_canonical_nodes=1, cache_limit=limit)).nodes[0]
        for limit in (None, 1 << 20, 3000)
    )
    assert free == large
    assert free.num_fetches == free.num_shards
    assert small.num_fetches > 2 * small.num_shards
    assert small.cache_bytes == free.cache_bytes > 3000


@pytest.mark.slow
@settings(max_examples=cases(full=1000, sample=100), deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=3), max_size=20),
    raw=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    limit=st.integers(1, 20),
)
def test_the_simulated_cache_is_lru(steps: list[list[int]], raw: list[int], limit: int) -> None:
    kept: list[int] = []
    fetched = []
    for shard in (shard for step in steps for shard in step):
        if shard not in kept:
            fetched.append(shard)
        kept = [other for other in kept if other != shard] + [shard]
        while sum(raw[other] for other in kept) > limit and len(kept) > 1:
            kept.pop(0)
    assert _fetches(steps, raw, limit) == fetched


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), share=st.floats(0, 1))
def test_the_expected_shards_of_a_uniform_batch_equal_the_exact_count(sizes: list[int], share: float) -> None:
    total = sum(sizes)
    batch = max(1, round(share * total))
    expected = sum(1 - math.comb(total - size, batch) / math.comb(total, batch) for size in sizes)
    assert _uniform_shards(np.array(sizes), batch) == pytest.approx(expected)


def test_invalid_simulations_raise(write: Callable[..., str]) -> None:
    folder = write(20)
    with pytest.raises(ConfigError, match="20 samples for 32 ranks"):
        simulate(folder, Cluster(num_nodes=4, ranks_per_node=8))
    with pytest.raises(ConfigError, match="`num_nodes` is 0"):
        Cluster(num_nodes=0)
    with pytest.raises(ConfigError, match="divi"):
        simulate(folder, Cluster(batch_size=4, num_canonical_nodes=3))


def test_simulate_and_bench_commands(write: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(300, compression="zstd")
    before = sorted(Path(folder).iterdir())

    def call(*args: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            app([args[0], folder, *args[1:]])
        return ended.value.code, capsys.readouterr().out

    small = ("simulate", "--nodes", "2", "--ranks-per-node", "2", "--batch-size", "4", "--cache-limit", "4kb")
    code, out = call(*small)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["NODE", "0", "1", "all"]
    assert "of a uniform permutation" in out
    assert "the first 2 of 19 batches" in call(*small, "--max-samples", "32")[1]
    document = json.loads(call(*small, "--json")[1])
    assert (document["whole_epoch"], document["num_batches"], len(document["nodes"])) == (True, 19, 2)
    assert document["cluster"]["cache_limit"] == 4096
    assert call("simulate", "--cache-limit", "much")[0] == 2

    code, out = call("bench", "--batch-size", "16")
    assert code == 0
    assert out.startswith("300 samples (the whole epoch)")
    document = json.loads(call("bench", "--seconds", "1e-9", "--batch-size", "16", "--json")[1])
    assert (document["samples"], document["whole_epoch"]) == (16, False)
    assert 0 < document["first_batch_s"] <= document["seconds"]
    assert call("bench", "--seconds", "0")[0] == 2
    assert sorted(Path(folder).iterdir()) == before
