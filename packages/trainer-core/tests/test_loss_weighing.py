"""Loss weights: with torch's losses, microbatches and two ranks make the update of the whole batch."""

from __future__ import annotations

import os
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from hocket.trainer import ComposerClassifier, ComposerModel, DataSpec, LossSum, Trainer
from hocket.trainer.loss import linear_cross_entropy
from hocket.trainer.models import HuggingFaceModel
from support.standing_ranks import standing_ranks

transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0])


class Pixels(nn.Module):
    """Maps images `(B, 3, 4, 4)` to logits of 4 classes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, images):
        return self.head(images)


class Rows(nn.Module):
    """Maps rows `(B, 5)` or sequences `(B, L, 5)` to 4 numbers for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(5, 4)

    def forward(self, rows):
        return self.head(rows)


class Own(ComposerModel):
    """A user's model with a loss of their own: `criterion` and `form` set it."""

    def __init__(self, module, criterion=functional.cross_entropy, form="plain"):
        super().__init__()
        self.module = module
        self.criterion = criterion
        self.form = form

    def forward(self, batch):
        return self.module(batch["x"] if isinstance(batch, dict) else batch[0])

    def loss(self, outputs, batch):
        if self.form == "divided":
            total = functional.cross_entropy(outputs, batch[1], ignore_index=255, reduction="sum")
            return total / (batch[1] != 255).sum()
        if self.form == "flat":
            return self.criterion(outputs.permute(0, 2, 3, 1).reshape(-1, 4), batch["mask"].long().flatten())
        if self.form == "parts":
            return {
                "main": self.criterion(outputs, batch[1]),
                "other": 0.4 * self.criterion(outputs * 2, batch[1]),
            }
        if self.form == "penalty":
            penalty = sum(parameter.square().sum() for parameter in self.parameters())
            return self.criterion(outputs, batch[1]) + 0.01 * penalty
        if self.form == "ctc":
            log_probabilities = outputs.log_softmax(-1).transpose(0, 1)
            return functional.ctc_loss(log_probabilities, batch["labels"], batch["lengths"], batch["targets"])
        if self.form == "masked":
            losses = functional.cross_entropy(outputs, batch[1], reduction="none")
            return (losses * batch[2]).sum() / batch[2].sum()
        return self.criterion(outputs, batch[1])


class Mine(nn.Module):
    """Computes its loss within `forward`, in little memory."""

    def __init__(self):
        super().__init__()
        self.module = Rows()

    def forward(self, x, targets):
        head = self.module.head
        loss = linear_cross_entropy(x, head.weight, targets, linear_bias=head.bias, ignore_index=0)
        return {"loss": loss}


def images(ignored):
    """Return two batches of 6 images with masks, of which one is ignored and others in part."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        masks = torch.randint(0, 4, (6, 4, 4), generator=generator)
        for row, mask in enumerate(masks):
            mask[torch.rand(4, 4, generator=generator) < 0.2 * row] = ignored
        masks[2] = ignored
        yield torch.randn(6, 3, 4, 4, generator=generator), masks


def rows(ignored=None):
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        labels = torch.randint(1, 4, (6,), generator=generator)
        if ignored is not None:
            labels[[0, 3]] = ignored
        yield torch.randn(6, 5, generator=generator), labels


def targets_of_speech():
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        lengths = torch.tensor([1, 2, 5, 3, 1, 4])
        labels = torch.randint(1, 4, (6, 5), generator=generator)
        labels[torch.arange(5) >= lengths[:, None]] = -100
        x = torch.randn(6, 12, 5, generator=generator)
        yield {"x": x, "labels": labels, "lengths": torch.full((6,), 12), "targets": lengths}


def texts(first=0):
    """Return two batches of ids with padded labels; the labels of one sample are ignored."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        ids = torch.randint(3, 20, (6, 8), generator=generator)
        labels = ids.clone()
        labels[torch.arange(8) >= torch.tensor([8, 3, 0, 6, 2, 8])[:, None]] = -100
        labels[:, :first] = -100
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def language_model():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def prompted():
    from peft import PromptTuningConfig

    torch.manual_seed(1)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return HuggingFaceModel(language_model(), peft_config=config)


