"""`hocket-stream simulate`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.native.cli.text import OutputConsole, console, count, print_json, print_table, size
from hocket.stream.cli.page import Band, Chart, check_page, write_page
from hocket.stream.errors import ConfigError
from hocket.stream.read.dataset_index import resolve_uri
from hocket.stream.settings.weights import parse_count
from hocket.stream.simulate import Cluster, Simulation, simulate

__all__ = ["show"]


def show(
    uris: Sequence[str],
    cluster: Cluster,
    *,
    split: str | None = None,
    config: str | None = None,
    weights: Sequence[str] = (),
    epoch_size: str | None = None,
    epoch: int,
    max_samples: int,
    html: str | None = None,
    as_json: bool,
) -> None:
    """Print the downloads and the cache use of each node, the mix, and the shuffle quality.

    Args:
        uris: The streams.
        cluster: The cluster.
        split: A split of each; None for the whole.
        config: Name of the configuration of a data set on a hub.
        weights: Phases of weights, each as text.
        epoch_size: Number of samples in an epoch, if there are weights.
        epoch: The epoch.
        max_samples: Number of samples to simulate.
        html: File to write a page with pictures to.
        as_json: Print only JSON.

    Raises:
        ConfigError: A phase is not one, or the page cannot be written there; with the errors of `simulate`.
    """
    page = None if html is None else check_page(html)
    simulation = simulate(
        uris,
        cluster,
        split=split,
        config=config,
        weights=[parse_phase(phase) for phase in weights] or None,
        epoch_size=None if epoch_size is None else parse_count("epoch_size", epoch_size),
        epoch=epoch,
        max_samples=max_samples,
    )
    if page is not None:
        _write_page(page, uris, cluster, simulation)
    if as_json:
        names = [resolve_uri(uri) for uri in uris]
        found = {field.name: getattr(simulation, field.name) for field in dataclasses.fields(simulation)}
        del found["series"]
        for name in ("nodes", "streams"):
            found[name] = [dataclasses.asdict(part) for part in found[name]]
        if simulation.mix is not None:
            found["mix"] = dataclasses.asdict(simulation.mix)
        print_json(
            {
                "uri": names[0] if len(names) == 1 else names,
                "cluster": dataclasses.asdict(cluster)
                | {"num_canonical_nodes": cluster.resolved_canonical_nodes},
                **found,
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
    rows = _node_rows(simulation)
    total = sum(node.fetched_bytes for node in simulation.nodes)
    fetches = sum(node.num_fetches for node in simulation.nodes)
    samples = sum(node.num_samples for node in simulation.nodes)
    rows.append(["all", f"{samples:,}", "", f"{fetches:,}", size(total), ""])
    head = ["NODE", "SAMPLES", "SHARDS", "FETCHES", "DOWNLOAD", "CACHE NEED"]
    print_table(out, head, rows, right=frozenset(range(6)))
    out.print()
    if len(simulation.streams) > 1 or simulation.mix is not None:
        _print_mix(out, simulation)
    shards = f"{simulation.shards_per_batch:.1f}, drawn uniformly {simulation.uniform_shards_per_batch:.1f}"
    out.print(f"shards in a batch: {shards}")
    if simulation.neighbour_distance is not None:
        out.print(
            f"distance between neighbours in a shard: {simulation.neighbour_distance:.3f} "
            "of a uniform permutation"
        )
    out.print("cache need: with less, a shard is fetched again before the epoch is over")
    if page is not None:
        out.print(f"pictures: {page}")


def _seen(simulation: Simulation) -> str:
    if simulation.is_whole:
        return f"the whole epoch: {simulation.num_batches:,} batches"
    return (
        f"the first {simulation.batches_seen:,} of {simulation.num_batches:,} batches "
        "(`--max-samples` for more)"
    )


def parse_phase(text: str) -> tuple[int | str, dict[str, float]]:
    """Return a phase of weights from text such as `12.8M:web=0.7,code=0.3`; without a start, from sample 0.

    Raises:
        ConfigError: It is not one.
    """
    start, colon, parts = text.rpartition(":")
    pairs = [part.rsplit("=", 1) for part in parts.split(",") if part.strip()]
    try:
        weights = {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        weights = {}
    if not weights or len(weights) < len(pairs) or (colon and not start.strip()):
        raise ConfigError(
            f"`--weights {text}`: expected the first sample or batch and weights by stream, each once, such "
            "as `0:web=0.7,code=0.3` or `50000ba:web=1,code=1`"
        )
    return (0 if start.strip() in ("", "0") else start.strip()), weights


def _print_mix(out: OutputConsole, simulation: Simulation) -> None:
    total = sum(stream.num_read for stream in simulation.streams)
    rows = [
        [
            stream.name,
            f"{stream.num_samples:,}",
            f"{stream.num_read:,}",
            f"{100 * stream.num_read / total:.1f}%",
            f"{stream.num_read / stream.num_samples:.2f}" if stream.num_samples else "",
        ]
        for stream in simulation.streams
    ]
    print_table(out, ["STREAM", "SAMPLES", "READ", "SHARE", "PASSES"], rows, right=frozenset(range(1, 5)))
    out.print()
    if simulation.mix is None:
        return
    names = [stream.name for stream in simulation.streams]
    phases = [[f"{start:,}", *_shares(weights, names)] for start, weights in simulation.mix.phases]
    print_table(out, ["FROM SAMPLE", *names], phases, right=frozenset(range(len(names) + 1)))
    out.print()


def _shares(weights: Mapping[str, float], names: Sequence[str]) -> list[str]:
    total = sum(weights.values())
    return [f"{100 * weights[name] / total:.1f}%" for name in names]


def _write_page(page: Path, uris: Sequence[str], cluster: Cluster, simulation: Simulation) -> None:
    series, charts = simulation.series, []
    nodes = range(len(simulation.nodes))
    axis: Any = {"edges": series.batches, "axis": "batches of the epoch"}
    if simulation.mix is not None:
        mix = simulation.mix
        parts = zip(*mix.stream_samples, strict=True)
        shares = [[100 * count / max(1, sum(part)) for count in part] for part in parts]
        charts.append(
            Chart(
                title="The mix over the run",
                note="Share of each stream. Dashed lines: the weights change.",
                edges=mix.positions,
                axis="samples of the run, over all ranks and epochs",
                unit="%",
                bands=_bands([stream.name for stream in simulation.streams], zip(*shares, strict=True)),
                marks=[(start, f"from {start:,}") for start, _ in mix.phases[1:]],
            )
        )
    elif len(simulation.streams) > 1:
        names = [stream.name for stream in simulation.streams]
        charts.append(
            Chart(
                title="The mix over the epoch",
                note="Samples of each stream in equal parts of the simulated batches.",
                unit="",
                bands=_bands(names, series.stream_samples),
                **axis,
            )
        )
    limit = "no limit" if cluster.cache_limit is None else f"a limit of {size(cluster.cache_limit)}"
    names = [f"node {node}" for node in nodes]
    charts += [
        Chart(
            title="Downloads",
            note="Stored bytes that the nodes fetch, in equal parts of the simulated batches.",
            unit="MB",
            bands=_bands(names, [[value / 1e6 for value in row] for row in series.fetched_bytes]),
            **axis,
        ),
        Chart(
            title="Cache",
            note=f"Raw bytes in the cache of each node, with {limit}.",
            unit="MB",
            bands=_bands(names, [[value / 1e6 for value in row] for row in series.cache_bytes]),
            is_stacked=False,
            **axis,
        ),
    ]
    head = ["node", "samples", "shards", "fetches", "download", "cache need"]
    rows = _node_rows(simulation)
    data = f"{count(simulation.num_samples, 'sample')} in {count(simulation.num_shards, 'shard')}"
    facts = [("data", f"{', '.join(resolve_uri(uri) for uri in uris)}: {data}")]
    facts += [("batches", f"{cluster.global_batch_size:,} samples; {_seen(simulation)}")]
    write_page(page, "hocket-stream simulate", facts=facts, charts=charts, table=(head, rows))


def _bands(names: Iterable[str], rows: Iterable[Sequence[float]]) -> list[Band]:
    return [Band(name=name, values=list(row)) for name, row in zip(names, rows, strict=True)]


def _node_rows(simulation: Simulation) -> list[list[str]]:
    return [
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
