"""`LossWeighing`: the loss weights of a fit, by the rule that the loss of its first batch follows."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.errors import DataError
from hocket.trainer.models.base import LossSum
from hocket.trainer.ranks.step_sync import GlobalStep, StepSync
from hocket.trainer.step.losses.loss_reader import LossReader
from hocket.trainer.step.losses.loss_rule import LossRule
from hocket.trainer.step.losses.losses import name_of

_log = logging.getLogger(__name__)

_UNKNOWN, _OWN = 0, 1
"""The codes of a loss without a rule, and of stated weights; all other codes are checksums of rules."""


def is_read(spec: DataSpec, model: Any) -> bool:
    """Return whether weights are read from the loss: unless the data specification or the model states them.

    The `loss_weights` of a model whose outputs have its loss are used if that loss cannot be read.
    """
    has_estimate = getattr(model, "has_loss_in_outputs", False)
    return spec.get_loss_weights is None and (
        has_estimate or not callable(getattr(model, "loss_weights", None))
    )


class LossWeighing:
    """The loss weights of the samples, where microbatches or ranks have to be weighed against each other.

    The first microbatch of a fit runs under a `LossReader`, which finds the rule that its loss follows. From
    then on the rule weighs each batch on the host, when it is fetched. The first batch, which was fetched
    before, is weighed again, and the ranks exchange its weights, which blocks once.

    Args:
        spec: The data specification, without functions that state loss weights.
        loader: The loader whose batches are weighed.
        sync: The exchange between the ranks.
        model: The model.

    Attributes:
        is_started: Whether the present fit needs weights.
        is_due: Whether the next microbatch shows the rule.
        is_sum: Whether the loss is a sum over the batch.
    """

    def __init__(self, spec: DataSpec, loader: TrainLoader, sync: StepSync, model: Any) -> None:
        self.spec = spec
        self.is_started = self.is_due = self.is_sum = False
        self.batch: Any = None
        """This rank's batch, while the rule is not known."""
        self._loader = loader
        self._sync = sync
        self._model = name_of(model)
        self._rule: LossRule | None = None
        self._has_told_unknown = self._has_told_other = False

    def start(self, *, is_needed: bool = True) -> None:
        """Begin a fit.

        Args:
            is_needed: Whether the fit has several ranks or microbatches.
        """
        self.is_started = self.is_due = is_needed
        self.is_sum = False
        self._use(self.spec)

    def _use(self, spec: DataSpec) -> None:
        self._loader.spec = spec
        self._loader.prefetcher.use_spec(spec)

    def take(
        self,
        reader: LossReader,
        loss: Any,
        microbatch: Any,
        num_samples: int,
        facts: DeviceBatch,
        step: GlobalStep,
    ) -> None:
        """Take the rule from the loss of the first microbatch, and weigh its batch. Collective.

        Args:
            reader: The reader that observed the loss.
            loss: The total loss of the microbatch.
            microbatch: The microbatch.
            num_samples: Its number of samples.
            facts: The counts of this rank's batch, whose weights are changed.
            step: The facts about the global batch, whose weight is changed.
        """
        self.is_due = False
        batch, self.batch = self.batch, None
        rule: LossRule | str | None = None
        code, weights, weight = _OWN, facts.weights, facts.weight
        if not (isinstance(loss, LossSum) or self._are_weights_stated(batch)):
            rule = reader.rule_of(loss, microbatch, num_samples)
            code = _UNKNOWN
        if isinstance(rule, LossRule):
            try:
                weights = _on_host(rule.weigh(batch), facts)
            except DataError as error:
                rule = f"{error}"
            else:
                weight = float(facts.counted) if weights is None else float(sum(weights))
                code = zlib.crc32(repr(rule.key).encode()) | 2
        if code == _UNKNOWN and self.spec.get_loss_weights is not None and weights is not None:
            code = _OWN  # the model's estimate
        codes, new_weights = self._exchange(code, weight)
        if len(set(codes)) > 1 or code == _UNKNOWN:
            self._tell(rule if isinstance(rule, str) else "the ranks compute it in different ways")
        elif isinstance(rule, LossRule):
            facts.weights, facts.weight, step.weight = weights, weight, sum(new_weights)
            self.is_sum, self._rule = rule.is_sum, rule
            self._use(self.spec.weighted_by(None if rule.path is None else self._weigh))

    def _exchange(self, code: int, weight: float) -> tuple[list[float], list[float]]:
        """Return the codes and the weights of all data-parallel ranks. Collective and blocking."""
        rank, slots = self._sync.data_rank, [0.0] * (2 * self._sync.num_data_ranks)
        slots[2 * rank : 2 * rank + 2] = code, weight
        numbers = self._sync.sum_of_data(*slots)
        return numbers[::2], numbers[1::2]

    def _are_weights_stated(self, batch: Any) -> bool:
        """Return whether the data specification counts the tokens that generate a loss."""
        count_tokens = self.spec.get_num_tokens_in_batch
        return count_tokens is not None and isinstance(count_tokens(batch), Mapping)

    def _weigh(self, batch: Any) -> Sequence[float] | torch.Tensor | None:
        assert self._rule is not None
        try:
            return self._rule.weigh(batch)
        except DataError as error:
            if not self._has_told_other:
                self._has_told_other = True
                _log.warning("a batch is unlike the first one, and is weighted without its labels: %s", error)
            return self.spec.loss_weights(batch)

    def _tell(self, reason: str) -> None:
        """Say once that microbatches and ranks may change the update."""
        if self._has_told_unknown or self._sync.rank != 0:
            return
        self._has_told_unknown = True
        _log.warning(
            "microbatches and ranks may change the update: the number that the loss of `%s` is divided by "
            "cannot be read (%s). It counts as the mean over the samples, or over `labels` that are not -100 "
            "where a sample has several. If it is another mean, return `LossSum(total, weight)` from the "
            "loss, or state the weight of each sample by `DataSpec(dataloader=…, get_loss_weights=…)`",
            self._model,
            reason,
        )


def _on_host(weights: Sequence[float] | torch.Tensor | None, facts: DeviceBatch) -> list[float] | None:
    """Return host numbers, 0 for the rows beyond the share of a short last batch.

    Raises:
        DataError: If there is not one weight for each sample.
    """
    if weights is None:
        numbers = None
    else:
        numbers = weights.tolist() if isinstance(weights, torch.Tensor) else list(weights)
        if len(numbers) != facts.samples:
            raise DataError(f"the labels have {len(numbers)} rows for {facts.samples} samples")
    if facts.counted < facts.samples:
        numbers = [1.0] * facts.samples if numbers is None else numbers
        numbers[facts.counted :] = [0.0] * (facts.samples - facts.counted)
    return numbers
