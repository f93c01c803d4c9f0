"""`hocket-ckpt inspect`: the whole of a checkpoint."""

from collections.abc import Hashable
from typing import Any

from rich.text import Text

from hocket.ckpt.cli.text import SHARD_MARKS, columns, console, count, print_json, size
from hocket.ckpt.cli.tree import Row, rows_of
from hocket.ckpt.datafiles import stored_bytes
from hocket.ckpt.formats.catalogue import FORMATS, Catalogue
from hocket.ckpt.manifest import Manifest, TensorRecord, encode_value
from hocket.ckpt.reader import Checkpoint, open  # noqa: A004 - this package's own

__all__ = ["show", "show_tensor"]

_STRIP_CELLS = 16
_VALUE_CELLS = 60


def show(uri: str, *, as_json: bool, unfold: bool = False) -> None:
    """Prints a checkpoint's head, files, tensors and values; reads no tensor.

    Args:
        uri: The checkpoint.
        as_json: Print JSON and nothing else.
        unfold: Show each of several layers that are alike, and long values whole.
    """
    checkpoint = open(uri)
    if as_json:
        print_json(_document(checkpoint))
        return
    manifest = checkpoint.contents
    out = console()
    for line in _head(checkpoint):
        out.print(line)
    out.print()
    for line in _files(manifest):
        out.print(line)
    out.print()
    for line in _tensors(manifest, unfold):
        out.print(line)
    for lines in (_values(manifest, unfold), _opaque(manifest)):
        if lines:
            out.print()
        for line in lines:
            out.print(line)


def show_tensor(uri: str, name: str, *, as_json: bool) -> None:
    """Prints one tensor's chunks and numbers; reads it in pieces."""
    from hocket.ckpt.cli import statistics

    checkpoint = open(uri, follow=False)
    statistics.show(checkpoint, name, as_json=as_json)


def _head(checkpoint: Checkpoint) -> list[Text]:
    contents = checkpoint.contents
    num_aliases = sum(record.same_as is not None for record in contents.tensors.values())
    tied = f", {num_aliases} of them tied," if num_aliases else ""
    held = Text(
        f"{count(len(contents.tensors), 'tensor')}{tied} of {size(contents.num_bytes)} "
        f"in {count(len(contents.files), 'file')}"
    )
    uri = Text(checkpoint.uri, "bold")
    if isinstance(contents, Catalogue):
        return [uri, Text(FORMATS[contents.format]), held]
    mesh = ", ".join(f"{axis} {extent}" for axis, extent in (contents.mesh or {}).items())
    by = count(contents.world_size, "rank") + (f" ({mesh})" if mesh else "")
    saved = contents.created[:19].replace("T", " ")
    return [
        uri,
        Text(f"step {contents.step}, saved {saved} UTC by {by}"),
        held,
        Text(
            f"format {contents.format}, by {contents.writer} {contents.version}, save {contents.save_id}",
            "dim",
        ),
    ]


def _mark(file: int) -> str:
    return SHARD_MARKS[file] if file < len(SHARD_MARKS) else "+"


def _files(manifest: Manifest | Catalogue) -> list[Text]:
    num_chunks = [0] * len(manifest.files)
    for record in manifest.tensors.values():
        for chunk in record.chunks:
            num_chunks[chunk.file] += 1
    rows = [
        [
            Text(_mark(i), "cyan"),
            Text(file["path"]),
            Text(size(stored_bytes(file))),
            Text(count(num_chunks[i], "chunk")),
            Text(f"zstd, of {size(file['size'])}" if "frames" in file else ""),
        ]
        for i, file in enumerate(manifest.files)
    ]
    return [Text("files", "bold"), *columns(rows, right=frozenset({2, 3}))]


def _tensors(manifest: Manifest | Catalogue, unfold: bool) -> list[Text]:
    def kind(name: str) -> Hashable:
        record = manifest.tensors[name]
        return record.dtype, record.shape, record.same_as, len(record.chunks)

    rows = rows_of(manifest.tensors, None if unfold else kind)
    lines = columns([_tensor_row(row, manifest) for row in rows], right=frozenset({3}))
    hint = "   the last column: which file holds which part, first to last"
    if any("…" in row.label for row in rows):
        hint += "; layers that are alike stand once (--all shows each)"
    return [Text.assemble(("tensors", "bold"), (hint, "dim")), *lines]


