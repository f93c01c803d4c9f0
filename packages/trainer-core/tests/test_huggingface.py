"""`HuggingFaceModel` with random weights: tasks, metrics, invalid batches, generation, adapters, folders."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")

from hocket.trainer import Trainer  # noqa: E402
from hocket.trainer.errors import DataError, TrainerConfigError  # noqa: E402
from hocket.trainer.loggers import InMemoryLogger  # noqa: E402
from hocket.trainer.metrics import LanguageCrossEntropy  # noqa: E402
from hocket.trainer.models import HuggingFaceModel  # noqa: E402
from hocket.trainer.models.huggingface_task import Task  # noqa: E402

# From peft, which uses an older name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
VOCABULARY = 32


def gpt2(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(kind, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8,
        patch_size=4, num_channels=1, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def sentences(num=12, length=8, seed=0):
    """Return token ids that count up, so that a model can learn them, some of them without labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.arange(length) + torch.randint(2, 20, (num, 1), generator=generator)) % VOCABULARY
    labels = ids.clone()
    labels[::3, -3:] = -100
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label, "ignored": row}
        for row, label in zip(ids, labels, strict=True)
    ]


def classes(num=12):
    return [{"input_ids": one["input_ids"], "labels": one["input_ids"][0] % 3} for one in sentences(num)]


def images(num=12):
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    pixels = torch.tensor(digits.images[:num], dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(digits.target[:num])
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, targets, strict=True)]


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[pad]": 0, "[end]": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[pad]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[pad]", eos_token="[end]", bos_token="[end]"
    )


def trainer_of(model, samples, **arguments):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=4),
        optimizers=torch.optim.AdamW(parameters, lr=0.01),
        progress_bar=False,
        device="cpu",
        seed=1,
        **arguments,
    )


TASKS = [
    (gpt2, sentences, Task.CAUSAL_LM, {"LanguageCrossEntropy", "LanguagePerplexity"}),
    (lambda: bert("BertForMaskedLM"), sentences, Task.MASKED_LM, {"LanguageCrossEntropy", "MaskedAccuracy"}),
    (t5, sentences, Task.SEQ2SEQ_LM, {"LanguageCrossEntropy", "LanguagePerplexity"}),
    (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        classes,
        Task.CLASSIFICATION,
        {"CrossEntropy", "MulticlassAccuracy"},
    ),
    (
        lambda: bert("BertForTokenClassification", num_labels=VOCABULARY),
        sentences,
        Task.TOKEN_CLASSIFICATION,
        {"CrossEntropy", "MaskedAccuracy"},
    ),
    (vit, images, Task.CLASSIFICATION, {"CrossEntropy", "MulticlassAccuracy"}),
]


@pytest.mark.parametrize(("make", "data", "task", "names"), TASKS, ids=[str(row[2]) for row in TASKS])
@pytest.mark.parametrize("use_logits", [False, True])
def test_models_learn_and_measure_their_task(make, data, task, names, use_logits):
    model = HuggingFaceModel(make(), use_logits=use_logits)
    logger = InMemoryLogger()
    samples = data()
    before = copy.deepcopy(samples)
    with trainer_of(
        model,
        samples,
        eval_dataloader=DataLoader(samples, batch_size=5),
        loggers=logger,
        max_duration="6ep",
        eval_interval="3ep",
    ) as trainer:
        trainer.eval()
        assert model.task is task
        assert set(trainer.state.eval_metrics["eval"]) == names
        trainer.fit()
        losses = [value for _, value in logger.data["loss/train/total"]]
        entropies = [value for _, value in logger.data[f"metrics/eval/{min(names)}"]]
        assert losses[-1] < losses[0]
        assert entropies[-1] < entropies[0]
        with torch.no_grad():
            batch = next(iter(DataLoader(samples, batch_size=12)))
            model.eval()
            torch.testing.assert_close(torch.tensor(entropies[-1]), model(batch).loss)
    assert all(
        before_one.keys() == one.keys() and all(torch.equal(before_one[key], one[key]) for key in one)
        for before_one, one in zip(before, samples, strict=True)
    )


