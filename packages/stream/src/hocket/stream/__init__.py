"""Training data from object storage, in a global order that does not depend on the number of ranks.

- `dataset`: `StreamingDataset`, which reads data sets in that order
- `options`: the arguments that determine the order, and the plan made from them
- `packing`: `PackedDataset`, rows of one length that hold several token sequences each
- `torch`: `StreamingDataLoader` and `PackedDataLoader`, batches as tensors
- `huggingface`: the same in Hugging Face's Trainer
- `ray`, `spark`: data sets from Ray's Datasets and Spark's DataFrames, written by their tasks
- `read`: indexes, the order of samples, the cursor, the reader of batches, and single samples
- `mosaic`: the orders of mosaicml-streaming, computed again
- `write`: writers of each format, and merging under one index
- `convert`: data sets from JSON lines, CSV, Parquet, Arrow, WebDataset, images and `datasets`
- `encodings`: the bytes of a value and back
- `verify`, `simulate`: checks of a data set, and of a cluster that would read it
- `cli`: the `hocket-stream` command
- `settings`: defaults, checks of arguments, sizes, weights, fetching, and the place of the process
- `errors`: the errors, one class for each way of handling it
"""

from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING

from hocket.native.arguments import check_arguments
from hocket.stream import errors
from hocket.stream.dataset import StreamingDataset
from hocket.stream.mosaic import MosaicOrder
from hocket.stream.packing import PackedDataset
from hocket.stream.read.streams import Stream
from hocket.stream.settings.validation import REMEDIES
from hocket.stream.write.merge import merge_index
from hocket.stream.write.text_writers import CSVWriter, JSONWriter, TSVWriter, XSVWriter
from hocket.stream.write.writer import MDSWriter

if TYPE_CHECKING:
    from hocket.stream.torch import PackedDataLoader, StreamingDataLoader

__all__ = [
    "CSVWriter",
    "JSONWriter",
    "MDSWriter",
    "MosaicOrder",
    "PackedDataLoader",
    "PackedDataset",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "XSVWriter",
    "errors",
    "merge_index",
]

check_arguments([CSVWriter, JSONWriter, MDSWriter, MosaicOrder, Stream, TSVWriter, XSVWriter])
_ALGORITHMS = [field.name for field in fields(MosaicOrder)]
_OF_SAMPLES = [name for name in signature(StreamingDataset).parameters if name != "algorithms"]
check_arguments([PackedDataset], passed_on=[*_OF_SAMPLES, *_ALGORITHMS, *REMEDIES])
check_arguments([StreamingDataset], passed_on=[*_ALGORITHMS, *REMEDIES])


def __getattr__(name: str) -> object:
    # Imported on first access, because they are the only names that need torch.
    if name in ("PackedDataLoader", "StreamingDataLoader"):
        from hocket.stream import torch

        return getattr(torch, name)
    raise AttributeError(f"module `hocket.stream` has no attribute `{name}`")
