"""`hocket-stream stats`."""

import dataclasses

from rich.text import Text

from hocket.native.cli.progress import progress
from hocket.native.cli.text import OutputConsole, console, count, print_json, print_table, size
from hocket.stream.read.column_stats import ColumnSizes, measure
from hocket.stream.read.dataset_index import DatasetIndex, IndexEntry

__all__ = ["show"]

_BAR_CELLS = 40


def show(
    uri: str, *, split: str | None = None, config: str | None = None, num_shards: int | None, as_json: bool
) -> None:
    """Print the sizes of each column's values, with a histogram if they differ."""
    dataset_index = DatasetIndex(uri, split=split, config=config)
    done = 0
    with progress("measuring", quiet=as_json) as show_progress:

        def on_shard(shard: IndexEntry) -> None:
            nonlocal done
            done += shard.stored_bytes
            show_progress(done, dataset_index.stored_bytes)

        columns, read = measure(uri, split=split, config=config, num_shards=num_shards, on_shard=on_shard)
    if as_json:
        print_json(
            {
                "uri": dataset_index.uri,
                "shards": len(dataset_index.shards),
                "shards_read": len(read),
                "columns": [dataclasses.asdict(column) for column in columns],
            }
        )
        return
    out = console()
    total = sum(column.num_bytes for column in columns)
    coverage = f"{len(read):,} of {count(len(dataset_index.shards), 'shard')} read"
    out.print(
        f"{coverage}: {size(total)} of values, {size(sum(shard.stored_bytes for shard in read))} stored"
    )
    out.print()
    print_table(
        out,
        ["COLUMN", "ENCODING", "VALUES", "BYTES", "SHARE", "LEAST", "MEAN", "MOST", "NUMBERS"],
        [_row(column, total) for column in columns],
        right=frozenset(range(2, 8)),
    )
    for column in columns:
        if column.least_bytes != column.most_bytes:
            _print_histogram(out, column)


def _row(column: ColumnSizes, total: int) -> list[str]:
    numbers = "" if column.least is None else f"{column.least:,.6g} to {column.most:,.6g}"
    return [
        column.name,
        column.encoding,
        f"{column.num_values:,}",
        size(column.num_bytes),
        f"{100 * column.num_bytes / max(total, 1):.1f}%",
        size(column.least_bytes),
        size(column.num_bytes / max(column.num_values, 1)),
        size(column.most_bytes),
        numbers,
    ]


def _print_histogram(out: OutputConsole, column: ColumnSizes) -> None:
    out.print()
    out.print(Text(f"{column.name}: values by size", "bold"))
    filled = [bin_index for bin_index, number in enumerate(column.bins) if number]
    for bin_index in range(filled[0], filled[-1] + 1):
        number = column.bins[bin_index]
        label = "0 B" if bin_index == 0 else f"below {size(1 << bin_index)}"
        bar = "█" * round(_BAR_CELLS * number / max(column.bins)) or ("▏" if number else "")
        out.print(Text.assemble(f"{label:>16}  {number:>12,}  ", (bar, "cyan")))
