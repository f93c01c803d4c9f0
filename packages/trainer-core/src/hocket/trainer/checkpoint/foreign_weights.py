"""Loading weights from checkpoints of other programs, through the package that reads their formats."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.trainer.errors import ResumeError
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.protocols import CheckpointStore, ReadsForeign

_PREFIXES = ("", "state.model.", "model.", "state_dict.", "model_state_dict.", "module.")
"""The prefixes of the model in files of other programs: none (safetensors and
`torch.save(model.state_dict())`), those of Composer, Lightning (`state_dict.`) and torch's tutorials
(`model_state_dict.`)."""
_WRAPPERS = ("", "module.", "model.")
"""The attribute under which a wrapper holds the user's model: none, that of `ModuleWithLoss` and
`ComposerClassifier`, that of `HuggingFaceModel`."""


def match_names(wanted: Mapping[str, Any], there: list[str]) -> dict[str, str]:
    """Map the model's tensor names to those of a checkpoint, by the prefixes that match the most.

    `module.` of `DistributedDataParallel` and the parts that compiling adds to names are left out. The
    checkpoint may be one of the model inside the trainer's wrapper, such as a folder of `save_pretrained`.

    Args:
        wanted: The model's names.
        there: The checkpoint's names.
    """
    best: dict[str, str] = {}
    prefixes = [outer + inner for outer in _PREFIXES for inner in _WRAPPERS]
    for wrapper in _WRAPPERS:
        if not all(name.startswith(wrapper) for name in wanted):
            continue
        for prefix in prefixes:
            stored_names = {
                plain_name(name.removeprefix(prefix)): name for name in there if name.startswith(prefix)
            }
            short_names = {name: name.removeprefix(wrapper) for name in wanted}
            matched = {
                name: stored_names[short_names[name]] for name in wanted if short_names[name] in stored_names
            }
            if len(matched) > len(best):
                best = matched
    return best


def check_names(
    source: str,
    wanted: Mapping[str, Any],
    matched: Mapping[str, str],
    there: list[str],
    ignore: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
) -> None:
    """Refuse a checkpoint that lacks a tensor of the model, or has extra ones that `ignore` does not match.

    Raises:
        ResumeError: If a tensor is missing, or an extra one is found.
    """
    ties = ties or {}
    matched_names = {ties.get(name, name) for name in matched}
    missing = sorted(name for name in wanted if ties.get(name, name) not in matched_names)
    prefix = _common_prefix(matched)
    used = set(matched.values())
    extra = sorted(
        name
        for name in there
        if name.startswith(prefix)
        and name not in used
        and not any(
            fnmatch.fnmatchcase(f"model.{plain_name(name.removeprefix(prefix))}", one) for one in ignore
        )
    )
    if not missing and not extra:
        return
    parts = [f"lacks {_some(missing)} of the model"] if missing else []
    parts += [f"has {_some(extra)}, which the model has not"] if extra else []
    remedy = "use the model that it was saved from, or `load_strict_model_weights=False` for what both have"
    if has_adapters(extra) and not has_adapters(wanted):
        remedy = (
            "its layers have LoRA's adapters around them, as older releases wrote a model with the algorithm "
            "`LoRA`; give that algorithm to the trainer, or call `apply_lora(model)`, load the folder, and "
            "write it anew with `save_pretrained`, after `merge_lora(model)` for a plain model"
        )
    raise ResumeError(f"the checkpoint `{source}` {' and '.join(parts)}; {remedy}")


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether tensor names are those of layers with adapters of LoRA around them."""
    parts = {part for name in names for part in name.split(".")}
    return {"base_layer", "lora_A"} <= parts


def _common_prefix(matched: Mapping[str, str]) -> str:
    for name, stored in matched.items():
        for short_name in (name.removeprefix(wrapper) for wrapper in _WRAPPERS):
            if stored.endswith(short_name):
                return stored.removesuffix(short_name)
        return ""
    return ""


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def load_foreign(
    store: CheckpointStore,
    source: str,
    model: Mapping[str, Any],
    *,
    strict: bool,
    ignore: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    elsewhere: Sequence[str] = (),
) -> str | None:
    """Fill a model's tensors from a checkpoint of another program.

    Args:
        store: Opens the checkpoint, if the store reads foreign formats.
        source: The checkpoint's path or URI.
        model: The model's state by name; filled in place.
        strict: Refuse names that only one side has.
        ignore: Globs over names, such as `model.head.*`, that only the checkpoint may have.
        ties: For each later name of a tied parameter its first name; one name of the parameter is enough.
        elsewhere: Names of the model that other ranks fill.

    Returns:
        A sentence for the user; None if `source` is no checkpoint of another program.

    Raises:
        ResumeError: If names or shapes differ.
    """
    opened = store.foreign_weights(source) if isinstance(store, ReadsForeign) else None
    if opened is None:
        return None
    wanted = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    others = [
        one for one in elsewhere if not any(fnmatch.fnmatchcase(f"model.{one}", glob) for glob in ignore)
    ]
    all_names: dict[str, Any] = {**wanted, **dict.fromkeys(others)}
    stored_names = list(opened)
    matched = match_names(all_names, stored_names)
    if not matched:
        raise ResumeError(
            f"the checkpoint `{source}` has no tensor of the model: it has {_some(stored_names)}, and the "
            f"model {_some(list(wanted))}"
        )
    if strict:
        check_names(source, all_names, matched, stored_names, ignore, ties)
    num_unmatched = len(all_names) - len(matched)
    own = {name: stored for name, stored in matched.items() if name in wanted}
    for name, stored in own.items():
        shape = tuple(opened.record(stored).shape)
        if shape != tuple(wanted[name].shape):
            raise ResumeError(
                f"`{stored}` of the checkpoint `{source}` has the shape {shape}, and `{name}` of the model "
                f"{tuple(wanted[name].shape)}"
            )
    opened.fill({stored: wanted[name] for name, stored in own.items()})
    suffix = (
        f"; {num_unmatched} tensors of the model are not in it and stay as they were" if num_unmatched else ""
    )
    return f"weights of {len(matched)} tensors from `{source}` ({opened.format}); the run starts at 0{suffix}"