def _tensor_row(row: Row, manifest: Manifest | Catalogue) -> list[Text]:
    label = Text.assemble((row.guides, "dim"), (row.label, "" if row.name else "bold"))
    if row.name is None:
        inside = size(
            sum(manifest.tensors[name].num_bytes for name in row.inside if not _is_alias(manifest, name))
        )
        return [label, Text(), Text(), Text(inside, "dim"), Text()]
    record = manifest.tensors[row.name]
    shape = "×".join(map(str, record.shape)) or "0-d"
    if record.same_as is not None:
        return [
            label,
            Text(record.dtype),
            Text(shape),
            Text("="),
            Text(f"shares {record.same_as}", "magenta"),
        ]
    return [label, Text(record.dtype), Text(shape), Text(size(record.num_bytes)), _strip(record)]


def _is_alias(manifest: Manifest | Catalogue, name: str) -> bool:
    return manifest.tensors[name].same_as is not None


def _strip(record: TensorRecord) -> Text:
    """Which file holds which part along the dimension that is cut, as letters."""
    if len(record.chunks) < 2:
        marks = "".join(_mark(chunk.file) for chunk in record.chunks)
        return Text(marks or ("in the manifest" if record.data is not None else "empty"), "cyan")
    dim = next(dim for dim in range(len(record.shape)) if any(chunk.start[dim] for chunk in record.chunks))
    extent = record.shape[dim]
    cells = min(_STRIP_CELLS, extent)
    line = sorted(
        (c for c in record.chunks if not any(c.start[:dim] + c.start[dim + 1 :])), key=lambda c: c.start[dim]
    )
    marks = ""
    for cell in range(cells):
        # The chunk that holds the middle of the cell; of chunks cut along other dims, the first.
        middle = (2 * cell + 1) * extent // (2 * cells)
        marks += next(_mark(c.file) for c in reversed(line) if c.start[dim] <= middle)
    return Text(marks, "cyan")


def _values(manifest: Manifest | Catalogue, unfold: bool) -> list[Text]:
    rows = [
        [Text(name), Text(repr(record.value) if unfold else _short(record.value))]
        for name, record in sorted(manifest.values.items())
    ]
    if isinstance(manifest, Manifest) and manifest.per_rank is not None:
        kept = (
            f"{len(manifest.per_rank.ranks)} kept; with another number of ranks: {manifest.per_rank.policy}"
        )
        rows.append([Text("(per rank)", "dim"), Text(kept, "dim")])
    if isinstance(manifest, Manifest) and manifest.user is not None:
        rows.append([Text("(user)", "dim"), Text(repr(manifest.user))])
    return [Text("values", "bold"), *columns(rows)] if rows else []


def _opaque(contents: Manifest | Catalogue) -> list[Text]:
    """What a foreign checkpoint holds that is not looked into, and why."""
    if not isinstance(contents, Catalogue) or not contents.opaque:
        return []
    rows = [[Text(name), Text(why, "dim")] for name, why in contents.opaque.items()]
    return [Text("not looked into", "bold"), *columns(rows)]


def _short(value: Any) -> str:
    """A value in a line: of a long list its beginning and how much is left."""
    text = repr(value)
    if len(text) <= _VALUE_CELLS:
        return text
    if not isinstance(value, list):
        return f"{text[: _VALUE_CELLS - 1]}…"
    return f"[{repr(value[0])[: _VALUE_CELLS // 2]}, … {len(value) - 1} more]"


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    contents = checkpoint.contents
    held = {
        "bytes": contents.num_bytes,
        "files": [
            {
                "path": file["path"],
                "size": file["size"],
                "stored": stored_bytes(file),
                "data_start": file["data_start"],
            }
            for file in contents.files
        ],
        "tensors": {name: describe(record) for name, record in contents.tensors.items()},
        "values": {name: encode_value(record.value) for name, record in contents.values.items()},
    }
    if isinstance(contents, Catalogue):
        return {"uri": checkpoint.uri, "format": contents.format, **held, "opaque": dict(contents.opaque)}
    return {
        "uri": checkpoint.uri,
        "format": contents.format,
        "version": contents.version,
        "writer": contents.writer,
        "save_id": contents.save_id,
        "step": contents.step,
        "created": contents.created,
        "world_size": contents.world_size,
        "mesh": None if contents.mesh is None else dict(contents.mesh),
        **held,
        "per_rank": contents.per_rank
        and {"policy": contents.per_rank.policy, "ranks": len(contents.per_rank.ranks)},
        "user": encode_value(contents.user),
    }


def describe(record: TensorRecord) -> dict[str, Any]:
    """A tensor's record for `--json`."""
    return {
        "dtype": record.dtype,
        "shape": record.shape,
        "bytes": record.num_bytes,
        "same_as": record.same_as,
        "chunks": [
            {"file": c.file, "offset": c.offset, "length": c.length, "start": c.start, "size": c.size}
            for c in record.chunks
        ],
    }
