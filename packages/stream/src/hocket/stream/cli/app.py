"""The subcommands of `hocket-stream` and their options; each is implemented in its own module."""

import importlib.metadata
from typing import Annotated

import typer

from hocket.native.cli.exits import run
from hocket.native.cli.verbosity import Verbose
from hocket.stream.cli.exit_codes import exit_on_error
from hocket.stream.settings.defaults import SHUFFLE_BLOCK_SIZE, SHUFFLE_SEED, SIZE_LIMIT

__all__ = ["app", "main"]

app = typer.Typer(
    name="hocket-stream",
    help="Inspect, verify, convert and benchmark data sets on a disk or an object store, without torch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 success, 1 problems found, 2 wrong usage, 3 not found, 4 refused, 5 store failed.",
)

_Uri = Annotated[str, typer.Argument(metavar="URI", help="A data set: its folder, or a URI (s3://…).")]
_Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="NAME",
        help="A folder within; or a split by the names of Parquet files or of a hub; or all.",
    ),
]
_Config = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME", help="Configuration of a data set on a hub (hf://datasets/…)."),
]
_Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures to this file, too.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hocket-stream {importlib.metadata.version('hocket-stream')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Inspect, verify, convert and benchmark data sets on a disk or an object store, without torch."""


@app.command()
def inspect(
    uri: _Uri,
    sample: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", help="Number of the sample to show, in storage order; its shard is read."
        ),
    ] = 0,
    split: _Split = None,
    config: _Config = None,
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Read only the index, and show no sample.")
    ] = False,
    unfold: Annotated[bool, typer.Option("--all", help="Show all shards, and long values in full.")] = False,
    as_json: _Json = False,
) -> None:
    """Show a data set: columns, encodings, shards, sizes, digests, compression, and one sample."""
    from hocket.stream.cli.inspect import show

    with exit_on_error(app, "inspect"):
        show(
            uri,
            split=split,
            config=config,
            sample=None if index_only else sample,
            unfold=unfold,
            as_json=as_json,
        )


@app.command()
def verify(uri: _Uri, split: _Split = None, config: _Config = None, as_json: _Json = False) -> None:
    """Read and check every shard: sizes, digests, offsets, values. Exits with 1 if one is bad."""
    from hocket.stream.cli.verify import show

    with exit_on_error(app, "verify"):
        is_sound = show(uri, split=split, config=config, as_json=as_json)
        if not is_sound:
            raise typer.Exit(1)


@app.command()
def stats(
    uri: _Uri,
    shards: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Number of shards to read, evenly spaced; by default all."),
    ] = None,
    split: _Split = None,
    config: _Config = None,
    as_json: _Json = False,
) -> None:
    """Show the sizes of the values of each column, with a histogram."""
    from hocket.stream.cli.statistics import show

    with exit_on_error(app, "stats"):
        show(uri, split=split, config=config, num_shards=shards, as_json=as_json)


@app.command()
def merge(
    uris: Annotated[
        list[str],
        typer.Argument(metavar="URI…", help="Data sets in order, or one folder that contains all of them."),
    ],
    out: Annotated[
        str | None, typer.Option(metavar="URI", help="Folder of the new index; by default the given folder.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write one index over several data sets without moving their shards."""
    from hocket.stream.cli.merge import show

    with exit_on_error(app, "merge"):
        show(uris, out=out, as_json=as_json)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A local file or folder."),
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Output location: a path or a URI.")],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="jsonl, csv, tsv, parquet, arrow, webdataset, images or datasets; detected by default.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ENCODING", help="Overrides an inferred encoding; may be repeated."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="train, validation or test, if the source has several; all to merge them."
        ),
    ] = None,
    compression: Annotated[
        str | None, typer.Option(metavar="NAME", help="br, bz2, gz, snappy or zstd, with a level: zstd:7.")
    ] = None,
    hashes: Annotated[str, typer.Option(metavar="NAMES", help="Digests, separated by commas.")] = "xxh3_64",
    size_limit: Annotated[str, typer.Option(metavar="SIZE", help="Size of a raw shard.")] = SIZE_LIMIT,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Replace an existing data set.")] = False,
    empty_as_nan: Annotated[
        bool, typer.Option("--empty-as-nan", help="CSV, TSV: empty fields of numbers become NaN.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a data set from JSON lines, CSV, TSV, Parquet, Arrow, WebDataset tar, images, or `datasets`."""
    from hocket.stream.cli.convert import show

    with exit_on_error(app, "convert"):
        show(
            source,
            destination,
            source_format=source_format,
            columns=columns or [],
            split=split,
            compression=compression,
            hashes=hashes,
            size_limit=size_limit,
            exist_ok=exist_ok,
            empty_as_nan=empty_as_nan,
            as_json=as_json,
        )


@app.command()
def simulate(
    uris: Annotated[
        list[str],
        typer.Argument(metavar="URI…", help="A data set, or the streams of a mix, by folder or URI."),
    ],
    split: _Split = None,
    config: _Config = None,
    nodes: Annotated[int, typer.Option(metavar="COUNT", help="Number of nodes.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(metavar="COUNT", help="Data-parallel ranks per node.")] = 1,
    batch_size: Annotated[int, typer.Option(metavar="SAMPLES", help="Batch size on each rank.")] = 32,
    cache_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Cache size of a node, such as 100gb; by default unlimited."),
    ] = None,
    shuffle: Annotated[bool, typer.Option(help="Shuffle, or read in storage order.")] = True,
    shuffle_seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, help="Seed of the order.")
    ] = SHUFFLE_SEED,
    shuffle_block_size: Annotated[
        int, typer.Option(metavar="SAMPLES", help="Size of a shuffle block.")
    ] = SHUFFLE_BLOCK_SIZE,
    num_canonical_nodes: Annotated[
        int | None, typer.Option(metavar="LANES", help="Number of lanes; by default as in the data set.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="START:NAME=WEIGHT,…",
            help="A phase of the mix, such as 12.8M:web=1,code=3 or 50000ba:web=1,code=1; may be repeated.",
        ),
    ] = None,
    epoch_size: Annotated[
        str | None, typer.Option(metavar="SAMPLES", help="Size of an epoch, with --weights.")
    ] = None,
    epoch: Annotated[int, typer.Option(metavar="NUMBER", help="The epoch.")] = 0,
    max_samples: Annotated[
        int, typer.Option(metavar="SAMPLES", help="Number of samples to simulate.")
    ] = 4_000_000,
    html: _Html = None,
    as_json: _Json = False,
) -> None:
    """Simulate downloads, cache use, mix and shuffle quality on a cluster; reads only the index."""
    from hocket.stream.cli.simulate import show
    from hocket.stream.settings.sizes import parse_bytes
    from hocket.stream.simulate import Cluster

    with exit_on_error(app, "simulate"):
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
        show(
            uris,
            cluster,
            split=split,
            config=config,
            weights=weights or [],
            epoch_size=epoch_size,
            epoch=epoch,
            max_samples=max_samples,
            html=html,
            as_json=as_json,
        )


@app.command()
def bench(
    uri: _Uri,
    split: _Split = None,
    config: _Config = None,
    local: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Cache folder; by default a temporary one."),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="SAMPLES", help="Batch size.")] = 64,
    shuffle: Annotated[bool, typer.Option(help="Shuffle, or read in storage order.")] = True,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time limit; by default the whole epoch is read.")
    ] = None,
    html: _Html = None,
    as_json: _Json = False,
) -> None:
    """Measure reading: samples and bytes per second, and time to the first batch."""
    from hocket.stream.cli.bench import show

    with exit_on_error(app, "bench"):
        show(
            uri,
            split=split,
            config=config,
            local=local,
            batch_size=batch_size,
            shuffle=shuffle,
            seconds=seconds,
            html=html,
            as_json=as_json,
        )


@app.command()
def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="The code in a message, such as HKT-ST02; all without it."),
    ] = None,
) -> None:
    """Explain an error: why it is raised, and what to do."""
    from hocket.native.cli.explain import explain as show

    show("hocket-stream", code, ("hocket.stream", "hocket.native"))


def main() -> None:
    """Run the command; the entry point of `hocket-stream`."""
    run("hocket-stream", app)
