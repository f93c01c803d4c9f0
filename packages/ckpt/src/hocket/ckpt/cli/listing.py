"""`hocket-ckpt ls`."""

import dataclasses

from rich.text import Text

from hocket.ckpt.cli.text import columns, console, print_json, size
from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.listing import Listing, list_checkpoints
from hocket.native import _native

__all__ = ["show"]

_STYLES = {"committed": "green", "partial": "yellow", "foreign": "dim"}


def show(prefix: str, *, as_json: bool) -> None:
    """Prints what stands under a prefix, the newest last."""
    listings = list_checkpoints(prefix)
    if all(listing.status == "foreign" for listing in listings) and _is_checkpoint(prefix):
        raise ValueError(
            f"`{prefix}` is itself a checkpoint, and `ls` takes the folder above. To look at it: "
            f"`hocket-ckpt inspect {prefix}`"
        )
    if as_json:
        print_json([dataclasses.asdict(listing) for listing in listings])
        return
    out = console()
    head = [Text(title, "bold") for title in ("STATUS", "STEP", "SAVED (UTC)", "FILES", "SIZE", "NAME")]
    for line in columns([head, *map(_row, listings)], right=frozenset({1, 3, 4})):
        out.print(line)
    if any(listing.status == "partial" for listing in listings):
        out.print()
        out.print("partial: data files without a manifest. The save never finished, and nothing loads it.")


def _row(listing: Listing) -> list[Text]:
    created = "-" if listing.created is None else listing.created[:19].replace("T", " ")
    name = Text(listing.name)
    if listing.problem:
        name.append(f"  ({listing.problem})", "dim")
    return [
        Text(listing.status, _STYLES[listing.status]),
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
