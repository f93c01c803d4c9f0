"""The part of `_native.pyi` about checkpoints of Hocket and of other programs."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, final, type_check_only

# `uri` is the checkpoint's own folder or prefix (`/run/ep0-ba1000`, `s3://bucket/run/ep0-ba1000`); `path` is
# a file inside it, as the manifest names it (`data/….safetensors`). Addresses are plain integers: the caller
# keeps the memory alive and unchanged until the call returns. Every function releases the interpreter lock
# and responds to Ctrl-C within 100 ms. Errors are those of `hocket.ckpt.errors`, and those of
# `hocket.native.errors` for a failure of the disk or the store.

CKPT_BLOCK_BYTES: int
"""Size of a block, the unit of digests and reads: 1 MiB of a file's data, counted from `data_start`."""

CKPT_FORMAT: int
"""The format number of a checkpoint that uses nothing of a later format; 2 to 4 are read as well."""

CKPT_INLINE_BYTES: int
"""Size limit of a tensor that is stored in the manifest itself."""

CKPT_INLINE_TOTAL_BYTES: int
"""Size limit of all tensors in the manifest together."""

CKPT_MANIFEST_NAME: str
"""The name of the manifest's file, whose presence marks a checkpoint as committed."""

CKPT_RANK_VALUES_NODE: str
"""The node of the tensors that hold values of single ranks; they are no part of the state tree."""

CKPT_MAX_DIMS: int
"""The most dims that a tensor may have."""

CKPT_VERSION_WRITER: str
"""The manifest's `writer` of versions of published weights, which may be bases of deltas."""

FOREIGN_TORCH_SUFFIXES: tuple[str, ...]
"""Suffixes of `torch.save` files, in the order in which a folder is searched."""

@type_check_only
class CkptFile(TypedDict):
    """A data file as the manifest lists it."""

    path: str
    size: int
    data_start: int
    header: str
    digests: str
    frames: NotRequired[str]
    planes: NotRequired[list[tuple[int, int]]]

@type_check_only
class CkptWritten(CkptFile):
    """The result of `ckpt_write_file`: the file's manifest record, and the location of each entry."""

    entries: dict[str, tuple[int, int]]

@type_check_only
class CkptGarbage(TypedDict):
    """An item that `ckpt_gc` removed, or would remove. `name` is `.` for a file in the prefix itself."""

    name: str
    path: str
    waste: Literal["file", "upload", "manifest", "probe", "unfinished"]
    bytes: int
    age_s: float

@type_check_only
class CkptCollected(TypedDict):
    """The result of `ckpt_gc`. `skipped`: (name, reason) of checkpoints that cannot be read or changed."""

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
    thinned: bool
    base: str | None
    problem: str | None

def ckpt_data_path(save_id: str, rank: int, number: int, *, compressed: bool) -> str:
    """Return the path of a data file inside its checkpoint."""

def ckpt_is_data_path(path: str) -> bool:
    """Return whether a path inside a checkpoint has the form of `ckpt_data_path`, for any save."""

def ckpt_entry_name(name: str, start: Sequence[int], *, is_whole: bool) -> str:
    """Return a chunk's name in the data file: the tensor's name, plus the offsets unless it is whole."""

def ckpt_entry_order(entries: Sequence[tuple[str, str]]) -> list[int]:
    """Return the indices of entries, given by dtype and name, in their order in a data file.

    They are sorted by descending item size, which aligns them, then by name.

    Raises:
        ValueError: A dtype is unknown.
    """

