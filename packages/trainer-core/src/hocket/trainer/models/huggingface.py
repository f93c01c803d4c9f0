"""`HuggingFaceModel`, a wrapper that makes models of the `transformers` library trainable."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.trainer.checks import refuse_class
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.models.base import ComposerModel
from hocket.trainer.models.huggingface_batch import BatchArguments, listed
from hocket.trainer.models.huggingface_folder import FolderWriter, check_ranks
from hocket.trainer.models.huggingface_saving import adapter_names, tensors_beside, with_adapters
from hocket.trainer.models.huggingface_task import (
    Task,
    as_measured,
    has_metrics,
    loss_metric,
    metrics_of,
    problem_of,
    shifts_labels,
    task_of,
)
from hocket.trainer.models.named_metrics import named_metrics
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.process.extras import import_extra

if TYPE_CHECKING:
    from torchmetrics import Metric

_IGNORED = -100


class HuggingFaceModel(ComposerModel):
    """Wraps a model of `transformers`; a batch is a mapping, such as a tokenizer's output with labels.

    Entries of the batch that the model's `forward` does not take are left out of the call; the batch itself
    is never changed. The loss is the model's own.

    Args:
        model: A model of `transformers`, or one that `peft` has put adapters into.
        tokenizer: The tokenizer, which is saved beside the model and decodes generated tokens.
        use_logits: Compute no loss in evaluation, and give every metric the logits instead of all outputs.
        metrics: Metrics measured while training, and in evaluation unless `eval_metrics` are given.
        eval_metrics: Metrics measured in evaluation. If neither is given, those of the model's task:
            cross-entropy and perplexity or accuracy.
        shift_labels: Whether the model predicts the next token, so that metrics compare its logits with the
            labels one position later. If None, True for causal language models.
        allow_embedding_resizing: Grow an embedding that is smaller than the tokenizer's vocabulary.
        peft_config: A configuration of `peft`, or a dict of one: its adapters are put into the model, and
            only they are trained.
        should_save_peft_only: Keep only the adapters in checkpoints and in saved folders, not the base model.

    Raises:
        MissingExtraError: If `transformers`, or for `peft_config` `peft`, is not installed.
        TrainerConfigError: If the tokenizer has more tokens than the model, or an argument has a wrong type.

    Example:
        >>> model = HuggingFaceModel(AutoModelForCausalLM.from_config(config), tokenizer)
        >>> Trainer(model=model, train_dataloader=loader, max_duration="1ep").fit()
        >>> model.save_pretrained("out")  # AutoModelForCausalLM.from_pretrained("out")
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        use_logits: bool = False,
        metrics: Any = None,
        eval_metrics: Any = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        import_extra("transformers", "transformers", needed_by="HuggingFaceModel")
        refuse_class("model", model)
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise TrainerConfigError(
                f"`model` is a `{type(model).__name__}`; expected a model of `transformers`, such as "
                "`AutoModelForCausalLM.from_config(config)`"
            )
        refuse_class("tokenizer", tokenizer)
        if tokenizer is not None:
            _fit_embedding(model, tokenizer, may_resize=allow_embedding_resizing)
        self.model = model if peft_config is None else with_adapters(model, peft_config)
        self.tokenizer = tokenizer
        self.use_logits = use_logits
        self.is_peft = hasattr(self.model, "peft_config") and hasattr(self.model, "get_base_model")
        adapters: Any = getattr(self.model, "peft_config", {}) if self.is_peft else {}
        self._has_prompt = any(one.is_prompt_learning for one in adapters.values())
        self.should_save_peft_only = should_save_peft_only
        self._trained_names: set[str] = set()
        base = self._base_model()
        self.config: Any = base.config
        self.task = task_of(base)
        does_shift = shifts_labels(self.task, base)
        self.shift_labels = does_shift if shift_labels is None else shift_labels
        if does_shift and not self.shift_labels:
            warnings.warn(
                f"`shift_labels=False` for `{type(base).__name__}`, which predicts the next token: metrics "
                "compare its logits with labels that must be shifted already",
                stacklevel=2,
            )
        self._arguments = BatchArguments(base)
        # Known from the first evaluated batch on, if not from the configuration.
        self._problem: str | None = None
        self._has_loss = False
        self._default_metrics: tuple[tuple[str | None, bool], dict[str, Metric]] | None = None
        self._train_metrics = {} if metrics is None else named_metrics(metrics)
        given = eval_metrics if eval_metrics is not None else metrics
        self._eval_metrics = None if given is None else named_metrics(given)

    def _base_model(self) -> Any:
        model: Any = self.model
        return model.get_base_model() if self.is_peft else model

    def forward(self, batch: Any) -> Any:
        """Return the model's outputs, a mapping with `loss` and `logits`.

        Raises:
            DataError: If the batch is not a mapping, or has no entry that the model takes.
        """
        return self.model(**self._arguments.take(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss that the model computed.

        Raises:
            DataError: If the model computed no loss, since the batch has no labels.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise DataError(self._arguments.describe_absence(batch))
        tensor: Tensor = loss
        return tensor

    @property
    def has_loss_in_outputs(self) -> bool:
        """Whether `forward` computes the loss, as long as no subclass computes another one."""
        return type(self).loss is HuggingFaceModel.loss

    def loss_weights(self, batch: Any) -> Sequence[float] | Tensor | None:
        """Return the number of labels of each sample that count in the loss; None if each sample weighs 1.

        Labels on a device are counted there: the weights are a tensor `(B,)` then.

        Args:
            batch: As `forward` takes it.
        """
        labels = self._arguments.labels(batch)
        if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return None
        predicted = labels[:, 1:] if self.shift_labels else labels
        weights = (predicted != _IGNORED).flatten(1).sum(1)
        if labels.device.type != "cpu":
            return weights.float()
        numbers: list[float] = weights.tolist()
        return numbers

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs that metrics are updated with.

        With `use_logits` these are the logits, computed without the labels. For a batch with
        `"mode": "generate"` they are the texts that the model generates.

        Args:
            batch: As `forward` takes it.
            outputs: The outputs of `forward` for this batch, if it ran.
        """
        if isinstance(batch, Mapping) and batch.get("mode") == "generate":
            return self._generate_texts(batch)
        labels = self._arguments.labels(batch)
        self._problem = self._problem or problem_of(self.task, self.config, labels)
        if outputs is None:
            arguments = self._arguments.take(batch)
            if self.use_logits and not self._evaluates_loss:
                arguments = self._without_labels(arguments)
            outputs = self.model(**arguments)
        self._has_loss = isinstance(outputs, Mapping) and outputs.get("loss") is not None
        if self.use_logits and not self._evaluates_loss and isinstance(outputs, Mapping):
            return outputs.get("logits", outputs)
        return outputs

    def _without_labels(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with which the model computes the same logits and no loss."""
        remaining = {name: value for name, value in arguments.items() if name != "labels"}
        needs_inputs = getattr(self.config, "is_encoder_decoder", False) and "labels" in arguments
        if needs_inputs and "decoder_input_ids" not in arguments and self.task is Task.SEQ2SEQ_LM:
            make_inputs = getattr(self._base_model(), "prepare_decoder_input_ids_from_labels", None)
            if make_inputs is None:
                return arguments  # the model makes the decoder's inputs from the labels itself
            remaining["decoder_input_ids"] = make_inputs(arguments["labels"])
        return remaining

    @property
    def _evaluates_loss(self) -> bool:
        """Whether the metric of evaluation is the model's loss, because its task has no other."""
        has_loss = self._has_loss or self._arguments.can_return_loss
        return self._eval_metrics is None and not has_metrics(self.task) and has_loss

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics by name.

        By default those of the task in evaluation, or the loss if the task has none. A classifier's depend on
        the problem that `transformers` infers from the first labels, unless `config.problem_type` states it.
        """
        if is_train:
            return self._train_metrics
        if self._eval_metrics is not None:
            return self._eval_metrics
        problem = self._problem or problem_of(self.task, self.config)
        key = problem, self._evaluates_loss
        if self._default_metrics is None or self._default_metrics[0] != key:
            found = loss_metric() if self._evaluates_loss else metrics_of(self.task, self.config, problem)
            self._default_metrics = key, found
        return self._default_metrics[1]

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Add a batch to a metric.

        Metrics of torchmetrics and of `hocket.trainer.metrics` get logits and labels, shifted where the model
        predicts the next token. Without `use_logits`, a metric of the user's own gets all outputs.

        Raises:
            DataError: If the batch has no labels.
        """
        labels = self._arguments.labels(batch)
        if labels is None:
            raise DataError(
                f"`{type(metric).__name__}` needs `labels`, and the batch has the keys {listed(batch)}"
            )
        is_known = type(metric).__module__.startswith(("torchmetrics", "hocket.trainer"))
        logits = outputs.get("logits") if isinstance(outputs, Mapping) and is_known else outputs
        labels = self._compared(labels, logits)
        if is_known and isinstance(logits, Tensor) and isinstance(labels, Tensor):
            logits, labels = as_measured(metric, logits, labels)
        metric.update(logits, labels)

    def _compared(self, labels: Any, logits: Any = None) -> Any:
        """Return the labels to compare with the logits of each position."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return labels
        if self._has_prompt and isinstance(logits, Tensor) and (labels.dim(), logits.dim()) == (2, 3):
            # `peft` puts the trained prompt before the text; its last token predicts the first of the text.
            num_prompt_tokens = max(0, logits.shape[1] - labels.shape[1])
            labels = torch.cat((labels.new_full((len(labels), num_prompt_tokens), _IGNORED), labels), dim=1)
        if not self.shift_labels:
            return labels
        # Shifted by one position; the last position is ignored, so that the logits keep their shape.
        return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], _IGNORED)), dim=1)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Generate tokens with the model's own `generate`.

        Collective where the model is sharded; every rank then makes as many steps as the longest text needs.

        Args:
            input_ids: `(B, L)`.
            attention_mask: `(B, L)`; by default 0 where `input_ids` are the tokenizer's padding.
            options: Options of `transformers`' `generate`, such as `max_new_tokens`.

        Returns:
            The token ids, the prompt included in decoder-only models, `(B, L')`.
        """
        if callable(getattr(self, "unshard", None)):
            check_ranks(self, "generate")
        pad = getattr(self.tokenizer, "pad_token_id", None)
        options.setdefault("pad_token_id", pad if pad is not None else self.config.eos_token_id)
        if attention_mask is None and pad is not None:
            attention_mask = (input_ids != pad).long()
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        # `generate` calls inner modules and bypasses this module's `forward`, around which FSDP2 gathers and
        # reshards the parameters.
        unshard, reshard = getattr(self, "unshard", None), getattr(self, "reshard", None)
        if callable(unshard) and callable(reshard):
            options.setdefault("synced_gpus", True)
            unshard()
        try:
            model: Any = self.model
            with torch.no_grad():
                tokens: Tensor = model.generate(input_ids=input_ids, **options)
        finally:
            if callable(unshard) and callable(reshard):
                reshard()
        return tokens

    def _generate_texts(self, batch: Mapping[str, Any]) -> Any:
        options = dict(batch.get("generation_kwargs") or {})
        if (length := batch.get("generation_length")) is not None:
            options.setdefault("max_new_tokens", int(length))
        tokens = self.generate(batch["input_ids"], batch.get("attention_mask"), **options)
        if not getattr(self.config, "is_encoder_decoder", False):
            tokens = tokens[:, batch["input_ids"].shape[1] :]
        if self.tokenizer is None:
            return tokens
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # overloads
        """Return the tensors by name; with `should_save_peft_only`, those that training changes.

        These are the adapters, parameters of the base that are trained beside them or have been, and the
        base's buffers, such as running statistics.
        """
        state: dict[str, Any] = super().state_dict(*args, **options)
        if not (self.is_peft and self.should_save_peft_only):
            return state
        prefix = options.get("prefix", args[1] if len(args) > 1 else "")
        names = self._adapter_names(state, prefix=prefix)
        names |= self._trained_beside(names) | tensors_beside(self, names).keys()
        return {name: value for name, value in state.items() if plain_name(name[len(prefix) :]) in names}

    def optional_names(self) -> set[str]:
        """Return the plain names of tensors that a checkpoint may lack, or may have beyond `state_dict`.

        Older checkpoints of adapters lack the base's buffers. A parameter of the base that is frozen now is
        in a checkpoint if a callback unfroze it before the save.
        """
        if not (self.is_peft and self.should_save_peft_only):
            return set()
        adapters = self._adapter_names(super().state_dict())
        parameters = {plain_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}
        beside = tensors_beside(self, adapters).keys()
        return (parameters | beside) - adapters - self._trained_beside(adapters)

    def _adapter_names(self, state: Mapping[str, Any], *, prefix: str = "") -> set[str]:
        """Return the plain names of the adapters' tensors in the whole state of this model."""
        names = adapter_names(self.model, state, prefix=f"{prefix}model.")
        return {plain_name(name[len(prefix) :]) for name in names}

    def _trained_beside(self, adapters: Collection[str]) -> set[str]:
        """Return the plain names of the parameters that are trained beside the adapters, or have been."""
        beside = tensors_beside(self, adapters)
        self._trained_names |= {name for name, one in beside.items() if one.requires_grad}
        return self._trained_names

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returned; the base model may be missing where only adapters are saved."""
        if not (self.is_peft and self.should_save_peft_only and strict):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        adapters = self._adapter_names(super().state_dict())
        needed = adapters | self._trained_beside(adapters)
        missing = sorted(name for name in result.missing_keys if plain_name(name) in needed)
        if missing or result.unexpected_keys:
            raise RuntimeError(
                f"the adapters' state does not fit: missing {missing}, unexpected {result.unexpected_keys}"
            )
        return result

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder: safetensors, configuration and tokenizer, for `from_pretrained`.

        With adapters, also those of the algorithm `LoRA`, the folder has those and what is trained beside
        them (`PeftModel.from_pretrained(base, folder)`); without `should_save_peft_only`, its subfolder
        `base` has the base model, too. On several ranks, every rank calls it before the trainer is closed,
        and rank 0 writes.

        Args:
            folder: The folder; created if it does not exist.

        Raises:
            TrainerClosedError: If there are several ranks and no process group.
            TrainerConfigError: If a parameter is trained beside the adapters that their folder cannot hold.
        """
        writer = FolderWriter(self.model, wrapper=self, task=self.task, trained=self._trained_names)
        writer.write(folder, tokenizer=self.tokenizer, has_own_base=not self.should_save_peft_only)


def _fit_embedding(model: Any, tokenizer: Any, *, may_resize: bool) -> None:
    embedding = model.get_input_embeddings()
    size, num_tokens = embedding.weight.shape[0], len(tokenizer)
    if size >= num_tokens:
        return
    if not may_resize:
        raise TrainerConfigError(
            f"the tokenizer has {num_tokens} tokens and the model's embedding {size} rows; use the tokenizer "
            "that belongs to the model, or set `allow_embedding_resizing=True`"
        )
    model.resize_token_embeddings(num_tokens)
