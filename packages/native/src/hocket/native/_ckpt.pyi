"""The part of `_native.pyi` about checkpoints: those of Hocket, and those of other programs."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, final, type_check_only

# `uri` is the checkpoint's own folder or prefix (`/run/ep0-ba1000`, `s3://bucket/run/ep0-ba1000`); `path` a
# file inside it, as the manifest names it (`data/….safetensors`). Addresses are plain integers: the caller
# keeps the memory alive and unchanged until the call returns. Every verb releases the interpreter lock and
# wakes within 100 ms for Ctrl-C. Errors are those of `hocket.ckpt.errors`, and of `hocket.native.errors`
# where the disk or the store failed.

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
    frames: NotRequired[str]

@type_check_only
class CkptWritten(CkptFile):
    """What `ckpt_write_file` says of the file it wrote: the manifest's record, and where each entry lies."""

    entries: dict[str, tuple[int, int]]

@type_check_only
class CkptGarbage(TypedDict):
    """Something that `ckpt_gc` removed, or would remove. `name`: `.` for a file in the prefix itself."""

    name: str
    path: str
    waste: Literal["file", "upload", "manifest", "probe", "unfinished"]
    bytes: int
    age_s: float

@type_check_only
class CkptCollected(TypedDict):
    """What `ckpt_gc` did. `skipped`: (name, reason) of checkpoints whose manifest does not read."""

    garbage: list[CkptGarbage]
    skipped: list[tuple[str, str]]

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
    level: int | None = None,
    background: bool = False,
) -> CkptWritten:
    """Write one data file, a plain safetensors file or a compressed one, straight from memory.

    The header is padded with spaces so that the data starts at a multiple of 4,096; entries stand by
    descending item size, then name. Bytes pass through a ring of aligned 4 MiB buffers (64 MiB at most), are
    hashed there, and go to disk by `O_DIRECT` where the file system takes it; an object store gets a
    multipart upload. Folders are made as needed. A file that fails half-way is removed.

    Args:
        uri: The checkpoint.
        path: The file inside it; created, never replaced.
        entries: (name, safetensors dtype such as `BF16`, shape, address, bytes) each; bytes = items × item
            size. An entry of no bytes may have address 0.
        metadata: The header's `__metadata__`.
        sync: Flush file and folder to the disk before returning. Without it the caller must not commit.
        level: zstd's: `path` ends with `.blocks` then, and the file is the safetensors file as zstd frames,
            one for the header and one for each block.
        background: Threads that write to a disk give way to whatever else wants the processor (on Linux).

    Returns:
        `path`, `size`, `data_start`; `header` (base64 of the XXH3-128 of the bytes before `data_start`);
        `digests` (base64 of the XXH3-128 of each block of data, in order, 16 bytes each); `entries` (name →
        (offset in the data, bytes)). Of a compressed file also `frames` (base64 of the bytes of each frame,
        32 bits little endian), while `size`, `data_start` and the digests are those of what is in it.
        XXH3-128 is always its canonical form: 16 bytes, big endian, as `xxhsum -H2` prints it.

    Raises:
        CheckpointExistsError: `path` is there already.
        ValueError: A bad entry (unknown dtype, bytes that do not fit the shape, a name twice) or a bad path.
    """

def ckpt_describe_file(
    path: str,
    *,
    entries: Sequence[tuple[str, str, Sequence[int], int, int]],
    metadata: Mapping[str, str],
    level: int | None = None,
) -> CkptWritten:
    """What `ckpt_write_file` would return for these entries; with a `level` it compresses. Writes nothing."""

def ckpt_manifest_encode(document: bytes) -> bytes:
    """Compress a manifest document (JSON, see docs/format.md) into the bytes of `checkpoint.json.zst`.

    The small first frame (format, version, save id, step, created, counts, digest of the document's frame) is
    made from the document. What `Checkpoint` would refuse is refused here, before it is committed.

    Raises:
        CheckpointCorruptError: The document breaks a rule of the format; the message says which.
        CheckpointIncompatibleError: Its format number is not one that this build writes.
    """

def ckpt_manifest_decode(manifest: bytes, *, uri: str = "") -> bytes:
    """The document inside the bytes of a manifest, after full validation. `uri` serves the messages only."""

def ckpt_manifest_head(uri: str) -> bytes:
    """The first frame of a manifest, JSON, by one ranged read. Raises as `Checkpoint`."""

def ckpt_commit(
    uri: str, manifest: bytes, save_id: str, *, unfenced: bool = False, replaces: str | None = None
) -> None:
    """Write the manifest to its name if and only if none is there: this is the commit.

    Disk: data folder flushed, a temporary file written and flushed, linked to the name, the folder flushed.
    Object store: a conditional PUT. When the answer is lost or says "exists", the manifest is read back, and
    the same save id is success.

    Args:
        uri: The checkpoint.
        manifest: What `ckpt_manifest_encode` gave.
        save_id: The save id inside it.
        unfenced: Commit although the store lets two conditional writes through. Two savers then may both
            believe that they won.
        replaces: The save id of the checkpoint to replace, in one step and only if it is still that one
            (under a lock on a disk, by `If-Match` on an object store). Its files stay: remove them with
            `ckpt_delete_files`.

    Raises:
        CheckpointExistsError: Another save's checkpoint is there, and not the one to replace.
        CheckpointUnfencedError: The store does not honour conditional writes (tried once per process and
            endpoint).
    """

