"""`StreamingDataLoader`: batches as torch tensors. The modules of this folder alone import torch."""

from hocket.native.arguments import check_arguments
from hocket.stream.torch.loader import INSTEAD, CollateFn, StreamingDataLoader

__all__ = ["CollateFn", "StreamingDataLoader"]

check_arguments([StreamingDataLoader], passed_on=INSTEAD)