def segmenter():
    torch.manual_seed(1)
    config = transformers.SegformerConfig(
        num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[4], patch_sizes=[3], strides=[1],
        num_attention_heads=[1], decoder_hidden_size=4, num_labels=4, hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0, drop_path_rate=0.0, semantic_loss_ignore_index=255,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module
    return HuggingFaceModel(model)


def speech_model():
    torch.manual_seed(1)
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        conv_dim=[4], conv_stride=[4], conv_kernel=[4], num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0, mask_time_prob=0.0,
        feat_extract_norm="layer",
    )  # fmt: skip
    return HuggingFaceModel(transformers.Wav2Vec2ForCTC(config))


def speech():
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        labels = torch.randint(1, 8, (6, 4), generator=generator)
        labels[torch.arange(4) >= torch.tensor([4, 1, 2, 3, 1, 4])[:, None]] = -100
        yield {"input_values": torch.randn(6, 80, generator=generator), "labels": labels}


def smooth(**options):
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1, **options)


ignoring = partial(functional.cross_entropy, ignore_index=255)
total = partial(functional.cross_entropy, reduction="sum")

# The model, the loss function of the trainer if there is one, batches, and the loss of a whole batch.
CASES = {
    "ignore index of a module": (Pixels, nn.CrossEntropyLoss(ignore_index=255), partial(images, 255)),
    "ignore index of a partial": (Pixels, ignoring, partial(images, 255)),
    "class weights": (Pixels, smooth(ignore_index=255), partial(images, 255)),
    "class weights of rows": (Rows, smooth(), partial(rows, -100)),
    "one label a sample": (Rows, functional.cross_entropy, partial(rows, -100)),
    "no label ignored": (Rows, functional.cross_entropy, rows),
    "negative log-likelihood": (
        Pixels,
        lambda outputs, targets: nn.NLLLoss(CLASS_WEIGHTS, ignore_index=255)(outputs.log_softmax(1), targets),
        partial(images, 255),
    ),
    "a sum": (Rows, total, partial(rows, -100)),
    "a scaled sum": (Rows, lambda outputs, targets: 0.1 * total(outputs, targets), rows),
    "a sum over samples": (Rows, lambda outputs, targets: total(outputs, targets) / len(targets), rows),
    "means over elements": (
        Pixels,
        lambda outputs, targets: (
            functional.mse_loss(outputs, functional.one_hot(targets, 4).movedim(3, 1).float())
            + 0.1 * outputs.abs().mean()
        ),
        partial(images, 3),
    ),
    "a criterion": (lambda: Own(Pixels(), nn.CrossEntropyLoss(ignore_index=255)), None, partial(images, 255)),
    "a division": (lambda: Own(Pixels(), form="divided"), None, partial(images, 255)),
    "parts": (lambda: Own(Pixels(), ignoring, "parts"), None, partial(images, 255)),
    "a penalty": (lambda: Own(Pixels(), ignoring, "penalty"), None, partial(images, 255)),
    "another key": (
        lambda: Own(Pixels(), ignoring, "flat"),
        None,
        lambda: [{"x": x, "mask": mask.to(torch.uint8)} for x, mask in images(255)],
    ),
    "CTC": (lambda: Own(Rows(), form="ctc"), None, targets_of_speech),
    "a classifier": (lambda: ComposerClassifier(Pixels(), 4), None, partial(images, -100)),
    "a loss in `forward`": (Mine, None, lambda: [{"x": x, "targets": y} for x, y in rows(0)]),
    "a bare language model": (language_model, None, texts),
    "a language model": (lambda: HuggingFaceModel(language_model()), None, texts),
    "prompt tuning": (prompted, None, texts),
    "segmentation": (
        segmenter,
        None,
        lambda: [{"pixel_values": x, "labels": mask} for x, mask in images(255)],
    ),
    "summed CTC": (speech_model, None, speech),
}


def loss_of(model, loss_fn, batch):
    """Return the loss of a whole batch, as plain torch computes it."""
    if loss_fn is not None:
        return loss_fn(model(batch[0]), batch[1])
    if isinstance(model, HuggingFaceModel):
        return model(batch).loss
    if not isinstance(model, ComposerModel):
        return model(**batch)["loss"]
    loss = model.loss(model(batch), batch)
    return sum(loss.values()) if isinstance(loss, dict) else loss