def ckpt_c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-order box, in items."""

def ckpt_pieces(size: Sequence[int], limit: int) -> list[tuple[list[int], list[int]]]:
    """Return start and size of boxes of at most `limit` items that, concatenated, are a box in C order.

    A piece has at least one item. An empty box has no pieces.
    """

def ckpt_write_file(
    uri: str,
    path: str,
    *,
    entries: Sequence[tuple[str, str, Sequence[int], int, int]],
    metadata: Mapping[str, str],
    sync: bool = True,
    compression: tuple[int, bool] | None = None,
    background: bool = False,
) -> CkptWritten:
    """Write one data file, a plain safetensors file or a compressed one, directly from memory.

    The header is padded with spaces so that the data starts at a multiple of 4,096 bytes. Entries are sorted
    by descending item size, then by name. Bytes are copied to a ring of aligned 4 MiB buffers (at most
    64 MiB), hashed there, and written to disk with `O_DIRECT` if the file system supports it; an object store
    gets a multipart upload. Missing folders are created. If the write fails, the partial file is removed.

    Args:
        uri: The checkpoint.
        path: The file inside it; created, never replaced.
        entries: A list of (name, safetensors dtype such as `BF16`, shape, address, bytes), with bytes = items
            × item size. An entry of 0 bytes may have address 0.
        metadata: The header's `__metadata__`.
        sync: Flush file and folder to the disk before returning. Without it the caller must not commit.
        compression: zstd level, and whether the bytes of floating dtypes are first ordered as planes. `path`
            must then end with `.blocks`, and the file is the safetensors file as zstd frames: one for the
            header and one for each block.
        background: Run the threads that write to a disk at a lower CPU priority (on Linux).

    Returns:
        `path`, `size`, `data_start`; `header` (base64 of the XXH3-128 of the bytes before `data_start`);
        `digests` (base64 of the XXH3-128 of each block of data, in order, 16 bytes each); `entries` (name →
        (offset in the data, bytes)). For a compressed file also `frames` (base64 of the size of each frame in
        bytes, 32 bits little endian), and `planes` (see docs/format.md) if there are any; `size`,
        `data_start` and the digests are then those of the uncompressed content. XXH3-128 is always in
        canonical form: 16 bytes, big endian, as `xxhsum -H2` prints it.

    Raises:
        CheckpointExistsError: `path` exists already.
        ValueError: A bad entry (unknown dtype, bytes that do not match the shape, a repeated name) or a bad
            path.
    """

@final
class CkptMemoryFile:
    """A data file in shared memory that is filled again and again, and keeps its pages between.

    When the object is freed, the file's own name is removed; the checkpoint that has it keeps it.
    """

    @staticmethod
    def create(path: str) -> CkptMemoryFile | None:
        """Create the file; return None where its folder is not in memory (`tmpfs`), as outside Linux.

        Raises:
            StoreError: The file cannot be created, for example since there is one.
        """

    def fill(
        self,
        entries: Sequence[tuple[str, str, Sequence[int], int, int]],
        metadata: Mapping[str, str],
    ) -> list[int]:
        """Copy entries into the file, each as `ckpt_write_file` takes it and in its order.

        No checkpoint may have the file any more. The memory of the entries belongs to the caller again
        afterwards.

        Returns:
            The address of each entry's copy, valid until the next call.

        Raises:
            ValueError: A bad entry.
            StoreError: The memory is full.
        """

    def publish(self, root: str, path: str) -> CkptWritten:
        """Compute the digests, on threads of a lower priority, and link the file to its name.

        Args:
            root: The folder of the checkpoint.
            path: The file inside it, as for `ckpt_write_file`, which says what is returned.

        Raises:
            CheckpointExistsError: There is a file of that name.
            ValueError: The file is not filled since the last call, or the path is not that of a data file.
        """

def ckpt_pack_report(
    written: CkptWritten | None,
    chunks: Sequence[tuple[str, int | None, Sequence[int], Sequence[int]]],
    per_rank: str | None = None,
) -> bytes:
    """Pack a rank's report of the file that it wrote, for `CkptReports`.

    Args:
        written: The result of `ckpt_write_file`; None if the rank wrote no file.
        chunks: (name of the entry in the file, index of the tensor in the rank's tree, start, size) of each
            chunk; the index is None for a tensor of bytes that holds the rank's own values.
        per_rank: The rank's own values as JSON, for the manifest.

    Raises:
        ValueError: `per_rank` is not JSON.
        KeyError: The file has no such entry.
    """

@final
class CkptReports:
    """The reports of the ranks of a save, which are joined to a manifest without the interpreter's lock."""

    def __new__(cls, reports: Sequence[bytes]) -> CkptReports:
        """Unpack the files of reports that `ckpt_pack_report` returned, in the order of the ranks.

        Raises:
            ValueError: Bytes that are no report; the message names the rank.
        """

    def files(self) -> list[tuple[int, str, int]]:
        """Return rank, path and stored bytes of each file, in the order of the ranks."""

    def join(
        self,
        document: bytes,
        *,
        trees: Sequence[Sequence[int]],
        tree_of: Sequence[int],
        holders: Sequence[Sequence[int]],
        holders_of: Sequence[int],
        inlined: Mapping[str, bytes],
    ) -> bytes:
        """Return the encoded manifest with the files and chunks of all reports, checked as usual.

        A chunk is left out if its rank is not among the holders of its tensor. The format's number becomes
        the least that has the fields in use.

        Args:
            document: The document as JSON without files, chunks, inlined tensors and values of ranks; those
                are left out if no rank reports any.
            trees: For each distinct tree of the ranks, the index in the document of each of its tensors.
            tree_of: The index in `trees` of each rank's tree.
            holders: Distinct groups of ranks that hold parts of a tensor.
            holders_of: The index in `holders` of each tensor of the document.
            inlined: The bytes of the tensors that the document has itself, by name.

        Raises:
            CheckpointCorruptError: The document violates a rule; the message names it.
            ValueError: A report does not match the trees; the message names its rank.
        """

@final
class CkptShardPlan:
    """The files and chunks of a checkpoint whose tensors are cut along dim 0 for a number of ranks."""

    def __new__(
        cls, tensors: Sequence[tuple[str, str, Sequence[int]]], *, ranks: int, file_bytes: int
    ) -> CkptShardPlan:
        """Cut tensors as `torch.chunk` does; rank 0 gets those without dims.

        Args:
            tensors: Name, safetensors dtype and shape of each tensor.
            ranks: The number of ranks.
            file_bytes: The most data of a file. A rank has several files if it has more, and a larger part of
                a tensor is cut further, down to single items.

        Raises:
            ValueError: A file would have two entries of one name, or one with a reserved name; or an unknown
                dtype.
        """

    def files(self) -> list[tuple[int, int]]:
        """Return the rank of each file, and the file's number among those of its rank."""

    def file(
        self, index: int, metadata: Mapping[str, str]
    ) -> tuple[bytes, list[tuple[int, list[int], list[int]]]]:
        """Return the bytes of a file before its data, and its entries in order: tensor, start and size.

        Raises:
            ValueError: There is no such file, or the header is larger than readers accept.
        """

    def chunks(self, tensor: int) -> ChunkColumns | None:
        """Return the chunks of a tensor; None if it has none."""

    def encode(self, document: bytes) -> bytes:
        """Return the encoded manifest of a document that lacks only the chunks, checked as usual.

        Raises:
            CheckpointCorruptError: The document violates a rule; the message names it.
            ValueError: The document is that of other tensors.
        """

def ckpt_manifest_encode(document: bytes) -> bytes:
    """Compress a manifest document (JSON, see docs/format.md) into the bytes of `checkpoint.json.zst`.

    The small first frame (format, version, save id, step, created, counts, digest of the document's frame) is
    generated from the document. A document that `Checkpoint` would reject is rejected here, before a commit.

    Raises:
        CheckpointCorruptError: The document breaks a rule of the format; the message says which.
        CheckpointIncompatibleError: Its format number is not one that this build writes.
    """

def ckpt_manifest_decode(manifest: bytes, *, uri: str = "") -> bytes:
    """Return the document in the bytes of a manifest, after full validation; `uri` is for messages only."""

def ckpt_manifest_head(uri: str) -> bytes:
    """Return the first frame of a manifest (JSON) with one ranged read. Raises as `Checkpoint`."""

def ckpt_manifest_stored(uri: str) -> bytes:
    """Return the bytes of `checkpoint.json.zst` without a check, for `Checkpoint(uri, stored)`.

    Raises:
        CheckpointNotFoundError: There is nothing at `uri`.
        CheckpointPartialError: There are data files but no manifest: the checkpoint was never committed.
    """

def ckpt_check_fence(uri: str, save_id: str) -> None:
    """Test whether an object store honours the conditional write of a commit; a disk shows it at the commit.

    The store is tested once per process and endpoint, on a key of its own that is deleted again.

    Args:
        uri: The checkpoint.
        save_id: 32 hexadecimal digits, for the name of that key.

    Raises:
        CheckpointUnfencedError: The store ignores or rejects the condition.
    """

def ckpt_commit(
    uri: str,
    manifest: bytes,
    save_id: str,
    *,
    unfenced: bool = False,
    replaces: str | None = None,
    must_exist: bool = False,
) -> None:
    """Commit a checkpoint: write the manifest under its final name if and only if none exists.

    On a disk, the data folder is flushed, a temporary file is written, flushed and linked to the final name,
    and the folder is flushed. An object store gets a conditional PUT. If its response is lost or reports an
    existing object, the manifest is read back; a manifest with the same save id counts as success.

    Args:
        uri: The checkpoint.
        manifest: The result of `ckpt_manifest_encode`.
        save_id: The save id inside it.
        unfenced: Commit even if the store lets two conditional writes succeed. Two concurrent savers may then
            both get a success.
        replaces: The save id of the checkpoint to replace. The manifest is replaced in one step, and only if
            it still has this save id (checked under a lock on a disk, by `If-Match` on an object store). The
            replaced data files stay: remove them with `ckpt_delete_files`.
        must_exist: Raise if the checkpoint to replace was removed, instead of committing a new one.

    Raises:
        CheckpointExistsError: The checkpoint of another save exists, other than the one to replace.
        CheckpointNotFoundError: With `must_exist`, the checkpoint to replace does not exist.
        CheckpointUnfencedError: The store does not honour conditional writes (tested once per process and
            endpoint).
    """

@final
class Checkpoint:
    """An open checkpoint, with its validated contents and access to its data files.

    The digests and the chunks of the tensors stay in the extension. Safe in threads and across forks.

    The constructor reads `checkpoint.json.zst` and validates both digests, the format number, file paths
    (plain and inside the checkpoint), offsets (within file sizes), chunks (inside the shape, and tiling each
    tensor exactly), and that nothing is listed twice.

    Args:
        uri: The checkpoint.
        stored: The bytes of `checkpoint.json.zst`, if they were read before; they are validated as usual.

    Raises:
        CheckpointNotFoundError: There is nothing at `uri`.
        CheckpointPartialError: There are data files but no manifest: the checkpoint was never committed.
        CheckpointCorruptError: A digest differs, or a rule of the format is broken.
        CheckpointIncompatibleError: The format is a later one; the message names the version that reads it.
    """

    def __new__(cls, uri: str, stored: bytes | None = None) -> Checkpoint: ...
    @staticmethod
    def open_foreign(uri: str) -> Checkpoint:
        """Recognise and list a checkpoint of another program, executing nothing in its files.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of a known format.
            CheckpointUnsafeError: A pickle refers to a name that is not data; the message gives the name.
            CheckpointCorruptError: The checkpoint breaks a rule of its format.
            CheckpointIncompatibleError: The variant of the format is not supported.
        """

    def summary(self) -> dict[str, Any]:
        """Return `save_id`, `step`, data file `paths` and the tagged `user` value of a Hocket checkpoint.

        Raises:
            ValueError: The contents were taken before, or the checkpoint is of another format.
        """

    def take_contents(self) -> dict[str, Any]:
        """Return the contents as Python objects; only once, so that they are not in memory twice.

        Of every format, `tensors` maps names to (dtype, shape, path, same_as, `ChunkColumns` or None, inlined
        bytes or None), and `values` maps names to (path, tagged value); paths and shapes are tuples.

        For Hocket's format these are the fields of the manifest (docs/format.md); `per_rank` is (policy,
        tagged values), `thinned`, where there is one, is (save id, globs, tensors, bytes), and
        `delta` (name of the base, its save id).

        For other formats it has: `format` (`dcp`, `torch`, `safetensors`), `root`, `files` ((path,
        bytes)), `tensors`, `values`, `opaque` (name → the reason why it is not inspected), `items` (the zips
        of a distributed checkpoint: file, offset, bytes, `torch` or `zstd`, name), `metadata` (of safetensors
        files), `integer_keyed` (paths), and `digest` (hexadecimal XXH3-128 of all of them, which does not
        change from version to version).

        Raises:
            ValueError: The contents were taken before, or a value is JSON that Python cannot decode.
            RecursionError: A value is nested too deeply.
        """

    def read_boxes(
        self,
        boxes: Sequence[tuple[str, Sequence[int], Sequence[int], int, Sequence[int] | None]],
        *,
        check: bool = True,
        scratch_bytes: int = 67108864,
    ) -> None:
        """Read boxes of tensors into memory, each assembled from its chunks; those of a delta with its bases.

        Data with the same layout in the file and in memory is read directly into place. Other data goes
        through scratch memory, as large as all boxes together, but at least 1 MiB and at most
        `scratch_bytes`. Zips of torch are located first; a compressed tensor that is not in C order is
        unpacked into a temporary file.

        The reads are sorted, coalesced (gap ≤ 1 MiB) and run in parallel. A block that falls entirely into
        one destination is read into it and hashed there; other blocks are read into a buffer. Uncached local
        files are read through the page cache while all reads of this object together fit in a quarter of the
        free memory; later reads bypass it.

        Args:
            boxes: A list of (tensor, start of the box, its size, address of its first item in memory, strides
                there in bytes or None for C order). Destinations must not overlap.
            check: Verify the digest of every block that a read touches. Other formats have no digests.
            scratch_bytes: Limit of the scratch memory.

        Raises:
            ValueError: There is no tensor of this name, or a box is not inside its tensor.
            CheckpointCorruptError: A block's digest differs, or a file's size. The message names the tensors
                among `boxes`; the attributes `file` (path) and `offset` (of the block in the data; None for a
                size) give the place. The content of the destinations is then undefined.
            CheckpointNotFoundError: A file is missing.
            CheckpointError: The temporary file cannot be written.
        """

    def open_bases(self) -> None:
        """Open the base of a delta, the base of that one, and so on; reads do so when they need them.

        Raises:
            CheckpointNotFoundError: A base was removed, or replaced by another save.
            CheckpointCorruptError: A base lacks a tensor of its delta, or a manifest is corrupt.
        """

    def check_boxes(
        self,
        boxes: Sequence[tuple[str, Sequence[int], Sequence[int], int, Sequence[int] | None]],
        *,
        with_bases: bool = True,
        scratch_bytes: int = 67108864,
    ) -> None:
        """Read boxes as `read_boxes` does, verify them and drop what was read; memory is not touched.

        Args:
            boxes: As for `read_boxes`.
            with_bases: Verify also what the bases of a delta hold.
            scratch_bytes: Limit of the scratch memory.

        Raises:
            CheckpointError: As for `read_boxes`.
        """

    def apply_delta(
        self,
        boxes: Sequence[tuple[str, Sequence[int], Sequence[int], int, Sequence[int] | None]],
        *,
        scratch_bytes: int = 67108864,
    ) -> None:
        """Turn the base's bytes of some boxes into those of the delta, in place.

        Raises:
            ValueError: The checkpoint is not a delta, or as for `read_boxes`. Nothing has changed.
            CheckpointError: As for `read_boxes`. The boxes then hold neither version.
        """

    def strides(self, names: Sequence[str]) -> list[list[tuple[int, list[int]]]]:
        """Return the chunks of some tensors that are not in C order: their indices and strides in items.

        The tensors inside zips are located first, many in one read. Strides of compressed chunks are unknown.

        Raises:
            ValueError: There is no tensor of this name.
            CheckpointCorruptError: The content of a zip differs from the contents.
        """

    def in_block(self, path: str, offset: int | None = None) -> list[tuple[str, str]]:
        """Return the (tensor, chunk) pairs that overlap a block of a data file, in the checkpoint's order.

        Chunks are named as in the data file: `weight@4,0` starts at row 4; a tensor stored whole has its own
        name. A tensor with several chunks in the block is listed once per chunk. An alias is listed with the
        chunks of the tensor that owns the storage.

        Args:
            path: The data file.
            offset: Start of the block in the file's data; None for the whole file.
        """

@final
class ChunkColumns:
    """The columns of a tensor's chunks in a checkpoint; `len()` is the number of chunks."""

    def __len__(self) -> int: ...
    def to_dict(self) -> dict[str, Any]:
        """Return `file`, `offset` and `length`, and for `start` and `size` a list of one column per dim."""

def ckpt_verify_file(uri: str, file: CkptFile) -> list[tuple[int, int]]:
    """Return every bad block of a file as (block, offset in the data).

    A bad header is reported as (-1, -data_start).

    Raises:
        CheckpointNotFoundError: The file does not exist.
        CheckpointCorruptError: The file is shorter or longer than the manifest says.
    """

def ckpt_list(uri: str) -> list[CkptListed]:
    """List the children of a prefix: the uncommitted first, the others by step, creation time and name.

    `committed`: a manifest exists and its first frame can be read. `partial`: data files of Hocket without a
    manifest. `foreign`: any other folder; if it has a manifest that cannot be read, `problem` gives the
    reason.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_delete(uri: str, name: str, *, save_id: str | None = None, dry_run: bool = False) -> None:
    """Remove the checkpoint `name` under `uri`, the manifest first, so that it never appears broken.

    Removes only the manifest and the files of its save, then the folder if it is empty. Without a manifest
    that can be read, the files of all saves are removed.

    Args:
        uri: The prefix.
        name: The checkpoint below it.
        save_id: Remove it only if it is of this save: exact in a folder; in an object store another save may
            commit during the one request that removes the manifest.
        dry_run: Remove nothing; raise the errors that the removal would raise.

    Raises:
        CheckpointExistsError: A delta beside it has it as its base.
        CheckpointNotFoundError: There is no such checkpoint, or it is of another save.
        ValueError: `name` is not one plain path component, or a symbolic link; or there is no manifest that
            can be read, and a process still writes a file.
    """

def ckpt_delete_files(uri: str, paths: Sequence[str]) -> None:
    """Remove data files of a checkpoint that its manifest no longer names.

    On a disk, folders that become empty are removed too.

    Raises:
        ValueError: A path is not below `data/`.
    """

def ckpt_gc(uri: str, *, min_age_s: float, dry_run: bool = False) -> CkptCollected:
    """Remove the files under a prefix that unfinished and replaced saves left behind.

    Removes data files that their folder's manifest does not name, temporary manifests that were never
    published, hidden files of conversions, and unfinished multipart uploads, if the youngest file of their
    save is at least `min_age_s` old. Files not written by Hocket and files with a live writer are kept.

    Args:
        uri: The prefix.
        min_age_s: Minimum age in seconds. A save that runs for longer may lose files.
        dry_run: Remove nothing.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_sizes(uri: str, paths: Sequence[str]) -> list[int | None]:
    """Return the size in bytes of each file as visible to this process, or None for a missing file."""

def xxh3_128(buffer: bytes) -> bytes:
    """Return the XXH3-128 of bytes: 16 bytes in canonical (big endian) form."""

# --- checkpoints of other programs --------------------------------------------------------------
# `root` is the folder or prefix that the contents name, `path` a file in it. Nothing in a file is executed.

def foreign_verify_zips(
    root: str, path: str, zips: Sequence[tuple[int, int, bool]]
) -> list[tuple[int, str, int, int, str]]:
    """Verify the CRC-32 of every member of the zips in one file.

    Args:
        root: The checkpoint.
        path: The file.
        zips: A list of (offset, bytes, is compressed).

    Returns:
        For each bad member: the index of its zip, its name (empty if the zip itself is bad), offset, bytes,
        the problem.
    """

def foreign_lax_rules(root: str, path: str) -> list[str]:
    """Return the rules of the specification that a safetensors file violates although readers accept it.

    Raises:
        CheckpointCorruptError: No reader accepts the file.
    """

def crc32(address: int, num_bytes: int, value: int = 0) -> int:
    """Return the CRC-32 of memory, continued from `value`."""

@final
class CkptStreamWriter:
    """A sequential writer of one file, which gets its final name when it is complete.

    Without `replaces`, the data is compared with an existing file, and nothing is written. If the writer is
    not finished, no file remains.

    Args:
        uri: The folder or prefix.
        path: The file in it.
        size: Exact number of bytes to be written (before compression).
        data_start: Hash the bytes before this offset as the header, and those after it in blocks.
        compression: As for `ckpt_write_file`: compress the header and each block into a frame. Requires
            `data_start`.
        replaces: Replace an existing data file in one step, without comparing it. Only for files whose
            contents follow from their names, so that several runs may replace them at the same time.

    Raises:
        CheckpointExistsError: A different file exists; `write` and `finish` raise it too. With `replaces`, a
            live process is writing to the existing file.
        ValueError: The path is not plain, or with `replaces` not below `data/`.
    """

    def __new__(
        cls,
        uri: str,
        path: str,
        *,
        size: int,
        data_start: int | None = None,
        compression: tuple[int, bool] | None = None,
        replaces: bool = False,
    ) -> CkptStreamWriter: ...
    @property
    def found(self) -> bool:
        """Whether the file existed already."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def write_from(self, address: int, num_bytes: int) -> None:
        """Append bytes from memory, which must stay alive and unchanged until this returns."""

    def finish(self) -> CkptFile | None:
        """Make the file durable and visible, and return its manifest record if it was hashed.

        Raises:
            CheckpointExistsError: Another writer has taken the name in the meantime.
            ValueError: Fewer bytes than `size` were written.
        """

    def close(self) -> None:
        """Discard the file if it is unfinished."""
