"""Data sets out of what people have: JSON lines, Parquet, Arrow, WebDataset, image folders, `datasets`.

Each source is read twice: once to see what types its columns have, once to write. All arguments beside the
source, the place and `columns` are `MDSWriter`'s; shards carry an `xxh3_64` digest unless `hashes` says else.
"""

from hocket.stream.convert.arrow import from_arrow, from_hugging_face, from_parquet
from hocket.stream.convert.detect import FORMATS, convert
from hocket.stream.convert.images import from_image_folder
from hocket.stream.convert.jsonl import from_jsonl
from hocket.stream.convert.webdataset import from_webdataset
from hocket.stream.convert.writing import Converted

__all__ = [
    "FORMATS",
    "Converted",
    "convert",
    "from_arrow",
    "from_hugging_face",
    "from_image_folder",
    "from_jsonl",
    "from_parquet",
    "from_webdataset",
]
