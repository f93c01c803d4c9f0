"""The tensors of a model with `peft` adapters: those of the adapters, and those of the base model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models.huggingface_batch import listed
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.process.extras import import_extra


def with_adapters(model: Any, peft_config: Any) -> nn.Module:
    """Return a model with adapters of `peft` around it.

    Args:
        model: A model of `transformers`.
        peft_config: A configuration of `peft`, or a dict of one.

    Raises:
        TrainerConfigError: If the model has adapters, or `peft_config` is no such configuration.
    """
    peft = import_extra("peft", "peft", needed_by="peft_config")
    if isinstance(peft_config, Mapping):
        peft_config = peft.get_peft_config(dict(peft_config))
    if not isinstance(peft_config, peft.PeftConfig):
        raise TrainerConfigError(
            f"`peft_config` is a `{type(peft_config).__name__}`; expected a configuration of `peft`, such as "
            "`LoraConfig(r=8)`, or a dict such as `{'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': 8}`"
        )
    if hasattr(model, "peft_config"):
        raise TrainerConfigError("the model has adapters already; leave `peft_config` out")
    known_types = sorted(kind.value for kind in peft.PeftType)
    if peft_config.peft_type not in known_types:
        raise TrainerConfigError(
            f"`peft_config` has the type {peft_config.peft_type!r}; expected one of {listed(known_types)}"
        )
    adapted: nn.Module = peft.get_peft_model(model, peft_config)
    return adapted


def adapter_names(model: Any, state: Mapping[str, Any], *, prefix: str) -> set[str]:
    """Return the names in `state` that belong to adapters, as `peft` decides.

    Args:
        model: A model of `peft`.
        state: Tensors by name, those of `model` under `prefix`.
        prefix: The prefix of the model's names in `state`.
    """
    peft = import_extra("peft", "peft", needed_by="should_save_peft_only")
    model_tensors = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    # `peft` renames the tensors that it keeps, but returns the same objects. Of a prompt it returns what the
    # prompt's encoder computes, and not what is trained.
    adapter_ids = {
        id(value)
        for adapter, config in model.peft_config.items()
        if not config.is_prompt_learning
        for value in peft.get_peft_model_state_dict(
            model, state_dict=model_tensors, adapter_name=adapter
        ).values()
    }
    has_prompt = any(config.is_prompt_learning for config in model.peft_config.values())
    return {
        prefix + name
        for name, value in model_tensors.items()
        if id(value) in adapter_ids or (has_prompt and _belongs_to_prompt(name))
    }


def _belongs_to_prompt(name: str) -> bool:
    return name.startswith("prompt_encoder.") or ".modules_to_save." in name


def tensors_beside(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained and the buffers that a pass may change, by plain name.

    Quantized weights are left out: they are buffers of integers with several dims, beside their scales.

    Args:
        model: The model.
        names: The plain names of tensors to leave out, also under their further names.
    """
    parameters = {plain_name(name): one for name, one in model.named_parameters(remove_duplicate=False)}
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_buffers(recurse=False))
        if not any(one.dim() > 1 and not one.is_floating_point() for one in own.values()):
            buffers |= {plain_name(f"{prefix}.{name}"): one for name, one in own.items()}
    known = {id(one) for name, one in {**parameters, **buffers}.items() if name in names}
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    return {name: one for name, one in {**trained, **buffers}.items() if id(one) not in known}
