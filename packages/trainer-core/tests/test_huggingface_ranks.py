"""`HuggingFaceModel` sharded over ranks: training, generation, folders and checkpoints of adapters."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")

tokenizers = pytest.importorskip("tokenizers")
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from hocket.trainer import Trainer  # noqa: E402
from hocket.trainer.metrics import CrossEntropy  # noqa: E402
from hocket.trainer.models import HuggingFaceModel  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

VOCABULARY = 32


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def sentences(num=12, length=8):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.arange(length) + torch.randint(2, 20, (num, 1), generator=generator)) % VOCABULARY
    labels = ids.clone()
    # Uneven lengths, so that only a mean over tokens does not depend on the division of the samples.
    labels[::2, 2:] = -100
    labels[5] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def train(model, batch_size, duration="1ep", **arguments):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer(
        model=model,
        train_dataloader=DataLoader(sentences(), batch_size=batch_size),
        optimizers=torch.optim.SGD(parameters, lr=0.1),
        progress_bar=False,
        device="cpu",
        seed=1,
        max_duration=duration,
        **arguments,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    return folder, run_ranks(everything_on_a_rank, 2, folder, init="gloo", timeout_s=200)


def everything_on_a_rank(folder):
    torch.set_num_threads(1)
    model = HuggingFaceModel(gpt2())
    with train(model, 2, fsdp_config={}) as trainer:
        trainer.fit()
        model.save_pretrained(f"{folder}/whole")
        trainer.eval(DataLoader(sentences(7), batch_size=2))
        perplexity = float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())
        # The ranks generate different numbers of tokens, but must make the same number of forward passes.
        length = 2 + 2 * int(os.environ["RANK"])
        model.eval()
        tokens = model.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=length, do_sample=False)
    return perplexity, tokens, adapters(folder), fine_tune_on_sst2(4)


def fine_tune_on_sst2(batch_size):
    """Fine-tune a classifier as its users write it, and return its weights and metrics.

    The batches have the columns of `datasets`: `label`, and no `labels`.
    """
    datasets = pytest.importorskip("datasets")
    words = ["[PAD]", "[UNK]", "good", "bad", "film", "plot", "cast", "was"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")
    labels = [index * 7 % 3 % 2 for index in range(32)]
    sentences = [
        f"{words[4 + index % 3]} was {'good' if label else 'bad'}" for index, label in enumerate(labels)
    ]
    sst2 = datasets.Dataset.from_dict({"sentence": sentences, "label": labels, "idx": list(range(32))})

    def tokenize(samples):
        return tokenizer(samples["sentence"], padding="max_length", truncation=True, max_length=8)

    sst2 = sst2.map(tokenize, batched=True, remove_columns=["sentence", "idx"])
    sst2.set_format("torch", columns=["input_ids", "attention_mask", "label"])
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=2,
        intermediate_size=16, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = HuggingFaceModel(
        transformers.BertForSequenceClassification(config),
        tokenizer=tokenizer,
        metrics=[CrossEntropy(), MulticlassAccuracy(num_classes=2, average="micro")],
        use_logits=True,
    )
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(sst2, batch_size=batch_size),
        eval_dataloader=DataLoader(sst2, batch_size=batch_size),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ep",
        seed=17,
        device="cpu",
        progress_bar=False,
    )
    with trainer:
        trainer.fit()
        metrics = {
            name: float(metric.compute()) for name, metric in trainer.state.eval_metrics["eval"].items()
        }
        return {name: value.clone() for name, value in model.model.state_dict().items()}, metrics


def adapters(folder):
    peft = pytest.importorskip("peft")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    weights = []
    for name, duration in (("whole", "1ep"), ("cut", "2ba"), ("cut", "1ep")):
        torch.manual_seed(7)
        model = HuggingFaceModel(gpt2(), peft_config=config)
        with train(
            model,
            2,
            duration=duration,
            save_folder=f"{folder}/{name}-run",
            save_interval="2ba",
            autoresume=True,
        ) as trainer:
            start = trainer.state.timestamp.counts.batch
            trainer.fit()
            model.save_pretrained(f"{folder}/{name}-adapters")
        weights.append((start, {key: value.clone() for key, value in model.state_dict().items()}))
    return weights


def test_sharded_ranks_train_as_one_process_with_losses_weighted_by_tokens(ranks):
    folder, results = ranks
    model = HuggingFaceModel(gpt2())
    with train(model, 4) as trainer:
        trainer.fit()
        trainer.eval(DataLoader(sentences(7), batch_size=7))
        expected = float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/whole")
    for name, value in model.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    for perplexity, tokens, *_ in results:
        assert perplexity == pytest.approx(expected, rel=1e-4)
        wanted = saved.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=1)
        assert torch.equal(tokens, wanted[:, : tokens.shape[1]])
    assert [tokens.shape[1] for _, tokens, *_ in results] == [5, 7]


def test_adapters_resume_on_ranks_and_open_in_peft(ranks):
    peft = pytest.importorskip("peft")
    folder, results = ranks
    for _, _, ((_, whole), (_, cut), (start, resumed)), _ in results:
        assert start == 2
        assert all("lora_" in name for name in whole)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert any(not torch.equal(whole[name], cut[name]) for name in whole)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        opened = peft.PeftModel.from_pretrained(gpt2(), f"{folder}/cut-adapters")
    saved = dict(opened.named_parameters())
    for name, value in results[0][2][2][1].items():
        torch.testing.assert_close(saved[name.removeprefix("model.")], value)


def test_a_classifier_over_columns_of_datasets_trains_on_ranks_as_on_one_process(ranks):
    _, results = ranks
    weights, metrics = fine_tune_on_sst2(8)
    assert metrics["MulticlassAccuracy"] == 1.0
    for *_, (found, measured) in results:
        assert measured == pytest.approx(metrics, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
