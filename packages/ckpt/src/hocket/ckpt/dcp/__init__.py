"""Storage for `torch.distributed.checkpoint`, for training loops that use torch's own API."""

from hocket.ckpt.dcp.reading import HocketReader
from hocket.ckpt.dcp.writing import HocketWriter

__all__ = ["HocketReader", "HocketWriter"]
