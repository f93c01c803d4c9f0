"""Conversion to data sets from JSON lines, CSV, TSV, Parquet, Arrow, WebDataset, images and `datasets`.

Each source is read twice: first to infer the types of its columns, then to write. All arguments except the
source, the output location and `columns` are those of `MDSWriter`.
"""

from hocket.stream.convert.arrow import from_arrow, from_hugging_face, from_parquet
from hocket.stream.convert.detect import FORMATS, convert
from hocket.stream.convert.images import from_image_folder
from hocket.stream.convert.jsonl import from_jsonl
from hocket.stream.convert.sample_writer import ConvertReport
from hocket.stream.convert.separated import from_csv, from_tsv
from hocket.stream.convert.webdataset import from_webdataset

__all__ = [
    "FORMATS",
    "ConvertReport",
    "convert",
    "from_arrow",
    "from_csv",
    "from_hugging_face",
    "from_image_folder",
    "from_jsonl",
    "from_parquet",
    "from_tsv",
    "from_webdataset",
]