@final
class Checkpoint:
    """A checkpoint, opened: its contents are read and checked once, its data files ready to be read.

    The digests stay in the extension. Holds no open file; safe in threads and across forks.

    The constructor reads `checkpoint.json.zst`. Validated: both digests; the format number; file paths plain
    and inside; offsets within file sizes; chunks inside shapes and tiling each tensor exactly; nothing twice.

    Args:
        uri: The checkpoint.

    Raises:
        CheckpointNotFoundError: There is nothing at `uri`.
        CheckpointPartialError: Data files without a manifest: never committed.
        CheckpointCorruptError: A digest or a rule does not hold.
        CheckpointIncompatibleError: A later format; the version that reads it is named.
    """

    def __new__(cls, uri: str) -> Checkpoint: ...
    @staticmethod
    def open_foreign(uri: str) -> Checkpoint:
        """Recognise and list a checkpoint that is not ours. Nothing in its files is executed.

        Raises:
            CheckpointNotFoundError: Nothing that is known is there.
            CheckpointUnsafeError: A pickle asks for more than data; the name it asks for is given.
            CheckpointCorruptError: It breaks a rule of its format.
            CheckpointIncompatibleError: A form of it that is not read.
        """

    def summary(self) -> dict[str, Any]:
        """Return `save_id`, `step`, `paths` of the data files and the tagged `user` of Hocket's format.

        Raises:
            ValueError: The contents were taken before, or the checkpoint is of another format.
        """

    def take_contents(self) -> dict[str, Any]:
        """Return the contents as Python objects, once: they are not kept twice in memory.

        Of Hocket's format the fields of the manifest (docs/format.md) with paths and shapes as tuples, where
        `tensors` maps names to (dtype, shape, path, same_as, columns of the chunks, base64 of inlined data),
        `values` names to (path, tagged value), and `per_rank` is (policy, tagged values).

        Of other formats a catalogue: `format` (`dcp`, `torch`, `safetensors`), `root`, `files` ([path,
        bytes]), `tensors` (name → dtype, shape, path, same_as, chunks with file, offset, length, start, size,
        strides, wrapped), `values` (name → path and tagged value), `opaque` (name → why it is not looked
        into), `items` (the zips of a distributed checkpoint: file, offset, bytes, `torch` or `zstd`, name),
        `integer_keyed` (paths), and `digest` (hexadecimal XXH3-128 of all of them).

        Raises:
            ValueError: The contents were taken before, or a value is not JSON that Python decodes.
            RecursionError: A value is nested too deeply.
        """

    def read(self, reads: Sequence[tuple[int, int, int, int]], *, check: bool = True) -> None:
        """Read byte ranges of data files into memory.

        Reads are sorted, coalesced (gap ≤ 1 MiB) and run in parallel. A block that lies wholly in one
        destination is read into it and hashed there; others go through a scratch block. Local files that are
        not cached are read into the page cache as long as all reads of this object together fit a quarter of
        the free memory, and past it from then on.

        Args:
            reads: (index in `files`, offset in the data, bytes, destination address) each. Destinations do
                not overlap.
            check: Verify the digest of every block that a read touches. Other formats have no digests.

        Raises:
            CheckpointCorruptError: A block's digest differs, or a file's size. Attributes `file` (path) and
                `offset` (in the data, of the block; None for a size) let the caller name the tensor.
                Destinations are then undefined.
            CheckpointNotFoundError: A file is gone.
        """

def ckpt_verify_file(uri: str, file: CkptFile) -> list[tuple[int, int]]:
    """Every bad block of a file, as (block, offset in the data).

    (-1, -data_start) stands for a header that differs.

    Raises:
        CheckpointNotFoundError: The file is not there.
        CheckpointCorruptError: It is shorter or longer than the manifest says.
    """

