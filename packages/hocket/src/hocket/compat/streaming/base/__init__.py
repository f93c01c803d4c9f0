"""The names of `streaming.base`."""

from hocket.compat.streaming.dataloader import StreamingDataLoader
from hocket.compat.streaming.dataset import StreamingDataset
from hocket.compat.streaming.local import LocalDataset
from hocket.stream import CSVWriter, JSONWriter, MDSWriter, Stream, TSVWriter, XSVWriter

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