def test_a_batch_is_never_changed():
    model = HuggingFaceModel(gpt2(), use_logits=True)
    batch = next(iter(DataLoader(sentences(), batch_size=3)))
    before = copy.deepcopy(batch)
    outputs = model.eval_forward(batch)
    for metric in model.get_metrics().values():
        model.update_metric(batch, outputs, metric)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_labels_are_shifted_once_and_only_for_causal_models():
    causal = HuggingFaceModel(gpt2())
    assert causal.shift_labels
    assert not HuggingFaceModel(bert("BertForMaskedLM")).shift_labels
    with pytest.warns(UserWarning, match="`shift_labels=False` for `GPT2LMHeadModel`"):
        plain = HuggingFaceModel(gpt2(), shift_labels=False, eval_metrics=LanguageCrossEntropy())
    batch = next(iter(DataLoader(sentences(), batch_size=12)))
    shifted = {**batch, "labels": torch.cat((batch["labels"][:, 1:], torch.full((12, 1), -100)), dim=1)}
    values = []
    for model, given in ((causal, batch), (plain, shifted)):
        model.eval()
        (metric, *_) = model.get_metrics().values()
        model.update_metric(given, model.eval_forward(given), metric)
        values.append(metric.compute())
    torch.testing.assert_close(*values)


def test_the_loss_of_a_causal_model_is_weighted_by_its_predicted_tokens():
    weights = HuggingFaceModel(gpt2()).loss_weights(next(iter(DataLoader(sentences(), batch_size=3))))
    assert weights == [4, 7, 7]
    weights = HuggingFaceModel(bert("BertForMaskedLM")).loss_weights(
        next(iter(DataLoader(sentences(), batch_size=3)))
    )
    assert weights == [5, 8, 8]
    assert HuggingFaceModel(vit()).loss_weights({"labels": torch.zeros(3, dtype=torch.long)}) is None


class OwnMetric(LanguageCrossEntropy):
    """A user's metric, which expects all of the model's outputs."""

    def update(self, outputs, targets):
        assert set(outputs) >= {"loss", "logits"}
        super().update(outputs, targets)


def test_given_metrics_are_measured_in_training_and_evaluation():
    model = HuggingFaceModel(gpt2(), metrics=[OwnMetric()])
    assert list(model.get_metrics(is_train=True)) == list(model.get_metrics()) == ["OwnMetric"]
    model.eval()
    batch = next(iter(DataLoader(sentences(), batch_size=12)))
    outputs = model.eval_forward(batch)
    (metric,) = model.get_metrics().values()
    model.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.compute(), outputs.loss)
    other = HuggingFaceModel(gpt2(), metrics=[OwnMetric()], eval_metrics={"ce": LanguageCrossEntropy()})
    assert list(other.get_metrics()) == ["ce"]


def test_invalid_batches_raise_with_their_keys():
    model = HuggingFaceModel(bert("BertForSequenceClassification", num_labels=3))
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "target": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(DataError, match=r"its keys are `input_ids`, `target`; rename `target` to `labels`"):
        model.loss(model(batch), batch)
    answers = HuggingFaceModel(bert("BertForQuestionAnswering"))
    with pytest.raises(DataError, match=r"no `start_positions` or `end_positions`; .*add `start_positions`"):
        answers.loss(answers({"input_ids": ids}), {"input_ids": ids})
    with pytest.raises(DataError, match="add `labels` to the batch"):
        model.loss(model({"input_ids": ids}), {"input_ids": ids})
    with pytest.raises(DataError, match=r"keys `image`, and `Bert.*forward` takes none of them"):
        model({"image": ids})
    with pytest.raises(DataError, match="a `Tensor`; `HuggingFaceModel` expects a mapping"):
        model(ids)
    with pytest.raises(DataError, match=r"needs `labels`, and the batch has the keys `input_ids`"):
        model.update_metric({"input_ids": ids}, None, LanguageCrossEntropy())


