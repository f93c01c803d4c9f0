"""`hocket-ckpt inspect --tensor`: one tensor's numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from hocket.ckpt.cli.inspecting import describe
from hocket.ckpt.cli.text import columns, console, print_json, size
from hocket.ckpt.reader import Checkpoint

__all__ = ["show"]

_BINS = 12
_BAR_CELLS = 40
_FIRST = 6


def show(checkpoint: Checkpoint, name: str, *, as_json: bool) -> None:
    """Prints a tensor's chunks, statistics and a histogram of its finite items."""
    array = checkpoint[name]
    record = checkpoint.record(name)
    numbers = _numbers(array)
    if as_json:
        document = {
            "uri": checkpoint.uri,
            "name": name,
            **describe(record),
            "statistics": _statistics(numbers),
        }
        counts, edges = _histogram(numbers)
        print_json({**document, "histogram": {"counts": counts, "edges": edges}})
        return
    out = console()
    shape = "×".join(map(str, record.shape)) or "0-d"
    out.print(Text.assemble((name, "bold"), f"  {record.dtype}  {shape}  {size(record.num_bytes)}"))
    own = checkpoint.contents.tensors[name]
    if own.same_as is not None:
        out.print(Text(f"shares {own.same_as}", "magenta"))
    out.print()
    for line in columns(_chunk_rows(checkpoint, record.chunks), right=frozenset({3})):
        out.print(line)
    out.print()
    rows = [[Text(key), Text(_shown(value))] for key, value in _statistics(numbers).items()]
    first = ", ".join(_shown(item) for item in numbers[:_FIRST].tolist())
    rows.append([Text("first"), Text(first + (", …" if numbers.size > _FIRST else ""))])
    for line in columns(rows):
        out.print(line)
    _print_histogram(*_histogram(numbers))


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The items in one row, in a dtype that NumPy computes with; a complex number by its absolute value."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = np.abs(flat)
    # bf16 and fp8 are exact in fp32.
    is_native = flat.dtype.kind in "iub" or flat.dtype in (np.float32, np.float64)
    return flat if is_native else flat.astype(np.float32)


def _statistics(numbers: npt.NDArray[Any]) -> dict[str, Any]:
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return {"items": numbers.size, "nan": int(np.isnan(numbers).sum())}
    statistics: dict[str, Any] = {
        "items": numbers.size,
        "min": finite.min().item(),
        "max": finite.max().item(),
        "mean": float(finite.mean(dtype=np.float64)),
        "std": float(finite.std(dtype=np.float64)),
        "zero": int((finite == 0).sum()),
    }
    if finite.size != numbers.size:
        statistics["nan"] = int(np.isnan(numbers).sum())
        statistics["inf"] = int(np.isinf(numbers).sum())
    return statistics


def _histogram(numbers: npt.NDArray[Any]) -> tuple[list[int], list[float]]:
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if finite.size < 2 or finite.min() == finite.max():
        return [], []
    counts, edges = np.histogram(finite, 2 if numbers.dtype.kind == "b" else _BINS)
    return counts.tolist(), edges.tolist()


def _print_histogram(counts: list[int], edges: list[float]) -> None:
    if not counts:
        return
    out = console()
    out.print()
    rows = []
    for i, number in enumerate(counts):
        bar = "█" * round(_BAR_CELLS * number / max(counts)) or ("▏" if number else "")
        rows.append(
            [
                Text(f"{edges[i]:.4g}"),
                Text("to"),
                Text(f"{edges[i + 1]:.4g}"),
                Text(f"{number:,}"),
                Text(bar, "cyan"),
            ]
        )
    for line in columns(rows, right=frozenset({0, 2, 3})):
        out.print(line)


def _chunk_rows(checkpoint: Checkpoint, chunks: Sequence[Any]) -> list[list[Text]]:
    files = checkpoint.contents.files
    if not chunks:
        return [[Text("in the manifest"), Text(), Text(), Text()]]
    rows = []
    for chunk in chunks:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(chunk.start, chunk.size, strict=True))
        at = f"data offset {chunk.offset}"
        rows.append([Text(f"[{box}]"), Text(files[chunk.file]["path"]), Text(at), Text(size(chunk.length))])
    return rows


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
