"""LoRA and QLoRA: frozen and trained parameters, 4-bit layers, merging, and errors."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from hocket.algos import (
    AlgorithmConfigError,
    LoRA,
    MissingLibraryError,
    QLoRA,
    SurgeryError,
    apply_lora,
    apply_qlora,
    libraries,
    merge_lora,
)
from hocket.dist.errors import WeightsError
from hocket.dist.layout.safetensors_load import load_safetensors
from hocket.trainer import Trainer
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.models import HuggingFaceModel
from support.methods import make_loader, make_model, train

peft: Any = pytest.importorskip("peft", reason="needs peft (group algos)")
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (group algos)")
# From peft, which uses an older name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAYERS = ("head", "attention.qkv", "mlp.0.dense", "mlp.1")


def _text(model: Any) -> torch.Tensor:
    batch = next(iter(make_loader("transformer", 1, shuffle=False)))
    logits: torch.Tensor = model(batch)
    return logits


def _give_adapters_values(model: nn.Module) -> None:
    torch.manual_seed(5)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)


def test_adapters_change_no_output_at_first_and_only_they_train() -> None:
    model = make_model("transformer")
    optimizer = torch.optim.AdamW(model.parameters())
    _text(model).sum().backward()
    optimizer.step()
    expected = _text(model)
    report = apply_lora(model, r=4, optimizers=optimizer)
    torch.testing.assert_close(_text(model), expected)
    assert sorted(one.names[0] for one in report) == sorted(LAYERS)
    trained = {id(value) for name, value in model.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * len(LAYERS)
    assert {id(value) for value in model.parameters() if value.requires_grad} == trained
    assert {id(value) for group in optimizer.param_groups for value in group["params"]} == trained
    assert not optimizer.state, "the state of frozen parameters must be dropped"
    removed = {change.name for change in report.optimizer_changes if change.action == "removed"}
    assert "embedding.weight" in removed
    assert "attention.qkv.weight" in removed
    assert "its state dropped" in str(report)


def test_modules_of_also_train_train_in_full() -> None:
    model = make_model("transformer")
    report = apply_lora(model, r=4, target_modules=["qkv"], also_train=["head", "*_norm"])
    assert [one.names[0] for one in report] == ["attention.qkv"]
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {"head.weight", "head.bias", "attention_norm.weight", "mlp_norm.weight"} < trained
    assert not any(name.startswith(("embedding", "mlp.")) for name in trained)
    assert "head.base_layer.weight" not in trained, "a layer that trains in full must have no adapter"
    with pytest.raises(
        AlgorithmConfigError,
        match="`classifier`, which no module of Transformer is named; it has `embedding`",
    ):
        apply_lora(make_model("transformer"), also_train=["classifier"])
    with pytest.raises(AlgorithmConfigError, match=r"expected a list: \['head'\]"):
        LoRA(also_train="head")


@pytest.mark.parametrize("apply", [apply_lora, apply_qlora])
def test_merged_adapters_compute_the_same_without_peft(apply: Any) -> None:
    model = make_model("transformer")
    apply(model, r=4)
    _give_adapters_values(model)
    expected = _text(model)
    assert merge_lora(model) == len(LAYERS)
    torch.testing.assert_close(_text(model), expected, atol=1e-5, rtol=1e-4)
    assert {type(model.get_submodule(name)) for name in LAYERS} == {nn.Linear}
    with pytest.raises(SurgeryError, match="has no adapters"):
        merge_lora(model)


def test_adapters_are_saved_in_pefts_format() -> None:
    model = make_model("transformer")
    apply_lora(model, r=4)
    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2 * len(LAYERS)
    assert all("lora_" in name for name in state)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_four_bit_layers_approximate_the_original_layers(quant_type: str, double_quant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    plain = copy.deepcopy(model)
    report = apply_qlora(model, r=4, quant_type=quant_type, double_quant=double_quant)
    assert len(report) == 2
    layer: Any = model[0].base_layer
    weight = layer.dequantized().weight
    x = torch.randn(8, 64, requires_grad=True)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias), atol=1e-5, rtol=1e-5)
    error = (weight - plain[0].weight).norm() / plain[0].weight.norm()
    assert 0.01 < error < 0.15
    stored = sum(
        one.numel() * one.element_size() for name, one in layer.named_buffers() if "levels" not in name
    )
    assert stored <= (0.53 if double_quant else 0.57) * plain[0].weight.numel()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(8, -1), atol=1e-5, rtol=1e-4)


def test_casting_the_model_keeps_the_dtype_of_quantization_scales() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    apply_qlora(model, r=4)
    layer: Any = model[0].base_layer
    expected = layer.dequantized().weight
    model.bfloat16()
    assert torch.equal(layer.dequantized().weight, expected)
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("method", [LoRA, QLoRA])
def test_adapters_train_in_bf16_with_evaluation_during_the_run(method: Any) -> None:
    _, losses = train(
        [], kind="transformer", algorithms=[method(4)], precision="amp_bf16",
        eval_dataloader=make_loader("transformer", 1), eval_interval="2ba",
    )  # fmt: skip
    assert all(0 < loss < 100 for loss in losses)


def test_transformers_models_keep_their_output_layer() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group models)")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    report = apply_lora(model, r=2)
    places = [one.names[0] for one in report]
    assert "transformer.h.0.attn.c_attn" in places
    assert "lm_head" not in places
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all((value.grad is not None) == ("lora_" in name) for name, value in model.named_parameters())


def test_the_conv1d_of_gpt2_is_kept_in_4_bits() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group models)")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=64, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(8)[None]
    expected, weight = model(input_ids=ids).logits, model.transformer.h[0].mlp.c_fc.weight.T
    assert len(apply_qlora(model, r=4)) == 4
    layer = model.transformer.h[0].mlp.c_fc.base_layer
    assert layer.weight.dtype == torch.uint8
    error = (layer.dequantized().weight - weight).norm() / weight.norm()
    assert 0.01 < error < 0.15
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=0.05, rtol=0.05)
    assert merge_lora(model) == 4


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="`r` is 0"):
        LoRA(0)
    with pytest.raises(AlgorithmConfigError, match="`quant_type` is 'int8'; expected one of `nf4`, `fp4`"):
        QLoRA(quant_type="int8")
    with pytest.raises(SurgeryError, match="Sequential has no linear layer"):
        apply_lora(nn.Sequential(nn.ReLU()))
    with pytest.raises(SurgeryError, match=r"`peft` cannot put adapters into Sequential: .*nothing"):
        apply_lora(nn.Sequential(nn.Linear(4, 4)), target_modules=["nothing"])
    model = make_model("transformer")
    apply_lora(model, r=2)
    with pytest.raises(SurgeryError, match="has adapters of `peft` already"):
        apply_qlora(model, r=2)
    with pytest.raises(TrainerConfigError, match=r"cannot be used together: .*each freezes the model"):
        train([], kind="transformer", algorithms=[LoRA(2), QLoRA(2)])


def test_a_library_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(libraries.OLDEST, "peft", (99, 0))
        with pytest.raises(MissingLibraryError, match=r"`peft` 99\.0 or newer, but .*hocket-algos\[peft\]"):
            train([], kind="transformer", algorithms=[LoRA(2)])
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingLibraryError, match=r"cannot be imported .*'hocket-algos\[bitsandbytes\]'"):
        train([], kind="transformer", algorithms=[QLoRA(2)])


def test_a_checkpoint_of_other_adapters_raises(tmp_path: Path) -> None:
    train(["LoRA"], steps=2, save_folder=tmp_path, save_interval="2ba")
    other = LoRA(4, target_modules=["qkv"])
    with pytest.raises(Exception, match=r"treated other modules in the run|missing|lora_A"):
        train([], kind="transformer", algorithms=[other], load_path=tmp_path / "ep0-ba2")


def _classifier() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group models)")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def _samples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(2, 40, (8, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


def _trained(method: Any) -> HuggingFaceModel:
    model = HuggingFaceModel(_classifier())
    with Trainer(
        model=model, train_dataloader=DataLoader(_samples(), batch_size=4), algorithms=[method], device="cpu",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05), max_duration="2ep", progress_bar=False,
    ) as trainer:  # fmt: skip
        trainer.fit()
    return model.eval()


@pytest.mark.parametrize(
    "method",
    [
        LoRA(2, also_train=["classifier"]),
        LoRA(2, target_modules=r"bert\.encoder\..*\.(query|value)", also_train=["bert.pooler", "classifier"]),
        LoRA(2, target_modules=["query"], options={"use_dora": True}),
    ],
)
def test_a_saved_folder_opens_in_peft_with_what_was_trained(method: Any, tmp_path: Path) -> None:
    model = _trained(method)
    batch = default_collate(_samples())
    loss = model(batch).loss
    model.save_pretrained(tmp_path / "adapters")
    opened = peft.PeftModel.from_pretrained(_classifier(), tmp_path / "adapters").eval()
    torch.testing.assert_close(opened(**batch).loss, loss)
    assert {one.rpartition(".")[2] for one in json.loads(
        (tmp_path / "adapters" / "adapter_config.json").read_text()
    )["target_modules"]} >= {"query"}  # fmt: skip
    merge_lora(model)
    model.save_pretrained(tmp_path / "merged")
    again = type(model.model).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(again(**batch).loss, loss)


def test_a_folder_of_4_bit_layers_has_the_adapters(tmp_path: Path) -> None:
    model = _trained(QLoRA(2, also_train=["classifier"]))
    model.save_pretrained(tmp_path / "adapters")
    opened = peft.PeftModel.from_pretrained(_classifier(), tmp_path / "adapters")
    own, inner = model.model.state_dict(), opened.get_base_model().state_dict()
    names = [name for name in own if "lora_" in name or name.startswith("classifier")]
    assert len(names) == 2 * 7 + 2
    for name in names:
        saved = name.replace("classifier.", "classifier.modules_to_save.default.")
        torch.testing.assert_close(inner[saved], own[name])
    model.should_save_peft_only = False
    with pytest.raises(TrainerConfigError, match=r"`bert.*\.weight` is quantized; .*`merge_lora`"):
        model.save_pretrained(tmp_path / "whole")


def test_a_folder_with_adapters_around_its_layers_is_recognised(tmp_path: Path) -> None:
    model = _trained(LoRA(2))
    inner = _classifier()
    inner.save_pretrained(tmp_path / "old", state_dict=model.model.state_dict())
    with pytest.raises(ResumeError, match=r"LoRA's adapters around them, .*`merge_lora\(model\)`"):
        Trainer(
            model=HuggingFaceModel(_classifier()), load_path=str(tmp_path / "old"), load_weights_only=True
        )
    with pytest.raises(WeightsError, match="LoRA's adapters around them, as older releases wrote"):
        load_safetensors(_classifier(), tmp_path / "old")
    again = HuggingFaceModel(_classifier())
    with Trainer(
        model=again, load_path=str(tmp_path / "old"), load_weights_only=True, algorithms=[LoRA(2)],
        device="cpu", progress_bar=False,
    ):  # fmt: skip
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
