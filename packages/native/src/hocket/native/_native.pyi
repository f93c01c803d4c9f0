"""The Rust extension: one function per verb, none of which holds the interpreter lock while bytes move."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, type_check_only

__version__: str

# --- store ------------------------------------------------------------------------------------

# --- stream -----------------------------------------------------------------------------------

# --- ckpt -------------------------------------------------------------------------------------
# `uri` is the checkpoint's own folder or prefix (`/run/ep0-ba1000`, `s3://bucket/run/ep0-ba1000`); `path` a file inside
# it, as the manifest names it (`data/….safetensors`). Addresses are plain integers: the caller keeps the memory alive and
# unchanged until the call returns. Every verb releases the interpreter lock and wakes within 100 ms for Ctrl-C.
# Errors are those of `hocket.ckpt.errors`, and of `hocket.native.errors` where the disk or the store failed.

CKPT_BLOCK_BYTES: int
"""Bytes of a block, the unit of digest and of reading: 1 MiB of a file's data, counted from `data_start`."""

CKPT_FORMAT: int
"""The greatest format number that this build reads and the one that it writes."""

@type_check_only
class CkptFile(TypedDict):
    """A data file as the manifest lists it."""

    path: str
    size: int
    data_start: int
    header: str
    digests: str

@type_check_only
class CkptWritten(CkptFile):
    """What `ckpt_write_file` says of the file it wrote: the manifest's record, and where each entry lies."""

    entries: dict[str, tuple[int, int]]

@type_check_only
class CkptListed(TypedDict):
    """One child of a prefix."""

    name: str
    status: Literal["committed", "partial", "foreign"]
    step: int | None
    created: str | None
    save_id: str | None
    format: int | None
    version: str | None
    files: int | None
    tensors: int | None
    bytes: int | None
    problem: str | None

def ckpt_write_file(
    uri: str,
    path: str,
    *,
    entries: Sequence[tuple[str, str, Sequence[int], int, int]],
    metadata: Mapping[str, str],
    sync: bool = True,
) -> CkptWritten:
    """Writes one data file, a plain safetensors file, straight from memory.

    The header is padded with spaces so that the data starts at a multiple of 4,096; entries stand by descending item
    size, then name. Bytes pass through a ring of aligned 4 MiB buffers (64 MiB at most), are hashed there, and go to
    disk by `O_DIRECT` where the file system takes it; an object store gets a multipart upload. Folders are made as
    needed. A file that fails half-way is removed.

    Args:
        uri: The checkpoint.
        path: The file inside it; created, never replaced.
        entries: (name, safetensors dtype such as `BF16`, shape, address, bytes) each; bytes = items × item size. An
            entry of no bytes may have address 0.
        metadata: The header's `__metadata__`.
        sync: Flush file and folder to the disk before returning. Without it the caller must not commit.

    Returns:
        `path`, `size`, `data_start`; `header` (base64 of the XXH3-128 of the bytes before `data_start`); `digests`
        (base64 of the XXH3-128 of each block of data, in order, 16 bytes each); `entries` (name → (offset in the
        data, bytes)). XXH3-128 is always its canonical form: 16 bytes, big endian, as `xxhsum -H2` prints it.

    Raises:
        CheckpointExistsError: `path` is there already.
        ValueError: A bad entry (unknown dtype, bytes that do not fit the shape, a name twice) or a bad path.
    """

def ckpt_manifest_encode(document: bytes) -> bytes:
    """Compresses a manifest document (JSON, see docs/format.md) into the bytes of `checkpoint.json.zst`.

    The small first frame (format, version, save id, step, created, counts, digest of the document's frame) is made
    from the document. What `ckpt_manifest_read` would refuse is refused here, before it is committed.

    Raises:
        CheckpointCorruptError: The document breaks a rule of the format; the message says which.
        CheckpointIncompatibleError: Its format number is not one that this build writes.
    """

