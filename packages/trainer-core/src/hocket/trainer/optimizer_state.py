"""State trees of models and optimizers, keyed by the parameter names of the unwrapped model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.trainer.errors import ResumeError, TrainerConfigError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class SlotsLike:
    """A placeholder in a state tree for the state of an optimizer that has not stepped yet, or for averages.

    A checkpoint store makes the slots from the checkpoint, with the layout of their parameters: for each
    parameter that the checkpoint has, a dict of slots, or a tensor where the checkpoint has one.
    """

    slots_like: Mapping[str, torch.Tensor]
    """The parameters by name."""

    def __deepcopy__(self, memo: Mapping[int, Any]) -> SlotsLike:
        return self  # nothing is loaded into the parameters


def plain_name(name: str) -> str:
    """Return a parameter or buffer name without the parts added by compiling and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


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


def take_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the entries of a tree that are not tensors into the model; tensors were filled in place."""
    extra = {
        name: state[plain_name(name)]
        for name, value in model.state_dict().items()
        if not isinstance(value, torch.Tensor)
    }
    if extra:
        model.load_state_dict(extra, strict=False)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state by parameter name: `{"kind", "state": {name: {slot: value}}, "param_groups"}`.

    The tensors are the optimizer's own, not copies. Before its first step, `state` is a `SlotsLike`.

    Raises:
        TrainerConfigError: If the optimizer holds a parameter that the model does not have.
    """
    name_of = {parameter: name for name, parameter in _named_parameters(model)}
    groups: list[dict[str, Any]] = []
    parameters: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        names = []
        for parameter in group["params"]:
            if parameter not in name_of:
                raise TrainerConfigError(
                    f"`{type(optimizer).__name__}` holds a parameter of shape {list(parameter.shape)} "
                    "that the model does not have; make it from the parameters of the model that is trained"
                )
            names.append(name_of[parameter])
            parameters[name_of[parameter]] = parameter
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    kind = type(optimizer).__name__
    if not optimizer.state:
        return {"kind": kind, "state": SlotsLike(parameters), "param_groups": groups}
    state = {
        name: dict(optimizer.state[parameter])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    return {"kind": kind, "state": state, "param_groups": groups}


def take_optimizer_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Load a state into the optimizer. Tensors are not copied.

    The settings of the parameter groups, such as learning rates, are set to those of the checkpoint.

    Returns:
        A sentence for the user if settings that the optimizer was made with are replaced.

    Raises:
        ResumeError: If the state is of another kind of optimizer, or if groups or their parameters differ.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise ResumeError(
            f"the checkpoint has the state of `{state['kind']}`, and this run's optimizer is `{kind}`; make "
            "the optimizer that the checkpoint was trained with, or start with a new one: "
            "`load_path` with `load_ignore_keys=['optimizers']`"
        )
    groups = state["param_groups"]
    current_groups = [group["params"] for group in optimizer_state(optimizer, model)["param_groups"]]
    saved_groups = [list(group["params"]) for group in groups]
    if current_groups != saved_groups:
        raise ResumeError(
            f"the parameter groups of `{type(optimizer).__name__}` differ from the checkpoint's: "
            f"{_difference(saved_groups, current_groups)}; make the optimizer as it was made for the "
            "checkpoint"
        )
    parameter_of = dict(_named_parameters(model))
    replaced: dict[str, str] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        replaced |= _replaced_settings(group, saved)
        group.update({key: value for key, value in saved.items() if key != "params"})
        # A step that is computed on the device needs its counter there.
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for name in saved["params"]:
            if name in state["state"]:
                parameter = parameter_of[name]
                slots = dict(state["state"][name])
                step = slots.get("step")
                if isinstance(step, torch.Tensor) and step.dim() == 0 and not hasattr(step, "to_local"):
                    slots["step"] = step.to(parameter.device if counts_on_device else "cpu")
                optimizer.state[parameter] = slots
    if not replaced:
        return []
    changes = ", ".join(f"`{name}` {change}" for name, change in replaced.items())
    return [f"`{kind}` has the settings of the checkpoint: {changes}"]


def _replaced_settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Describe the numbers of a group that differ from the saved ones, by name."""
    given, kept = _numbers(group), _numbers(saved)
    return {
        name: f"{kept[name]} in place of {value}"
        for name, value in given.items()
        if name in kept and value != kept[name]
    }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among a group's settings; the learning rate is that before the schedules."""
    settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
    numbers = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if name not in ("params", "param_names", "initial_lr")
    }
    return {name: value for name, value in numbers.items() if type(value) in (int, float, tuple)}


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def _difference(saved_groups: list[list[str]], current_groups: list[list[str]]) -> str:
    if len(saved_groups) != len(current_groups):
        return f"{len(saved_groups)} groups in the checkpoint, {len(current_groups)} here"
    for index, (saved, current) in enumerate(zip(saved_groups, current_groups, strict=True)):
        if saved != current:
            missing = [name for name in saved if name not in current]
            added = [name for name in current if name not in saved]
            if missing or added:
                return f"group {index} lacks {missing[:5]} of the checkpoint's and has {added[:5]} of its own"
            return f"group {index} has the same parameters in another order"
    return "nothing"
