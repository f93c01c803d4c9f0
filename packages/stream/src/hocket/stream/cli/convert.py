"""`hocket-stream convert`."""

import dataclasses
import time
from collections.abc import Sequence

from rich.text import Text

from hocket.native.cli.text import console, count, print_json, print_table, size
from hocket.stream.convert import convert
from hocket.stream.convert.detect import detect
from hocket.stream.convert.sources import source_path
from hocket.stream.read.dataset_index import DatasetIndex

__all__ = ["parse_columns", "show"]


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form `name=encoding`.

    Raises:
        ValueError: A text does not have this form.
    """
    columns = {}
    for pair in pairs:
        name, _, encoding = pair.rpartition("=")
        if not name or not encoding:
            raise ValueError(f"`--columns {pair}`: expected `name=encoding`, such as `tokens=ndarray:uint16`")
        columns[name] = encoding
    return columns


def show(
    source: str,
    destination: str,
    *,
    source_format: str | None,
    columns: Sequence[str],
    split: str | None,
    compression: str | None,
    hashes: str,
    size_limit: str,
    exist_ok: bool,
    empty_as_nan: bool,
    as_json: bool,
) -> None:
    """Convert a source and print a summary.

    Raises:
        ValueError: `empty_as_nan` is given for a source that is not CSV or TSV.
    """
    start_s = time.monotonic()
    reading = {}
    if empty_as_nan:
        source_format = detect(source_path(source)) if source_format is None else source_format
        if source_format not in ("csv", "tsv"):
            raise ValueError(
                f"`--empty-as-nan` for a source of format `{source_format}`: expected csv or tsv"
            )
        reading["empty_as_nan"] = True
    converted = convert(
        source,
        destination,
        format=source_format,
        columns=parse_columns(columns),
        split=split,
        compression=compression,
        hashes=[name.strip() for name in hashes.split(",") if name.strip()],
        size_limit=size_limit,
        exist_ok=exist_ok,
        progress_bar=not as_json,
        **reading,
    )
    dataset_index = DatasetIndex(destination)
    if as_json:
        print_json(
            {
                "uri": dataset_index.uri,
                **dataclasses.asdict(converted),
                "shards": len(dataset_index.shards),
                "raw_bytes": dataset_index.raw_bytes,
                "stored_bytes": dataset_index.stored_bytes,
            }
        )
        return
    out = console()
    out.print(Text.assemble(("written", "bold green"), f": {dataset_index.uri}"))
    shards = f"{count(converted.num_samples, 'sample')} in {count(len(dataset_index.shards), 'shard')}"
    sizes = f"raw {size(dataset_index.raw_bytes)}, stored {size(dataset_index.stored_bytes)}"
    out.print(f"{shards}, {sizes}, in {time.monotonic() - start_s:.1f} s")
    out.print()
    print_table(
        out, ["COLUMN", "ENCODING"], [[name, kind] for name, kind in sorted(converted.columns.items())]
    )
