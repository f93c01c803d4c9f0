"""Verification of every byte of a checkpoint against its digests."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.file_names import stored_bytes
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.read.opener import open  # noqa: A004 - this package's own
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.uris import local_path
from hocket.native import _native

__all__ = ["BadBlock", "VerifyReport", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadBlock:
    """A corrupt part of a data file."""

    file: str
    offset: int | None
    """Start of the bad block in the file's data; None for the header or the whole file."""
    tensors: tuple[str, ...]
    """Names of the tensors stored there."""
    problem: str
    chunks: tuple[str, ...] = ()
    """Their chunks as named in the file: `weight@4,0` starts at row 4. Empty for other formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The result of a verification."""

    uri: str
    contents: CheckpointContents
    flaws: tuple[BadBlock, ...]
    num_blocks: int
    """Number of data blocks to check; for other formats, the number of zip members."""
    num_bytes: int
    """Stored size of all data files in bytes."""

    @property
    def is_sound(self) -> bool:
        """Whether no flaw was found."""
        return not self.flaws

    @property
    def bad_tensors(self) -> list[str]:
        """Names of the corrupt tensors without duplicates, in manifest order."""
        bad_names = {name for flaw in self.flaws for name in flaw.tensors}
        return [name for name in self.contents.tensors if name in bad_names]


def verify(
    source: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_file: Callable[[str, int, list[BadBlock]], None] | None = None,
) -> VerifyReport:
    """Read every data file and compare its header, size and blocks with the manifest's digests.

    Verification continues after a bad block and reports all of them. Other formats are checked by what they
    provide: the CRC-32 values of torch's zips, which torch itself does not check, and the layout rules of
    safetensors, which has no digests. Of a delta's bases, only the manifests are read.

    Args:
        source: The checkpoint's folder or URI.
        strict: Also report violations of the safetensors specification that its readers accept.
        on_file: Called after each file with its path, its stored size and its flaws.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or it was replaced during the verification.
        CheckpointCorruptError: The manifest itself is corrupt.
        CheckpointIncompatibleError: A later format.

    Example:
        >>> verify(folder + "/demo").is_sound
        True
    """
    source = local_path(source)
    opened = open(source)
    check = _CHECKS[opened.format]
    contents = opened.contents
    flaws: list[BadBlock] = []
    num_blocks = 0
    for number, file in enumerate(contents.files):
        num_checked, file_flaws = check(opened, number, strict)
        flaws += file_flaws
        num_blocks += num_checked
        if on_file is not None:
            on_file(file["path"], stored_bytes(file), file_flaws)
    if flaws:
        opened.identity()  # raises if the checkpoint was replaced, which explains missing files
    return VerifyReport(
        uri=source,
        contents=contents,
        flaws=tuple(flaws),
        num_blocks=num_blocks,
        num_bytes=sum(map(stored_bytes, contents.files)),
    )


def _by_digests(opened: Checkpoint, number: int, _strict: bool) -> tuple[int, list[BadBlock]]:
    """Compare a file with its digests; return the number of its blocks, and the flaws."""
    file = opened.contents.files[number]
    path = file["path"]
    num_blocks = -(-(file["size"] - file["data_start"]) // _native.CKPT_BLOCK_BYTES)

    def flaw(offset: int | None, problem: str, *, is_data: bool = True) -> BadBlock:
        pairs = opened.in_block(path, offset) if is_data else []
        return BadBlock(
            file=path,
            offset=offset,
            tensors=tuple(dict.fromkeys(name for name, _ in pairs)),
            problem=problem,
            chunks=tuple(dict.fromkeys(chunk for _, chunk in pairs)),
        )

    try:
        bad_blocks = _native.ckpt_verify_file(opened.uri, file)
    except CheckpointNotFoundError:
        return num_blocks, [flaw(None, "the file is missing")]
    except CheckpointCorruptError as error:
        return num_blocks, [flaw(None, str(error))]
    return num_blocks, [
        flaw(None, "the safetensors header does not match its digest", is_data=False)
        if block < 0
        else flaw(offset, "the block does not match its digest")
        for block, offset in bad_blocks
    ]


def _by_layout(opened: Checkpoint, number: int, strict: bool) -> tuple[int, list[BadBlock]]:
    """Check a file of safetensors for violations that its readers accept."""
    path = opened.contents.files[number]["path"]
    # `open` has already checked the rules that every reader enforces.
    violations = _native.foreign_lax_rules(opened.contents.root, path) if strict else []
    return 0, [BadBlock(file=path, offset=None, tensors=(), problem=problem) for problem in violations]


def _by_zip(opened: Checkpoint, number: int, _strict: bool) -> tuple[int, list[BadBlock]]:
    """Check a file of `torch.save`, which is one zip, by its CRC-32 values."""
    return 1, _bad_members(opened, number, [(0, opened.contents.files[number]["size"], False)], [None])


def _by_zips(opened: Checkpoint, number: int, _strict: bool) -> tuple[int, list[BadBlock]]:
    """Check the zips in a file of a distributed checkpoint; return their number, and the flaws."""
    items = [item for item in opened.contents.items if item[0] == number]
    zips = [(offset, length, wrapped == "zstd") for _, offset, length, wrapped, _ in items]
    return len(zips), _bad_members(opened, number, zips, [name for *_, name in items])


_CHECKS = {"hocket": _by_digests, "safetensors": _by_layout, "torch": _by_zip, "dcp": _by_zips}
"""The check of one file, by format; it returns the number of blocks or zips, and the flaws."""


def _bad_members(
    opened: Checkpoint, number: int, zips: list[tuple[int, int, bool]], owners: Sequence[str | None]
) -> list[BadBlock]:
    """Return the flaws of zips in a file, each with its owner or with the tensors stored there."""
    root, path = opened.contents.root, opened.contents.files[number]["path"]
    flaws = []
    for zip_number, member, offset, length, problem in _native.foreign_verify_zips(root, path, zips):
        owner = owners[zip_number]
        tensors = (owner,) if owner is not None else _hit(opened.contents, offset, offset + length)
        told = f"member `{member}`: {problem}" if member else problem
        flaws.append(BadBlock(file=path, offset=offset, tensors=tensors, problem=told))
    return flaws


def _hit(contents: CheckpointContents, begin: int, end: int) -> tuple[str, ...]:
    """Return the tensors, aliases included, that overlap a byte range of the only file."""
    owners = {
        name
        for name, record in contents.tensors.items()
        if any(chunk.offset < end and begin < chunk.offset + chunk.length for chunk in record.chunks)
    }
    return tuple(
        name for name, record in contents.tensors.items() if name in owners or record.same_as in owners
    )
