"""`StateGuard`: the comparison of what training changes with what the first checkpoint of a run holds."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.callback import Callback
from hocket.trainer.checkpoint.registry import named
from hocket.trainer.checkpoint.tree_filter import unlisted
from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.errors import IncompleteCheckpointError
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.optim.torch_schedulers import unsaved_values
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.state import State

# Attributes of torch's optimizers. What changes in them is in the parameter groups and the state, or a cache.
_OF_TORCH = frozenset(
    ("defaults", "param_groups", "state", "_numel_cache", "_opt_called", "_params", "grad_scale", "found_inf")
)

Missing = dict[tuple[str, ...], str]
"""Why a part is missing, by its place in the tree."""


class StateGuard:
    """Finds what training changes and a checkpoint does not hold.

    It looks at parameters that are trained, buffers, the state and the attributes of optimizers, schedulers,
    callbacks and algorithms. Buffers that torch does not save and frozen parameters are left out on purpose.
    An entry of a tree holds a tensor if it has the tensor's memory or name, or if it changes with the tensor.

    Args:
        state: The state of the run.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._start: dict[tuple[str, ...], Any] | None = None
        self._missing: dict[bool, Missing] = {}

    def start(self) -> None:
        """Record the values whose changes are looked for, unless this was done before."""
        if self._start is None:
            self._start = {
                ("optimizers", str(index), name): _value_of(value, optimizer)
                for index, optimizer in enumerate(self._state.optimizers)
                for name, value in _attributes(optimizer)
            }
            held = _HeldTensors(self._state.model.state_dict())
            for name, buffer in _unheld_buffers(self._state.model, held):
                self._start["model", name] = _value_of(buffer)

    def check(self, tree: dict[str, Any], ignore_keys: Any) -> Missing:
        """Return what a tree to save lacks; compared for the first tree of a run, and then remembered.

        Raises:
            IncompleteCheckpointError: If it lacks something that `ignore_keys` do not leave out.
        """
        missing = self._missing_of(tree)
        places = unlisted(tree, missing, ignore_keys) if missing else []
        if places:
            reasons = {"/".join(place): missing[place] for place in places}
            shown = [f"`{name}` ({reason})" for name, reason in reasons.items()][:5]
            more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            raise IncompleteCheckpointError(
                f"the checkpoint would lack what training changes: {', '.join(shown)}{more}; save and load "
                "it in `state_dict` and `load_state_dict`, or, if a resumed run may start it anew, list it: "
                f"`save_ignore_keys={list(reasons)[:5]}`"
            )
        return missing

    def _missing_of(self, tree: Mapping[str, Any]) -> Missing:
        is_whole = "optimizers" in tree
        if (found := self._missing.get(is_whole)) is not None:
            return found
        missing = self._missing_of_model(tree["model"])
        if is_whole:
            missing |= self._missing_of_optimizers(tree["optimizers"]) | self._missing_parts()
        if self._start is not None:
            self._missing[is_whole] = missing
        return missing

    def _missing_of_model(self, tree: Mapping[str, Any]) -> Missing:
        model, held = self._state.model, _HeldTensors(tree)
        own_tensors = [*model.parameters(), *model.buffers()]
        missing: Missing = {}

        def is_held(name: str, tensor: torch.Tensor) -> bool:
            return held.has(name, tensor) or _changes_with(tensor, model.state_dict, own_tensors)

        for name, parameter in model.named_parameters():
            plain = plain_name(name)
            if parameter.requires_grad and not is_held(plain, parameter):
                missing["model", plain] = "a trained parameter that `state_dict` leaves out"
        for name, buffer in _unheld_buffers(model, held):
            is_changed = self._start is not None and self._start.get(("model", name)) != _value_of(buffer)
            if is_changed and not is_held(name, buffer):
                missing["model", name] = "a buffer that training changed and `state_dict` leaves out"
        return missing

    def _missing_of_optimizers(self, trees: list[Any]) -> Missing:
        missing: Missing = {}
        for index, (optimizer, tree) in enumerate(zip(self._state.optimizers, trees, strict=False)):
            held = _HeldTensors(tree)
            kind, place = type(optimizer).__name__, ("optimizers", str(index))
            known = [*tensors(optimizer.state, into_objects=False), *_parameters(optimizer)]
            for key, value in optimizer.state.items():
                lost = [one for one in tensors(value, into_objects=False) if not held.has("", one)]
                if any(not _changes_with(one, optimizer.state_dict, known) for one in lost):
                    shown = f"a tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else key
                    missing[*place, "state"] = f"`{kind}` has a state of {shown} that its `state_dict` lacks"
            for name, value in _attributes(optimizer):
                started = None if self._start is None else self._start.get((*place, name))
                if self._start is None or started == _value_of(value, optimizer):
                    continue
                if not _is_attribute_held(optimizer, name, value, held):
                    missing[*place, name] = f"an attribute of `{kind}` that training changed"
        return missing

    def _missing_parts(self) -> Missing:
        missing: Missing = {}
        for kind in ("schedulers", "callbacks", "algorithms"):
            for name, part in named(getattr(self._state, kind)):
                if isinstance(part, LRScheduler):
                    for key in unsaved_values(part):
                        missing[kind, name, key] = "a value that a checkpoint cannot store"
                elif hasattr(part, "state_dict") and not _can_load(part) and part.state_dict():
                    missing[kind, name] = (
                        "it has a `state_dict` and lacks a `load_state_dict`, which may do nothing"
                    )
        return missing


