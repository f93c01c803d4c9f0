"""Verification of every byte of a checkpoint against its digests."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from hocket.ckpt.document.catalogue import Catalogue
from hocket.ckpt.document.file_names import stored_bytes
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.read.foreign import Foreign
from hocket.ckpt.read.opener import open  # noqa: A004 - this package's own
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.verbs.foreign_verify import verify_file
from hocket.ckpt.verbs.rerun import identity_of
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
    contents: Manifest | Catalogue
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
    safetensors, which has no digests.

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
    source = os.fspath(source)
    opened = open(source)
    if isinstance(opened, Foreign):
        return _verify_foreign(opened, strict, on_file)
    manifest = opened.manifest
    flaws: list[BadBlock] = []
    num_blocks = 0
    for file in manifest.files:
        file_flaws = _flaws(opened, file["path"], file)
        flaws += file_flaws
        num_blocks += -(-(file["size"] - file["data_start"]) // _native.CKPT_BLOCK_BYTES)
        if on_file is not None:
            on_file(file["path"], stored_bytes(file), file_flaws)
    if flaws:
        identity_of(source, manifest)  # raises if the checkpoint was replaced, which explains missing files
    return VerifyReport(
        uri=source,
        contents=manifest,
        flaws=tuple(flaws),
        num_blocks=num_blocks,
        num_bytes=sum(map(stored_bytes, manifest.files)),
    )


def _verify_foreign(
    opened: Foreign, strict: bool, on_file: Callable[[str, int, list[BadBlock]], None] | None
) -> VerifyReport:
    flaws: list[BadBlock] = []
    num_zips = 0
    contents = opened.contents
    for number, file in enumerate(contents.files):
        zips, rows = verify_file(contents, number, strict)
        file_flaws = [
            BadBlock(file=file["path"], offset=offset, tensors=names, problem=problem)
            for offset, names, problem in rows
        ]
        flaws += file_flaws
        num_zips += zips
        if on_file is not None:
            on_file(file["path"], file["size"], file_flaws)
    return VerifyReport(
        uri=opened.uri,
        contents=contents,
        flaws=tuple(flaws),
        num_blocks=num_zips,
        num_bytes=sum(file["size"] for file in contents.files),
    )


def _flaws(opened: Checkpoint, path: str, file: "_native.CkptFile") -> list[BadBlock]:
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
        return [flaw(None, "the file is missing")]
    except CheckpointCorruptError as error:
        return [flaw(None, str(error))]
    return [
        flaw(None, "the safetensors header does not match its digest", is_data=False)
        if block < 0
        else flaw(offset, "the block does not match its digest")
        for block, offset in bad_blocks
    ]
