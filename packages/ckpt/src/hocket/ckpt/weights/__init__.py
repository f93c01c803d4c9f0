"""Published weights: versions of one state, whole ones and deltas, and the followers that apply them.

A version is an ordinary checkpoint named `version-<step>`. A delta stores the XOR of its bytes with those of
the version before; at the learning rates of fine-tuning this compresses to a few per cent of the weights.
`hocket.ckpt.torch.Publisher` writes versions; everything here reads them without torch.
"""

from hocket.ckpt.weights.folder import FolderFollower
from hocket.ckpt.weights.follower import Follower, WeightUpdate
from hocket.native.arguments import check_arguments

__all__ = ["FolderFollower", "Follower", "WeightUpdate"]

check_arguments([Follower, FolderFollower])
