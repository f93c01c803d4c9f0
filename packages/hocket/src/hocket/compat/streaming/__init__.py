"""mosaicml-streaming's public names over `hocket.stream`: change the import, and runs can be resumed.

`from hocket.compat.streaming import StreamingDataset`, or once at the program's start `install()`, and then
`import streaming` as before. The order of samples is always mosaicml-streaming's. What has no counterpart is
refused with its name and a remedy.
"""

from hocket.compat.streaming.dataloader import StreamingDataLoader
from hocket.compat.streaming.dataset import StreamingDataset
from hocket.compat.streaming.install import install
from hocket.compat.streaming.local import LocalDataset
from hocket.compat.streaming.stream import Stream
from hocket.compat.streaming.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

#: The release of mosaicml-streaming that has these names.
__version__ = "0.13.0"

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
    "install",
]
