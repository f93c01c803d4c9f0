"""`hocket-ckpt inspect`: a whole checkpoint."""

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hocket.ckpt.cli.tree import Row, rows_of
from hocket.ckpt.document.chunks import files_of
from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.file_names import stored_bytes
from hocket.ckpt.document.records import TensorRecord, ThinnedState
from hocket.ckpt.document.values import encode_value
from hocket.ckpt.formats.companions import other_states
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.read.opener import open  # noqa: A004 - this package's own
from hocket.ckpt.read.reader import Checkpoint
from hocket.native.cli.text import Cell, Line, columns, console, count, print_json, size

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["describe", "show"]

_SHARD_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A letter for each data file, in manifest order; `+` for all further files."""

_STRIP_CELLS = 16
_VALUE_CELLS = 60


def show(uri: str, *, as_json: bool, unfold: bool = False) -> None:
    """Print a checkpoint's summary, files, tensors and values; reads no tensor data.

    Args:
        uri: The checkpoint.
        as_json: Print JSON and nothing else.
        unfold: Show every layer of a group of similar ones, and long values whole.
    """
    with gc_paused():
        _show(open(uri), as_json=as_json, unfold=unfold)


def _show(checkpoint: Checkpoint, *, as_json: bool, unfold: bool) -> None:
    if as_json:
        print_json(_document(checkpoint))
        return
    manifest = checkpoint.contents
    out = console()
    out.lines(_head(checkpoint))
    for lines in (
        _files(manifest),
        _tensors(manifest, unfold),
        _values(manifest, unfold),
        _opaque(manifest),
        _beside(checkpoint),
    ):
        if lines:
            out.print()
            out.lines(lines)


def _head(checkpoint: Checkpoint) -> list[Text]:
    contents = checkpoint.contents
    num_aliases = sum(record.same_as is not None for record in contents.tensors.values())
    tied = f", {num_aliases} of them tied," if num_aliases else ""
    summary = Text(
        f"{count(len(contents.tensors), 'tensor')}{tied} of {size(contents.num_bytes)} "
        f"in {count(len(contents.files), 'file')}"
    )
    uri = Text(checkpoint.uri, "bold")
    if not checkpoint.has_manifest:
        return [uri, Text(FORMATS[contents.format].title), summary]
    manifest = checkpoint.manifest
    mesh = ", ".join(f"{axis} {extent}" for axis, extent in (manifest.mesh or {}).items())
    ranks = count(manifest.world_size, "rank") + (f" ({mesh})" if mesh else "")
    saved = manifest.created[:19].replace("T", " ")
    delta = [] if manifest.delta is None else [Text(f"a delta to {manifest.delta.base}", "yellow")]
    thinned = [] if manifest.thinned is None else [Text(_describe_thinned(manifest.thinned), "yellow")]
    return [
        uri,
        Text(f"step {manifest.step}, saved {saved} UTC by {ranks}"),
        summary,
        *thinned,
        *delta,
        Text(
            f"format {manifest.format_number}, by {manifest.writer} {manifest.version}, "
            f"save {manifest.save_id}",
            "dim",
        ),
    ]


def _describe_thinned(thinned: ThinnedState) -> str:
    return (
        f"thinned: {count(thinned.num_tensors, 'tensor')} of {size(thinned.num_bytes)} dropped "
        f"({', '.join(thinned.dropped)}) from save {thinned.save_id}; it loads as weights"
    )


def _mark(file: int) -> str:
    return _SHARD_MARKS[file] if file < len(_SHARD_MARKS) else "+"


def _files(manifest: CheckpointContents) -> list[Cell]:
    num_chunks = [0] * len(manifest.files)
    for record in manifest.tensors.values():
        for file in files_of(record.chunks):
            num_chunks[file] += 1
    rows: list[list[Cell]] = [
        [
            Line((_mark(i), "cyan")),
            file["path"],
            size(stored_bytes(file)),
            count(num_chunks[i], "chunk"),
            _encoding(file),
        ]
        for i, file in enumerate(manifest.files)
    ]
    return [Text("files", "bold"), *columns(rows, right=frozenset({2, 3}))]


def _encoding(file: "CkptFile") -> str:
    if "frames" not in file:
        return ""
    return f"{'planes+zstd' if 'planes' in file else 'zstd'}, of {size(file['size'])}"


def _tensors(manifest: CheckpointContents, unfold: bool) -> list[Cell]:
    def kind(name: str) -> Hashable:
        record = manifest.tensors[name]
        return record.dtype, record.shape, record.same_as, len(record.chunks)

    rows = rows_of(manifest.tensors, None if unfold else kind)
    shared: dict[Hashable, list[Cell]] = {}
    lines = columns([_tensor_row(row, manifest, shared) for row in rows], right=frozenset({3}))
    hint = "   the last column: which file holds which part, first to last"
    if any("…" in row.label for row in rows):
        hint += "; layers that are alike stand once (--all shows each)"
    return [Text.assemble(("tensors", "bold"), (hint, "dim")), *lines]


def _tensor_row(row: Row, manifest: CheckpointContents, shared: dict[Hashable, list[Cell]]) -> list[Cell]:
    """Return the cells of a line; `shared` holds those of tensors that differ in their names alone."""
    label = Line((row.guides, "dim"), (row.label, "" if row.name else "bold"))
    if row.name is None:
        total_size = size(
            sum(manifest.tensors[name].num_bytes for name in row.inside if not _is_alias(manifest, name))
        )
        return [label, "", "", Line((total_size, "dim")), ""]
    record = manifest.tensors[row.name]
    if record.same_as is None and len(record.chunks) == 1:
        key = (record.dtype, record.shape, files_of(record.chunks)[0])
        if key not in shared:
            shared[key] = _record_cells(record)
        return [label, *shared[key]]
    return [label, *_record_cells(record)]


def _record_cells(record: TensorRecord) -> list[Cell]:
    shape = "×".join(map(str, record.shape)) or "0-d"
    if record.same_as is not None:
        return [record.dtype, shape, "=", Line((f"shares {record.same_as}", "magenta"))]
    return [record.dtype, shape, size(record.num_bytes), _strip(record)]


def _is_alias(manifest: CheckpointContents, name: str) -> bool:
    return manifest.tensors[name].same_as is not None


def _strip(record: TensorRecord) -> Line:
    """Return a strip of letters that shows which file holds which part along the sharded dim."""
    if len(record.chunks) < 2:
        marks = "".join(map(_mark, files_of(record.chunks)))
        return Line((marks or ("in the manifest" if record.data is not None else "empty"), "cyan"))
    dim = next(dim for dim in range(len(record.shape)) if any(chunk.start[dim] for chunk in record.chunks))
    extent = record.shape[dim]
    cells = min(_STRIP_CELLS, extent)
    line = sorted(
        (c for c in record.chunks if not any(c.start[:dim] + c.start[dim + 1 :])), key=lambda c: c.start[dim]
    )
    marks = ""
    for cell in range(cells):
        # The chunk at the middle of the cell; the first one if chunks are split along other dims too.
        middle = (2 * cell + 1) * extent // (2 * cells)
        marks += next(_mark(c.file) for c in reversed(line) if c.start[dim] <= middle)
    return Line((marks, "cyan"))


def _values(manifest: CheckpointContents, unfold: bool) -> list[Cell]:
    rows: list[list[Cell]] = [
        [name, repr(record.value) if unfold else _short(record.value)]
        for name, record in sorted(manifest.values.items())
    ]
    if manifest.per_rank is not None:
        summary = (
            f"{len(manifest.per_rank.ranks)} kept; with another number of ranks: {manifest.per_rank.policy}"
        )
        rows.append([Line(("(per rank)", "dim")), Line((summary, "dim"))])
    if manifest.user is not None:
        # A trainer keeps values of each step there, so a long run's would fill the screen.
        parts = {"(user)": manifest.user}
        if isinstance(manifest.user, dict) and not unfold:
            parts = {f"(user).{name}": value for name, value in manifest.user.items()}
        rows += [[Line((name, "dim")), (repr if unfold else _short)(value)] for name, value in parts.items()]
    return [Text("values", "bold"), *columns(rows)] if rows else []


def _opaque(contents: CheckpointContents) -> list[Cell]:
    """Return the entries of a foreign checkpoint that are not read, with the reasons."""
    if not contents.opaque:
        return []
    rows: list[list[Cell]] = [[name, Line((reason, "dim"))] for name, reason in contents.opaque.items()]
    return [Text("not looked into", "bold"), *columns(rows)]


def _beside(checkpoint: Checkpoint) -> list[Cell]:
    """Return the files of a folder that hold state and do not belong to the model in it."""
    rows: list[list[Cell]] = [
        [name, size(num_bytes)] for name, num_bytes in _other_states(checkpoint).items()
    ]
    if not rows:
        return []
    hint = "   not part of this model; each can be inspected and converted by its own path"
    return [Line(("beside it", "bold"), (hint, "dim")), *columns(rows, right=frozenset({1}))]


def _other_states(checkpoint: Checkpoint) -> dict[str, int]:
    contents = checkpoint.contents
    if not contents.root or contents.root.rstrip("/") != checkpoint.uri.rstrip("/"):
        return {}
    return other_states(contents.root, {file["path"] for file in contents.files})


def _short(value: Any) -> str:
    """Return a value on one line; a long list is truncated, with the number of omitted items."""
    text = repr(value)
    if len(text) <= _VALUE_CELLS:
        return text
    if not isinstance(value, list):
        return f"{text[: _VALUE_CELLS - 1]}…"
    return f"[{repr(value[0])[: _VALUE_CELLS // 2]}, … {len(value) - 1} more]"


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    contents = checkpoint.contents
    fields = {
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
    if not checkpoint.has_manifest:
        foreign_fields = {"beside": _other_states(checkpoint), "opaque": dict(contents.opaque)}
        return {"uri": checkpoint.uri, "format": contents.format, **fields, **foreign_fields}
    manifest = checkpoint.manifest
    return {
        "uri": checkpoint.uri,
        "format": manifest.format_number,
        "version": manifest.version,
        "writer": manifest.writer,
        "save_id": manifest.save_id,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "mesh": None if manifest.mesh is None else dict(manifest.mesh),
        **fields,
        "per_rank": manifest.per_rank
        and {"policy": manifest.per_rank.policy, "ranks": len(manifest.per_rank.ranks)},
        "user": encode_value(manifest.user),
        "thinned": manifest.thinned and dataclasses.asdict(manifest.thinned),
        "delta": manifest.delta and dataclasses.asdict(manifest.delta),
    }


def describe(record: TensorRecord) -> dict[str, Any]:
    """Return a tensor's record for `--json`."""
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
