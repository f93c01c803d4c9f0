"""Muon: the optimizer of hidden matrices, on one process and on shards.

- `optimizer`: the class `Muon`.
- `exchange`: gives each cut matrix whole to one rank, and the results back as shards.
- `with_adamw`: `Muon` for the hidden matrices of a model and AdamW for its other parameters.
"""

from hocket.trainer.optim.muon.optimizer import Muon
from hocket.trainer.optim.muon.with_adamw import muon_with_adamw

__all__ = ["Muon", "muon_with_adamw"]
