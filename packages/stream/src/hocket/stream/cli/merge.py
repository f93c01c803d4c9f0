"""`hocket-stream merge`."""

from collections.abc import Sequence

from rich.text import Text

from hocket.native.cli.text import console, count, print_json, size
from hocket.stream.read.dataset_index import DatasetIndex
from hocket.stream.write.merge import merge_index

__all__ = ["show"]


def show(uris: Sequence[str], *, out: str | None, as_json: bool) -> None:
    """Write one index over several data sets and print a summary.

    Raises:
        ValueError: There are several data sets and no `out`.
    """
    if len(uris) > 1 and out is None:
        raise ValueError("`--out` is not given: expected the folder of the new index, above all data sets")
    target = uris[0] if out is None else out
    merge_index(uris[0] if out is None else list(uris), target)
    merged = DatasetIndex(target)
    folders = {shard.name.rpartition("/")[0] for shard in merged.shards}
    if as_json:
        print_json(
            {
                "uri": merged.uri,
                "folders": sorted(folders),
                "shards": len(merged.shards),
                "samples": merged.index.num_samples,
            }
        )
        return
    summary = f"{count(len(folders), 'folder')}, {count(len(merged.shards), 'shard')}"
    samples = count(merged.index.num_samples, "sample")
    console().print(
        Text.assemble(
            ("merged", "bold green"), f": {merged.uri}, {summary}, {samples}, {size(merged.stored_bytes)}"
        )
    )
