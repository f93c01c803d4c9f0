"""`hocket-ckpt inspect --tensor`: the statistics of one tensor."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from hocket.ckpt.cli.inspect import describe
from hocket.ckpt.document.boxes import pieces, whole
from hocket.ckpt.read.opener import open  # noqa: A004 - this package's own
from hocket.ckpt.read.reader import Checkpoint
from hocket.native.cli.text import columns, console, print_json, size

__all__ = ["show"]

_BINS = 12
_BAR_CELLS = 40
_FIRST = 6

# Each piece has several copies in memory, of up to 8 bytes per item.
_PIECE_ITEMS = 2 << 20


def show(uri: str, name: str, *, as_json: bool) -> None:
    """Print a tensor's chunks, statistics and a histogram of its finite items; reads it twice, in pieces."""
    checkpoint = open(uri, follow=False)
    record = checkpoint.record(name)
    tally = _Tally()
    for numbers in _pieces(checkpoint, name):
        tally.add(numbers)
    counts, edges = _histogram(_pieces(checkpoint, name), tally)
    if as_json:
        document = {
            "uri": checkpoint.uri,
            "name": name,
            **describe(record),
            "statistics": tally.statistics(),
        }
        print_json({**document, "histogram": {"counts": counts, "edges": edges}})
        return
    out = console()
    shape = "×".join(map(str, record.shape)) or "0-d"
    out.print(Text.assemble((name, "bold"), f"  {record.dtype}  {shape}  {size(record.num_bytes)}"))
    named_record = checkpoint.contents.tensors[name]
    if named_record.same_as is not None:
        out.print(Text(f"shares {named_record.same_as}", "magenta"))
    out.print()
    for line in columns(_chunk_rows(checkpoint, record.chunks), right=frozenset({3})):
        out.print(line)
    out.print()
    rows = [[Text(key), Text(_shown(value))] for key, value in tally.statistics().items()]
    first = ", ".join(map(_shown, tally.first))
    rows.append([Text("first"), Text(first + (", …" if tally.num_items > _FIRST else ""))])
    for line in columns(rows):
        out.print(line)
    _print_histogram(counts, edges)


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's items in flat pieces, in a dtype that NumPy can compute with."""
    record = checkpoint.record(name)
    for box in pieces(whole(record.shape), 1, _PIECE_ITEMS):
        yield _numbers(checkpoint.part(name, box))


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the items as a flat array; complex numbers as absolute values."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = np.abs(flat)
    # bf16 and fp8 are exact in fp32.
    is_native = flat.dtype.kind in "iub" or flat.dtype in (np.float32, np.float64)
    return flat if is_native else flat.astype(np.float32)


class _Tally:
    """Running statistics of a tensor's items."""

    def __init__(self) -> None:
        self.num_items = 0
        self.first: list[Any] = []
        self.lowest: Any = None
        self.highest: Any = None
        self._num_finite = self._num_zero = self._num_nan = 0
        self._mean = self._squares = 0.0

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Update the statistics with another piece."""
        self.num_items += numbers.size
        self.first += numbers[: _FIRST - len(self.first)].tolist()
        finite = numbers[np.isfinite(numbers)]
        self._num_nan += int(np.isnan(numbers).sum())
        if not finite.size:
            return
        low, high = finite.min().item(), finite.max().item()
        self.lowest = low if self.lowest is None else min(low, self.lowest)
        self.highest = high if self.highest is None else max(high, self.highest)
        self._num_zero += int((finite == 0).sum())
        # Parallel update of mean and sum of squared deviations (Chan, Golub and LeVeque, 1979).
        mean, squares = (
            float(finite.mean(dtype=np.float64)),
            float(finite.var(dtype=np.float64)) * finite.size,
        )
        total = self._num_finite + finite.size
        delta = mean - self._mean
        self._squares += squares + delta * delta * (self._num_finite * finite.size / total)
        self._mean += delta * (finite.size / total)
        self._num_finite = total

    def statistics(self) -> dict[str, Any]:
        """Return the statistics by display name."""
        if not self._num_finite:
            return {"items": self.num_items, "nan": self._num_nan}
        statistics: dict[str, Any] = {
            "items": self.num_items,
            "min": self.lowest,
            "max": self.highest,
            "mean": self._mean,
            "std": math.sqrt(self._squares / self._num_finite),
            "zero": self._num_zero,
        }
        if self._num_finite != self.num_items:
            statistics["nan"] = self._num_nan
            statistics["inf"] = self.num_items - self._num_finite - self._num_nan
        return statistics


def _histogram(parts: Iterable[npt.NDArray[Any]], tally: _Tally) -> tuple[list[int], list[float]]:
    """Return counts and bin edges; both are empty if all finite items are equal."""
    span = float(tally.lowest or 0), float(tally.highest or 0)
    if span[0] == span[1]:
        return [], []
    num_bins = 2 if isinstance(tally.lowest, bool) else _BINS
    counts = np.zeros(num_bins, np.int64)
    for numbers in parts:
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        counts += np.histogram(finite, num_bins, span)[0]
    return counts.tolist(), np.histogram_bin_edges([], num_bins, span).tolist()


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
        offset = f"data offset {chunk.offset}"
        rows.append(
            [Text(f"[{box}]"), Text(files[chunk.file]["path"]), Text(offset), Text(size(chunk.length))]
        )
    return rows


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
