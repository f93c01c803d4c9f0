"""Terms of a loss that come from parts of activations are refused or said, by the loss of the first batch."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.dist import ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Trainer
from support.standing_ranks import StandingRanks


class Penalised(GPT):
    """A GPT whose loss has a term of activations between its blocks."""

    def __init__(self, weight: float) -> None:
        super().__init__(GPTConfig(context=8, width=16, num_layers=2, num_heads=2))
        self.weight, self.kept = weight, list[Tensor]()
        self.blocks[0].register_forward_hook(lambda _module, _args, output: self.kept.append(output))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        kept, self.kept = self.kept, []
        loss = super().loss(outputs, batch)
        if self.weight < 0:  # noise, which ranks that share their data draw alike
            return loss + 0.1 * torch.rand(()) + 0.1 * nn.functional.dropout(outputs, 0.5).square().mean()
        return loss + self.weight * kept[-1].square().mean() if self.weight else loss


CASES: dict[str, tuple[dict[str, Any], float, str]] = {
    "tp": ({"tp": 2}, 10.0, ""),
    "sequences": ({"tp": {"degree": 2, "sequence_parallel": True}}, 10.0, "leave `sequence_parallel` out"),
    "sequences, no term": ({"tp": {"degree": 2, "sequence_parallel": True}}, 0.0, ""),
    "cp": ({"dp_shard": 1, "cp": 2}, 10.0, "The trainer minimises the mean of their losses"),
    "tp, noise": ({"tp": 2}, -1.0, ""),
    "sequences, noise": ({"tp": {"degree": 2, "sequence_parallel": True}}, -1.0, ""),
    "cp, noise": ({"dp_shard": 1, "cp": 2}, -1.0, ""),
    "cp, no term": ({"dp_shard": 1, "cp": 2}, 0.0, ""),
}


def _train(case: str) -> tuple[float, str, list[str]]:
    """Return the last loss, the refusal, and the warnings of losses."""
    config, weight, _ = CASES[case]
    torch.manual_seed(0)
    tokens = torch.randint(256, (12, 9), generator=torch.Generator().manual_seed(1))
    told = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hocket.dist").addHandler(handler)
    model = Penalised(weight)
    try:
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader([{"tokens": row} for row in tokens], batch_size=4),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="3ba",
            parallelism_config=config if torch.distributed.is_initialized() else None,
            progress_bar=False,
            device="cpu",
        )
        with contextlib.closing(trainer):
            try:
                trainer.fit()
            except ModelError as error:
                return 0.0, str(error), told
            return float(trainer.state.loss), "", [text for text in told if "different losses" in text]
    finally:
        logging.getLogger("hocket.dist").removeHandler(handler)


@pytest.mark.parametrize("case", list(CASES))
def test_a_loss_of_parts_of_activations_is_refused_or_said(two_ranks: StandingRanks, case: str) -> None:
    words = CASES[case][2]
    alone, _, _ = _train(case)
    results = two_ranks.run(_train, case)
    for rank, (_, refusal, told) in enumerate(results):
        if "leave" in words:
            assert "ranks of `tp` have the same data, and different losses of the first batch" in refusal
            assert words in refusal
            continue
        assert not refusal
        assert len(told) == (bool(words) and not rank)
        assert all(words in text for text in told)
    if not words or "mean" in words:  # of equal parts, the mean of means is the mean
        mean = sum(loss for loss, _, _ in results) / 2
        assert mean == pytest.approx(alone, rel=1e-6)
