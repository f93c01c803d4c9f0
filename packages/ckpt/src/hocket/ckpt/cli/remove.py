"""`hocket-ckpt rm`, `hocket-ckpt gc` and `hocket-ckpt thin`."""

import dataclasses
import re
from collections.abc import Sequence

from rich.text import Text

from hocket.ckpt.cli.convert import parse_size
from hocket.ckpt.verbs.remove import GarbageFile, collect_garbage, remove
from hocket.ckpt.verbs.thin import OPTIMIZER_STATE, thin
from hocket.native.cli.progress import progress
from hocket.native.cli.text import columns, console, count, print_json, size

__all__ = ["parse_age", "show_collection", "show_removal", "show_thinning"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WHAT = {
    "file": "no manifest names it",
    "upload": "never finished",
    "manifest": "never got its name",
    "probe": "a commit was cut short",
    "unfinished": "a conversion was cut short",
}


def parse_age(text: str) -> float:
    """Parse an age such as `90s`, `30m`, `24h` or `7d` into seconds.

    Raises:
        ValueError: The text is not an age.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ValueError(
            f"`--min-age` is `{text}`; expected a number and a unit, such as 90s, 30m, 24h or 7d"
        )
    return float(found[1]) * _UNITS[found[2]]


def show_removal(uri: str, *, dry_run: bool, as_json: bool) -> None:
    """Remove a checkpoint and print what was removed."""
    removed = remove(uri, dry_run=dry_run)
    if as_json:
        print_json({**dataclasses.asdict(removed), "dry_run": dry_run})
        return
    verb = "would remove" if dry_run else "removed"
    step = "" if removed.step is None else f" of step {removed.step}"
    files = f"{count(removed.num_files, 'file')}, {size(removed.num_bytes)}"
    console().print(f"{verb} {removed.uri}: {removed.status}{step}, {files}")


def show_collection(prefix: str, *, min_age: str, dry_run: bool, as_json: bool) -> None:
    """Collect garbage and print what was removed."""
    collected = collect_garbage(prefix, min_age_s=parse_age(min_age), dry_run=dry_run)
    if as_json:
        print_json({**dataclasses.asdict(collected), "dry_run": dry_run})
        return
    out = console()
    for line in columns([_row(item) for item in collected.garbage], right=frozenset({2, 3})):
        out.print(line)
    for name, reason in collected.skipped.items():
        out.print(Text.assemble((f"left alone: {name}", "yellow"), f" ({reason})"))
    total = size(sum(item.num_bytes for item in collected.garbage))
    verb = "would remove" if dry_run else "removed"
    out.print(f"{verb} {count(len(collected.garbage), 'leftover')} of {total}, older than {min_age}")


def show_thinning(
    prefix: str,
    *,
    after: int,
    every: int | None,
    drop: Sequence[str],
    dry_run: bool,
    memory: str,
    unfenced: bool,
    as_json: bool,
) -> None:
    """Thin the checkpoints under a prefix and print what was dropped."""
    with progress("thinning", quiet=as_json or dry_run) as on_progress:
        report = thin(
            prefix,
            after=after,
            every=every,
            drop=drop or OPTIMIZER_STATE,
            dry_run=dry_run,
            memory_bytes=parse_size(memory),
            unfenced=unfenced,
            on_progress=on_progress,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "dry_run": dry_run})
        return
    out = console()
    rows = [
        [
            Text(one.name),
            Text(f"step {one.step}"),
            Text(count(one.num_tensors, "tensor")),
            Text(size(one.num_bytes)),
        ]
        for one in report.thinned
    ]
    for line in columns(rows, right=frozenset({1, 2, 3})):
        out.print(line)
    for name, reason in report.skipped.items():
        out.print(Text.assemble((f"left alone: {name}", "yellow"), f" ({reason})"))
    total = size(sum(one.num_bytes for one in report.thinned))
    verb = "would thin" if dry_run else "thinned"
    others = f"{len(report.whole)} stay whole, {len(report.unchanged)} have nothing to drop"
    out.print(f"{verb} {count(len(report.thinned), 'checkpoint')} by {total}; {others}")


def _row(garbage: GarbageFile) -> list[Text]:
    num_bytes = "-" if garbage.waste == "upload" else size(garbage.num_bytes)
    return [
        Text(garbage.waste),
        Text(garbage.path if garbage.name == "." else f"{garbage.name}/{garbage.path}"),
        Text(num_bytes),
        Text(f"{garbage.age_s / 3600:.0f} h"),
        Text(_WHAT[garbage.waste], "dim"),
    ]
