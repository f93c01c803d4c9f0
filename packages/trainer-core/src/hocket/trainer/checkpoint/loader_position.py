"""The position of a data loader in a checkpoint, and the way back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.process.rng import capture_rng, restore_loader_rng, restore_rng
from hocket.trainer.time import Time


@dataclass(slots=True)
class LoaderPosition:
    """The loader's position in a checkpoint."""

    loader_state: Mapping[str, Any] | None = None
    epoch_rng: Mapping[str, Any] | None = None
    """The states of the random generators at the start of the epoch."""
    rng: Mapping[str, Any] = field(default_factory=dict)
    is_of_other_ranks: bool = False
    counted: Mapping[str, Any] | None = None
    """The position in samples; None in checkpoints of earlier versions."""

    def restore(
        self, loader: TrainLoader, *, device: torch.device, num_batches: int, is_shared: bool
    ) -> list[str]:
        """Move a loader to this position.

        Args:
            loader: The loader.
            device: The device whose random generator is saved too.
            num_batches: Number of batches of the epoch that a loader without a state fetches and discards.
            is_shared: Whether the loader has one state for all ranks.

        Returns:
            Sentences for the user.
        """
        # A position in one rank's share, or in all of the data, is not valid in another share.
        loader_state = None if self.is_of_other_ranks and not is_shared else self.loader_state
        if not loader.resume(loader_state, num_batches=num_batches, position=self.counted):
            restore_loader_rng(self.rng, loader.loader)
            return []
        # The epoch's shuffle is drawn again from the generator states at its start. Then the current states
        # are restored.
        current_rng = capture_rng(device)
        if self.epoch_rng is not None:
            restore_rng(self.epoch_rng, device)
            restore_loader_rng(self.epoch_rng, loader.loader)
        first = loader.skip()
        restore_rng(current_rng, device)
        restore_loader_rng(self.rng, loader.loader)
        if first is not None:
            notice = (
                "the data loader has another batch size than in the checkpoint: each rank leaves out the "
                f"first {first} samples of this epoch, which were trained on"
            )
            return [notice]
        reason = "has no state in the checkpoint" if loader.is_stateful else "keeps no state"
        proviso = ""
        if self.is_of_other_ranks:
            reason += " of another number of ranks" if loader.is_stateful else ""
            proviso = " (the same samples, where the global batch and its order are as before)"
        notice = (
            f"the data loader {reason}: what was trained on in this epoch, "
            f"{Time.from_batch(num_batches).describe()}{proviso}, was fetched again and discarded"
        )
        return [notice]
