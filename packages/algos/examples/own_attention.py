"""ALiBi on an attention class of your own: register how the class gets it, then name the method.

`python packages/algos/examples/own_attention.py` trains a tiny causal model with it for 20 steps, and
evaluates on sequences four times as long as those it was trained on.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.algos import Alibi
from hocket.algos.alibi import AlibiAttention, policy_registry
from hocket.trainer import Trainer

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 32, 6, 64


class MyAttention(nn.Module):
    """Causal self-attention with a head size of its own: 6 heads of 8 over a width of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * HEADS * 8)
        self.outputs = nn.Linear(HEADS * 8, WIDTH)
        self.alibi: AlibiAttention | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Attend over earlier positions, `(B, L, D)` to `(B, L, D)`."""
        q, k, v = self.inputs(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        attend = F.scaled_dot_product_attention if self.alibi is None else self.alibi
        mixed = attend(q, k, v, is_causal=True)
        out: Tensor = self.outputs(mixed.transpose(1, 2).flatten(2))
        return out


@policy_registry.register(MyAttention)
def give_alibi(module: MyAttention, index: int, max_sequence_length: int) -> nn.Module:  # noqa: ARG001
    """Put ALiBi into one attention module; the trainer calls it for each."""
    module.alibi = AlibiAttention(HEADS, max_sequence_length)
    return module


class Model(nn.Module):
    """A language model of one block, with learned positions until ALiBi takes their place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        self.attention = MyAttention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of the next token, `(B, L, V)`."""
        ids = batch["input_ids"]
        x = self.embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        logits: Tensor = self.head(x + self.attention(x))
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the next token."""
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def main(steps: int = 20) -> dict[str, float]:
    """Train, print the losses before and after on long sequences, and return them."""
    torch.manual_seed(0)
    # Each token follows from the one before it: x, x + 3, x + 6, ...
    starts = torch.randint(0, VOCABULARY, (8 * steps, 1))
    rows = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
    model = Model()
    with Trainer(
        model=model,
        train_dataloader=DataLoader([{"input_ids": row} for row in rows], batch_size=8),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration=f"{steps}ba",
        algorithms=[Alibi(max_sequence_length=LENGTH, train_sequence_length_scaling=0.25)],
        progress_bar=False,
        device="cpu",
        seed=1,
    ) as trainer:
        whole = {"input_ids": rows[:8]}
        with torch.no_grad():
            before = float(model.loss(model(whole), whole))
        trainer.fit()
        with torch.no_grad():
            after = float(model.loss(model(whole), whole))
    print(f"loss on sequences of {LENGTH}: {before:.3f} before, {after:.3f} after training on {LENGTH // 4}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
