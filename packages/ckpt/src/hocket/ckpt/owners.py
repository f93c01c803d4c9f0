"""Which tensors have bytes in a block: what is bad is told by their names."""

from bisect import bisect_left, bisect_right
from collections import defaultdict

from hocket.ckpt.manifest import Manifest
from hocket.native import _native

__all__ = ["Owners"]


class Owners:
    """Finds tensors by where their bytes lie; made once, it answers without a look at each chunk."""

    def __init__(self, manifest: Manifest) -> None:
        self._order = {name: number for number, name in enumerate(manifest.tensors)}
        self._aliases: dict[str, list[str]] = defaultdict(list)
        runs: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, record in manifest.tensors.items():
            if record.same_as is not None:
                self._aliases[record.same_as].append(name)
            for chunk in record.chunks:
                runs[chunk.file].append((chunk.offset, chunk.offset + chunk.length, name))
        # No two chunks lie on the same bytes: in the order of their beginnings, their ends are in order, too.
        self._runs = {manifest.files[file]["path"]: sorted(found) for file, found in runs.items()}

    def names(self, file: str | None, offset: int | None) -> list[str]:
        """Tensors, aliases too, that have bytes in a block, in the manifest's order.

        Args:
            file: The data file's path.
            offset: Where the block begins in the file's data; None is the whole file.
        """
        runs = self._runs.get(file or "", [])
        if offset is not None:
            end = offset + _native.CKPT_BLOCK_BYTES
            first = bisect_right(runs, offset, key=lambda run: run[1])
            runs = runs[first : bisect_left(runs, end, key=lambda run: run[0])]
        hit = {name for *_, name in runs}
        hit |= {alias for name in hit for alias in self._aliases.get(name, ())}
        return sorted(hit, key=self._order.__getitem__)
