"""`hocket-ckpt diff`."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from hocket.ckpt.cli.convert import parse_renames, parse_size
from hocket.ckpt.document.values import encode_value
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.verbs.diff import Difference, TensorDifference, diff
from hocket.native.cli.progress import progress
from hocket.native.cli.text import columns, console, count, print_json, size

__all__ = ["show"]


def show(
    a: str,
    b: str,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    limit: int,
    memory: str,
    as_json: bool,
) -> bool:
    """Compare two checkpoints and print the differences; return whether there are none."""
    start_s = time.monotonic()
    with progress("comparing", quiet=as_json) as on_progress:
        difference = diff(
            a,
            b,
            include=include,
            exclude=exclude,
            rename=parse_renames(rename),
            memory_bytes=parse_size(memory),
            on_progress=on_progress,
        )
    if as_json:
        print_json(_document(difference))
        return difference.is_empty
    out = console()
    for mark, uri, format_ in (("-", a, difference.formats[0]), ("+", b, difference.formats[1])):
        style = "red" if mark == "-" else "green"
        kind = FORMATS[format_].title
        out.print(Text.assemble((f"{mark} {uri}", style), (f"  {kind}", "dim")))
    if not difference.is_empty:
        out.print()
    for mark, names, style in (("-", difference.only_a, "red"), ("+", difference.only_b, "green")):
        _print_some(out, [Text(f"{mark} {name}", style) for name in names], mark, limit)
    shown = difference.tensors[: limit or None]
    lines = columns([_row(tensor) for tensor in shown], right=frozenset({3, 4, 5}))
    _print_some(out, lines, "~", limit, of=len(difference.tensors))
    values = [
        Text.assemble(("~ ", "yellow"), f"{name}  {_short(left)} → {_short(right)}")
        for name, (left, right) in difference.values.items()
    ]
    _print_some(out, values, "~", limit)
    out.print()
    _print_verdict(out, difference, time.monotonic() - start_s)
    return difference.is_empty


def _print_some(out: Any, lines: Sequence[Any], mark: str, limit: int, *, of: int | None = None) -> None:
    """Print at most `limit` lines, and how many of all of them are not shown."""
    shown = lines[: limit or None]
    for line in shown:
        out.print(line)
    rest = (len(lines) if of is None else of) - len(shown)
    if rest:
        out.print(Text(f"{mark} … {rest:,} more (`--limit 0` shows all)", "dim"))


def _print_verdict(out: Any, difference: Difference, seconds: float) -> None:
    compared = (
        f"{count(difference.num_equal, 'tensor')} equal; "
        f"{size(difference.num_bytes)} compared in {seconds:.1f} s"
    )
    if difference.is_empty:
        out.print(Text.assemble(("equal", "bold green"), f": {compared}"))
        return
    parts = [
        count(len(difference.tensors), "tensor") + " differ" if difference.tensors else "",
        count(len(difference.values), "value") + " differ" if difference.values else "",
        f"{len(difference.only_a)} only in the first" if difference.only_a else "",
        f"{len(difference.only_b)} only in the second" if difference.only_b else "",
    ]
    summary = ", ".join(part for part in parts if part)
    out.print(Text.assemble(("different", "bold red"), f": {summary}; {compared}"))
    if len(difference.tensors) > 1:
        kinds = Counter(tensor.kind for tensor in difference.tensors)
        told = ", ".join(f"{number} by {kind}" for kind, number in kinds.most_common())
        absolute = max(difference.tensors, key=lambda tensor: tensor.largest_absolute)
        relative = max(difference.tensors, key=lambda tensor: tensor.largest_relative)
        if absolute.num_items:
            told += (
                f"; largest absolute difference {absolute.largest_absolute:.3g} in {absolute.name}, "
                f"relative {relative.largest_relative:.3g} in {relative.name}"
            )
        out.print(Text(f"tensors: {told}", "dim"))


def _row(tensor: TensorDifference) -> list[Text]:
    dtypes, shapes = tensor.dtypes, tensor.shapes
    dtype = dtypes[0] if dtypes[0] == dtypes[1] else f"{dtypes[0]} → {dtypes[1]}"
    shape = _shape(shapes[0]) if shapes[0] == shapes[1] else f"{_shape(shapes[0])} → {_shape(shapes[1])}"
    row = [Text.assemble(("~ ", "yellow"), tensor.name), Text(dtype), Text(shape)]
    if not tensor.num_items:
        note = "" if tensor.kind == "shape" else "same numbers"
        return [*row, Text(note, "dim"), Text(), Text()]
    share = 100 * tensor.num_items / math.prod(shapes[0])
    return [
        *row,
        Text(f"{share:.3g}% of items"),
        Text(f"max abs {tensor.largest_absolute:.3g}"),
        Text(f"max rel {tensor.largest_relative:.3g}"),
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "0-d"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _number(number: float) -> float | str:
    return number if math.isfinite(number) else repr(number)


def _document(difference: Difference) -> dict[str, Any]:
    return {
        "a": difference.a,
        "b": difference.b,
        "formats": difference.formats,
        "equal": difference.is_empty,
        "only_a": difference.only_a,
        "only_b": difference.only_b,
        "tensors": {
            tensor.name: {
                "kind": tensor.kind,
                "dtypes": tensor.dtypes,
                "shapes": tensor.shapes,
                "items": tensor.num_items,
                "largest_absolute": _number(tensor.largest_absolute),
                "largest_relative": _number(tensor.largest_relative),
            }
            for tensor in difference.tensors
        },
        "values": {
            name: [encode_value(left), encode_value(right)]
            for name, (left, right) in difference.values.items()
        },
        "equal_tensors": difference.num_equal,
        "bytes": difference.num_bytes,
    }
