"""`PackedDataset`: token sequences of different lengths in rows of one length, with little padding.

- `best_fit`: the division of sequences into rows
- `windows`: the rows of a window of samples, and the arrays of a batch
- `packed_dataset`: batches of rows, their position and state
"""

from hocket.stream.packing.packed_dataset import PackedDataset
from hocket.stream.packing.windows import count_tokens, sequence_offsets

__all__ = ["PackedDataset", "count_tokens", "sequence_offsets"]
