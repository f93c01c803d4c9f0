"""Python's own library source as a text corpus: real text that is on every machine that runs Hocket."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hocket.stream import MDSWriter
from hocket.stream.write.output import Place

LEAST_BYTES = 10_000_000
CONTEXT = 128
"""Bytes of a sample that a model predicts in the demo; a sample has one more."""
GLOBAL_BATCH = 8
"""Samples of a step in the demo, over all ranks."""


def source_files() -> list[Path]:
    """Return the `.py` files of the standard library, sorted by path, without installed packages.

    Raises:
        FileNotFoundError: This Python has no library source on disk.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in library.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(library).parts)
    )
    if not files:
        raise FileNotFoundError(
            f"no `.py` files under `{library}`: this Python ships its library without source; "
            f"run with one that has it"
        )
    return files


def samples(length: int) -> Iterator[dict[str, object]]:
    """Cut the corpus into samples.

    Args:
        length: Bytes in a sample, `L + 1`; a sample begins with the last byte of the previous sample, so that
            every byte but the first is predicted once.

    Yields:
        `id`, a number from 0, and `tokens`, `(L + 1,) uint8`.
    """
    text = np.frombuffer(b"".join(path.read_bytes() for path in source_files()), dtype=np.uint8)
    stride = length - 1
    for number, start in enumerate(range(0, len(text) - stride, stride)):
        yield {"id": number, "tokens": text[start : start + length]}


def write_corpus(out: Place, length: int) -> int:
    """Write the corpus as zstd-compressed MDS shards.

    Args:
        out: The destination: a folder, a URI, or a pair (local folder, URI).
        length: Bytes in a sample.

    Returns:
        Number of samples written.

    Raises:
        ValueError: The corpus is smaller than `LEAST_BYTES`.
    """
    count = 0
    columns = {"id": "int", "tokens": f"ndarray:uint8:{length}"}
    with MDSWriter(
        columns=columns, out=out, compression="zstd:3", hashes=["xxh3_64"], size_limit=1 << 20
    ) as writer:
        for sample in samples(length):
            writer.write(sample)
            count += 1
    if count * (length - 1) < LEAST_BYTES:
        raise ValueError(
            f"the standard library has {count * (length - 1):,} bytes of source, "
            f"at least {LEAST_BYTES:,} were expected: run with a Python that ships its whole library"
        )
    return count