def expected_of(case):
    make, loss_fn, batches = CASES[case]
    model = make()
    optimizer = torch.optim.SGD(trained(model), lr=0.05)
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, loss_fn, batch)
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in trained(model)], loss.detach()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(case, size, part=slice(None), **arguments):
    """Train on two batches, or a part of each; return the parameters and the last loss."""
    make, loss_fn, batches = CASES[case]
    model = make()
    own = [
        {name: value[part] for name, value in batch.items()}
        if isinstance(batch, dict)
        else tuple(value[part] for value in batch)
        for batch in batches()
    ]
    with Trainer(
        model=model,
        loss_fn=loss_fn,
        optimizers=torch.optim.SGD(trained(model), lr=0.05),
        train_dataloader=DataSpec(own, is_sharded=True),
        device_train_microbatch_size=size,
        max_duration="2ba",
        progress_bar=False,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
        whole = [
            one.full_tensor() if hasattr(one, "full_tensor") else one for one in trained(trainer.state.model)
        ]
        return [one.detach().clone() for one in whole], trainer.state.loss


@pytest.mark.parametrize("case", CASES)
def test_microbatches_give_the_update_of_the_whole_batch(case, caplog):
    expected, loss = expected_of(case)
    for size in (None, 1, 4):
        parameters, last = train(case, size)
        torch.testing.assert_close(parameters, expected, **TOLERANCE)
        torch.testing.assert_close(last, loss, **TOLERANCE)
    assert "may change the update" not in caplog.text


def train_on_a_rank(case, size, config):
    """Train on 2 of 6 samples on rank 0, and on 4 of them on rank 1."""
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    part = slice(0, 2) if os.environ["RANK"] == "0" else slice(2, 6)
    return train(case, size, part, fsdp_config=config)[0]


@pytest.fixture(scope="module")
def ranks():
    with standing_ranks(2) as two:
        yield two


def check_on_ranks(ranks, case, size, config):
    expected, _ = expected_of(case)
    for parameters in ranks.run(train_on_a_rank, case, size, config):
        torch.testing.assert_close(parameters, expected, **TOLERANCE)


OFTEN = ["class weights", "a scaled sum", "another key", "CTC", "prompt tuning", "segmentation"]


@pytest.mark.parametrize("case", OFTEN)
def test_two_ranks_give_the_update_of_the_whole_batch(ranks, case):
    check_on_ranks(ranks, case, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, {}])
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_microbatches_on_two_ranks_give_the_update_of_the_whole_batch(ranks, case, size, config):
    check_on_ranks(ranks, case, size, config)


class Unread(Own):
    """A mean over the positions of a mask, which no function of torch computes; of sequences `(B, 3, 5)`."""

    def loss(self, outputs, batch):
        losses = functional.cross_entropy(outputs, batch[1], reduction="none")
        mask = (batch[1] != 0).float()
        return (losses * mask).sum() / mask.sum()


def weighed(batch):
    return (batch[1] != 0).sum(1).tolist()


def train_unread(caplog, model=None, size=2, **spec):
    """Train in two calls of `fit`; return the warnings about the split."""
    caplog.clear()
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(4, 3, 5, generator=generator), torch.randint(0, 3, (4, 4), generator=generator)
    model = Unread(Rows()) if model is None else model
    with Trainer(
        model=model,
        train_dataloader=DataSpec([batch] * 3, **spec),
        device_train_microbatch_size=size,
        max_duration="2ba",
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()
        trainer.fit("1ba")
    return [
        record.getMessage() for record in caplog.records if "may change the update" in record.getMessage()
    ]


def test_a_loss_that_cannot_be_read_is_told_once_with_the_remedy(caplog):
    (message,) = train_unread(caplog)
    for part in (
        "loss of `Unread`",
        "`LossSum(total, weight)`",
        "`DataSpec(dataloader=…, get_loss_weights=…)`",
    ):
        assert part in message


def test_nothing_is_told_where_the_split_does_not_matter_or_weights_are_stated(caplog):
    class Stated(Unread):
        def loss(self, outputs, batch):
            mask = (batch[1] != 0).float()
            losses = functional.cross_entropy(outputs, batch[1], reduction="none")
            return LossSum((losses * mask).sum(), mask.sum())

    assert train_unread(caplog, size=None) == []
    assert train_unread(caplog, get_loss_weights=weighed) == []
    assert train_unread(caplog, model=Stated(Rows())) == []
