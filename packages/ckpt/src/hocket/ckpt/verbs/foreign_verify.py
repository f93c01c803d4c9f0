"""Verification of files of foreign formats, by what these formats provide."""

from hocket.ckpt.document.catalogue import Catalogue
from hocket.native import _native

__all__ = ["verify_file"]

_Row = tuple[int | None, tuple[str, ...], str]


def verify_file(contents: Catalogue, file: int, strict: bool) -> tuple[int, list[_Row]]:
    """Check one file of a foreign checkpoint.

    Args:
        contents: The checkpoint's catalogue.
        file: The file's index in it.
        strict: Also report violations of the safetensors specification that its readers accept.

    Returns:
        The number of zips checked, and the flaws: offset in the file, tensors stored there, description.
    """
    path, size = contents.files[file]["path"], contents.files[file]["size"]
    if contents.format == "safetensors":
        # `open` has already checked the rules that every reader enforces.
        violations = _native.foreign_lax_rules(contents.root, path) if strict else []
        return 0, [(None, (), violation) for violation in violations]
    if contents.format == "torch":
        zips: list[tuple[int, int, bool]] = [(0, size, False)]
        owners: list[str | None] = [None]
    else:
        items = [item for item in contents.items if item[0] == file]
        zips = [(offset, length, wrapped == "zstd") for _, offset, length, wrapped, _ in items]
        owners = [name for *_, name in items]
    rows: list[_Row] = []
    for number, member, offset, length, problem in _native.foreign_verify_zips(contents.root, path, zips):
        owner = owners[number]
        names = (owner,) if owner is not None else _hit(contents, offset, offset + length)
        rows.append((offset, names, f"member `{member}`: {problem}" if member else problem))
    return len(zips), rows


def _hit(contents: Catalogue, begin: int, end: int) -> tuple[str, ...]:
    """Return the tensors, aliases included, that overlap a byte range of the only file."""
    owners = {
        name
        for name, record in contents.tensors.items()
        if any(chunk.offset < end and begin < chunk.offset + chunk.length for chunk in record.chunks)
    }
    return tuple(
        name for name, record in contents.tensors.items() if name in owners or record.same_as in owners
    )
