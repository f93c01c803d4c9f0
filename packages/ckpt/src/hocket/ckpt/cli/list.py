"""`hocket-ckpt ls`."""

import dataclasses
import shlex

from rich.text import Text

from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.uris import child_uri, local_path
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.native import _native
from hocket.native.cli.text import columns, console, print_json, size
from hocket.native.errors import StoreError

__all__ = ["show"]

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_STYLES = {"committed": "green", "partial": "yellow", "foreign": "dim"}


def show(prefix: str, *, as_json: bool) -> None:
    """Print the checkpoints under a prefix, the newest last, each with its format and size."""
    listings = list_checkpoints(prefix)
    if all(listing.status == "foreign" for listing in listings) and _is_checkpoint(prefix):
        raise ValueError(
            f"`{prefix}` is itself a checkpoint, and `ls` takes the folder above. To look at it: "
            f"`hocket-ckpt inspect {shlex.quote(prefix)}`"
        )
    rows = [_described(listing) for listing in [*_files(local_path(prefix)), *listings]]
    if as_json:
        print_json([dataclasses.asdict(listing) | {"kind": kind} for listing, kind in rows])
        return
    out = console()
    titles = ("STATUS", "FORMAT", "STEP", "SAVED (UTC)", "FILES", "SIZE", "NAME")
    head = [Text(title, "bold") for title in titles]
    for line in columns([head, *(_row(listing, kind) for listing, kind in rows)], right=frozenset({2, 4, 5})):
        out.print(line)
    if any(listing.status == "partial" for listing in listings):
        out.print()
        out.print("partial: data files without a manifest. The save never finished, and nothing loads it.")


def _files(prefix: str) -> list[ListedCheckpoint]:
    """Return the files directly under a prefix that look like checkpoints of other formats."""
    _, objects = _native.Store(prefix).list_dirs()
    return [
        ListedCheckpoint(
            name=entry.key,
            uri=child_uri(prefix, entry.key),
            status="foreign",
            num_files=1,
            num_bytes=entry.size,
        )
        for entry in objects
        if entry.key.endswith(_SUFFIXES)
    ]


def _described(listing: ListedCheckpoint) -> tuple[ListedCheckpoint, str | None]:
    """Return a listing and the format of what it lists; files and bytes are filled in for a foreign one."""
    if listing.status != "foreign":
        return listing, "hocket"
    if listing.problem is not None:
        return listing, None
    try:
        checkpoint = open_checkpoint(listing.uri)
    except (CheckpointError, StoreError):
        return listing, None
    sizes = [file["size"] for file in checkpoint.contents.files]
    return dataclasses.replace(listing, num_files=len(sizes), num_bytes=sum(sizes)), checkpoint.format


def _row(listing: ListedCheckpoint, kind: str | None) -> list[Text]:
    created = "-" if listing.created is None else listing.created[:19].replace("T", " ")
    name = Text(listing.name)
    if listing.is_thinned:
        name.append("  (thinned)", "dim")
    if listing.base:
        name.append(f"  (delta to {listing.base})", "dim")
    if listing.problem:
        name.append(f"  ({listing.problem})", "dim")
    return [
        Text(listing.status, _STYLES[listing.status]),
        Text(kind or "-"),
        Text("-" if listing.step is None else str(listing.step)),
        Text(created),
        Text("-" if listing.num_files is None else str(listing.num_files)),
        Text("-" if listing.num_bytes is None else size(listing.num_bytes)),
        name,
    ]


def _is_checkpoint(uri: str) -> bool:
    try:
        _native.ckpt_manifest_head(uri)
    except CheckpointError:
        return False
    return True
