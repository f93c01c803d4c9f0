"""`hocket-stream simulate`."""

import dataclasses

from hocket.native.cli.text import console, count, print_json, print_table, size
from hocket.stream.read.dataset_index import resolve_uri
from hocket.stream.simulate import Cluster, Simulation, simulate

__all__ = ["show"]


def show(uri: str, cluster: Cluster, *, epoch: int, max_samples: int, as_json: bool) -> None:
    """Print the downloads and the cache use of each node, and the shuffle quality."""
    simulation = simulate(uri, cluster, epoch=epoch, max_samples=max_samples)
    if as_json:
        print_json(
            {
                "uri": resolve_uri(uri),
                "cluster": dataclasses.asdict(cluster)
                | {"num_canonical_nodes": cluster.resolved_canonical_nodes},
                **dataclasses.asdict(simulation),
                "whole_epoch": simulation.is_whole,
            }
        )
        return
    out = console()
    data = f"{count(simulation.num_samples, 'sample')} in {count(simulation.num_shards, 'shard')}"
    lanes = count(cluster.resolved_canonical_nodes, "lane")
    out.print(f"{data}; batches of {cluster.global_batch_size:,}, {lanes}")
    out.print(_seen(simulation))
    out.print()
    rows = [
        [
            str(number),
            f"{node.num_samples:,}",
            f"{node.num_shards:,}",
            f"{node.num_fetches:,}",
            size(node.fetched_bytes),
            size(node.cache_bytes),
        ]
        for number, node in enumerate(simulation.nodes)
    ]
    total = sum(node.fetched_bytes for node in simulation.nodes)
    fetches = sum(node.num_fetches for node in simulation.nodes)
    samples = sum(node.num_samples for node in simulation.nodes)
    rows.append(["all", f"{samples:,}", "", f"{fetches:,}", size(total), ""])
    head = ["NODE", "SAMPLES", "SHARDS", "FETCHES", "DOWNLOAD", "CACHE NEED"]
    print_table(out, head, rows, right=frozenset(range(6)))
    out.print()
    shards = f"{simulation.shards_per_batch:.1f}, drawn uniformly {simulation.uniform_shards_per_batch:.1f}"
    out.print(f"shards in a batch: {shards}")
    if simulation.neighbour_distance is not None:
        out.print(
            f"distance between neighbours in a shard: {simulation.neighbour_distance:.3f} "
            "of a uniform permutation"
        )
    out.print("cache need: with less, a shard is fetched again before the epoch is over")


def _seen(simulation: Simulation) -> str:
    if simulation.is_whole:
        return f"the whole epoch: {simulation.num_batches:,} batches"
    return (
        f"the first {simulation.batches_seen:,} of {simulation.num_batches:,} batches "
        "(`--max-samples` for more)"
    )
