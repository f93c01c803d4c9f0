"""mosaicml-streaming's public names over `hocket.stream`; a run can be resumed with the import changed.

Use `from hocket.compat.streaming import StreamingDataset`, or call `install()` once at the program's start
and `import streaming` as before. The order of samples is always that of mosaicml-streaming. A feature without
a counterpart is refused by an error that names it and a remedy.
"""

from hocket.compat.streaming.dataloader import StreamingDataLoader
from hocket.compat.streaming.dataset import StreamingDataset
from hocket.compat.streaming.install import install
from hocket.compat.streaming.local import LocalDataset
from hocket.compat.streaming.stream import Stream
from hocket.compat.streaming.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from hocket.native.arguments import check_arguments

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

check_arguments([LocalDataset, Stream, StreamingDataset])
