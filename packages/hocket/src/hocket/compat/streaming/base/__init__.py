"""The names of `streaming.base`."""

from hocket.compat.streaming.dataloader import StreamingDataLoader
from hocket.compat.streaming.dataset import StreamingDataset
from hocket.compat.streaming.local import LocalDataset
from hocket.compat.streaming.stream import Stream
from hocket.compat.streaming.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

__all__ = [
    "CSVWriter",
    "JSONWriter",
    "LocalDataset",
    "MDSWriter",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "XSVWriter",
]
