"""A reader of Composer's own checkpoint files, and a loader that resumes a run from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import hocket.ckpt as ckpt
from hocket.ckpt.errors import CheckpointError
from hocket.compat.composer.composer_ema import algorithm_states, take_average
from hocket.compat.composer.ignore_keys import as_lenient
from hocket.trainer import State
from hocket.trainer.checkpoint.model_state import model_state, model_state_to_fill, take_model_state
from hocket.trainer.checkpoint.optimizer_state import optimizer_state, take_optimizer_state
from hocket.trainer.checkpoint.tree_filter import without
from hocket.trainer.errors import ResumeError
from hocket.trainer.protocols import Pipelined
from hocket.trainer.timestamp import Counts, Timestamp


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposerFile:
    """The tensors and plain values of a file that Composer saved. Nothing in it is executed."""

    uri: str
    tensors: Mapping[tuple[Any, ...], torch.Tensor]
    """Tensors by path, such as `("state", "model", "module.0.weight")`."""
    values: Mapping[tuple[Any, ...], Any] = field(default_factory=dict)

    def tree(self, *path: Any) -> dict[Any, Any]:
        """Return everything below a path as nested dicts."""
        nested: dict[Any, Any] = {}
        for full_path, leaf in [*self.values.items(), *self.tensors.items()]:
            if full_path[: len(path)] == path and len(full_path) > len(path):
                inner = nested
                *parents, last = full_path[len(path) :]
                for name in parents:
                    inner = inner.setdefault(name, {})
                inner[last] = leaf
        return nested


def is_composer_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a file of `torch.save`, and not a checkpoint folder."""
    return os.path.isfile(path)


def read_composer_file(path: str | os.PathLike[str]) -> ComposerFile:
    """Read a file that Composer saved.

    Raises:
        ResumeError: If the path is not such a file.
    """
    uri = os.fspath(path)
    try:
        opened = ckpt.open(uri)
    except CheckpointError as error:
        raise ResumeError(f"`{uri}` cannot be read as a checkpoint file of Composer: {error}") from error
    tensors = {tuple(opened.contents.tensors[name].path): as_tensor(opened[name]) for name in opened}
    if not any(where[:2] == ("state", "model") for where in tensors):
        raise ResumeError(f"`{uri}` has no `state.model`; expected a file that Composer's trainer saved")
    values = {tuple(record.path): record.value for record in opened.contents.values.values()}
    return ComposerFile(uri=uri, tensors=tensors, values=values)


def load_composer_file(
    file: ComposerFile,
    state: State,
    *,
    weights_only: bool = False,
    strict: bool = True,
    ignore_keys: Any = None,
) -> list[str]:
    """Load the model, the optimizers and the time of a file into a run.

    Args:
        file: The file to load.
        state: The run's state.
        weights_only: Load the model alone; the run starts at 0.
        strict: Refuse names that only the model or only the file has.
        ignore_keys: Parts of the file's `state` that are not loaded: globs such as `model/head.*`.

    Returns:
        Sentences for the user.

    Raises:
        ResumeError: If the model or an optimizer differs from the file's, or the model is in stages.
    """
    if isinstance(state.parallelism, Pipelined):
        raise ResumeError(
            f"`{file.uri}` is a checkpoint of Composer, which is not loaded with `pp`; load it without `pp`, "
            "save it, and go on from that checkpoint with `pp`"
        )
    saved = file.tree("state")
    whole, saved = saved, without(saved, as_lenient(ignore_keys, "load_ignore_keys"))
    left_out = whole.get("model", {}).keys() - saved.get("model", {}).keys()
    has_average = not weights_only and take_average(saved, state, _laid_out)
    _fill_model(state, saved.get("model", {}), file.uri, strict=strict, left_out=left_out)
    if weights_only:
        return [f"weights from `{file.uri}`; the run starts at 0"]
    by_kind = saved.get("optimizers", {})
    for optimizer in state.optimizers:
        kind = type(optimizer).__name__
        if kind in by_kind:
            _fill_optimizer(state, optimizer, by_kind[kind])
        elif by_kind:
            raise ResumeError(
                f"`{file.uri}` has the state of `{', '.join(map(str, by_kind))}`, and this run's optimizer "
                f"is `{kind}`; make the same one, or load with `load_weights_only=True`"
            )
    times = saved.get("timestamp", {}).get("Timestamp", {})
    counts = {name: int(times[name]) for name in Counts._fields[:10] if isinstance(times.get(name), int)}
    state.timestamp = state.previous_timestamp = Timestamp(**counts)
    if isinstance(saved.get("rank_zero_seed"), int):
        state.seed = saved["rank_zero_seed"]
    duration = f"{state.timestamp.counts.batch}ba"
    notices = [f"going on from `{file.uri}`, {duration} of training, with random generators of this run"]
    dropped = algorithm_states(saved).keys() - ({"EMA"} if has_average else set())
    others = [
        name for name, states in (("algorithms", dropped), ("callbacks", saved.get("callbacks"))) if states
    ]
    if others:
        notices.append(f"the states of Composer's {' and '.join(others)} in `{file.uri}` were left out")
    return notices


def _fill_model(
    state: State, saved: Mapping[str, Any], uri: str, *, strict: bool, left_out: Collection[str] = ()
) -> None:
    to_fill = model_state_to_fill(state.model)
    tensors = {name: value for name, value in to_fill.items() if isinstance(value, torch.Tensor)}
    missing, unexpected = sorted(set(tensors) - set(saved) - set(left_out)), sorted(set(saved) - set(tensors))
    if strict and (missing or unexpected):
        raise ResumeError(
            f"the model differs from that of `{uri}`: the file lacks {missing[:5]} and has {unexpected[:5]}; "
            "make the same model, or set `load_strict_model_weights=False`"
        )
    for name in tensors.keys() & saved.keys():
        if tensors[name].shape != saved[name].shape:
            raise ResumeError(
                f"`{name}` has shape {list(saved[name].shape)} in `{uri}` and {list(tensors[name].shape)} in "
                "the model"
            )
        with torch.no_grad():
            target = tensors[name]
            like = _laid_out(saved[name], target)
            if isinstance(target, DTensor):
                target.to_local().copy_(like.to_local())  # type: ignore[attr-defined]
            else:
                target.copy_(like)
    take_model_state(state.model, tensors)


def _fill_optimizer(state: State, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    parameter_of = dict(_parameters(state))
    slots = {
        name: {
            slot: _laid_out(value, parameter_of[name])
            if isinstance(value, torch.Tensor) and value.shape == parameter_of[name].shape
            else value
            for slot, value in fields.items()
        }
        for name, fields in saved.get("state", {}).items()
        if name in parameter_of
    }
    current_groups = optimizer_state(optimizer, state.model)["param_groups"]
    groups_by_index = saved.get("param_groups", {})
    groups = [
        # Options that only Composer's optimizer has would have no effect here.
        {**group, **{key: value for key, value in groups_by_index.get(index, {}).items() if key in group}}
        for index, group in enumerate(current_groups)
    ]
    kind = type(optimizer).__name__
    take_optimizer_state(optimizer, state.model, {"kind": kind, "state": slots, "param_groups": groups})


def _parameters(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(value): name for name, value in model_state(state.model).items()}
    by_name = dict(model_state(state.model))
    for name, parameter in state.model.named_parameters():
        plain = names.get(id(parameter), name)
        yield plain, by_name.get(plain, parameter)


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(
            value.to(like.to_local().device, like.dtype), like.device_mesh, like.placements
        )
    return value.to(like.device, like.dtype)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor with its own copy of an array that a checkpoint's reader returned."""
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
