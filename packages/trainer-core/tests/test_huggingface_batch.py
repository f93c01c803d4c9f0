"""Batches of a transformers model: labels as its collators rename them, and rows without padding."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")

from hocket.trainer import Trainer  # noqa: E402
from hocket.trainer.models import HuggingFaceModel  # noqa: E402
from hocket.trainer.step.losses.losses import as_model  # noqa: E402

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
IDS = torch.randint(4, 32, (12, 6), generator=torch.Generator().manual_seed(0))


def classifier(num_labels=3, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, num_labels=num_labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options
    )
    return transformers.BertForSequenceClassification(config)


def tagger():
    torch.manual_seed(0)
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=5))


def plainly(model):
    """Return the model itself, which the trainer wraps."""
    return model


LABELS = {
    "classes": (classifier, "label", [int(ids[0]) % 3 for ids in IDS]),
    "numbers": (lambda: classifier(1), "label", [float(ids[0]) / 32 for ids in IDS]),
    "small integers": (classifier, "label", list((IDS[:, 0] % 3).to(torch.uint8))),
    "several labels": (classifier, "label_ids", list((IDS[:, :3] % 2).float())),
    "labels of tokens": (tagger, "label_ids", list(IDS % 5)),
}


@pytest.mark.parametrize("wrap", [HuggingFaceModel, plainly])
@pytest.mark.parametrize(("make", "name", "labels"), LABELS.values(), ids=LABELS)
def test_labels_of_a_data_set_train_as_with_the_collator_of_transformers(make, name, labels, wrap):
    samples = [{"input_ids": ids, name: label} for ids, label in zip(IDS, labels, strict=True)]
    weights = []
    for collate in (None, transformers.default_data_collator):
        model = wrap(make())
        with Trainer(
            model=model,
            train_dataloader=DataLoader(samples, batch_size=6, collate_fn=collate),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="1ep",
            device="cpu",
            progress_bar=False,
            seed=1,
        ) as trainer:
            trainer.fit()
        weights.append(model.state_dict())
    ours, theirs = weights
    assert not all(torch.equal(value, start) for value, start in
                   zip(ours.values(), wrap(make()).state_dict().values(), strict=True))  # fmt: skip
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_labels_that_the_model_names_itself_are_not_renamed():
    class Own(transformers.BertForSequenceClassification):
        def forward(self, input_ids, label=None, labels=None):
            assert label is not None
            assert labels is None
            return super().forward(input_ids, labels=label)

    model = HuggingFaceModel(Own(transformers.BertConfig(**SIZES, num_labels=3)))
    batch = {"input_ids": IDS, "label": IDS[:, 0] % 3}
    assert model.loss(model(batch), batch).isfinite()
    assert set(batch) == {"input_ids", "label"}


def decoder(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8, "patch_size": 4,
        "projection_dim": 8,
    }  # fmt: skip
    text = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=3)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llava"])
@pytest.mark.parametrize("wrap", [HuggingFaceModel, as_model])
@pytest.mark.parametrize("training", [True, False])
def test_sequences_in_one_row_without_padding_do_not_see_each_other(kind, wrap, training):
    model = wrap(decoder(kind)).train(training)
    first, second = IDS[:1, :5], IDS[1:2]
    row = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(5), torch.arange(6)))[None]
    with torch.no_grad():
        found = model({"input_ids": row, "position_ids": positions, "labels": row}).logits
        alone = [model({"input_ids": ids, "labels": ids}).logits for ids in (first, second)]
    torch.testing.assert_close(found, torch.cat(alone, dim=1))
    assert getattr(model, "config", decoder(kind).config).to_dict() == decoder(kind).config.to_dict()
