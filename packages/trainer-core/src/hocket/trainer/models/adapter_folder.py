"""Folders of `peft` adapters, with the modules of the base model that are trained beside them."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models.huggingface_saving import tensors_beside
from hocket.trainer.process.extras import import_extra

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BASE = "base_model.model."
"""The prefix of a base model's names in a model of `peft`, and in its folders."""


def has_injected_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters in its layers, without a model of `peft` around it."""
    return not hasattr(model, "get_base_model") and any(map(_is_adapted, model.modules()))


def modules_beside(base: nn.Module, adapters: Collection[str], trained: Collection[str] = ()) -> list[str]:
    """Return the modules of a base model that an adapter's folder has to hold in whole.

    They have parameters that are trained beside the adapters, or running statistics.

    Args:
        base: The base model, with adapters in its layers.
        adapters: The adapters' tensors, by their names in `base`.
        trained: Further parameters that were trained before, by their names in `base`.

    Raises:
        TrainerConfigError: If a parameter is in no module that can be stored apart from the adapters.
    """
    beside = tensors_beside(base, adapters)
    names = {name for name, one in beside.items() if one.requires_grad} | set(trained)
    names |= {name for name in beside if name.rpartition(".")[2] in _STATISTICS}
    modules = dict(base.named_modules(remove_duplicate=False))
    owners = {name.rpartition(".")[0] for name in names}
    outermost = sorted(owner for owner in owners if not any(_is_inside(owner, other) for other in owners))
    for owner in outermost:
        if not owner or any(map(_is_adapted, modules[owner].modules())):
            parameter = next(name for name in sorted(names) if name.rpartition(".")[0] == owner)
            raise TrainerConfigError(
                f"`{parameter}` is trained beside the adapters, and a folder of adapters cannot hold it, "
                "because its module has adapters inside, or is the model itself; pass "
                "`should_save_peft_only=False`, which saves the base model as well"
            )
    return outermost


def add_modules(folder: Path, names: Collection[str], state: Mapping[str, Tensor]) -> None:
    """Add modules of the base model to an adapter's folder, as `modules_to_save` of its configuration.

    Args:
        folder: A folder with `adapter_config.json` and `adapter_model.safetensors`.
        names: The modules' names in the base model.
        state: The base model's tensors by name.
    """
    if not names:
        return
    safetensors: Any = import_extra("safetensors.torch", "safetensors", needed_by="save_pretrained")
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["modules_to_save"] = [*(config.get("modules_to_save") or ()), *names]
    # `peft` compares the ends of names, so that a short name may mean further modules.
    added = {
        f"{_BASE}{name}": value.clone().contiguous()
        for name, value in state.items()
        if any(name.startswith(f"{one}.") or f".{one}." in name for one in names)
    }
    safetensors.save_file({**safetensors.load_file(weights), **added}, weights, metadata={"format": "pt"})
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def write_injected(
    folder: Path,
    owner: Any,
    base: nn.Module,
    state: Mapping[str, Tensor],
    *,
    prefix: str,
    beside: Collection[str],
    task_type: str | None,
) -> None:
    """Write the adapters that were put into a model's layers as a folder of `peft`.

    Args:
        folder: The folder; it exists.
        owner: The module with the configurations of the adapters: `base`, or a wrapper of it.
        base: The model of `transformers`, with adapters in its layers.
        state: All tensors of `owner` by name.
        prefix: The prefix of the names of `base` in `owner`.
        beside: The modules to store in whole, as `modules_beside` returns them.
        task_type: The task in the folder's configuration.
    """
    peft = import_extra("peft", "peft", needed_by="save_pretrained")
    safetensors: Any = import_extra("safetensors.torch", "safetensors", needed_by="save_pretrained")
    for adapter, given in owner.peft_config.items():
        own = folder if adapter == "default" else folder / adapter
        own.mkdir(exist_ok=True)
        config = copy.copy(given)
        config.inference_mode = True
        config.task_type = task_type if config.task_type is None else config.task_type
        config.base_model_name_or_path = getattr(getattr(base, "config", None), "_name_or_path", None)
        config.target_modules = {name for name, one in base.named_modules() if _is_adapted(one)}
        config.save_pretrained(str(own))
        kept = peft.get_peft_model_state_dict(
            owner, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=False
        )
        tensors = {
            _BASE + name.removeprefix(prefix): value.clone().contiguous() for name, value in kept.items()
        }
        safetensors.save_file(tensors, own / "adapter_model.safetensors", metadata={"format": "pt"})
        add_modules(own, beside, {name.removeprefix(prefix): value for name, value in state.items()})


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer")


def _is_inside(name: str, other: str) -> bool:
    return name != other and (name.startswith(f"{other}.") or not other)
