"""A callback that reacts to jumps of the loss or of the gradient norm."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.rank_values import DelayedRows, RankValues
from hocket.trainer.checks import check_count, check_number
from hocket.trainer.errors import DivergedError, TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.ranks.sharded_tensors import global_norm, tensor_norms

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)
_POLICIES = ("warn", "raise", "skip", "ignore")


class SpikeWatcher(Callback):
    """Warns, raises, skips the update or only logs when the loss or the gradient norm jumps.

    A value is a spike if it is not finite, or more than `threshold` standard deviations above the mean of the
    last `window_size` values that were no spikes. The values are means over the ranks, so every rank comes to
    the same verdict at the same batch. The window is kept in checkpoints. Logs `spike/loss`, and
    `spike/grad_norm` if watched: 1 for a spike, else 0.

    With `"skip"` the optimizers change nothing: parameters and moments stay, and no weight decay is applied.
    The values must be known before the update, so every batch waits for the device once. The other policies
    check a batch when the next one has been computed, without waiting. `"ignore"` only logs the spikes.

    Args:
        policy: `"warn"`, `"raise"`, `"skip"` or `"ignore"`.
        window_size: Values to compare with.
        threshold: Standard deviations above the mean.
        min_batches: Batches before the first verdict; non-finite values are spikes from the start.
        watch_grad_norm: Also watch the norm of all gradients, before clipping by an algorithm that runs
            later.
        max_skipped_in_a_row: With `"skip"`, the most batches to skip in a row; the next one raises.

    Raises:
        TrainerConfigError: If an argument is out of range.
        DivergedError: While training, with `"raise"`, or after too many skipped batches in a row.
    """

    needs_whole_model = True
    reads_outputs = False

    def __init__(
        self,
        policy: Literal["warn", "raise", "skip", "ignore"] = "warn",
        *,
        window_size: int = 128,
        threshold: float = 6.0,
        min_batches: int = 20,
        watch_grad_norm: bool = False,
        max_skipped_in_a_row: int = 10,
    ) -> None:
        if policy not in _POLICIES:
            raise TrainerConfigError(
                f"`policy` is `{policy}`; expected one of {', '.join(f'`{name}`' for name in _POLICIES)}"
            )
        check_count("window_size", window_size, least=2)
        check_count("min_batches", min_batches, least=2)
        check_count("max_skipped_in_a_row", max_skipped_in_a_row, least=0)
        check_number("threshold", threshold, least=0)
        if min_batches > window_size or threshold == 0:
            raise TrainerConfigError(
                f"`min_batches` is {min_batches}, `window_size` {window_size} and `threshold` {threshold}; "
                "expected 2 <= min_batches <= window_size and a threshold above 0"
            )
        self.policy = policy
        self.threshold = threshold
        self.min_batches = min_batches
        self.watch_grad_norm = watch_grad_norm
        self.max_skipped_in_a_row = max_skipped_in_a_row
        names = ("loss", "grad_norm") if watch_grad_norm else ("loss",)
        self._windows: dict[str, deque[float]] = {name: deque(maxlen=window_size) for name in names}
        self._num_skipped_in_a_row = 0
        self._logger: Logger | None = None
        self._verdicts = DelayedRows(self._react)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the batch: now with `"skip"`, else when the next one has been computed."""
        self._logger = logger
        batch = state.timestamp.counts.batch + 1
        values = RankValues(state.parallelism, self._measure(state))
        if self.policy != "skip":
            self._verdicts.push(values, batch)
            return
        if spikes := self._judge(values.read(), batch):
            self._skip(state, spikes, batch)
        else:
            self._num_skipped_in_a_row = 0

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check the last batch of the epoch."""
        self._verdicts.flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Check the last batch."""
        self._verdicts.flush()

    def _measure(self, state: State) -> torch.Tensor:
        loss: torch.Tensor = state.loss.detach().reshape(1).double()
        if not self.watch_grad_norm:
            return loss
        gradients = {
            name: parameter.grad
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None
        }
        norm = global_norm(tensor_norms(gradients)).to(loss.device)
        return torch.cat([loss, norm.reshape(1).double()])

    def _judge(self, rows: Sequence[Sequence[float]], batch: int) -> list[str]:
        """Return a sentence for each value that is a spike, and add the other values to their windows."""
        spikes, logged = [], {}
        for index, (name, window) in enumerate(self._windows.items()):
            value = statistics.fmean(row[index] for row in rows)
            sentence = self._sentence(name, value, window)
            logged[f"spike/{name}"] = int(sentence is not None)
            if sentence is None:
                window.append(value)
            else:
                spikes.append(sentence)
        if self._logger is not None:
            self._logger.log_metrics(logged, step=batch)
        return spikes

    def _sentence(self, name: str, value: float, window: deque[float]) -> str | None:
        shown = name.replace("_", " ")
        if not math.isfinite(value):
            return f"the {shown} is {value}"
        if len(window) < self.min_batches:
            return None
        mean, deviation = statistics.fmean(window), statistics.pstdev(window)
        if value <= mean + self.threshold * deviation:
            return None
        usual_range = f"{mean:.4g} ± {deviation:.2g} in the {len(window)} batches before"
        return f"the {shown} is {value:.4g}, and was {usual_range}"

    def _react(self, rows: list[list[float]], batch: int) -> None:
        spikes = self._judge(rows, batch)
        if spikes and self.policy != "ignore":
            message = f"a spike at batch {batch}: {'; '.join(spikes)}"
            if self.policy == "raise":
                raise DivergedError(f"{message}. Go on from a checkpoint before it, or use `policy='skip'`")
            _log.warning(message)

    def _skip(self, state: State, spikes: list[str], batch: int) -> None:
        self._num_skipped_in_a_row += 1
        message = f"a spike at batch {batch}, whose update is skipped: {'; '.join(spikes)}"
        if self._num_skipped_in_a_row > self.max_skipped_in_a_row:
            raise DivergedError(
                f"{message}. It is number {self._num_skipped_in_a_row} in a row; go on from an earlier "
                "checkpoint with a lower learning rate"
            )
        _log.warning(message)
        # An optimizer skips parameters without a gradient, and their moments and weight decay too.
        for parameter in state.model.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the windows."""
        return {name: list(window) for name, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the windows."""
        for name, window in self._windows.items():
            window.clear()
            window.extend(state.get(name, ()))
