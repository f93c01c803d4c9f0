"""A tensor's record as JSON, for `--json`."""

from typing import Any

from hocket.ckpt.document.records import TensorRecord

__all__ = ["describe"]


def describe(record: TensorRecord) -> dict[str, Any]:
    """Return a tensor's record for `--json`."""
    return {
        "dtype": record.dtype,
        "shape": record.shape,
        "bytes": record.num_bytes,
        "same_as": record.same_as,
        "chunks": [
            {"file": c.file, "offset": c.offset, "length": c.length, "start": c.start, "size": c.size}
            for c in record.chunks
        ],
    }
