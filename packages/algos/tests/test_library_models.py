"""Methods train models of torchvision and transformers, and resume them from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.methods import CASES, CLASSES, LENGTH, VOCABULARY, train

resnet = pytest.importorskip("torchvision.models.resnet", reason="needs torchvision")
transformers = pytest.importorskip("transformers", reason="needs transformers")
for library in ("peft", "torchao", "bitsandbytes", "schedulefree"):
    pytest.importorskip(library, reason=f"needs {library}")

VISION = sorted(name for name, case in CASES.items() if "convnet" in case.kinds)
TEXT = sorted(name for name, case in CASES.items() if "transformer" in case.kinds)
# Methods for which a model has no matching module.
WITHOUT_EFFECT = {
    ("resnet", "GyroDropout"), ("resnet", "LowPrecisionGroupNorm"),
    ("bert", "FusedLayerNorm"), ("gpt2", "FusedLayerNorm"), ("gpt2", "GatedLinearUnits"),
    ("llama", "Alibi"), ("llama", "GatedLinearUnits"), ("llama", "LowPrecisionLayerNorm"),
}  # fmt: skip


class Vision(nn.Module):
    """A ResNet of torchvision with the `loss` method that the trainer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = resnet.ResNet(resnet.BasicBlock, [2, 1, 1, 1], num_classes=CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch[0])
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1], reduction=reduction)


class Language(nn.Module):
    """A causal or masked language model of transformers with the `loss` method that the trainer needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch.get("attention_mask"),
            position_ids=batch.get("position_ids"),
        ).logits
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.float().flatten(0, 1), batch["labels"].flatten())


def _make(name: str) -> nn.Module:
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        match name:
            case "resnet":
                return Vision()
            case "bert":
                config = transformers.BertConfig(
                    **small, vocab_size=VOCABULARY, max_position_embeddings=2 * LENGTH
                )
                return Language(transformers.BertForMaskedLM(config))
            case "gpt2":
                config = transformers.GPT2Config(
                    n_layer=1, n_head=2, n_embd=16, n_positions=2 * LENGTH, **sizes
                )
                return Language(transformers.GPT2LMHeadModel(config))
        config = transformers.LlamaConfig(**small, **sizes, num_key_value_heads=1)
        return Language(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model, names in {"resnet": VISION, "bert": TEXT, "gpt2": TEXT, "llama": TEXT}.items()
        for name in names
        if (model, name) not in WITHOUT_EFFECT and name not in ("NoOpModel", "SelectiveBackprop")
    ],
)
def test_a_librarys_model_trains_and_resumes(model: str, name: str, tmp_path: Path) -> None:
    kind: Any = "convnet" if model == "resnet" else "transformer"
    expected, losses = train([name], kind=kind, model=_make(model), save_folder=tmp_path, save_interval="2ba")
    assert all(0 < loss < 100 for loss in losses)
    resumed, rest = train([name], kind=kind, model=_make(model), load_path=tmp_path / "ep0-ba2")
    assert rest == losses[2:]
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[key], value) for key, value in expected.items())
