"""Metrics of language models."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from hocket.trainer.checks import check_arguments
from hocket.trainer.loss.ignored_label import is_counted
from hocket.trainer.metrics.logits import logits_of
from hocket.trainer.metrics.mean import OPTIONS, SumMean


class LanguageCrossEntropy(SumMean):
    """The cross-entropy, averaged over the tokens that are not ignored.

    Args:
        ignore_index: Targets with this index do not count.
        options: Options of `torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(**options)
        self.ignore_index = ignore_index

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Logits `(B, L, V)`, or a mapping with `logits`.
            targets: Token ids `(B, L)`, shifted already where the model predicts the next token.
        """
        logits = logits_of(outputs)
        flat = targets.reshape(-1)
        self.total += cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            flat,
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        self.count += is_counted(flat, self.ignore_index).sum()


class LanguagePerplexity(LanguageCrossEntropy):
    """The exponential of `LanguageCrossEntropy`."""

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar."""
        # From the rounded cross-entropy, so that the two metrics agree to the last bit.
        return super().compute().exp()


check_arguments([LanguageCrossEntropy, LanguagePerplexity], passed_on=OPTIONS)
