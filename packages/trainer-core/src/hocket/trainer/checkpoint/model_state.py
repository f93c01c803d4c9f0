"""The state tree of a model, keyed by the names of the unwrapped model, and its way back into the model."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hocket.trainer.checkpoint.registry import has_tensors
from hocket.trainer.errors import ResumeError
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.ranks.sharded_tensors import local_part

# Modules and hooks of these packages load each tensor by copying it to the parameter or buffer of its name.
_COPYING = tuple(
    f"{package}."
    for package in (
        *("torch.nn.modules", "torch.nn.utils", "torch.nn.parallel", "torch.distributed"),
        *("torchmetrics", "hocket"),
    )
)

RESHAPED = "reshaped_buffers"
"""The key in a checkpoint's `user` of the names of buffers whose shape is not that of a new model."""


class _AllNames(Container[object]):
    """A container of everything."""

    def __contains__(self, key: object) -> bool:
        return True


class AsStored(dict[Any, Any]):
    """A mapping in a tree to load into, of which some keys take what the checkpoint has, whatever its shape.

    Args:
        entries: The tensors and values to load into.
        open_names: The keys that take what the checkpoint has; by default all keys.
        layouts: Tensors by key; a new tensor below such a key is laid out like it if the shapes are equal.
    """

    def __init__(
        self,
        entries: Mapping[Any, Any],
        *,
        open_names: Container[object] | None = None,
        layouts: Mapping[Any, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(entries)
        self.open_names = _AllNames() if open_names is None else open_names
        self.layouts = layouts or {}

    def like(self, entries: Mapping[Any, Any]) -> AsStored:
        """Return the same with other entries."""
        return AsStored(entries, open_names=self.open_names, layouts=self.layouts)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map every later plain name of a tied parameter to its first plain name."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), plain_name(name))
    return {
        plain_name(name): first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != plain_name(name)
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's parameters and buffers by plain name; the tensors are not copied."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def model_state_to_fill(model: nn.Module) -> dict[str, Any]:
    """Return the tree to load a model's state into; `take_model_state` takes the result of the load.

    The model's own tensors are filled in place. A model that loads a state in a way of its own
    (`loads_itself`) gets copies of its other tensors, and its entries may have other shapes and names in the
    checkpoint. Of any other model, only buffers may have another shape.
    """
    optional = _optional_names(model)
    state = {name: value for name, value in model_state(model).items() if name not in optional}
    own_tensors = _own_tensors(model)
    if not loads_itself(model, state):
        open_names = optional | {plain_name(name) for name, _ in _named_buffers(model)}
        layouts = {name: own_tensors[name] for name in optional if name in own_tensors}
        return AsStored(state, open_names=open_names, layouts=layouts) if open_names else state
    filled = {
        name: value if _is_own(value, own_tensors.get(name)) else _copied(value)
        for name, value in state.items()
    }
    return AsStored(filled)


def take_model_state(model: nn.Module, state: Mapping[str, Any], *, reshaped: Collection[str] = ()) -> None:
    """Load a tree that was loaded into `model_state_to_fill`; the model's own tensors were filled in place.

    Args:
        model: The model.
        state: The loaded tree; entries that it lacks stay as they are.
        reshaped: The names of buffers that have another shape in a new model than in the checkpoint.

    Raises:
        ResumeError: If the model's own `load_state_dict` fails or leaves an entry out, or if a buffer has
            another shape than in the checkpoint.
    """
    own_state = model.state_dict()
    given = OrderedDict(own_state)
    given._metadata = getattr(own_state, "_metadata", None)  # type: ignore[attr-defined]
    names = {plain_name(name): name for name in own_state}
    if loads_itself(model, {plain_name(name): value for name, value in own_state.items()}):
        given.update({names.get(name, name): value for name, value in state.items()})
        _call_load_state_dict(model, given)
        return
    extra = {
        name: state[plain]
        for plain, name in names.items()
        if plain in state and not isinstance(own_state[name], torch.Tensor)
    }
    if extra:
        model.load_state_dict(extra, strict=False)
    _take_optional(model, state)
    _replace_buffers(model, state, reshaped)


def _optional_names(model: nn.Module) -> set[str]:
    """Return the names that a checkpoint of the model may lack or have, as its method states them."""
    method = getattr(model, "optional_names", None)
    return set(method()) if callable(method) else set()


@torch.no_grad()
def _take_optional(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy the optional tensors that a checkpoint has, and say which buffers it lacks."""
    optional, own_tensors = _optional_names(model), _own_tensors(model)
    for name in optional & state.keys() & own_tensors.keys():
        if own_tensors[name].shape == state[name].shape:
            own_tensors[name].copy_(state[name])
    buffers = {plain_name(name) for name, buffer in _named_buffers(model) if buffer is not None}
    if lacking := sorted(optional & buffers - state.keys()):
        warnings.warn(
            f"the checkpoint lacks the buffers {_listed(lacking)} of the base model, which keep their values",
            stacklevel=2,
        )


def loads_itself(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether loading the model takes more than a copy of each entry to the tensor of its name.

    It does where `state_dict` returns copies, converted or renamed tensors, and where `load_state_dict`,
    `_load_from_state_dict` or a load hook is the user's or a library's own.

    Args:
        model: The model.
        state: The return value of `model_state`.
    """
    own_tensors = _own_tensors(model)
    if any(has_tensors(value) and not _is_own(value, own_tensors.get(name)) for name, value in state.items()):
        return True
    loads: list[Any] = [model.load_state_dict]
    for module in model.modules():
        loads.append(module._load_from_state_dict)
        loads += module._load_state_dict_pre_hooks.values()
        loads += module._load_state_dict_post_hooks.values()
    return any(not _copies_by_name(function) for function in loads)


def buffer_shapes(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the buffers by plain name; None for a buffer that is None, or has no shape yet."""
    return {
        plain_name(name): None if buffer is None or nn.parameter.is_lazy(buffer) else tuple(buffer.shape)
        for name, buffer in _named_buffers(model)
    }


def _call_load_state_dict(model: nn.Module, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(model.load_state_dict).parameters.values()
    is_lenient = any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in parameters)
    try:
        # Names that the model leaves out of its state are missing on purpose.
        result = model.load_state_dict(given, strict=False) if is_lenient else model.load_state_dict(given)
    except Exception as error:
        raise ResumeError(
            f"`load_state_dict` of `{type(model).__name__}` failed on the checkpoint's state: {error}; it is "
            "given what the model's `state_dict` returned when the checkpoint was saved"
        ) from error
    own_tensors = {_memory(tensor) for tensor in _own_tensors(model).values()}
    unexpected = [
        name
        for name in getattr(result, "unexpected_keys", ())
        if not isinstance(given[name], torch.Tensor) or _memory(given[name]) not in own_tensors
    ]
    if unexpected:
        raise ResumeError(
            f"`load_state_dict` of `{type(model).__name__}` takes no {_listed(unexpected)}, which the "
            "checkpoint has; give the model a `load_state_dict`, or a hook, that takes what its `state_dict` "
            "returns"
        )


def _replace_buffers(model: nn.Module, state: Mapping[str, Any], reshaped: Collection[str]) -> None:
    """Set the buffers that have another shape or dtype in the checkpoint, or are None here."""
    for name, buffer in list(_named_buffers(model)):
        value = state.get(plain_name(name))
        if value is None:
            continue
        if buffer is not None and value.shape == buffer.shape and value.dtype == buffer.dtype:
            continue
        if plain_name(name) not in reshaped:
            found = "None" if buffer is None else f"{list(buffer.shape)} of {buffer.dtype}"
            raise ResumeError(
                f"the buffer `{plain_name(name)}` has the shape {list(value.shape)} of {value.dtype} in the "
                f"checkpoint, and is {found} in the model; make the model as it was made for the checkpoint, "
                f"or leave the buffer as it is: `load_ignore_keys=['model/{plain_name(name)}']`"
            )
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = value


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the buffers that torch saves, also those that are None."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {plain_name(name): tensor for named in (parameters, buffers) for name, tensor in named}


def _is_own(value: Any, own_tensor: torch.Tensor | None) -> bool:
    """Return whether an entry of the state is the parameter or buffer of its name, or has no tensor."""
    if own_tensor is None or not isinstance(value, torch.Tensor):
        return not has_tensors(value)
    return value is own_tensor or _memory(value) == _memory(own_tensor)


@torch.no_grad()
def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_part(tensor)
    place = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
    return *place, local.shape, tensor.shape, tensor.dtype


def _copied(value: Any) -> Any:
    """Return an entry of the state with copies of its tensors, to load into."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return AsStored({key: _copied(child) for key, child in value.items()})
    return [_copied(child) for child in value] if isinstance(value, list) else value


def _copies_by_name(function: Any) -> bool:
    """Return whether a method or hook that loads a state is torch's, which copies tensors by name."""
    while isinstance(function, functools.partial) or hasattr(function, "hook"):
        function = function.func if isinstance(function, functools.partial) else function.hook
    return str(getattr(function, "__module__", "")).startswith(_COPYING)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
