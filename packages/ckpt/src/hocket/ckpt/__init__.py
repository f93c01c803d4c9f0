"""Sharded checkpoints: atomic commits, verified reads, loading on any number of ranks.

- `document`: the manifest and what stands in it: trees, values, chunks, dtypes, file names
- `read`: opens a checkpoint of any format, and reads boxes of its tensors
- `formats`: the files of each format that Hocket writes
- `verbs`: convert, diff, list, merge, remove, reshard, rewrite, thin, verify, and retention
- `weights`: published versions of weights, and the followers that keep up with them
- `cli`: the command `hocket-ckpt`, a module for each verb
- `torch`: saves and loads of PyTorch state, by ranks
- `dcp`: storage for `torch.distributed.checkpoint`
- `plain`: an independent reader of the format, to test this one against
- `errors`, `uris`, `globs`, `gc_pause`: exceptions, places, and small parts that every room uses
"""

from hocket.ckpt import errors
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.read.opener import open  # noqa: A004 - read as `hocket.ckpt.open`
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.verbs.convert import ConvertReport, convert
from hocket.ckpt.verbs.diff import Difference, diff
from hocket.ckpt.verbs.kept_part import ThinnedCheckpoint
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.verbs.merge import merge
from hocket.ckpt.verbs.remove import GarbageFile, GcReport, RemovedCheckpoint, collect_garbage, remove
from hocket.ckpt.verbs.reshard import ReshardReport, reshard
from hocket.ckpt.verbs.thin import ThinReport, thin
from hocket.ckpt.verbs.verify import BadBlock, VerifyReport, verify
from hocket.ckpt.weights.folder import FolderFollower
from hocket.ckpt.weights.follower import Follower, WeightUpdate

__all__ = [
    "BadBlock",
    "Checkpoint",
    "ConvertReport",
    "Difference",
    "FolderFollower",
    "Follower",
    "GarbageFile",
    "GcReport",
    "ListedCheckpoint",
    "Manifest",
    "RemovedCheckpoint",
    "ReshardReport",
    "ThinReport",
    "ThinnedCheckpoint",
    "VerifyReport",
    "WeightUpdate",
    "collect_garbage",
    "convert",
    "diff",
    "errors",
    "list_checkpoints",
    "merge",
    "open",
    "remove",
    "reshard",
    "thin",
    "verify",
]
