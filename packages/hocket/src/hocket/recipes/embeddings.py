"""Embeddings: a text encoder with a contrastive loss over the negatives of the whole global batch.

`python -m hocket.recipes.embeddings text` trains plainly, `--stack` with the recipe's methods. A pair is two
windows of a source file that overlap by half. The loss and its gradient are those of one batch on one rank,
however the batch is divided into microbatches and over ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from hocket import algos
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.language import windows
from hocket.recipes.recipe import Recipe, main
from hocket.trainer import Algorithm, Event, Logger, State
from hocket.trainer.precision import Precision

LENGTH = 32
TEMPERATURE = 0.07


class TextEncoder(GPT):
    """An encoder of texts as unit vectors, trained to match the two texts of a pair (Oord 2018).

    A batch holds `first` and `second`, `(B, L) uint8`. The encoder must be deterministic: no dropout.

    Attributes:
        gathered: The embeddings of the global batch, `(N, 2, D)`, set by `GatheredNegatives`; None where the
            current batch has all negatives.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        del self.head
        self.gathered: Tensor | None = None
        for block in self.blocks:
            block.is_causal = False  # type: ignore[assignment]

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of both texts, `(B, 2, D)`."""
        texts = torch.stack([batch["first"], batch["second"]], 1).long()
        features = self.encode(texts.flatten(0, 1)).mean(1)
        return F.normalize(features, dim=-1).view(*texts.shape[:2], -1)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy of finding each text's partner in the global batch, in both directions."""
        if self.gathered is None or "row" not in batch:
            return contrastive_loss(outputs)
        rows, embeddings = batch["row"], self.gathered
        # Every microbatch computes the loss of the global batch, with a gradient through its own rows alone;
        # these gradients add up to that of the global batch. The trainer weighs a microbatch by its share of
        # the rows.
        global_loss = contrastive_loss(embeddings.index_copy(0, rows, outputs))
        return global_loss.detach() + (global_loss - global_loss.detach()) * (len(embeddings) / len(rows))


def contrastive_loss(embeddings: Tensor) -> Tensor:
    """Return the symmetric InfoNCE loss of unit vectors, `(N, 2, D)`."""
    scores = embeddings[:, 0] @ embeddings[:, 1].T / TEMPERATURE
    targets = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


class GatheredNegatives(Algorithm):
    """An algorithm that embeds the global batch before each step, so that microbatches see all negatives.

    The embedding is computed without gradients and costs a forward pass. Ranks must have equally many rows.
    With one rank and no microbatches there is nothing to gather, and the algorithm does nothing.
    """

    events = frozenset({Event.BATCH_START})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Store the embeddings in the model, and the position of each row among them in the batch."""
        rank, num_ranks = state.parallelism.data_parallel
        model: Any = state.model
        size, batch = state.device_train_microbatch_size, dict(state.batch)
        rows = len(batch["first"])
        if num_ranks == 1 and (size is None or size >= rows):
            return
        pieces = [{name: batch[name].split(size or rows)[i] for name in ("first", "second")}
                  for i in range(-(-rows // (size or rows)))]  # fmt: skip
        with torch.no_grad(), Precision(state.precision, state.device).forward():
            local = torch.cat([model(piece) for piece in pieces])
        parts = [torch.empty_like(local) for _ in range(num_ranks)]
        if num_ranks > 1:
            dist.all_gather(parts, local.contiguous())
        else:
            parts = [local]
        model.gathered = torch.cat(parts)
        batch["row"] = torch.arange(rows, device=local.device) + rank * rows
        state.batch = batch


def make_data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of pairs of windows that overlap by half."""

    def collate(pairs: list[Tensor]) -> dict[str, Tensor]:
        texts = torch.stack(pairs)
        return {"first": texts[:, :LENGTH], "second": texts[:, LENGTH // 2 :]}

    train, held_out = windows(LENGTH + LENGTH // 2)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collate),  # type: ignore[arg-type]
        DataLoader(held_out, batch_size=len(held_out), collate_fn=collate),  # type: ignore[arg-type]
    )


RECIPES = {
    "text": Recipe(
        make_model=lambda: TextEncoder(GPTConfig(context=LENGTH, width=48, num_layers=2, num_heads=4)),
        make_data=make_data,
        methods={
            "EMA": lambda: algos.EMA("10ba"),
            "GradientClipping": lambda: algos.GradientClipping("norm", 1.0),
        },
        target=2.6,
        learning_rate=5e-4,
        batch_size=32,
    ),
}


if __name__ == "__main__":
    main(RECIPES, __doc__)
