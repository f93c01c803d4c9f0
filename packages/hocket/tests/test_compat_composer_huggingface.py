"""`HuggingFaceModel` of the layer: rebuilt from a checkpoint, and written as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hocket.compat.composer as composer
from hocket.compat.composer.models import (
    HuggingFaceModel,
    write_huggingface_pretrained_from_composer_checkpoint,
)
from hocket.trainer.errors import ResumeError, TrainerConfigError

transformers = pytest.importorskip("transformers")


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "to": 2, "be": 3, "or": 4, "not": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", model_max_length=9
    )


def train(folder: Path, **arguments: Any) -> HuggingFaceModel:
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=6,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    inner = transformers.BertForSequenceClassification(config)
    model = HuggingFaceModel(inner, tokenizer=make_tokenizer(), use_logits=True)
    rows = [{"input_ids": torch.tensor([2, 3, 4]), "labels": torch.tensor(row % 3)} for row in range(8)]
    with composer.Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        save_folder=str(folder),
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
    return model


def test_model_and_tokenizer_are_rebuilt_from_a_checkpoint(tmp_path: Path) -> None:
    trained = train(tmp_path)
    latest = str(tmp_path / "latest-rank0.pt")
    model, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(latest)
    assert type(model) is transformers.BertForSequenceClassification
    assert model.config.num_labels == 3
    assert model.config.hidden_size == 8
    assert tokenizer("to be or not")["input_ids"] == [2, 3, 4, 5]
    assert (tokenizer.pad_token, tokenizer.model_max_length) == ("[PAD]", 9)
    again = HuggingFaceModel(model, tokenizer, use_logits=True)
    with composer.Trainer(
        model=again,
        optimizers=torch.optim.SGD(again.parameters(), lr=0.1),
        load_path=latest,
        load_weights_only=True,
        device="cpu",
        progress_bar=False,
    ):
        torch.testing.assert_close(again.state_dict(), trained.state_dict())


def test_another_class_and_configuration_may_be_given(tmp_path: Path) -> None:
    train(tmp_path)
    latest = tmp_path / "ep1-ba2"
    for given in (
        transformers.AutoModelForTokenClassification,
        transformers.BertForTokenClassification,
        "transformers.BertForTokenClassification",
    ):
        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(latest, given, {"num_labels": 5})
        assert type(model) is transformers.BertForTokenClassification
        assert model.classifier.out_features == 5
    with pytest.raises(TrainerConfigError, match=r"`nowhere\.Model` could not be imported"):
        HuggingFaceModel.hf_from_composer_checkpoint(latest, "nowhere.Model")


def test_a_checkpoint_folder_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    trained = train(tmp_path / "run")
    write_huggingface_pretrained_from_composer_checkpoint(tmp_path / "run" / "ep1-ba2", tmp_path / "out")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(back.state_dict(), trained.model.state_dict())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("be")["input_ids"] == [3]


def test_a_checkpoint_of_weights_only_cannot_rebuild_the_model(tmp_path: Path) -> None:
    train(tmp_path, save_weights_only=True)
    with pytest.raises(ResumeError, match="says nothing of a model of Hugging Face's"):
        HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "ep1-ba2")


def test_a_missing_class_raises(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ValueError, match=r"`nowhere\.BertForMaskedLM` could not be imported"):
        HuggingFaceModel.hf_from_composer_checkpoint(str(tmp_path), "nowhere.BertForMaskedLM")


def make_gpt2(**arguments: Any) -> HuggingFaceModel:
    config = transformers.GPT2Config(vocab_size=6, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    return HuggingFaceModel(transformers.GPT2LMHeadModel(config), make_tokenizer(), **arguments)


def test_labels_of_the_last_batch_are_kept_for_metrics() -> None:
    class Averaged(HuggingFaceModel):
        """Removes the labels from the batch, as some subclasses for Composer do."""

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            super().eval_forward(batch, outputs)
            batch = dict(batch)
            self.labels = batch.pop("labels")[:, 1:]
            return self.model(**batch).logits[:, :-1]

    batch = {"input_ids": torch.tensor([[2, 3, 4]]), "labels": torch.tensor([[2, 3, 4]])}
    model = make_gpt2(use_logits=True)
    model.eval_forward(batch)
    assert model.labels.tolist() == [[3, 4, -100]]
    assert batch["labels"].tolist() == [[2, 3, 4]]

    model = Averaged(model.model, use_logits=True)
    seen = []

    class Metric:
        def update(self, *given: torch.Tensor) -> None:
            seen.extend(given)

    without = {"input_ids": batch["input_ids"]}
    outputs = model.eval_forward(batch)
    model.update_metric(without, outputs, Metric())
    assert seen[0].shape == (1, 2, 6)
    assert seen[1].tolist() == [[3, 4]]


# peft uses an attribute of transformers by its past name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("should_save_peft_only", [True, False])
def test_a_checkpoint_with_adapters_becomes_a_peft_folder(
    tmp_path: Path, should_save_peft_only: bool
) -> None:
    peft = pytest.importorskip("peft")
    transformers.GPT2LMHeadModel(make_gpt2().config).save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, r=2)
    config.peft_type, config.task_type = "loRa", "causal_lm"
    model = HuggingFaceModel(
        base, make_tokenizer(), peft_config=config, should_save_peft_only=should_save_peft_only
    )
    saved = model.get_metadata()["model"]["peft_config"]["content"]
    assert (saved["peft_type"], saved["task_type"], saved["r"]) == ("LORA", "CAUSAL_LM", 2)
    rows = [{name: torch.tensor([2, 3, 4]) for name in ("input_ids", "labels")}] * 4
    with composer.Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=2),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration="1ep",
        save_folder=str(tmp_path / "saved"),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    write_huggingface_pretrained_from_composer_checkpoint(str(tmp_path / "saved"), tmp_path / "written")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    read = peft.PeftModelForCausalLM.from_pretrained(again, tmp_path / "written").state_dict()
    trained = model.model.state_dict()
    assert read.keys() == trained.keys()
    assert all(torch.equal(read[name], value) for name, value in trained.items())
    assert any("lora_B" in name and value.any() for name, value in trained.items())


def test_an_unknown_kind_of_adapter_raises() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"])
    config.peft_type = "magic"
    with pytest.raises(ValueError, match=r"has the type 'MAGIC'; expected one of .*`LORA`"):
        make_gpt2(peft_config=config)
