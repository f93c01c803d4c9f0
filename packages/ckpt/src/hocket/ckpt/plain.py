"""An independent reader of formats 1 to 3 on safetensors and zstandard alone, to test the main one against.

This file imports nothing of Hocket and may be copied. It reads local folders, one whole data file at a time.
Digests are verified if `xxhash` is installed (`hocket-ckpt[xxhash]`); without it, only sizes and zstd
checksums are.
"""

import base64
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - makes numpy know bf16 and fp8 by name
import numpy as np
import safetensors
import zstandard

try:
    from xxhash import xxh3_128_digest
except ImportError:
    xxh3_128_digest = None  # type: ignore[assignment]

__all__ = ["load_tensors", "load_values", "read_manifest"]

_BLOCK_BYTES = 1 << 20
_TRAILER = bytes.fromhex("502a4d1810000000")  # a skippable frame of 16 bytes
_DTYPES = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4",
    "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest's document; raise `FileNotFoundError` without one, `ValueError` for a bad one."""
    stored = (Path(folder) / "checkpoint.json.zst").read_bytes()
    content = stored[:-24]
    _expect(stored[-24:-16] == _TRAILER, "the manifest's last frame is not its digest")
    _check(content, stored[-16:], "the manifest")
    head_text, frame = _first_frame(content)
    head = json.loads(head_text)
    _expect(head["format"] in (1, 2, 3), f"format {head['format']}: this reader knows formats 1 to 3")
    _check(frame, bytes.fromhex(head["digest"]), "the manifest's document")
    text, rest = _first_frame(frame)
    _expect(not rest, "bytes stand between the manifest's document and its digest")
    return dict(json.loads(text))


def load_tensors(folder: str | Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Load whole tensors by name, or all; raise `KeyError` for an unknown name, else as `read_manifest`."""
    document = read_manifest(folder)
    records = document["tensors"]
    origins = {name: records[name].get("same_as", name) for name in (records if names is None else names)}
    arrays = {k: np.empty(records[k]["shape"], _DTYPES[records[k]["dtype"]]) for k in origins.values()}
    for number, file in enumerate(document["files"]):
        wanted = [name for name in arrays if number in records[name].get("chunks", {}).get("file", ())]
        content = _content(Path(folder), file) if wanted else b""
        entries = dict(safetensors.deserialize(content) if wanted else {})  # type: ignore[no-untyped-call]
        for name in wanted:
            _fill(arrays[name], name, records[name]["chunks"], number, entries)
    for name, array in arrays.items():
        if "data" in records[name]:
            data = base64.b64decode(records[name]["data"])
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
    return {name: arrays[origin] for name, origin in origins.items()}


def load_values(folder: str | Path) -> dict[str, Any]:
    """Load the leaves that are not tensors, by name. Raises as `read_manifest`."""
    return {name: _decode(leaf["value"]) for name, leaf in read_manifest(folder)["values"].items()}


def _fill(array: Any, name: str, chunks: dict[str, Any], number: int, entries: dict[str, Any]) -> None:
    for i, file in enumerate(chunks["file"]):
        if file != number:
            continue
        start, size = ([column[i] for column in chunks[key]] for key in ("start", "size"))
        whole = size == list(array.shape)
        entry = entries[name if whole and name in entries else f"{name}@{','.join(map(str, start))}"]
        _expect(entry["shape"] == size, f"an entry of `{name}` has shape {entry['shape']}, expected {size}")
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        array[(*box, ...)] = np.frombuffer(bytes(entry["data"]), array.dtype).reshape(size)


def _content(folder: Path, file: dict[str, Any]) -> bytes:
    """Return a data file as plain safetensors, with every digest verified."""
    stored: bytes = (folder / str(file["path"])).read_bytes()
    start, digests = file["data_start"], base64.b64decode(file["digests"])
    if "frames" in file:  # the header and each block are zstd frames
        ends = np.cumsum(np.frombuffer(base64.b64decode(file["frames"]), "<u4"), dtype=np.int64).tolist()
        _expect(len(stored) == ends[-1], f"`{file['path']}` has {len(stored)} bytes, expected {ends[-1]}")
        pieces = [stored[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        header, *blocks = (_first_frame(piece)[0] for piece in pieces)
        for number, block in enumerate(blocks):
            blocks[number] = _items(block, number * _BLOCK_BYTES, file.get("planes", [[1, 1 << 62]]))
        stored = b"".join([header, *blocks])
    _expect(len(stored) == file["size"], f"`{file['path']}` has {len(stored)} bytes, expected {file['size']}")
    _check(stored[:start], base64.b64decode(file["header"]), f"the header of `{file['path']}`")
    for number, at in enumerate(range(start, len(stored), _BLOCK_BYTES)):
        digest = digests[16 * number : 16 * number + 16]
        _check(stored[at : at + _BLOCK_BYTES], digest, f"`{file['path']}` at data offset {at - start}")
    return stored


def _items(block: bytes, at: int, runs: list[list[int]]) -> bytes:
    """Return a block's items; of each run's items, it holds all first bytes, then all second ones."""
    ends = np.cumsum([0, *(length for _, length in runs)]).clip(at, at + len(block)) - at
    pieces = [block[a:b] for a, b in itertools.pairwise(ends)]
    planes = (np.frombuffer(piece, "u1").reshape(run[0], -1) for piece, run in zip(pieces, runs, strict=True))
    return b"".join(plane.T.tobytes() for plane in planes)


def _first_frame(stored: bytes) -> tuple[bytes, bytes]:
    """Return the contents of the first zstd frame, and the bytes after it."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        content = frame.decompress(stored)
    except zstandard.ZstdError as error:
        raise ValueError(f"a zstd frame cannot be decompressed: {error}") from error
    _expect(frame.eof, "a zstd frame is cut short")
    return bytes(content), frame.unused_data


def _decode(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_decode(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    tag, inner = next(iter(raw.items())) if len(raw) == 1 else ("", ())
    if tag == "$map":
        return {_decode(key): _decode(item) for key, item in inner}
    if tag == "$tuple":
        return tuple(map(_decode, inner))
    decoders: dict[str, Any] = {"$float": float, "$int": int, "$bytes": base64.b64decode}
    return decoders[tag](inner) if tag in decoders else {key: _decode(item) for key, item in raw.items()}


def _check(content: bytes, digest: bytes, what: str) -> None:
    matches = xxh3_128_digest is None or xxh3_128_digest(content) == digest
    _expect(matches, f"{what} does not match its digest")


def _expect(is_so: bool, problem: str) -> None:
    if not is_so:
        raise ValueError(problem)
