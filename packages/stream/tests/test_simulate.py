"""`simulate` counts the shards and bytes that real readers fetch; `bench` reads the data set."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.stream import MDSWriter, Stream, StreamingDataset
from hocket.stream.cli.app import app
from hocket.stream.errors import ConfigError
from hocket.stream.simulate import Cluster, simulate
from hocket.stream.simulate.node_reads import list_fetches
from hocket.stream.simulate.simulation import _uniform_shards
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


WEIGHTS: Any = [(0, {"web": 0.7, "code": 0.3}), ("10ba", {"web": 1, "code": 3})]


def test_a_mix_reads_what_a_data_set_with_its_weights_reads(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folders = [write(200, "web", size_limit=1000), write(90, "code", size_limit=1000)]
    cluster = Cluster(num_nodes=2, batch_size=6, shuffle_block_size=32)
    found = simulate(folders, cluster, weights=WEIGHTS, epoch_size=250)
    options: dict[str, Any] = {"weights": WEIGHTS, "epoch_size": 250, "shuffle_block_size": 32}
    options |= {"shuffle": True, "batch_size": 6, "prefetch_next_epoch": False}
    for rank, node in enumerate(found.nodes):
        kept = [tmp_path / f"{rank}" / name for name in ("web", "code")]
        streams = [Stream(remote=folder, local=local) for folder, local in zip(folders, kept, strict=True)]
        dataset = StreamingDataset(streams=streams, rank=rank, world_size=2, **options)
        assert sum(dataset.batch_share()[0] for _ in dataset.batches()) == node.num_samples
        assert node.num_fetches == sum(len(list(folder.glob("*.mds"))) for folder in kept)
    assert [stream.num_read for stream in found.streams] == dataset.stream_counts
    assert found.mix is not None
    assert [start for start, _ in found.mix.phases] == [0, 120]
    assert 120 in found.mix.positions
    first, rest = ([], [])  # type: tuple[list[Any], list[Any]]
    for position, *parts in zip(found.mix.positions, *found.mix.stream_samples, strict=True):
        (first if position <= 120 else rest).append(parts)
    assert np.sum(first, axis=0).tolist() == [84, 36]
    assert abs(np.sum(rest, axis=0)[0] * 3 - np.sum(rest, axis=0)[1]) <= 4
    assert found.neighbour_distance is None
    assert sum(map(sum, found.series.stream_samples)) == 250
    for number, node in enumerate(found.nodes):
        assert sum(found.series.fetched_bytes[number]) == node.fetched_bytes


class _Page(HTMLParser):
    """A parser that counts the tags of a page, and collects what they load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loaded += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]


def test_the_pages_are_one_file_each_with_pictures_and_load_nothing(
    write: Callable[..., str], call: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    web, code = write(200, "web", size_limit=1000), write(90, "<code>", size_limit=1000)
    page = tmp_path / "mix.html"
    options = ["--nodes", "2", "--batch-size", "4", "--html", page]
    exit_code, out, _ = call(
        "simulate", web, code, *options, "--weights", "web=1,<code>=1", "--weights", "80:web=1,<code>=3"
    )
    assert exit_code == 0
    assert f"pictures: {page}" in out.replace("\n", "")
    assert "80 25.0% 75.0%" in " ".join(out.split())
    shown = _Page(page)
    assert (shown.tags["svg"], shown.tags["script"], shown.tags["code"]) == (3, 0, 0)
    assert shown.tags["polygon"] == 2 + 2, "streams and nodes"
    assert shown.tags["polyline"] == 2
    assert shown.loaded == []
    assert "url(" not in page.read_text()
    assert "@import" not in page.read_text()
    assert "from 80" in page.read_text()
    assert "&lt;code&gt;" in page.read_text()

    page = tmp_path / "bench.html"
    exit_code, out, _ = call("bench", web, "--local", tmp_path / "cache", "--html", page, "--json")
    assert exit_code == 0
    assert json.loads(out)["samples"] == 200
    shown = _Page(page)
    assert (shown.tags["svg"], shown.tags["script"], shown.loaded) == (5, 0, [])
    assert not re.search(r"\bnan\b|\binf\b", page.read_text())

    for wrong, message in (
        (["--html", tmp_path], "expected a file in a folder that exists"),
        (["--html", tmp_path / "no" / "x.html"], "expected a file in a folder that exists"),
    ):
        assert (call("simulate", web, *wrong)[0], message in call("bench", web, *wrong)[2]) == (2, True)
    for phase in ("web", "web=x", ":web=1", "", "web=1,<code>=1,web=3"):
        exit_code, _, said = call("simulate", web, code, "--weights", phase)
        assert exit_code == 2
        assert "first sample or batch and weights" in said
    exit_code, out, _ = call("simulate", web, code, "--json")
    found = json.loads(out)
    assert [stream["num_read"] for stream in found["streams"]] == [200, 90]
    assert found["mix"] is None
    assert "series" not in found


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
    found, num_bytes = list_fetches(steps, raw, limit)
    assert [shard for step in found for shard in step] == fetched
    assert num_bytes[-1:] == [sum(raw[shard] for shard in kept)] * bool(steps)


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
