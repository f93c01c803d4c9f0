"""Training of small models under a layout, and the numbers by which layouts are compared with one process."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from hocket.trainer import Trainer
from hocket.trainer.callbacks import GradNormMonitor
from hocket.trainer.loggers import InMemoryLogger
from support.ranks import skip_without_group

GLOBAL_BATCH = 8
LENGTH = 9
VOCABULARY = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}

LONG = ("gpt", "tied gpt", "tied llama", "mixture", "tied mixture", "resnet")
"""Models that are compared over 20 steps."""


def num_steps(kind: str) -> int:
    """Return the steps over which a slow test compares a model: 20 for those of `LONG`, and 6 for others.

    The others differ by their plans and their modules, which the first steps show. Some amplify rounding
    later: with `tp` alone the norm of step 19 of a Qwen3 of five layers differs by 1.4e-5, its loss by 1e-7.
    """
    return 20 if kind in LONG else 6


class Numbers(NamedTuple):
    """The numbers of one training, alike on all ranks."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    description: str

    def largest_differences(self, other: Numbers) -> dict[str, float]:
        """Return the largest relative differences of losses, gradients' norms and the update as a whole."""
        assert list(self.trained) == list(other.trained)
        assert len(self.losses) == len(other.losses) > 0
        updates = [
            torch.cat([(one.trained[name] - one.initial[name]).double().flatten() for name in self.trained])
            for one in (self, other)
        ]
        return {
            "loss": max(abs(a / b - 1) for a, b in zip(self.losses, other.losses, strict=True)),
            "norm": max(abs(a / b - 1) for a, b in zip(self.norms, other.norms, strict=True)),
            "update": float((updates[0] - updates[1]).norm() / updates[1].norm()),
        }


def build(kind: str, layers: int = 2) -> nn.Module:
    """Return a small model with seeded values; `, checkpointed` turns on transformers' checkpointing."""
    if kind.endswith(", checkpointed"):
        model: Any = build(kind.removesuffix(", checkpointed"), layers)
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    if kind == "starved mixtral":
        model = build("mixtral", layers)
        model.model.config._experts_implementation = "eager"  # it leaves experts without rows out
        for name, one in model.named_parameters():
            if name.endswith("gate.weight"):
                nn.init.zeros_(one)
        return model
    torch.manual_seed(3)
    if kind == "resnet":
        return _resnet()
    if kind == "gpt":
        return GPT(GPTConfig(context=LENGTH - 1, width=24, num_layers=layers, num_heads=4))
    if kind in ("tied gpt", "tied gpt with bias", "tied mixture"):
        tied: Any = build("mixture" if kind == "tied mixture" else "gpt", layers)
        tied.head = nn.Linear(24, tied.head.out_features, bias=kind.endswith("bias"))
        tied.head.weight = tied.byte_embedding.weight
        return tied
    if kind == "mixture":
        size = GPTConfig(context=LENGTH - 1, width=24, num_layers=layers, num_heads=4)
        return MixtureGPT(MixtureConfig(gpt=size, num_experts=4))
    try:
        import transformers
    except ModuleNotFoundError as error:
        if "RANK" not in os.environ:  # the process of the tests skips for its ranks, too
            skip_without_group(error)
        raise

    sizes = SIZES | {"num_hidden_layers": layers}

    heads = {"num_key_value_heads": 2}
    rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    made = {
        "llama": lambda: transformers.LlamaConfig(**sizes, **heads),
        "tied llama": lambda: transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, **heads),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, **heads, head_dim=6),
        "mistral": lambda: transformers.MistralConfig(**sizes, **heads),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, **heads, **experts),
        "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
            **sizes, **heads, head_dim=6, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "dense first": lambda: transformers.Qwen3MoeConfig(
            **sizes,
            **heads,
            head_dim=6,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            mlp_only_layers=list(range(layers - 2)),
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=24, n_layer=layers, n_head=4, n_positions=16, **rates
        ),
        "untied gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=layers,
            n_head=4,
            n_positions=16,
            tie_word_embeddings=False,
            **rates,
        ),
        "bert": lambda: transformers.BertConfig(**sizes, **no_dropout),
    }[kind]()
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    from hocket.trainer.models import HuggingFaceModel

    return HuggingFaceModel(auto.from_config(made, attn_implementation="sdpa"))


def _resnet() -> nn.Module:
    """Return a ResNet whose norms are of each sample, since ranks have parts of a batch."""
    from hocket.recipes.images import CLASSES, ResNet
    from hocket.trainer import ComposerClassifier

    network = ResNet(8)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return ComposerClassifier(network, num_classes=CLASSES)


def samples(kind: str, steps: int) -> list[Any]:
    """Return the samples of all steps; those of Hugging Face's models have labels of different numbers."""
    generator = torch.Generator().manual_seed(11)
    made: list[Any] = []
    for index in range(steps * GLOBAL_BATCH):
        if kind == "resnet":
            made.append((torch.rand(1, 8, 8, generator=generator), index % 10))
            continue
        is_gpt = kind in ("gpt", "tied gpt", "tied gpt with bias", "mixture", "tied mixture")
        length = LENGTH if is_gpt else LENGTH - 1
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator)
        if is_gpt:
            made.append({"tokens": tokens.to(torch.uint8)})
            continue
        hidden = torch.rand(length, generator=generator) < torch.rand((), generator=generator) * 0.7
        made.append({"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100)})
    return made


def train(kind: str, config: dict[str, Any] | None, num_ranks: int, **options: Any) -> Numbers:
    """Train under a layout and return the numbers of this rank. Collective with several ranks.

    Args:
        kind: The model.
        config: The `parallelism_config`.
        num_ranks: Data-parallel ranks of it.
        **options: `steps`, `layers`, `make_optimizers` (from the model), `memory` (a logger), and arguments
            of the trainer.
    """
    steps = options.pop("steps", 3)
    model = build(kind, options.pop("layers", 2))
    make_optimizers = options.pop("make_optimizers", _adamw)
    initial = whole(model)
    memory = options.pop("memory", None) or InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(samples(kind, steps), batch_size=GLOBAL_BATCH // num_ranks),
        optimizers=make_optimizers(model),
        max_duration=f"{steps}ba",
        **{
            "loggers": [memory],
            "callbacks": [GradNormMonitor()],
            "gradient_clipping": 0.5,
            "device_train_microbatch_size": max(2, GLOBAL_BATCH // num_ranks // 2),
            "parallelism_config": config,
            "progress_bar": False,
            "device": "cpu",
            "seed": 7,
        }
        | options,
    )
    with contextlib.closing(trainer):
        trainer.fit()
        return numbers(trainer, memory, initial)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def numbers(trainer: Trainer, memory: InMemoryLogger, initial: dict[str, Tensor]) -> Numbers:
    """Return the numbers of a training that has ended. Collective with several ranks."""
    return Numbers(
        losses=_logged(memory, "loss/train/total"),
        norms=_logged(memory, "l2_norm/grad/before_clipping"),
        initial=initial,
        trained=whole(trainer.state.model),
        description=getattr(trainer.state.parallelism, "describe", str)(),
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, gathered from their shards. Collective."""
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in model.named_parameters()
    }


def _logged(memory: InMemoryLogger, name: str) -> list[float]:
    return [float(value) for _, value in memory.data[name]]
