"""Training data from object storage, in a global order that does not depend on the number of ranks."""

from typing import TYPE_CHECKING

from hocket.stream import errors
from hocket.stream.dataset import StreamingDataset
from hocket.stream.merge import merge_index
from hocket.stream.mosaic import MosaicOrder
from hocket.stream.streams import Stream
from hocket.stream.text_writers import CSVWriter, JSONWriter, TSVWriter, XSVWriter
from hocket.stream.writer import MDSWriter

if TYPE_CHECKING:
    from hocket.stream.torch import StreamingDataLoader

__all__ = [
    "CSVWriter",
    "JSONWriter",
    "MDSWriter",
    "MosaicOrder",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "XSVWriter",
    "errors",
    "merge_index",
]


def __getattr__(name: str) -> object:
    # Imported on first access, because it is the only name that needs torch.
    if name == "StreamingDataLoader":
        from hocket.stream.torch import StreamingDataLoader

        return StreamingDataLoader
    raise AttributeError(f"module `hocket.stream` has no attribute `{name}`")
