"""The command's verbs and flags; what each does stands in a module of its own."""

import importlib.metadata
from typing import Annotated

import typer

from hocket.stream.cli.outcomes import told
from hocket.stream.defaults import SHUFFLE_BLOCK_SIZE, SHUFFLE_SEED, SIZE_LIMIT

__all__ = ["app", "main"]

app = typer.Typer(
    name="hocket-stream",
    help="Looks at data sets, checks and makes them: on a disk or on an object store, without torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 found wanting, 2 wrong use, 3 not found, 4 refused, 5 store failed.",
)

_Uri = Annotated[str, typer.Argument(metavar="URI", help="A data set: its folder, or a URI (s3://…).")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hocket-stream {importlib.metadata.version('hocket-stream')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Looks at data sets, checks and makes them: on a disk or on an object store, without torch."""


@app.command()
def inspect(
    uri: _Uri,
    sample: Annotated[
        int, typer.Option(metavar="NUMBER", help="The sample to show, in storage order; its shard is read.")
    ] = 0,
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Read the index alone, and show no sample.")
    ] = False,
    unfold: Annotated[bool, typer.Option("--all", help="Show every shard, and long values whole.")] = False,
    as_json: _Json = False,
) -> None:
    """Show a data set: columns, encodings, shards, sizes, digests, compression, and one sample."""
    from hocket.stream.cli import inspecting

    with told():
        inspecting.show(uri, sample=None if index_only else sample, unfold=unfold, as_json=as_json)


@app.command()
def verify(uri: _Uri, as_json: _Json = False) -> None:
    """Read every shard: sizes, digests, offsets, values; name each bad one. Exits 1 where there is one."""
    from hocket.stream.cli import verifying

    with told():
        is_sound = verifying.show(uri, as_json=as_json)
        if not is_sound:
            raise typer.Exit(1)


@app.command()
def stats(
    uri: _Uri,
    shards: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Read only so many, evenly spaced; by default all.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show how large the values of each column are, with a histogram."""
    from hocket.stream.cli import statistics

    with told():
        statistics.show(uri, num_shards=shards, as_json=as_json)


@app.command()
def merge(
    uris: Annotated[
        list[str],
        typer.Argument(metavar="URI…", help="Data sets, in order; or one folder that is above all."),
    ],
    out: Annotated[
        str | None, typer.Option(metavar="URI", help="The new index's folder; by default the one folder.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write one index over several data sets, whose shards stay where they are."""
    from hocket.stream.cli import merging

    with told():
        merging.show(uris, out=out, as_json=as_json)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A file or a folder of this machine."),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where the data set goes: a path or a URI.")
    ],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="jsonl, parquet, arrow, webdataset, images or datasets; by default what file names say.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ENCODING", help="In place of what is inferred; may be repeated."),
    ] = None,
    compression: Annotated[
        str | None, typer.Option(metavar="NAME", help="br, bz2, gz, snappy or zstd, with a level: zstd:7.")
    ] = None,
    hashes: Annotated[str, typer.Option(metavar="NAMES", help="Digests, between commas.")] = "xxh3_64",
    size_limit: Annotated[str, typer.Option(metavar="SIZE", help="Of a raw shard.")] = SIZE_LIMIT,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Replace the data set that is there.")] = False,
    as_json: _Json = False,
) -> None:
    """Write a data set from JSON lines, Parquet, Arrow, WebDataset tar, images, or `datasets`."""
    from hocket.stream.cli import converting

    with told():
        converting.show(
            source,
            destination,
            source_format=source_format,
            columns=columns or [],
            compression=compression,
            hashes=hashes,
            size_limit=size_limit,
            exist_ok=exist_ok,
            as_json=as_json,
        )


@app.command()
def simulate(
    uri: _Uri,
    nodes: Annotated[int, typer.Option(metavar="COUNT", help="Machines.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(metavar="COUNT", help="Data-parallel ranks of each.")] = 1,
    batch_size: Annotated[int, typer.Option(metavar="SAMPLES", help="On each rank.")] = 32,
    cache_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Raw shards that a machine keeps: 100gb; by default all."),
    ] = None,
    shuffle: Annotated[bool, typer.Option(help="Shuffled, or in the order of storage.")] = True,
    shuffle_seed: Annotated[int, typer.Option(metavar="SEED", help="Of the order.")] = SHUFFLE_SEED,
    shuffle_block_size: Annotated[
        int, typer.Option(metavar="SAMPLES", help="Of a block.")
    ] = SHUFFLE_BLOCK_SIZE,
    num_canonical_nodes: Annotated[
        int | None, typer.Option(metavar="LANES", help="By default as the data set chooses them.")
    ] = None,
    epoch: Annotated[int, typer.Option(metavar="NUMBER", help="Whose order.")] = 0,
    max_samples: Annotated[
        int, typer.Option(metavar="SAMPLES", help="Look at so many from the epoch's beginning.")
    ] = 4_000_000,
    as_json: _Json = False,
) -> None:
    """Count what a cluster would download and keep, and how well it shuffles; reads the index alone."""
    from hocket.stream.cli import simulating
    from hocket.stream.simulating import Cluster
    from hocket.stream.sizes import parse_bytes

    with told():
        cluster = Cluster(
            num_nodes=nodes,
            ranks_per_node=ranks_per_node,
            batch_size=batch_size,
            cache_limit=None if cache_limit is None else parse_bytes("cache_limit", cache_limit),
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            num_canonical_nodes=num_canonical_nodes,
        )
        simulating.show(uri, cluster, epoch=epoch, max_samples=max_samples, as_json=as_json)


@app.command()
def bench(
    uri: _Uri,
    local: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The cache; by default an empty one that goes afterwards."),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="SAMPLES", help="Of a batch.")] = 64,
    shuffle: Annotated[bool, typer.Option(help="Shuffled, or in the order of storage.")] = True,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop after so long; by default read the epoch.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Read a data set, and say how fast that was: samples and bytes a second, time to the first batch."""
    from hocket.stream.cli import benching

    with told():
        benching.show(
            uri, local=local, batch_size=batch_size, shuffle=shuffle, seconds=seconds, as_json=as_json
        )


def main() -> None:
    """Runs the command; the entry point of `hocket-stream`."""
    app()
