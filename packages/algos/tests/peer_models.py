"""Small models of plain torch, which the parity tests build in Composer's environment and in Hocket's."""

import torch
from torch import nn


class Convnet(nn.Module):
    """Convolutions with and without stride, pooling, norms of three kinds and linear layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.groups = nn.GroupNorm(4, 32)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.wide = nn.Conv2d(32, 32, (3, 1), padding=(1, 0), dilation=1)
        self.layers = nn.LayerNorm(32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = self.pool(torch.relu(self.groups(self.down(x))))
        x = self.wide(x).mean((2, 3))
        return self.head(torch.relu(self.hidden(self.layers(x))))


def bottlenecks():
    from torchvision.models.resnet import Bottleneck

    down = nn.Conv2d(8, 16, 1)
    return nn.Sequential(Bottleneck(8, 4, downsample=down), Bottleneck(16, 4), Bottleneck(16, 4))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def optimizer_of(model, num_groups=1):
    """Return SGD with state for each parameter; with two groups, weights in the first."""
    groups = [
        {"params": [value for value in model.parameters() if min(1, value.ndim // 2) != group]}
        for group in range(num_groups)
    ]
    optimizer = torch.optim.SGD(groups if num_groups > 1 else model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def groups_by_name(model, optimizer):
    """Return, for each group, the sorted names of its parameters, and of those with state."""
    names = {id(value): name for name, value in model.named_parameters()}
    groups = [sorted(names[id(value)] for value in group["params"]) for group in optimizer.param_groups]
    return groups, sorted(names[id(value)] for value in optimizer.state)


def run(model, x):
    """Return outputs in training and evaluation, the gradients of the first, and the buffers after it."""
    model.train()
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        return {"train": out.detach(), "gradients": gradients, "buffers": buffers, "eval": model(x)}
