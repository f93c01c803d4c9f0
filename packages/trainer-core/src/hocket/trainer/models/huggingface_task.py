"""The task of a Hugging Face model, and the default metrics of each task."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric


class Task(StrEnum):
    """The kind of prediction that a model's head makes."""

    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    SEQ2SEQ_LM = "seq2seq_lm"
    CLASSIFICATION = "classification"
    MULTIPLE_CHOICE = "multiple_choice"
    TOKEN_CLASSIFICATION = "token_classification"
    OTHER = "other"


# The names under which transformers registers the classes of a task.
_REGISTRIES = {
    Task.CAUSAL_LM: ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    # Some models of this task are registered for masked language modelling, too.
    Task.SEQ2SEQ_LM: ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    Task.MASKED_LM: ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    Task.CLASSIFICATION: (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task.MULTIPLE_CHOICE: ("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",),
    Task.TOKEN_CLASSIFICATION: ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",),
}
# Endings of class names, for a user's own models, which no registry lists.
_ENDINGS = {
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForMaskedLM": Task.MASKED_LM,
    "ForMultipleChoice": Task.MULTIPLE_CHOICE,
    "ForSequenceClassification": Task.CLASSIFICATION,
    "ForImageClassification": Task.CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
}
_UNSHIFTED = frozenset(
    f"{family}ForCausalLM"
    for family in (
        "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian", "Musicgen",
        "MusicgenMelody", "Mvp", "PLBart", "Pegasus", "ProphetNet", "TrOCR", "Whisper",
    )
) | {"XLMWithLMHeadModel", "XLNetLMHeadModel"}  # fmt: skip
"""Models that generate text and whose loss compares each position's logits with its own label."""


def task_of(model: nn.Module) -> Task:
    """Return the task of a transformers model, by its class and the classes that it derives from.

    Args:
        model: The model, without an adapter around it.
    """
    from transformers.models.auto import modeling_auto

    for kind in type(model).__mro__:
        for task, registries in _REGISTRIES.items():
            if any(_has(getattr(modeling_auto, registry, {}), kind.__name__) for registry in registries):
                return task
        for ending, task in _ENDINGS.items():
            if kind.__name__.endswith(ending):
                return task
        if kind.__name__.endswith("ForConditionalGeneration"):
            return Task.SEQ2SEQ_LM if _is_encoder_decoder(model) else Task.CAUSAL_LM
    return Task.OTHER


def shifts_labels(task: Task, model: nn.Module) -> bool:
    """Return whether a model's loss compares the logits of each position with the label of the next one."""
    return task is Task.CAUSAL_LM and not any(kind.__name__ in _UNSHIFTED for kind in type(model).__mro__)


def _is_encoder_decoder(model: Any) -> bool:
    """Return whether a model has a decoder of its own; a model of images and text may be a decoder alone."""
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(
        getattr(config, "is_encoder_decoder", False) or getattr(text_config, "is_encoder_decoder", False)
    )


def _has(registry: Any, name: str) -> bool:
    return any(name == entry or (isinstance(entry, tuple) and name in entry) for entry in registry.values())


def problem_of(task: Task, config: Any, labels: Any = None) -> str | None:
    """Return the problem of a classifier as `transformers` infers it for the loss; None if not known yet.

    Args:
        task: The task of the model.
        config: The model's configuration.
        labels: The labels of a batch.
    """
    if task is not Task.CLASSIFICATION:
        return None
    problem, num_labels = getattr(config, "problem_type", None), getattr(config, "num_labels", 0)
    if problem is not None or num_labels == 1:
        return problem or "regression"
    if not isinstance(labels, Tensor):
        return None
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def has_metrics(task: Task) -> bool:
    """Return whether a task has metrics of its own."""
    return task is not Task.OTHER


def loss_metric() -> dict[str, Metric]:
    """Return the metric of a model that is measured by its loss alone."""
    from hocket.trainer.metrics.model_loss import Loss

    return {"Loss": Loss()}


def metrics_of(task: Task, config: Any, problem: str | None = None) -> dict[str, Metric]:
    """Return the metrics of a task by name; none for a task without metrics of its own.

    Args:
        task: The task of the model.
        config: The model's configuration, for its number of labels.
        problem: The problem of a classifier, as `problem_of` returns it.
    """
    # Here, not above: torchmetrics takes a second to import.
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

    from hocket.trainer.metrics import CrossEntropy, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy

    metrics: list[Metric] = []
    num_labels = getattr(config, "num_labels", 0)
    if task in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM):
        metrics = [LanguageCrossEntropy(), LanguagePerplexity()]
    elif task is Task.MASKED_LM:
        metrics = [LanguageCrossEntropy(), MaskedAccuracy()]
    elif task is Task.TOKEN_CLASSIFICATION:
        metrics = [CrossEntropy(), MaskedAccuracy()]
    elif problem == "multi_label_classification":
        metrics = [MultilabelF1Score(num_labels, validate_args=False)]
    elif problem == "regression":
        metrics = [MeanSquaredError()]
    elif task in (Task.CLASSIFICATION, Task.MULTIPLE_CHOICE):
        metrics = [CrossEntropy(), MulticlassAccuracy(num_labels, average="micro", validate_args=False)]
    return {type(metric).__name__: metric for metric in metrics}


def as_measured(metric: Metric, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and labels in the shapes in which a metric of torchmetrics or of Hocket compares them.

    Args:
        metric: The metric.
        logits: The model's logits, with the classes last.
        labels: The labels, shifted where the model predicts the next token.
    """
    name = type(metric).__name__
    if logits.shape[-1:] == (1,) and labels.dim() == logits.dim() - 1:
        return logits.squeeze(-1), labels
    if name.startswith("Multilabel"):
        # torchmetrics takes a batch whose logits all lie between 0 and 1 for probabilities.
        return logits.sigmoid() if logits.is_floating_point() else logits, labels
    if logits.dim() == 2 and labels.shape == (len(logits), 1) and not labels.is_floating_point():
        labels = labels.squeeze(-1)
    if logits.dim() == 3 and labels.shape == logits.shape[:2] and _has_classes_in_dim_1(name):
        # Moved, since the dim of the classes is ambiguous where a text is as long as there are classes.
        logits = logits.movedim(-1, 1)
    return logits, labels


def _has_classes_in_dim_1(name: str) -> bool:
    return name in ("CrossEntropy", "MaskedAccuracy") or name.startswith("Multiclass")
