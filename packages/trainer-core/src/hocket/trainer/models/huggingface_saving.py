"""Functions that write a model as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.trainer.extras import import_extra
from hocket.trainer.optimizer_state import plain_name


def save_folder(model: Any, folder: str | os.PathLike[str], *, tokenizer: Any, has_own_base: bool) -> None:
    """Write weights, configuration and tokenizer. Collective where the model is sharded; rank 0 writes.

    Args:
        model: A model of `transformers` or `peft`.
        folder: The folder; created if it does not exist.
        tokenizer: The tokenizer, written too unless it is None.
        has_own_base: Whether to write the base model of `peft` to the subfolder `base`.
    """
    state = {name: _whole(value) for name, value in model.state_dict().items()}
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_distributed or torch.distributed.get_rank() == 0:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(path, state_dict=state)
        if has_own_base:
            adapters = adapter_names(model, state, prefix="")
            model.get_base_model().save_pretrained(path / "base", state_dict=base_state(state, adapters))
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    if is_distributed:
        # No rank may open the folder before it is complete.
        torch.distributed.barrier()


def base_state(state: Mapping[str, Any], adapters: set[str]) -> dict[str, Any]:
    """Return the base model's tensors by its own names, from the state of a model with adapters around it."""
    base_tensors = {}
    for name, value in state.items():
        if name not in adapters:
            base_name = name.removeprefix("base_model.model.")
            base_tensors[base_name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return base_tensors


def _whole(value: Any) -> Any:
    """Return a tensor with all of its shards, on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu()


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
