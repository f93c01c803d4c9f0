"""`StreamingDataLoader` and `PackedDataLoader`: batches as torch tensors. This folder alone imports torch."""

from hocket.native.arguments import check_arguments
from hocket.stream.torch.loader import INSTEAD, CollateFn, StreamingDataLoader
from hocket.stream.torch.packed_loader import PackedDataLoader

__all__ = ["CollateFn", "PackedDataLoader", "StreamingDataLoader"]

check_arguments([PackedDataLoader])
check_arguments([StreamingDataLoader], passed_on=INSTEAD)
