"""`hocket-ckpt convert`."""

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import cast

from rich.text import Text

from hocket.ckpt.cli.exit_codes import in_options_of
from hocket.ckpt.formats.table import FORMATS, Format
from hocket.ckpt.verbs.convert import ConvertReport, convert
from hocket.native.cli.progress import progress
from hocket.native.cli.text import console, count, print_json, size

__all__ = ["parse_renames", "parse_size", "parse_user", "print_report", "show"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Parse a size such as `5GB` or `256MiB` into bytes.

    Raises:
        ValueError: The text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a size; expected a number and a unit, such as `5GB` or `256MiB`")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def parse_renames(pairs: Sequence[str]) -> dict[str, str]:
    """Parse pairs of the form `old=new`.

    Raises:
        ValueError: A pair has no `=`, or nothing before it.
    """
    renames = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not old or not equals:
            raise ValueError(f"`--rename {pair}`: expected `old=new`, such as `model.=` or `model=net`")
        renames[old] = new
    return renames


def parse_user(text: str | None) -> object:
    """Parse the JSON of `--user`.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'`--user {text}` is not JSON ({error}); expected a value such as `\'{{"run": "a"}}\'`'
        ) from error


def show(
    source: str,
    destination: str,
    *,
    to: str,
    dtype: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    max_shard_size: str,
    memory: str,
    compression: str | None,
    unfenced: bool,
    step: int | None,
    user: str | None,
    allow_expand: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint and print what was written."""
    start_s = time.monotonic()
    if to not in FORMATS:
        raise ValueError(f"`--to {to}`: expected one of {', '.join(FORMATS)}")
    with progress("converting", quiet=as_json) as on_progress:
        conversion = convert(
            source,
            destination,
            to=cast("Format", to),
            dtype=dtype,
            include=include,
            exclude=exclude,
            rename=parse_renames(rename),
            max_shard_bytes=parse_size(max_shard_size),
            memory_bytes=parse_size(memory),
            compression=compression,
            unfenced=unfenced,
            step=step,
            user=parse_user(user),
            allow_expand=allow_expand,
            on_progress=on_progress,
        )
    if as_json:
        print_json(dataclasses.asdict(conversion))
        return
    print_report(conversion, f"a {FORMATS[conversion.format].title}", time.monotonic() - start_s)


def print_report(conversion: ConvertReport, source_kind: str, seconds: float) -> None:
    """Print what was written, and what the destination does not hold as the source does."""
    out = console()
    out.print(Text.assemble(("written", "bold green"), f": {conversion.destination}, from {source_kind}"))
    values = f", {count(conversion.values, 'value')}" if conversion.values else ""
    reused = (
        f" ({count(conversion.files_found, 'file')} of them from an earlier run)"
        if conversion.files_found
        else ""
    )
    out.print(
        f"{count(conversion.tensors, 'tensor')}{values} in {count(conversion.files, 'file')}{reused}, "
        f"{size(conversion.num_bytes)} in {seconds:.1f} s"
    )
    if conversion.step_from is not None and conversion.step is not None:
        out.print(f"step {conversion.step}, as `{conversion.step_from}` of the source says")
    elif conversion.step == 0 and not FORMATS[cast("Format", conversion.format)].has_manifest:
        out.print(Text("step 0: the source names none that is known; `--step` gives it", "yellow"))
    if conversion.left_out:
        names = ", ".join(conversion.left_out[:5]) + (", …" if len(conversion.left_out) > 5 else "")
        out.print(
            Text(f"left out, without a place in this format: {count(len(conversion.left_out), 'value')} "
                 f"({names})", "yellow")
        )  # fmt: skip
    if conversion.beyond_range:
        names = ", ".join(list(conversion.beyond_range)[:5]) + (
            ", …" if len(conversion.beyond_range) > 5 else ""
        )
        items = count(sum(conversion.beyond_range.values()), "item")
        tensors = count(len(conversion.beyond_range), "tensor")
        out.print(
            Text(f"{items} of {tensors} ({names}) are beyond the range of the dtype and were cast as torch "
                 "does: to its largest number, infinity or NaN", "yellow")
        )  # fmt: skip
    for sentence in conversion.idle_exclude:
        out.print(Text(in_options_of(sentence, ("--exclude",)), "yellow"))
    if conversion.text_keyed:
        names = ", ".join(conversion.text_keyed[:5]) + (", …" if len(conversion.text_keyed) > 5 else "")
        out.print(
            Text(f"keys of {names} are text, such as '0', where they may have been integers: a distributed "
                 "checkpoint does not tell, and an optimizer's state needs integers", "yellow")
        )  # fmt: skip
