"""Storage for `torch.distributed.checkpoint`, for training loops that use torch's own API."""

from hocket.ckpt.dcp.reading import HocketReader
from hocket.ckpt.dcp.writing import HocketWriter
from hocket.native.arguments import check_arguments

__all__ = ["HocketReader", "HocketWriter"]

check_arguments(globals()[name] for name in __all__)
