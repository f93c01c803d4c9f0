"""Maps byte ranges of data files back to the tensors stored in them, for error messages."""

from bisect import bisect_left, bisect_right
from collections import defaultdict

from hocket.ckpt.file_names import entry_name
from hocket.ckpt.manifest import Chunk, Manifest
from hocket.native import _native

__all__ = ["BlockIndex", "describe_block"]


class BlockIndex:
    """An index from (file, block) to the tensors whose bytes the block holds.

    Built once per manifest; a lookup is a binary search and does not scan the chunks.
    """

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
        # Chunks do not overlap, so sorting by start also sorts by end.
        self._runs = {
            manifest.files[file]["path"]: sorted(file_runs, key=lambda run: run[:2])
            for file, file_runs in runs.items()
        }

    def lookup(self, file: str | None, offset: int | None) -> list[tuple[str, str]]:
        """Return the (tensor, chunk) pairs that overlap a block, in manifest order.

        Chunks are named as in the data file: `weight@4,0` starts at row 4; a tensor stored whole has its own
        name. A tensor with several chunks in the block is listed once per chunk. An alias is listed with the
        chunks of the tensor that owns the storage.

        Args:
            file: The data file's path.
            offset: Start of the block in the file's data; None for the whole file.
        """
        runs = self._runs.get(file or "", [])
        if offset is not None:
            end = offset + _native.CKPT_BLOCK_BYTES
            first = bisect_right(runs, offset, key=lambda run: run[1])
            runs = runs[first : bisect_left(runs, end, key=lambda run: run[0])]
        pairs = [
            (name, entry_name(owner, chunk.start, is_whole=chunk.size == self._tensors[owner].shape))
            for *_, owner, chunk in runs
            for name in (owner, *self._aliases.get(owner, ()))
        ]
        return sorted(pairs, key=lambda pair: self._order[pair[0]])


def describe_block(
    manifest: Manifest, file: str | None, offset: int | None, *, name: str | None = None
) -> str:
    """Name the tensors stored in a block, for an error message: ``Tensor `weight` (chunk `weight@4,0`)``.

    Args:
        manifest: The checkpoint's manifest.
        file: The data file's path.
        offset: Start of the block in the file's data; None for the whole file.
        name: The only tensor to name; if None, the first five are named.
    """
    pairs = [pair for pair in BlockIndex(manifest).lookup(file, offset) if name in (None, pair[0])]
    names = [f"`{tensor}`" if chunk == tensor else f"`{tensor}` (chunk `{chunk}`)" for tensor, chunk in pairs]
    if not names:
        return "A tensor" if name is None else f"Tensor `{name}`"
    suffix = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Tensor {', '.join(names[:5])}{suffix}"