def ckpt_list(uri: str) -> list[CkptListed]:
    """What stands under a prefix, sorted by step, then created, then name; the uncommitted come first.

    `committed`: has a manifest whose first frame reads. `partial`: has our data files and no manifest.
    `foreign`: anything else that is a folder; `problem` says why where it has a manifest that does not read.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_delete(uri: str, name: str, *, dry_run: bool = False) -> None:
    """Remove the checkpoint `name` under `uri`: the manifest first, so that no instant shows a broken one.

    Takes only the manifest and files under `data/`, then the folder if it is empty.

    Args:
        uri: The prefix.
        name: The checkpoint below it.
        dry_run: Remove nothing; refuse what would be refused.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        ValueError: `name` is not one plain path component, or a symbolic link.
    """

def ckpt_delete_files(uri: str, paths: Sequence[str]) -> None:
    """Remove data files of a checkpoint that its manifest does not name any more.

    On a disk the folders go, too, where nothing else is in them.

    Raises:
        ValueError: A path is not below `data/`.
    """

def ckpt_discard_file(uri: str, path: str) -> None:
    """Remove a data file that its writer did not finish; one that is gone already is no error.

    Raises:
        CheckpointExistsError: Somebody is writing it, as far as the file system tells.
        ValueError: The path is not below `data/`.
    """

def ckpt_gc(uri: str, *, min_age_s: float, dry_run: bool = False) -> CkptCollected:
    """Remove what no checkpoint under a prefix needs: what unfinished and replaced saves left behind.

    Data files that their folder's manifest does not name, manifests that never came to their name, hidden
    files of conversions, and unfinished multipart uploads, if the youngest of their save is `min_age_s` old.
    Files that are not ours stay, and so does what has a writer.

    Args:
        uri: The prefix.
        min_age_s: Seconds. A save that takes longer is in danger.
        dry_run: Remove nothing.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_sizes(uri: str, paths: Sequence[str]) -> list[int | None]:
    """Bytes of each file as seen from here, before a commit; None where it is not there."""

def xxh3_128(buffer: bytes) -> bytes:
    """XXH3-128 of bytes, 16 bytes in canonical (big endian) form."""

# --- checkpoints of others ----------------------------------------------------------------------
# `root` is the folder or prefix that a catalogue names, `path` a file in it. Nothing in a file is executed.

def foreign_locate(
    root: str, path: str, items: Sequence[tuple[int, int, str, Sequence[int]]]
) -> list[tuple[int, list[int] | None]]:
    """Find the tensors inside items of a distributed checkpoint's file, two small reads an item.

    Args:
        root: The checkpoint.
        path: The file.
        items: (offset, bytes, dtype, shape) each, as the catalogue has them.

    Returns:
        Where the first item of each tensor lies in the file, and the strides where they are not C order's.

    Raises:
        CheckpointCorruptError: An item does not hold what the metadata says.
    """

@final
class ForeignUnpacker:
    """The tensor in a compressed item, unpacked front to back; some MiB of it are in memory.

    Safe to use from several threads, one at a time.

    Args:
        root: The checkpoint.
        path: The file.
        item: Offset, bytes, dtype and shape of the item, as for `foreign_locate`.

    Raises:
        CheckpointCorruptError: The item does not hold what `.metadata` says, or is cut short.
    """

    def __new__(cls, root: str, path: str, item: tuple[int, int, str, Sequence[int]]) -> ForeignUnpacker: ...
    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, with what its strides leave between items."""

    @property
    def strides(self) -> list[int] | None:
        """Its strides in items, where they are not C order's."""

    def read(self, reads: Sequence[tuple[int, int, int]]) -> None:
        """Read ranges of the tensor's bytes: (offset, bytes, address) each.

        Those that ascend, in this call and over several, take one pass over the item; one that lies before
        the last begins another.

        Raises:
            ValueError: A range is not in it.
        """

def foreign_verify_zips(
    root: str, path: str, zips: Sequence[tuple[int, int, bool]]
) -> list[tuple[int, str, int, int, str]]:
    """Compare every member of zips in one file with its CRC-32.

    Args:
        root: The checkpoint.
        path: The file.
        zips: (offset, bytes, compressed or not) each.

    Returns:
        For each bad one: which zip, the member (empty where the zip is bad), offset, bytes, the problem.
    """

def foreign_lax_rules(root: str, path: str) -> list[str]:
    """What a safetensors file breaks of the format's text although readers take it.

    Raises:
        CheckpointCorruptError: No reader takes it.
    """

def crc32(address: int, num_bytes: int, value: int = 0) -> int:
    """CRC-32 of memory, carried on from `value`."""

@final
class CkptSink:
    """A file written front to back in pieces. It has its name when it is whole, never in place of another.

    One that is not finished leaves nothing. Where a file stands already, what comes is compared with it, and
    nothing is written.

    Args:
        uri: The folder or prefix.
        path: The file in it.
        size: Bytes that will come, exactly.
        data_start: Hash the bytes before it as the header, those after it in blocks.
        level: zstd's: compress header and blocks, a frame each. Only with `data_start`.

    Raises:
        CheckpointExistsError: Another file is there; `write` and `finish` raise it too.
    """

    def __new__(
        cls, uri: str, path: str, *, size: int, data_start: int | None = None, level: int | None = None
    ) -> CkptSink: ...
    @property
    def found(self) -> bool:
        """Whether the file stood there already."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def write_from(self, address: int, num_bytes: int) -> None:
        """Append memory that stays alive and unchanged until this returns."""

    def finish(self) -> CkptFile | None:
        """Make the file durable and visible; the manifest's record of it, where it was hashed.

        Raises:
            CheckpointExistsError: The name was taken meanwhile.
            ValueError: Not all bytes came.
        """

    def close(self) -> None:
        """Give an unfinished file up."""
