"""Samples and data sets of the parity tests; `python peer.py COMMAND FOLDER` runs mosaicml-streaming.

The test and the peer's process both import this module, so it imports neither library at the top.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SCALARS = [
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
]
COLUMNS = {
    "bytes": "bytes", "str": "str", "int": "int", "str_int": "str_int", "str_float": "str_float",
    "str_decimal": "str_decimal", "ndarray": "ndarray", "ndarray_typed": "ndarray:int16",
    "ndarray_shaped": "ndarray:float32:2,3", "pil": "pil", "jpeg": "jpeg", "png": "png",
    "list_pil": "list[pil]", "list_jpeg": "list[jpeg]", "list_png": "list[png]",
    "jpeg_array": "jpeg_array", "jpegarray": "jpegarray", "json": "json", "pkl": "pkl",
    **{name: name for name in SCALARS},
}  # fmt: skip
TEXT_COLUMNS = {"b": "str", "a": "int", "c": "float"}
COMPRESSIONS = [None, "br:3", "bz2", "gz:6", "snappy", "zstd:7"]
HASHES = [
    "blake2b", "blake2s", "md5", "sha1", "sha224", "sha256", "sha384", "sha3_224", "sha3_256", "sha3_384",
    "sha3_512", "sha512", "xxh128", "xxh32", "xxh3_128", "xxh3_64", "xxh64",
]  # fmt: skip
#: Format, compression and size limit of each data set, by name. `mds-empty` begins with an empty shard.
SETS: dict[str, tuple[str, str | None, int]] = {
    **{f"mds-{number}": ("mds", text, 40_000) for number, text in enumerate(COMPRESSIONS)},
    **{f"{kind}-raw": (kind, None, 60) for kind in ("json", "csv", "tsv", "xsv")},
    **{f"{kind}-zstd": (kind, "zstd", 60) for kind in ("json", "csv", "tsv", "xsv")},
    "mds-empty": ("mds", "gz", 2_000),
}  # fmt: skip


def image(number: int, mode: str = "RGB") -> Any:
    pixels = np.random.default_rng(number).integers(0, 256, (8 + number, 11, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    image(number).save(out, format="JPEG")
    return out.getvalue()


def sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    images = [image(number), image(number + 1)][: number % 3]
    return {
        "bytes": bytes(range(number)), "str": "é" * number, "int": -number, "str_int": 10**20 + number,
        "str_float": number / 3, "str_decimal": Decimal("1.10") * number,
        "ndarray": rng.integers(0, 9, (1, 300) if number % 2 else (2, 2, 2)).astype(SCALARS[number % 11]),
        "ndarray_typed": np.arange(number + 1, dtype=np.int16),
        "ndarray_shaped": rng.random((2, 3), np.float32),
        "pil": image(number, ["RGB", "L", "1", "CMYK"][number % 4]), "jpeg": image(number),
        "png": image(number, "RGBA"),
        "list_pil": images, "list_jpeg": images, "list_png": images,
        "jpeg_array": [jpeg(number)] * (1 + number % 3), "jpegarray": [jpeg(number)],
        "json": {"b": [number, None], "a": "é"}, "pkl": {"set": {number}, "pair": (1, "x")},
        **{name: np.dtype(name).type(number) for name in SCALARS},
    }  # fmt: skip


def text_sample(number: int) -> dict[str, Any]:
    return {"a": number - 5, "b": f"é{number}", "c": number / 7}


def shown(value: Any) -> Any:
    """Return a value in an exact JSON form, in which the tests compare the two libraries' samples."""
    if isinstance(value, (np.ndarray, np.generic)):
        return [value.dtype.name, list(value.shape), value.tobytes().hex()]
    if isinstance(value, Image.Image):
        return [value.mode, list(value.size), hashlib.sha1(value.tobytes()).hexdigest()]
    if isinstance(value, list):
        return [shown(item) for item in value]
    return f"{type(value).__name__} {value!r}"


def write(root: Path, writers: dict[str, Any]) -> None:
    for name, (kind, compression, limit) in SETS.items():
        settings = {
            "out": str(root / name),
            "compression": compression,
            "hashes": HASHES,
            "size_limit": limit,
        }
        if kind == "xsv":
            settings |= {"separator": "::", "newline": "\r\n"}
        is_mds = kind == "mds"
        with writers[kind](columns=COLUMNS if is_mds else TEXT_COLUMNS, **settings) as writer:
            for number in range(20):
                writer.write(sample(number) if is_mds else text_sample(number))


#: The parts of a data set to be merged, for Hocket and the peer, which merges folders of one level only.
OUR_PARTS, THEIR_PARTS = ["a/deep", "b", "c"], ["a", "b", "c"]


def write_parts(root: Path, writer: Any, names: list[str]) -> None:
    """Write samples 0 to 21, divided over the folders."""
    for name, (first, end) in zip(names, [(0, 12), (12, 21), (21, 22)], strict=True):
        columns = {"id": "int", "text": "str"}
        out = str(root / name)
        with writer(columns=columns, out=out, size_limit=150, compression="zstd", hashes=["sha1"]) as into:
            for number in range(first, end):
                into.write({"id": number, "text": "é" * number})


def main() -> None:
    import streaming

    command, root = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        kinds = {
            "mds": "MDSWriter",
            "json": "JSONWriter",
            "csv": "CSVWriter",
            "tsv": "TSVWriter",
            "xsv": "XSVWriter",
        }
        write(root, {kind: getattr(streaming, name) for kind, name in kinds.items()})
        return
    if command == "merge":
        write_parts(root, streaming.MDSWriter, THEIR_PARTS)
        streaming.base.util.merge_index(str(root))
        return
    if command == "read-merged":
        streams = streaming.StreamingDataset(local=str(root), batch_size=1)
        merged = [streams[number] for number in range(len(streams))]
        (root / "read.json").write_text(json.dumps([[one["id"], one["text"]] for one in merged]))
        return
    read = {}
    for name in SETS:
        streams = streaming.StreamingDataset(local=str(root / name), batch_size=1, allow_unsafe_types=True)
        samples = [streams[number] for number in range(len(streams))]
        read[name] = [{key: shown(value) for key, value in one.items()} for one in samples]
    (root / "read.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main()
