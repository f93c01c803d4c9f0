"""Folders that `transformers` and `peft` open, written from a model that may be sharded over ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.trainer.checks import local_path
from hocket.trainer.errors import TrainerClosedError, TrainerConfigError
from hocket.trainer.models.adapter_folder import (
    add_modules,
    has_injected_adapters,
    modules_beside,
    write_injected,
)
from hocket.trainer.models.huggingface_saving import adapter_names
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.process.world import num_ranks
from hocket.trainer.ranks.sharded_tensors import whole_tensor

_PEFT_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}


def check_ranks(model: nn.Module, verb: str) -> None:
    """Refuse a collective call on a model whose ranks have left their process group.

    Raises:
        TrainerClosedError: If there are several ranks and no process group.
    """
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    count = num_ranks()
    if not is_distributed and (is_sharded or count > 1):
        raise TrainerClosedError(
            f"`{verb}` needs all {count} ranks, and there is no process group: the trainer is closed, or "
            "not made yet; call it on every rank before `close()`, inside of `with trainer:`"
        )


class FolderWriter:
    """Writes a model of `transformers` or `peft` as a folder. Collective where the model is sharded.

    Args:
        model: The model.
        wrapper: A module that holds it as `model`, and may have the configurations of adapters that were put
            into its layers.
        task: The task of the model.
        trained: Parameters of the wrapper that were trained beside adapters before, by plain name.
    """

    def __init__(self, model: Any, *, wrapper: Any, task: str, trained: Collection[str]) -> None:
        self._model = model
        self._task = task
        self._trained = trained
        self._is_injected = has_injected_adapters(model)
        self._owner = wrapper if self._is_injected and hasattr(wrapper, "peft_config") else model
        self._has_adapters = hasattr(self._owner, "peft_config")
        self._prefix = "model." if self._owner is wrapper else ""
        if self._has_adapters and not self._is_injected:
            has_prompt = any(config.is_prompt_learning for config in model.peft_config.values())
            self._prefix = "base_model." if has_prompt else "base_model.model."

    def write(self, folder: str | os.PathLike[str], *, tokenizer: Any, has_own_base: bool) -> None:
        """Write weights, configuration and tokenizer; rank 0 writes.

        Args:
            folder: The folder; created if it does not exist.
            tokenizer: The tokenizer, written too unless it is None.
            has_own_base: Whether to write the base model of adapters to the subfolder `base`.

        Raises:
            TrainerClosedError: If there are several ranks and no process group.
            TrainerConfigError: If the folder cannot hold a tensor that is trained, or the base model.
        """
        path = Path(local_path("folder", folder))
        check_ranks(self._model, "save_pretrained")
        state = {plain_name(name): _whole(value) for name, value in self._owner.state_dict().items()}
        # Before anything is written, and on every rank.
        beside = self._beside(state) if self._has_adapters and not has_own_base else []
        base_state = self._base_state(state) if self._has_adapters else {}
        if has_own_base:
            _check_whole(base_state)
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not is_distributed or torch.distributed.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            self._write_model(path, state, base_state, beside)
            if has_own_base and self._has_adapters:
                base = self._model if self._is_injected else self._model.get_base_model()
                base.save_pretrained(path / "base", state_dict=base_state)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)
        if is_distributed:
            # No rank may open the folder before it is complete.
            torch.distributed.barrier()

    def _write_model(
        self, path: Path, state: dict[str, Any], base_state: dict[str, Any], beside: list[str]
    ) -> None:
        if self._is_injected:
            write_injected(
                path,
                self._owner,
                self._model,
                state,
                prefix=self._prefix,
                beside=beside,
                task_type=_PEFT_TASKS.get(self._task),
            )
            return
        self._model.save_pretrained(path, state_dict=state)
        for adapter in self._owner.peft_config if beside else ():
            add_modules(path if adapter == "default" else path / adapter, beside, base_state)

    def _beside(self, state: Mapping[str, Any]) -> list[str]:
        """Return the modules of the base that the adapters' folder holds in whole."""
        base = self._model if self._is_injected else self._model.get_base_model()
        outer = "" if self._owner is not self._model else "model."
        trained = self._of_base(name.removeprefix(outer) for name in self._trained)
        adapters = adapter_names(self._owner, state, prefix="")
        beside = modules_beside(base, self._of_base(adapters), trained)
        if beside and self._prefix == "base_model.":
            raise TrainerConfigError(
                f"`{beside[0]}` is trained beside a prompt, and the folder of a prompt cannot hold it; pass "
                "`should_save_peft_only=False`, which saves the base model as well"
            )
        return beside

    def _of_base(self, names: Iterable[str]) -> set[str]:
        return {name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)}

    def _base_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base model's tensors by its own names."""
        adapters = adapter_names(self._owner, state, prefix="")
        inner = {
            name.removeprefix(self._prefix): value
            for name, value in state.items()
            if name not in adapters and name.startswith(self._prefix) and ".token_adapter." not in name
        }
        return {
            name.replace(".base_layer.", ".").replace(".original_module.", "."): value
            for name, value in inner.items()
        }


def _check_whole(state: Mapping[str, Any]) -> None:
    packed = [
        name for name, value in state.items() if name.endswith(".weight") and value.dtype is torch.uint8
    ]
    if packed:
        raise TrainerConfigError(
            f"the base model cannot be saved beside its adapters: `{packed[0]}` is quantized; save the "
            "adapters alone, with `should_save_peft_only=True`, or merge them first (`merge_lora`)"
        )


def _whole(value: Any) -> Any:
    """Return a tensor with all of its shards, on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    full = whole_tensor(value)
    return full.detach().cpu()
