"""Hocket's checkpoints behind `torch.distributed.checkpoint`, for training loops that are not ours."""

from hocket.ckpt.dcp.reading import HocketReader
from hocket.ckpt.dcp.writing import HocketWriter

__all__ = ["HocketReader", "HocketWriter"]
