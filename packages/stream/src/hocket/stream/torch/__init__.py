"""`StreamingDataLoader`: batches as torch tensors. The modules of this folder alone import torch."""

from hocket.stream.torch.loader import CollateFn, StreamingDataLoader

__all__ = ["CollateFn", "StreamingDataLoader"]