def test_invalid_arguments_raise():
    with pytest.raises(TrainerConfigError, match="`model` is a `Linear`"):
        HuggingFaceModel(nn.Linear(1, 1))
    with pytest.raises(TrainerConfigError, match=r"32 tokens and the model's embedding 8 rows"):
        HuggingFaceModel(_small_gpt2(), tokenizer())
    resized = HuggingFaceModel(_small_gpt2(), tokenizer(), allow_embedding_resizing=True)
    assert resized.model.get_input_embeddings().weight.shape[0] == VOCABULARY


def _small_gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def test_generation_continues_the_prompt_and_decodes_it():
    model = HuggingFaceModel(gpt2(), tokenizer())
    ids = torch.tensor([[0, 0, 4, 5], [2, 3, 4, 5]])
    model.eval()
    tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 7)
    alone = model.generate(ids[1:], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens[1:], alone)
    batch = {
        "mode": "generate",
        "input_ids": ids,
        "generation_length": 3,
        "generation_kwargs": {"do_sample": False},
    }
    texts = model.eval_forward(batch)
    assert texts == model.tokenizer.batch_decode(tokens[:, 4:], skip_special_tokens=True)


def test_a_saved_folder_opens_in_transformers(tmp_path):
    model = HuggingFaceModel(gpt2(), tokenizer())
    with trainer_of(model, sentences(), max_duration="2ba") as trainer:
        trainer.fit()
        model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "out").glob("*.bin"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("w4 w5")["input_ids"] == [4, 5]
    batch = next(iter(DataLoader(sentences(), batch_size=4)))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batch["input_ids"]).logits, model(batch).logits)


def lora(**options):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", **options
    )


def test_only_adapters_are_trained_and_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = HuggingFaceModel(gpt2(), tokenizer(), peft_config=lora())
    assert model.task is Task.CAUSAL_LM
    base = {name: value.clone() for name, value in model.model.get_base_model().state_dict().items()}
    names = set(model.state_dict())
    assert names
    assert all("lora_" in name for name in names)
    with trainer_of(model, sentences(), max_duration="1ep") as trainer:
        trainer.fit()
        model.save_pretrained(tmp_path / "adapters")
    trained = model.model.get_base_model().state_dict()
    assert all(torch.equal(base[name], trained[name]) for name in base if "lora_" not in name)
    assert any(not torch.equal(base[name], trained[name]) for name in base if "lora_" in name)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapters")
    batch = next(iter(DataLoader(sentences(), batch_size=4)))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batch["input_ids"]).logits, model(batch).logits)


def test_an_adapters_state_loads_into_another_model():
    one = HuggingFaceModel(gpt2(), peft_config=lora(init_lora_weights=False))
    other = HuggingFaceModel(gpt2(), peft_config=lora())
    other.load_state_dict(one.state_dict())
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())
    incomplete = dict(list(one.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="the adapters' state does not fit: missing"):
        other.load_state_dict(incomplete)


def test_the_whole_model_is_saved_with_its_adapters_when_asked(tmp_path):
    peft = pytest.importorskip("peft")
    model = HuggingFaceModel(gpt2(), peft_config=lora(init_lora_weights=False), should_save_peft_only=False)
    assert any("wte" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    batch = next(iter(DataLoader(sentences(), batch_size=4)))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batch["input_ids"]).logits, model(batch).logits)


def test_a_peft_config_may_be_a_dict_and_other_types_raise():
    pytest.importorskip("peft")
    options = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"]}
    assert HuggingFaceModel(gpt2(), peft_config={**options, "fan_in_fan_out": True}).is_peft
    with pytest.raises(TrainerConfigError, match="`peft_config` is a `int`"):
        HuggingFaceModel(gpt2(), peft_config=3)
    adapted = HuggingFaceModel(gpt2(), peft_config=lora())
    with pytest.raises(TrainerConfigError, match="has adapters already"):
        HuggingFaceModel(adapted.model, peft_config=lora())
