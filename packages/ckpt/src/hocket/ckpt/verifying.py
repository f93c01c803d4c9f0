"""Every byte of a checkpoint compared with what was written."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from hocket.ckpt.datafiles import stored_bytes
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.formats.catalogue import Catalogue
from hocket.ckpt.formats.flaws import verify_file
from hocket.ckpt.formats.foreign import Foreign
from hocket.ckpt.manifest import Manifest
from hocket.ckpt.owners import Owners
from hocket.ckpt.reader import open  # noqa: A004 - this package's own
from hocket.ckpt.resuming import identity_of
from hocket.native import _native

__all__ = ["Flaw", "Verdict", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flaw:
    """A part of a data file that is not what was written."""

    file: str
    offset: int | None
    """Where the bad block begins in the file's data; None for the header or the whole file."""
    tensors: tuple[str, ...]
    """Tensors that have bytes there."""
    problem: str
    chunks: tuple[str, ...] = ()
    """Their chunks there, as the file calls them: `weight@4,0` begins in row 4 of `weight`. None are told of
    another format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verification found."""

    uri: str
    contents: Manifest | Catalogue
    flaws: tuple[Flaw, ...]
    num_blocks: int
    """Blocks of data that were to be checked; of another format, the zips."""
    num_bytes: int
    """Bytes of all data files as they are stored."""

    @property
    def is_sound(self) -> bool:
        """Whether every byte is what was written."""
        return not self.flaws

    @property
    def bad_tensors(self) -> list[str]:
        """Names of the tensors that are hit, each once, in the manifest's order."""
        hit = {name for flaw in self.flaws for name in flaw.tensors}
        return [name for name in self.contents.tensors if name in hit]


def verify(
    source: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_file: Callable[[str, int, list[Flaw]], None] | None = None,
) -> Verdict:
    """Reads every data file and compares header, size and blocks with the manifest's digests.

    Goes on after a bad block, so that the verdict names all of them. Another format is compared with what it
    has: torch's zips with their CRC-32, which torch itself never looks at; safetensors, which has no digests,
    with the rules of its layout.

    Args:
        source: The checkpoint's folder or URI.
        strict: Count as flaws of safetensors what its text forbids and its readers let pass.
        on_file: Called after each file with its path, its bytes as stored and its flaws.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or it was replaced meanwhile.
        CheckpointCorruptError: The manifest itself is bad: nothing can be compared.
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
    flaws: list[Flaw] = []
    num_blocks = 0
    owners = functools.cache(lambda: Owners(manifest))  # a sound one needs none
    for file in manifest.files:
        found = _flaws(source, owners, file["path"], file)
        flaws += found
        num_blocks += -(-(file["size"] - file["data_start"]) // _native.CKPT_BLOCK_BYTES)
        if on_file is not None:
            on_file(file["path"], stored_bytes(file), found)
    if flaws:
        identity_of(source, manifest)  # what was replaced meanwhile has no files, and no flaws
    return Verdict(
        uri=source,
        contents=manifest,
        flaws=tuple(flaws),
        num_blocks=num_blocks,
        num_bytes=sum(map(stored_bytes, manifest.files)),
    )


def _verify_foreign(
    opened: Foreign, strict: bool, on_file: Callable[[str, int, list[Flaw]], None] | None
) -> Verdict:
    flaws: list[Flaw] = []
    num_zips = 0
    contents = opened.contents
    for number, file in enumerate(contents.files):
        zips, rows = verify_file(contents, number, strict)
        found = [Flaw(file=file["path"], offset=at, tensors=names, problem=what) for at, names, what in rows]
        flaws += found
        num_zips += zips
        if on_file is not None:
            on_file(file["path"], file["size"], found)
    return Verdict(
        uri=opened.uri,
        contents=contents,
        flaws=tuple(flaws),
        num_blocks=num_zips,
        num_bytes=sum(file["size"] for file in contents.files),
    )


def _flaws(uri: str, owners: Callable[[], Owners], path: str, file: "_native.CkptFile") -> list[Flaw]:
    def flaw(offset: int | None, problem: str, *, is_data: bool = True) -> Flaw:
        hits = owners().hits(path, offset) if is_data else []
        return Flaw(
            file=path,
            offset=offset,
            tensors=tuple(dict.fromkeys(name for name, _ in hits)),
            problem=problem,
            chunks=tuple(dict.fromkeys(chunk for _, chunk in hits)),
        )

    try:
        bad = _native.ckpt_verify_file(uri, file)
    except CheckpointNotFoundError:
        return [flaw(None, "the file is missing")]
    except CheckpointCorruptError as error:
        return [flaw(None, str(error))]
    return [
        flaw(None, "the safetensors header is not what was written", is_data=False)
        if block < 0
        else flaw(offset, "the block is not what was written")
        for block, offset in bad
    ]
