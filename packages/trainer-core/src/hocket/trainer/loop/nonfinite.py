"""`NonFiniteGuard`: the policies for a loss that is NaN or infinite."""

from __future__ import annotations

import logging
import math
from typing import Any, cast

import torch

from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.errors import NonFiniteLossError, RankFailedError
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.state import State

_log = logging.getLogger(__name__)


class NonFiniteGuard:
    """A check of each step's loss, by one of three policies.

    `"raise"`: in one process on the CPU, the step raises before the optimizer runs. On a GPU the loss is
    copied to pinned memory and checked one step later, so the host does not wait. On several ranks, all of
    them end at the same step, one or two steps later. A checkpoint is saved only after all losses up to it
    were checked.

    `"skip"`: every rank skips the update. This policy waits for the loss, as `GradScaler` waits for its
    overflow flag, and on several ranks it adds one all-reduce of a number to each step.

    `"ignore"`: the loss is not checked.

    Args:
        policy: `"raise"`, `"skip"` or `"ignore"`.
        state: The state of the run.
        sync: The exchange between the ranks.
        loader: The loader that passes a failure on to the other ranks.

    Attributes:
        num_skipped: Number of skipped updates.
    """

    def __init__(self, policy: str, state: State, sync: StepSync, loader: TrainLoader) -> None:
        self.policy = policy
        self.num_skipped = 0
        self._state = state
        self._sync = sync
        self._loader = loader
        self._is_alone = sync.num_ranks == 1
        # Reading a loss in host memory does not wait. `tolist` takes half the time of `item`.
        self._reads_at_once = policy == "raise" and state.device.type == "cpu"
        self._pending: tuple[int, torch.Tensor, Any] | None = None
        self._error: NonFiniteLossError | None = None

    def allows(self, loss: torch.Tensor) -> bool:
        """Return whether to update the model; False skips the update.

        Args:
            loss: The mean loss of this rank's batch, without gradients.

        Raises:
            NonFiniteLossError: If a loss is not finite under the policy `"raise"`, in one process.
        """
        if self._reads_at_once:
            value = cast("float", loss.tolist())
            if not math.isfinite(value):
                self._fail(self._state.counts.batch + 1, value)
            return True
        if self.policy == "ignore":
            return True
        if self.policy == "skip":
            return self._is_finite_everywhere(loss)
        self.look(wait=False)
        if self._pending is not None:
            # The device is more than a step behind. A NaN persists, so the check of a later loss finds it.
            return True
        landing = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=loss.is_cuda)
        landing.copy_(loss, non_blocking=True)
        arrival = torch.cuda.Event() if loss.is_cuda else None  # type: ignore[no-untyped-call]
        if arrival is not None:
            arrival.record()
        self._pending = (self._state.counts.batch + 1, landing, arrival)
        return True

    def look(self, *, wait: bool) -> None:
        """Check the loss that was copied last, if it has arrived.

        Args:
            wait: Whether to wait until the loss has arrived.
        """
        if self._pending is None:
            return
        batch, landing, arrival = self._pending
        if arrival is not None and not arrival.query():
            if not wait:
                return
            arrival.synchronize()
        self._pending = None
        if not is_finite(landing):
            self._fail(batch, float(landing))

    def settle(self) -> None:
        """Check every loss so far, on all ranks, before a checkpoint is saved. Collective.

        Raises:
            NonFiniteLossError: If this rank had a loss that is not finite.
            RankFailedError: If another rank had one.
        """
        if self.policy != "raise":
            return
        self.look(wait=True)
        failed = [rank for rank, flag in enumerate(self._sync.gather(float(self._error is not None))) if flag]
        if self._error is not None:
            raise self._error
        if failed:
            ranks = ", ".join(map(str, failed))
            raise RankFailedError(
                f"the loss of rank {ranks} is not finite; the run ends without a checkpoint"
            )

    def _fail(self, batch: int, value: float) -> None:
        if self._error is not None:
            return
        rank = self._state.parallelism.data_parallel[0]
        self._error = NonFiniteLossError(
            f"the loss of batch {batch} on rank {rank} is {value}; look at the batch and the learning "
            f"rate, or set "
            '`loop={"nonfinite_loss": "skip"}` to leave such updates out'
        )
        if self._is_alone:
            raise self._error
        self._loader.fail(self._error)

    def _is_finite_everywhere(self, loss: torch.Tensor) -> bool:
        # A finite number minus itself is 0; NaN and infinity give NaN, which a sum over ranks keeps.
        flag = loss - loss
        if not self._is_alone:
            flag = self._state.parallelism.reduce_async(
                flag.reshape(1).double() if flag.device.type == "cpu" else flag.reshape(1)
            ).wait()[0]
        if is_finite(flag):
            return True
        self.num_skipped += 1
        _log.warning("batch %d: the loss is not finite, no update", self._state.counts.batch + 1)
        return False


def is_finite(scalar: torch.Tensor) -> bool:
    """Return whether a scalar tensor is finite; waits for the device."""
    return math.isfinite(cast("float", scalar.tolist()))
