"""Tasks of transformers models, and what their default metrics measure, against the models' own losses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MultilabelF1Score

transformers = pytest.importorskip("transformers")

from hocket.trainer import Trainer  # noqa: E402
from hocket.trainer.models import HuggingFaceModel  # noqa: E402
from hocket.trainer.models.huggingface_task import Task  # noqa: E402

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
IDS = torch.randint(4, VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(0))
TEXT = IDS.clone()
TEXT[::3, -2:] = -100
GIVEN = {"input_ids": IDS}


def bert(kind, **options):
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**SIZES, **options))


def bart(kind):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    return getattr(transformers, f"BartFor{kind}")(config)


def xlnet():
    config = transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=16)
    return transformers.XLNetLMHeadModel(config)


VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


def llava():
    text = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
    vision = {"model_type": "clip_vision_model", "projection_dim": 8, **VISION}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=3)
    return transformers.LlavaForConditionalGeneration(config)


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8],
        num_attention_heads=[1, 1], patch_sizes=[7, 3], strides=[4, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def masked_image_model():
    config = transformers.ViTConfig(**VISION, encoder_stride=4)
    return transformers.ViTForMaskedImageModeling(config)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


FIRST = IDS[:, 0]
CASES = {
    # The first metric of each is the loss that the model itself computes.
    "questions": (lambda: bert("QuestionAnswering"), Task.OTHER, "Loss",
                  {**GIVEN, "start_positions": FIRST % 6, "end_positions": IDS[:, 1] % 6}),
    "next sentence": (lambda: bert("NextSentencePrediction"), Task.OTHER, "Loss",
                      {**GIVEN, "labels": FIRST % 2}),
    "segmentation": (segformer, Task.OTHER, "Loss",
                     {"pixel_values": drawn(4, 3, 32, 32), "labels": (drawn(4, 32, 32) > 0).long()}),
    "masked images": (masked_image_model, Task.OTHER, "Loss",
                      {"pixel_values": drawn(12, 3, 8, 8), "bool_masked_pos": drawn(1, 4).expand(12, 4) > 0}),
    "one number": (lambda: bert("SequenceClassification", num_labels=1), Task.CLASSIFICATION,
                   "MeanSquaredError", {**GIVEN, "labels": FIRST.float()}),
    "several numbers": (
        lambda: bert("SequenceClassification", num_labels=3, problem_type="regression"), Task.CLASSIFICATION,
        "MeanSquaredError", {**GIVEN, "labels": IDS[:, :3].float()}),
    "a column of classes": (lambda: bert("SequenceClassification", num_labels=3), Task.CLASSIFICATION,
                            "CrossEntropy", {**GIVEN, "label": IDS[:, :1] % 3}),
    "choices": (lambda: bert("MultipleChoice"), Task.MULTIPLE_CHOICE, "CrossEntropy",
                {"input_ids": IDS.reshape(3, 4, 6), "labels": torch.tensor([0, 3, 1])}),
    # As many classes as tokens: the dim of the classes cannot be told from the shape.
    "tokens": (lambda: bert("TokenClassification", num_labels=6), Task.TOKEN_CLASSIFICATION, "CrossEntropy",
               {**GIVEN, "labels": IDS % 6}),
    "unshifted": (lambda: bart("CausalLM"), Task.CAUSAL_LM, "LanguageCrossEntropy",
                  {**GIVEN, "labels": TEXT}),
    "permuted": (xlnet, Task.CAUSAL_LM, "LanguageCrossEntropy", {**GIVEN, "labels": TEXT}),
    "decoder with images": (llava, Task.CAUSAL_LM, "LanguageCrossEntropy", {**GIVEN, "labels": TEXT}),
    "denoising": (lambda: bart("ConditionalGeneration"), Task.SEQ2SEQ_LM, "LanguageCrossEntropy",
                  {**GIVEN, "labels": TEXT[:, 1:]}),
    "speech": (whisper, Task.SEQ2SEQ_LM, "LanguageCrossEntropy",
               {"input_features": drawn(12, 8, 32), "labels": TEXT}),
}  # fmt: skip


def rows(columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def evaluate(model, samples, batch_size=5):
    with Trainer(model=model, eval_dataloader=DataLoader(samples, batch_size=batch_size), device="cpu",
                 progress_bar=False, seed=0) as trainer:  # fmt: skip
        trainer.eval()
        metrics = trainer.state.eval_metrics["eval"]
        return {name: float(metric.compute()) for name, metric in metrics.items()}


@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize(("make", "task", "name", "columns"), CASES.values(), ids=CASES)
def test_the_first_metric_of_a_task_is_the_loss_of_the_model(make, task, name, columns, use_logits):
    torch.manual_seed(0)
    model = HuggingFaceModel(make(), use_logits=use_logits)
    samples = rows(columns)
    measured = evaluate(model, samples)
    assert model.task is task
    assert next(iter(measured)) == name
    with torch.no_grad():
        loss = model.eval()(default_collate(samples)).loss
    assert measured[name] == pytest.approx(float(loss), rel=1e-4)


def test_accuracy_counts_choices_and_tokens():
    torch.manual_seed(0)
    for key in ("choices", "tokens"):
        make, _, _, columns = CASES[key]
        model = HuggingFaceModel(make())
        samples = rows(columns)
        measured = evaluate(model, samples)
        batch = default_collate(samples)
        with torch.no_grad():
            correct = (model.eval()(batch).logits.argmax(-1) == batch["labels"]).float().mean()
        assert measured["MulticlassAccuracy" if key == "choices" else "MaskedAccuracy"] == pytest.approx(
            float(correct)
        )


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("trains_first", [False, True])
def test_float_labels_of_several_classes_are_measured_as_several_labels(problem, use_logits, trains_first):
    torch.manual_seed(0)
    inner = bert("SequenceClassification", num_labels=3, problem_type=problem)
    # Every logit lies between 0 and 1, where torchmetrics would take them for probabilities.
    torch.nn.init.constant_(inner.classifier.bias, 0.25)
    model = HuggingFaceModel(inner, use_logits=use_logits)
    samples = rows({**GIVEN, "labels": (IDS[:, :3] % 2).float()})
    loader = DataLoader(samples, batch_size=5)
    with Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        max_duration="1ba",
        loop={"num_sanity_val_steps": 1},
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit() if trains_first else trainer.eval()
        metrics = trainer.state.eval_metrics["eval"]
        assert list(metrics) == ["MultilabelF1Score"]
        found = metrics["MultilabelF1Score"].compute()
    batch = default_collate(samples)
    with torch.no_grad():
        logits = model.model.eval()(**batch).logits
    assert ((logits > 0) & (logits < 1)).all()
    expected = MultilabelF1Score(3)
    expected.update(logits.sigmoid(), batch["labels"].long())
    torch.testing.assert_close(found, expected.compute())


def test_a_model_without_a_loss_measures_nothing():
    model = HuggingFaceModel(transformers.BertModel(transformers.BertConfig(**SIZES)), use_logits=True)
    assert evaluate(model, rows(GIVEN)) == {}
