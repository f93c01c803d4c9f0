"""Checkpoints of PyTorch state: saved by any number of ranks, loaded by any other."""

from hocket.ckpt.listing import Listing
from hocket.ckpt.retention import KeepBest, KeepEvery, KeepLast, Policy
from hocket.ckpt.torch.async_save import SaveHandle
from hocket.ckpt.torch.functions import load, provide, save
from hocket.ckpt.torch.load_job import Loaded
from hocket.ckpt.torch.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Listing",
    "Loaded",
    "Policy",
    "SaveHandle",
    "load",
    "provide",
    "save",
]
