"""Checkpoints of PyTorch state: saved by any number of ranks, loaded by any other."""

from hocket.ckpt.retention import KeepBest, KeepEvery, KeepLast, Policy
from hocket.ckpt.torch.async_save import SaveHandle
from hocket.ckpt.torch.functions import load, provide, save
from hocket.ckpt.torch.load_job import Loaded
from hocket.ckpt.torch.store import CheckpointStore, Entry

__all__ = [
    "CheckpointStore",
    "Entry",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Loaded",
    "Policy",
    "SaveHandle",
    "load",
    "provide",
    "save",
]