def ckpt_manifest_decode(manifest: bytes, *, uri: str = "") -> bytes:
    """The document inside the bytes of a manifest, after full validation. `uri` serves the messages only."""

def ckpt_manifest_read(uri: str) -> bytes:
    """Reads `checkpoint.json.zst` of a checkpoint; returns its document, JSON, after full validation.

    Validated: both digests; the format number; file paths plain and inside; offsets within file sizes; chunks
    inside shapes and tiling each tensor exactly; nothing twice.

    Raises:
        CheckpointNotFoundError: There is nothing at `uri`.
        CheckpointPartialError: Data files without a manifest: never committed.
        CheckpointCorruptError: A digest or a rule does not hold.
        CheckpointIncompatibleError: A later format; the version that reads it is named.
    """

def ckpt_manifest_head(uri: str) -> bytes:
    """The first frame of a manifest, JSON, by one ranged read; the document is not looked at. Raises as `ckpt_manifest_read`."""

def ckpt_commit(uri: str, manifest: bytes, save_id: str, *, unfenced: bool = False) -> None:
    """Writes the manifest to its name if and only if none is there: this is the commit.

    Disk: data folder flushed, a temporary file written and flushed, linked to the name, the folder flushed. Object
    store: a conditional PUT. When the answer is lost or says "exists", the manifest is read back, and the same save
    id is success.

    Args:
        uri: The checkpoint.
        manifest: What `ckpt_manifest_encode` gave.
        save_id: The save id inside it.
        unfenced: Commit although the store lets two conditional writes through. Two savers then may both believe
            that they won.

    Raises:
        CheckpointExistsError: Another save's checkpoint is there.
        CheckpointUnfencedError: The store does not honour conditional writes (tried once per process and endpoint).
    """

def ckpt_read(
    uri: str,
    files: Sequence[CkptFile],
    reads: Sequence[tuple[int, int, int, int]],
    *,
    check: bool = True,
) -> None:
    """Reads byte ranges of data files into memory, every block checked.

    Reads are sorted, coalesced (gap ≤ 1 MiB) and run in parallel. A block that lies wholly in one destination is read
    into it and hashed there; others go through a scratch block.

    Args:
        uri: The checkpoint.
        files: Files of the manifest; only those that a read names are opened.
        reads: (index in `files`, offset in the data, bytes, destination address) each. Destinations do not overlap.
        check: False reads bare ranges and hashes nothing.

    Raises:
        CheckpointCorruptError: A block's digest differs, or a file's size. Attributes `file` (path) and `offset` (in
            the data, of the block; None for a size) let the caller name the tensor. Destinations are then undefined.
        CheckpointNotFoundError: A file is gone.
    """

def ckpt_verify_file(uri: str, file: CkptFile) -> list[tuple[int, int]]:
    """Every bad block of a file as (block, offset in the data); (-1, -data_start) stands for a header that differs.

    Raises:
        CheckpointNotFoundError: The file is not there.
        CheckpointCorruptError: It is shorter or longer than the manifest says.
    """

def ckpt_list(uri: str) -> list[CkptListed]:
    """What stands under a prefix, sorted by step, then created, then name; the uncommitted come first.

    `committed`: has a manifest whose first frame reads. `partial`: has our data files and no manifest. `foreign`:
    anything else that is a folder; `problem` says why where it has a manifest that does not read.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_delete(uri: str, name: str) -> None:
    """Removes the checkpoint `name` under `uri`: the manifest first, so that no instant shows a broken one.

    Takes only the manifest and files under `data/`, then the folder if it is empty.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        ValueError: `name` is not one plain path component.
    """

def ckpt_sizes(uri: str, paths: Sequence[str]) -> list[int | None]:
    """Bytes of each file as seen from here; None where it is not there. For the coordinator, before it commits."""

def xxh3_128(buffer: bytes) -> bytes:
    """XXH3-128 of bytes, 16 bytes in canonical (big endian) form."""
