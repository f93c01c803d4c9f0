"""Language: a GPT and a BERT over bytes, on the source of Python's own library.

`python -m hocket.recipes.language gpt` trains plainly, `--stack` with the recipe's methods. Every tenth
window of the text is held out. The loss is in nats a byte.
"""

from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from hocket import algos
from hocket.recipes.corpus import samples
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.recipe import Recipe, main
from hocket.trainer import LossSum

LENGTH = 64
WINDOWS = 20_000
MASKED_SHARE = 0.15
MASK = 0
"""The byte that replaces a masked byte; source text does not contain it."""
IGNORED = -100
SMALL = GPTConfig(context=LENGTH, width=64, num_layers=2, num_heads=4)


class BERT(GPT):
    """A transformer that predicts masked bytes from the bytes on both sides (Devlin et al. 2019).

    A batch holds `tokens`, `(B, L)`, and `labels`, `(B, L)`: the byte that was masked, else -100.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.is_causal = False  # type: ignore[assignment]

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the byte at each position, `(B, L, V)`."""
        return self.logits(batch["tokens"].long())

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> LossSum:  # type: ignore[override]
        """Return the cross-entropy summed over the masked bytes."""
        labels = batch["labels"]
        total = F.cross_entropy(
            outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return LossSum(total, (labels != IGNORED).sum())


def mask_bytes(text: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Mask 15% of the bytes of `(B, L)`; of these, one in ten stays as it is and one in ten is random."""
    draws = torch.rand(text.shape, generator=generator)
    labels = text.long().masked_fill(draws >= MASKED_SHARE, IGNORED)
    tokens = text.masked_fill(draws < 0.8 * MASKED_SHARE, MASK)
    random = torch.randint(0, 256, text.shape, generator=generator, dtype=text.dtype)
    is_random = (draws >= 0.8 * MASKED_SHARE) & (draws < 0.9 * MASKED_SHARE)
    return {"tokens": torch.where(is_random, random, tokens), "labels": labels}


@cache
def windows(length: int) -> tuple[Tensor, Tensor]:
    """Return windows of the corpus for training and evaluation, `(N, length) uint8`."""
    text = [sample["tokens"] for sample in islice(samples(length), WINDOWS)]
    all_windows = torch.from_numpy(np.stack(text))  # type: ignore[arg-type]
    is_held_out = torch.arange(len(all_windows)) % 10 == 0
    return all_windows[~is_held_out], all_windows[is_held_out][:256]


def causal_data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders for the GPT: windows of one byte more than its context."""

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        return {"tokens": torch.stack(rows)}

    train, held_out = windows(LENGTH + 1)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collate),  # type: ignore[arg-type]
        DataLoader(held_out, batch_size=128, collate_fn=collate),  # type: ignore[arg-type]
    )


def masked_data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders for the BERT: training draws new masks each time, evaluation has one set of masks."""
    train, held_out = windows(LENGTH)
    masked = mask_bytes(held_out, torch.Generator().manual_seed(0))
    rows = [{name: value[row] for name, value in masked.items()} for row in range(len(held_out))]
    return (
        DataLoader(
            train,  # type: ignore[arg-type]
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=lambda texts: mask_bytes(torch.stack(texts)),
        ),
        DataLoader(rows, batch_size=128),  # type: ignore[arg-type]
    )


RECIPES = {
    "gpt": Recipe(
        make_model=lambda: GPT(SMALL),
        make_data=causal_data,
        methods={
            "Alibi": lambda: algos.Alibi(LENGTH + 1, 0.5, input_key="tokens"),
            "EMA": lambda: algos.EMA("10ba"),
            "GradientClipping": lambda: algos.GradientClipping("norm", 1.0),
            "SeqLengthWarmup": lambda: algos.SeqLengthWarmup(0.3, 16, LENGTH + 1, 16),
        },
        stack=("Alibi", "GradientClipping", "SeqLengthWarmup"),
        target=2.7,
    ),
    "bert": Recipe(
        make_model=lambda: BERT(SMALL),
        make_data=masked_data,
        methods={
            "Alibi": lambda: algos.Alibi(LENGTH, 1.0, input_key="tokens"),
            "EMA": lambda: algos.EMA("10ba"),
            "GradientClipping": lambda: algos.GradientClipping("norm", 1.0),
            "SeqLengthWarmup": lambda: algos.SeqLengthWarmup(0.3, 16, LENGTH, 16),
        },
        stack=("Alibi", "GradientClipping"),
        target=3.16,
        learning_rate=1e-3,
        steps=300,
    ),
}


if __name__ == "__main__":
    main(RECIPES, __doc__)