class _HeldTensors:
    """The names and the memory of the tensors of a tree."""

    def __init__(self, tree: Any) -> None:
        self._names = set(map(plain_name, tree)) if isinstance(tree, Mapping) else set()
        self._places = {_place(tensor) for tensor in tensors(tree, into_objects=False)}

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        return name in self._names or _place(tensor) in self._places


def _unheld_buffers(model: nn.Module, held: _HeldTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that torch saves and that the state does not have by name or memory."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            if buffer is None or key in module._non_persistent_buffers_set or held.has(name, buffer):
                continue
            yield name, buffer


def _can_load(part: Any) -> bool:
    base = next((base for base in (Callback, Algorithm) if isinstance(part, base)), None)
    if base is None:
        return hasattr(part, "load_state_dict")
    kind: Any = type(part)
    return kind.state_dict is base.state_dict or kind.load_state_dict is not base.load_state_dict


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in which an optimizer that is not torch's or ours may keep a state."""
    if not type(optimizer).__module__.startswith(("torch.optim.", "hocket.")):
        for name, value in vars(optimizer).items():
            is_of_torch = name in _OF_TORCH or name.startswith(("_optimizer_", "_warned_", "_zero_grad_"))
            if not is_of_torch and not callable(value):
                yield name, value


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_attribute_held(optimizer: Optimizer, name: str, value: Any, held: _HeldTensors) -> bool:
    """Return whether the optimizer's `state_dict` has an attribute: by memory or name, or by its changes."""
    parameters = {id(parameter) for parameter in _parameters(optimizer)}
    known = [*tensors(optimizer.state, into_objects=False), *_parameters(optimizer)]
    content = value.state if isinstance(value, Optimizer) else value
    found = list(tensors(content, into_objects=False))
    unheld = [one for one in found if id(one) not in parameters and not held.has("", one)]
    if any(not _changes_with(one, optimizer.state_dict, known) for one in unheld):
        return False
    if found:
        return True
    if type(value) in (int, float):
        return _differs(
            lambda: setattr(optimizer, name, value + 1),
            lambda: setattr(optimizer, name, value),
            optimizer.state_dict,
            known,
        )
    return isinstance(value, Optimizer) or name.lstrip("_") in map(str, optimizer.state_dict())


def _changes_with(tensor: torch.Tensor, read: Callable[[], Any], known: list[torch.Tensor]) -> bool:
    """Return whether the return value of `read` changes with a tensor, which is restored."""
    own = tensor.detach()
    kept = own.clone()

    def change() -> None:
        if own.dtype is torch.bool:
            own.logical_not_()
        else:
            own.add_(1)

    with torch.no_grad():
        return _differs(change, lambda: own.copy_(kept), read, known)


def _differs(
    change: Callable[[], object],
    restore: Callable[[], object],
    read: Callable[[], Any],
    known: list[torch.Tensor],
) -> bool:
    """Return whether a change shows in what `read` returns, beside the tensors that are known."""
    places = {_place(tensor) for tensor in known}

    def values() -> Any:
        return _value_of(read(), places=places)

    before = values()
    change()
    try:
        return bool(before != values())
    finally:
        restore()


def _value_of(value: Any, owner: Optimizer | None = None, *, places: Any = (), depth: int = 0) -> Any:
    """Return the numbers and tensors in a value, to compare them, without parameters and known places."""
    if isinstance(value, torch.Tensor):
        if _place(value) in places or isinstance(value, nn.Parameter):
            return None
        local = local_part(value).detach().cpu().contiguous()
        content: Any = local.view(-1).view(torch.uint8).numpy() if local.numel() else b""
        # A digest, since a quantized base model may be gigabytes of such buffers.
        return str(value.dtype), value.shape, hashlib.blake2b(content).digest()
    if isinstance(value, bool):
        return None  # a flag of what was set up
    if isinstance(value, Number):
        return value if value == value else "nan"
    if isinstance(value, Optimizer) and value is not owner:
        return _value_of(list(value.state.values()), owner, places=places, depth=depth + 1)
    if depth > 8:
        return None
    if isinstance(value, Mapping | list | tuple | deque):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        values = {str(key): _value_of(one, owner, places=places, depth=depth + 1) for key, one in pairs}
        return {key: one for key, one in values.items() if one is not None} or None
    return value.tobytes() if hasattr(value, "tobytes") else None


@torch.no_grad()
def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    local = local_part(tensor)
    try:
        return local.untyped_storage()._cdata, int(local.storage_offset()), local.numel()
    except (RuntimeError, ValueError):  # sparse, nested or uninitialised tensors have no storage
        return id(tensor), 0, 0
