"""Which tensors have bytes in a block, and in which of their chunks: what is bad is told by these names."""

from bisect import bisect_left, bisect_right
from collections import defaultdict

from hocket.ckpt.datafiles import entry_name
from hocket.ckpt.manifest import Chunk, Manifest
from hocket.native import _native

__all__ = ["Owners", "told"]


class Owners:
    """Finds tensors by where their bytes lie; made once, it answers without a look at each chunk."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._order = {name: number for number, name in enumerate(manifest.tensors)}
        self._aliases: dict[str, list[str]] = defaultdict(list)
        runs: dict[int, list[tuple[int, int, str, Chunk]]] = defaultdict(list)
        for name, record in manifest.tensors.items():
            if record.same_as is not None:
                self._aliases[record.same_as].append(name)
            for chunk in record.chunks:
                runs[chunk.file].append((chunk.offset, chunk.offset + chunk.length, name, chunk))
        # No two chunks lie on the same bytes: in the order of their beginnings, their ends are in order, too.
        self._runs = {
            manifest.files[file]["path"]: sorted(found, key=lambda run: run[:2])
            for file, found in runs.items()
        }

    def hits(self, file: str | None, offset: int | None) -> list[tuple[str, str]]:
        """Tensors, aliases too, that have bytes in a block, in the manifest's order, each with its chunk.

        A chunk is told by what the file calls it: `weight@4,0` begins in row 4; where the file has all of the
        tensor, it is the tensor's name. A tensor with several chunks in the block comes several times, and an
        alias has the chunks of the tensor whose storage it shares.

        Args:
            file: The data file's path.
            offset: Where the block begins in the file's data; None is the whole file.
        """
        runs = self._runs.get(file or "", [])
        if offset is not None:
            end = offset + _native.CKPT_BLOCK_BYTES
            first = bisect_right(runs, offset, key=lambda run: run[1])
            runs = runs[first : bisect_left(runs, end, key=lambda run: run[0])]
        hit = [
            (name, entry_name(owner, chunk.start, is_whole=chunk.size == self._tensors[owner].shape))
            for *_, owner, chunk in runs
            for name in (owner, *self._aliases.get(owner, ()))
        ]
        return sorted(hit, key=lambda each: self._order[each[0]])


def told(manifest: Manifest, file: str | None, offset: int | None, *, name: str | None = None) -> str:
    """What a bad block is of, for a message: `Tensor `weight` (chunk `weight@4,0`)`.

    Args:
        manifest: The checkpoint's.
        file: The data file's path.
        offset: Where the block begins in the file's data; None is the whole file.
        name: The only tensor to be named; else the first five.
    """
    hits = [hit for hit in Owners(manifest).hits(file, offset) if name in (None, hit[0])]
    names = [f"`{each}`" if chunk == each else f"`{each}` (chunk `{chunk}`)" for each, chunk in hits]
    if not names:
        return "A tensor" if name is None else f"Tensor `{name}`"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Tensor {', '.join(names[:5])}{more}"
