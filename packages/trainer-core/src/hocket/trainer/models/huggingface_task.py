"""The task of a Hugging Face model, and the default metrics of each task."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torchmetrics import Metric


class Task(StrEnum):
    """The kind of prediction that a model's head makes."""

    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    SEQ2SEQ_LM = "seq2seq_lm"
    CLASSIFICATION = "classification"
    TOKEN_CLASSIFICATION = "token_classification"
    OTHER = "other"


# The names under which transformers registers the classes of a task.
_REGISTRIES = {
    Task.CAUSAL_LM: ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    Task.MASKED_LM: ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    Task.SEQ2SEQ_LM: ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    Task.CLASSIFICATION: (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    ),
    Task.TOKEN_CLASSIFICATION: ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",),
}
# Endings of class names, for a user's own models, which no registry lists.
_ENDINGS = {
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForMaskedLM": Task.MASKED_LM,
    "ForConditionalGeneration": Task.SEQ2SEQ_LM,
    "ForSequenceClassification": Task.CLASSIFICATION,
    "ForImageClassification": Task.CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
}


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
    return Task.OTHER


def _has(registry: Any, name: str) -> bool:
    return any(name == entry or (isinstance(entry, tuple) and name in entry) for entry in registry.values())


def metrics_of(task: Task, config: Any) -> dict[str, Metric]:
    """Return the metrics of a task by name; none for a task without metrics of its own.

    Args:
        task: The task of the model.
        config: The model's configuration, for its number of labels.
    """
    # Here, not above: torchmetrics takes a second to import.
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

    from hocket.trainer.metrics import CrossEntropy, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy

    metrics: list[Metric] = []
    num_labels, problem = getattr(config, "num_labels", 0), getattr(config, "problem_type", None)
    if task in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM):
        metrics = [LanguageCrossEntropy(), LanguagePerplexity()]
    elif task is Task.MASKED_LM:
        metrics = [LanguageCrossEntropy(), MaskedAccuracy()]
    elif task is Task.TOKEN_CLASSIFICATION:
        metrics = [CrossEntropy(), MaskedAccuracy()]
    elif task is Task.CLASSIFICATION and problem == "multi_label_classification":
        metrics = [MultilabelF1Score(num_labels, validate_args=False)]
    elif task is Task.CLASSIFICATION and num_labels == 1:
        metrics = [MeanSquaredError()]
    elif task is Task.CLASSIFICATION:
        metrics = [CrossEntropy(), MulticlassAccuracy(num_labels, average="micro", validate_args=False)]
    return {type(metric).__name__: metric for metric in metrics}
