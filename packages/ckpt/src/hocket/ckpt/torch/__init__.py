"""Checkpoints of PyTorch state: saved by any number of ranks, loaded by any other.

- `store`, `functions`: what scripts call, with and without a store
- `layout`: dtype, shape, placement and memory of each tensor
- `saving`: one save as each rank runs it
- `loading`: one load as each rank runs it
- `ranks`: messages and errors between ranks
- `weights`: published versions of weights: their publisher, and a follower into tensors
"""

from hocket.ckpt.torch.functions import load, provide, save
from hocket.ckpt.torch.loading.job import Loaded
from hocket.ckpt.torch.saving.async_save import SaveHandle
from hocket.ckpt.torch.store import CheckpointStore
from hocket.ckpt.torch.weights.publisher import Publisher, publish
from hocket.ckpt.torch.weights.tensor_follower import TensorFollower
from hocket.ckpt.verbs.list import ListedCheckpoint
from hocket.ckpt.verbs.retention import KeepBest, KeepEvery, KeepLast, KeepPolicy
from hocket.ckpt.verbs.thin import Thin
from hocket.native.arguments import check_arguments

__all__ = [
    "CheckpointStore",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "ListedCheckpoint",
    "Loaded",
    "Publisher",
    "SaveHandle",
    "TensorFollower",
    "Thin",
    "load",
    "provide",
    "publish",
    "save",
]

check_arguments([CheckpointStore, KeepBest, KeepEvery, KeepLast, Publisher, TensorFollower, Thin])
