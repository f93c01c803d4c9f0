"""The subcommands and flags of `hocket-ckpt`; each subcommand is implemented in its own module."""

from typing import Annotated

import typer

from hocket.ckpt.cli.exit_codes import exit_on_error
from hocket.ckpt.cli.follow import add_follow
from hocket.native.cli.exits import run
from hocket.native.cli.verbosity import Verbose

__all__ = ["app", "main"]

app = typer.Typer(
    name="hocket-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 found wanting, 2 wrong use, 3 not found, 4 refused, 5 store failed.",
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        from hocket.native import _native

        print(f"hocket-ckpt {_native.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Inspect, check and clean up checkpoints on a disk or in an object store, without torch."""


_Uri = Annotated[str, typer.Argument(metavar="URI", help="A checkpoint: its folder, or a URI (s3://…).")]
_Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
_Compression = Annotated[
    str | None,
    typer.Option(metavar="[planes+]zstd:N", help="Compress the data files of a Hocket checkpoint."),
]

_Dtype = Annotated[
    str | None, typer.Option(metavar="NAME", help="Dtype of floating-point tensors: BF16, float32, …")
]
_Include = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Take only names that match; may be repeated.")
]
_Exclude = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Leave out names that match; may be repeated.")
]
_ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest size of the tensors in one file.")]
_Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory that tensors may use.")]
_Step = Annotated[int | None, typer.Option(help="The step to record (`hocket` only).")]
_User = Annotated[str | None, typer.Option(metavar="JSON", help="The `user` part to record (`hocket` only).")]

_Unfenced = Annotated[
    bool,
    typer.Option(
        "--unfenced", help="Write to a store that ignores conditional requests; nothing else may write there."
    ),
]


@app.command()
def inspect(
    uri: _Uri,
    tensor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One tensor: its chunks, statistics and a histogram."),
    ] = None,
    unfold: Annotated[
        bool, typer.Option("--all", help="Show every layer of a repeated group, and long values in full.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show a checkpoint: tensors with shapes, dtypes and sizes, files, values and metadata."""
    from hocket.ckpt.cli.inspect import show
    from hocket.ckpt.cli.statistics import show as show_tensor

    with exit_on_error(app, "inspect"):
        if tensor is None:
            show(uri, as_json=as_json, unfold=unfold)
        else:
            show_tensor(uri, tensor, as_json=as_json)


@app.command()
def verify(
    uri: _Uri,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Check safetensors files against the specification, beyond what readers require."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Compare every block with its digest (others: CRCs, layout); name each bad tensor, file and offset."""
    from hocket.ckpt.cli.verify import show

    with exit_on_error(app, "verify"):
        is_sound = show(uri, strict=strict, as_json=as_json)
        if not is_sound:
            raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any known format.")],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="A folder or URI, or a file name for `torch`. It is never replaced."
        ),
    ],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hocket, dcp, safetensors or torch.")],
    dtype: _Dtype = None,
    include: _Include = None,
    exclude: _Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="Replace the beginning of names (`model=`: cut it off)."),
    ] = None,
    max_shard_size: _ShardSize = "5GB",
    memory: _Memory = "256MiB",
    compression: _Compression = None,
    step: _Step = None,
    user: _User = None,
    allow_expand: Annotated[
        bool, typer.Option("--allow-expand", help="Write out views that are far larger than their storage.")
    ] = False,
    unfenced: _Unfenced = False,
    as_json: _Json = False,
) -> None:
    """Convert a checkpoint of any known format to another; run it again to resume after a kill."""
    from hocket.ckpt.cli.convert import show

    with exit_on_error(app, "convert"):
        show(
            source,
            destination,
            to=to,
            dtype=dtype,
            include=include or [],
            exclude=exclude or [],
            rename=rename or [],
            max_shard_size=max_shard_size,
            memory=memory,
            compression=compression,
            unfenced=unfenced,
            step=step,
            user=user,
            allow_expand=allow_expand,
            as_json=as_json,
        )


