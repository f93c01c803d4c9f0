"""`hocket-stream inspect`."""

import base64
import math
from typing import Any

import numpy as np
from rich.text import Text

from hocket.native.cli.text import console, count, print_json, print_table, size
from hocket.stream.read.dataset_index import DatasetIndex, IndexEntry

__all__ = ["show"]

_FIRST_SHARDS = 10
_VALUE_CELLS = 60
_FIRST_ITEMS = 6


def show(
    uri: str,
    *,
    split: str | None = None,
    config: str | None = None,
    sample: int | None,
    unfold: bool,
    as_json: bool,
) -> None:
    """Print columns, shards and one sample.

    Args:
        uri: The data set.
        split: A split of it; None for the whole.
        config: Name of the configuration of a data set on a hub.
        sample: Number of the sample to show in storage order; None for none. Its shard is read.
        unfold: Show all shards, and long values in full.
        as_json: Print only JSON, with values in full: arrays with their type and shape, bytes in base64.

    Raises:
        ValueError: `sample` is out of range.
    """
    dataset_index = DatasetIndex(uri, split=split, config=config)
    num_samples = dataset_index.index.num_samples
    if sample is not None and not 0 <= sample < max(num_samples, 1):
        raise ValueError(f"`--sample {sample}`: expected a number from 0 to {num_samples - 1}")
    values = None if sample is None or not num_samples else _read_sample(dataset_index, sample)
    if as_json:
        print_json(_document(dataset_index, sample, values))
        return
    out = console()
    _print_head(dataset_index)
    out.print()
    mixed = set(dataset_index.index.mixed_columns)
    rows = [
        [
            name,
            kind,
            "varies" if width is None else f"{width:,}",
            "not in all shards" if name in mixed else "",
        ]
        for name, kind, width in dataset_index.index.columns
    ]
    print_table(out, ["COLUMN", "ENCODING", "BYTES", ""], rows, right=frozenset({2}))
    out.print()
    shards = dataset_index.shards if unfold else dataset_index.shards[:_FIRST_SHARDS]
    rows = [
        [shard.name, f"{shard.num_samples:,}", size(shard.raw_bytes), size(shard.stored_bytes)]
        for shard in shards
    ]
    print_table(out, ["SHARD", "SAMPLES", "RAW", "STORED"], rows, right=frozenset({1, 2, 3}))
    if len(shards) < len(dataset_index.shards):
        out.print(
            f"… and {count(len(dataset_index.shards) - len(shards), 'shard')} more (`--all` shows them)"
        )
    if values is not None:
        out.print()
        out.print(Text(f"sample {sample}", "bold"))
        for name, value in values.items():
            out.print(Text(f"{name}: {_shown(value, unfold)}"))


def _print_head(dataset_index: DatasetIndex) -> None:
    shards = dataset_index.shards
    out = console()
    out.print(Text(dataset_index.uri, "bold"))
    sizes = f"raw {size(dataset_index.raw_bytes)}, stored {size(dataset_index.stored_bytes)}"
    out.print(f"{count(dataset_index.index.num_samples, 'sample')} in {count(len(shards), 'shard')}, {sizes}")
    for title, names in (
        ("format", {shard.entry["format"] for shard in shards}),
        ("compression", {shard.entry.get("compression") or "none" for shard in shards}),
        ("hashes", {name for shard in shards for name in shard.hashes} or {"none"}),
        ("fingerprint", {dataset_index.index.fingerprint}),
    ):
        out.print(Text(f"{title}: {', '.join(sorted(names))}"))
    if dataset_index.notice is not None:
        out.print(Text(dataset_index.notice))


def _read_sample(dataset_index: DatasetIndex, number: int) -> dict[str, Any]:
    position = number
    for shard in dataset_index.shards:
        if position < shard.num_samples:
            break
        position -= shard.num_samples
    with dataset_index.open(shard) as opened:
        ((_, columns),) = opened.read(range(position, position + 1))
        decoder = opened.decoder()
        decoded = decoder.decode(columns, 1)
        return {name: decoder.encodings[name].item(column, 0) for name, column in decoded.items()}


def _shown(value: Any, unfold: bool) -> str:
    """Return a value as one line, shortened unless `unfold`."""
    if isinstance(value, np.ndarray):
        items = value.reshape(-1)
        first = items.tolist() if unfold else items[:_FIRST_ITEMS].tolist()
        rest = ", …" if len(first) < items.size else ""
        return f"{value.dtype.name} {value.shape}  [{', '.join(map(str, first))}{rest}]"
    if _is_image(value):
        return f"{value.format or 'raw'} image, {value.width}×{value.height} {value.mode}"
    if isinstance(value, bytes):
        text = repr(value if unfold else value[:_VALUE_CELLS])
        return _cut(text, unfold) + f"  ({count(len(value), 'byte')})"
    return _cut(str(value) if isinstance(value, np.generic) else repr(value), unfold)


def _is_image(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "size")


def _plain(value: Any) -> Any:
    """Return a value as JSON: arrays and bytes as objects with their type, NaN as a string."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": _plain(value.tolist())}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if _is_image(value):
        return {"format": value.format, "mode": value.mode, "shape": [value.height, value.width]}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_json = value is None or isinstance(value, (bool, int, str))
    return value if is_json or (isinstance(value, float) and math.isfinite(value)) else str(value)


def _cut(text: str, unfold: bool) -> str:
    return text if unfold or len(text) <= _VALUE_CELLS else f"{text[: _VALUE_CELLS - 1]}…"


def _document(
    dataset_index: DatasetIndex, sample: int | None, values: dict[str, Any] | None
) -> dict[str, Any]:
    index = dataset_index.index
    mixed = set(index.mixed_columns)
    return {
        "uri": dataset_index.uri,
        "fingerprint": index.fingerprint,
        "samples": index.num_samples,
        "raw_bytes": dataset_index.raw_bytes,
        "stored_bytes": dataset_index.stored_bytes,
        "columns": [
            {"name": name, "encoding": kind, "bytes": width, "in_all_shards": name not in mixed}
            for name, kind, width in index.columns
        ],
        "shards": [_describe(shard) for shard in dataset_index.shards],
        "sample": None if values is None else {"number": sample, "values": _plain(values)},
    }


def _describe(shard: IndexEntry) -> dict[str, Any]:
    return {
        "name": shard.name,
        "samples": shard.num_samples,
        "format": shard.entry["format"],
        "compression": shard.entry.get("compression"),
        "hashes": shard.hashes,
        "raw_bytes": shard.raw_bytes,
        "stored_bytes": shard.stored_bytes,
    }
