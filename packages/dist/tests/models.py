"""Small models, and one way to train them, shared by the tests of hocket.dist."""

from collections.abc import Iterator

import torch
from torch import nn

STEPS = 20
BATCH = 8


class Block(nn.Module):
    """A residual block whose inner width divides by no number of ranks."""

    def __init__(self, width: int, inner: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Has a forward and a loss, as the trainer wants them; the head's 3 rows are fewer than 4 ranks."""

    def __init__(self, *, depth: int = 3, width: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch["y"])

    def eval_forward(
        self, batch: dict[str, torch.Tensor], outputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.forward(batch) if outputs is None else outputs


class TiedModel(nn.Module):
    """Embedding and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 3, **options: int) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(**options)


def batches(steps: int = STEPS, *, size: int = BATCH) -> Iterator[dict[str, torch.Tensor]]:
    """The global batches of a run, alike wherever they are made."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield {
            "x": torch.randn(size, 5, generator=generator),
            "y": torch.randint(0, 3, (size,), generator=generator),
        }


def share(batch: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """This rank's slice."""
    return {key: value.chunk(size)[rank] for key, value in batch.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a parameter, plain or sharded. Collective."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full else tensor).detach().clone()


def train_alone(
    steps: int = STEPS, *, max_norm: float = 1.0
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train the plain model in this process: final parameters, losses, and gradient norms before clipping."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for batch in batches(steps):
        loss = model.loss(model(batch), batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: whole(value) for name, value in model.named_parameters()}, losses, norms