@app.command()
def merge(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="A B… OUT", help="Checkpoints of any formats, by their steps, and the new one."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD", help="mean, ema, 1-sqrt, slerp or task (a base and differences to it)."
        ),
    ] = "mean",
    weight: Annotated[
        list[float] | None,
        typer.Option(metavar="W", help="The weight of a checkpoint, for `mean` and `task`; once for each."),
    ] = None,
    decay: Annotated[
        float | None, typer.Option(metavar="D", help="The share of the average so far, for `ema`.")
    ] = None,
    t: Annotated[
        float | None, typer.Option("--t", metavar="T", help="The share of the second one, for `slerp`.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="URI", help="What the checkpoints were trained from, for `task`.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="hocket, dcp, safetensors or torch; as the last one.")
    ] = None,
    dtype: _Dtype = None,
    include: _Include = None,
    exclude: _Exclude = None,
    copied: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Take these from the last one; running statistics of norms by default."
        ),
    ] = None,
    max_shard_size: _ShardSize = "5GB",
    memory: _Memory = "256MiB",
    compression: _Compression = None,
    step: _Step = None,
    user: _User = None,
    unfenced: _Unfenced = False,
    as_json: _Json = False,
) -> None:
    """Merge checkpoints: mean, averages over steps, slerp, task arithmetic; again to resume after a kill."""
    from hocket.ckpt.cli.merge import show

    with exit_on_error(app, "merge"):
        show(
            places,
            method=method,
            weights=weight or [],
            decay=decay,
            t=t,
            base=base,
            to=to,
            dtype=dtype,
            include=include or [],
            exclude=exclude or [],
            copied=copied or [],
            max_shard_size=max_shard_size,
            memory=memory,
            compression=compression,
            unfenced=unfenced,
            step=step,
            user=user,
            as_json=as_json,
        )


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any known format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare it with.")],
    include: _Include = None,
    exclude: _Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW", help="First replace the beginning of names of A (`model=`: cut it off)."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Show at most N differences of each kind; 0: all of them.")
    ] = 50,
    memory: _Memory = "256MiB",
    as_json: _Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, every number. Exits with 1 if they differ."""
    from hocket.ckpt.cli.diff import show

    with exit_on_error(app, "diff"):
        is_equal = show(
            a,
            b,
            include=include or [],
            exclude=exclude or [],
            rename=rename or [],
            limit=limit,
            memory=memory,
            as_json=as_json,
        )
        if not is_equal:
            raise typer.Exit(1)


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A folder of checkpoints, or a URI.")],
    as_json: _Json = False,
) -> None:
    """List the checkpoints under a prefix: committed, partial (never finished), foreign."""
    from hocket.ckpt.cli.list import show

    with exit_on_error(app, "ls"):
        show(prefix, as_json=as_json)


@app.command()
def reshard(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a folder or a URI.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the new one goes.")],
    ranks: Annotated[int, typer.Option(metavar="M", help="How many ranks will load it.")],
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that tensor data may use: 512MiB, 4GiB.")
    ] = "256MiB",
    compression: _Compression = None,
    unfenced: _Unfenced = False,
    as_json: _Json = False,
) -> None:
    """Rewrite a checkpoint for M ranks, between stores; run it again to resume after a kill."""
    from hocket.ckpt.cli.reshard import show

    with exit_on_error(app, "reshard"):
        show(
            source,
            destination,
            ranks=ranks,
            memory=memory,
            compression=compression,
            unfenced=unfenced,
            as_json=as_json,
        )


_DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing; list what would be removed.")]


@app.command()
def rm(uri: _Uri, dry_run: _DryRun = False, as_json: _Json = False) -> None:
    """Remove a checkpoint, committed or partial."""
    from hocket.ckpt.cli.remove import show_removal

    with exit_on_error(app, "rm"):
        show_removal(uri, dry_run=dry_run, as_json=as_json)


@app.command()
def gc(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A folder of checkpoints, or a URI.")],
    min_age: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Keep younger files: 90s, 30m, 24h, 7d. It must exceed the longest save."
        ),
    ] = "24h",
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Remove leftovers of unfinished work: files that no manifest names, uploads, hidden files."""
    from hocket.ckpt.cli.remove import show_collection

    with exit_on_error(app, "gc"):
        show_collection(prefix, min_age=min_age, dry_run=dry_run, as_json=as_json)


@app.command()
def thin(
    prefix: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints, or a URI.")],
    after: Annotated[
        int, typer.Option(metavar="N", help="How many of the newest checkpoints stay whole.")
    ] = 1,
    every: Annotated[
        int | None, typer.Option(metavar="K", help="Those whose step is a multiple of K stay whole, too.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Names to drop; may be repeated. Optimizer state by default."),
    ] = None,
    dry_run: _DryRun = False,
    memory: _Memory = "256MiB",
    unfenced: _Unfenced = False,
    as_json: _Json = False,
) -> None:
    """Drop the optimizer state of older checkpoints; their weights stay. Again to finish after a kill."""
    from hocket.ckpt.cli.remove import show_thinning

    with exit_on_error(app, "thin"):
        show_thinning(
            prefix,
            after=after,
            every=every,
            drop=drop or [],
            dry_run=dry_run,
            memory=memory,
            unfenced=unfenced,
            as_json=as_json,
        )


@app.command()
def demo(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="The folder to create it in; it must not hold a checkpoint yet."),
    ],
) -> None:
    """Write a small checkpoint of four ranks, to try the other subcommands on."""
    from hocket.ckpt.cli.demo import show

    with exit_on_error(app, "demo"):
        show(directory)


@app.command()
def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="The code in a message, such as HKT-CK03; all without it."),
    ] = None,
) -> None:
    """Explain an error: why it is raised, and what to do."""
    from hocket.native.cli.explain import explain as show

    show("hocket-ckpt", code, ("hocket.ckpt", "hocket.native"))


add_follow(app)


def main() -> None:
    """Run the command; the entry point of `hocket-ckpt`."""
    run("hocket-ckpt", app)
