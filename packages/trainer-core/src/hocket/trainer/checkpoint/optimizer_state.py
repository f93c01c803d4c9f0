"""State trees of optimizers, keyed by the parameter names of the unwrapped model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.trainer.checkpoint.model_state import AsStored
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.protocols import Pipelined

_HOOKS = tuple(
    f"_optimizer_{direction}_{when}_hooks"
    for direction in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


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


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state by parameter name: `{"kind", "state": {name: {slot: value}}, "param_groups"}`.

    The tensors are the optimizer's own, not copies. Before its first step, `state` is a `SlotsLike`. What an
    optimizer keeps beyond that is in a further entry `own`: entries of its state that belong to no parameter
    in `own["state"]`, and the further entries of a `state_dict` of its own.

    Raises:
        TrainerConfigError: If the optimizer holds a parameter that the model does not have.
    """
    groups, parameters = _named_groups(optimizer, model)
    if has_own_state_dict(optimizer):
        slots, groups, own = _by_name(optimizer.state_dict(), list(parameters), groups)
    else:
        slots = {
            name: dict(optimizer.state[parameter])
            for name, parameter in parameters.items()
            if parameter in optimizer.state
        }
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        own = {"state": others} if others else {}
    state: Any = slots if slots or optimizer.state else SlotsLike(parameters)
    tree = {"kind": type(optimizer).__name__, "state": state, "param_groups": groups}
    return {**tree, "own": own} if own or has_own_state_dict(optimizer) else tree


def optimizer_state_to_fill(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the tree to load an optimizer's state into; `take_optimizer_state` takes the result of the load.

    It has room for the slots of all parameters of the model, since a checkpoint may have parameter groups
    that were added during training.
    """
    tree = optimizer_state(optimizer, model)
    parameters = dict(_named_parameters(model))
    slots = tree["state"]
    is_flat = not has_own_state_dict(optimizer) and isinstance(slots, Mapping)
    if is_flat and slots and not any(map(_is_nested, slots.values())):
        tree["state"] = AsStored(slots, layouts=parameters)
    else:
        tree["state"] = SlotsLike(parameters)
    tree.pop("own", None)
    if not type(optimizer).__module__.startswith(("torch.optim.", "hocket.")) or has_own_state_dict(
        optimizer
    ):
        _, own_parameters = _named_groups(optimizer, model)
        by_index = dict(enumerate(own_parameters.values()))
        tree["own"] = AsStored({}, layouts={**parameters, **by_index})
    return tree


def with_all_names(tree: dict[str, Any], parallelism: Any, index: int) -> dict[str, Any]:
    """Return an optimizer's state whose groups name the parameters of all stages of a pipeline.

    Args:
        tree: The result of `optimizer_state` or `optimizer_state_to_fill`.
        parallelism: The layout of the run; one without stages returns `tree`.
        index: The index of the optimizer.

    Raises:
        TrainerConfigError: The optimizer has a state beyond that of single parameters, or other groups than
            at the start.
    """
    if not isinstance(parallelism, Pipelined):
        return tree
    tree, kind = dict(tree), tree["kind"]
    if tree.get("own") and not isinstance(tree["own"], AsStored):
        raise TrainerConfigError(
            f"`{kind}` has a state beyond that of single parameters, or a `state_dict` of its own, which is "
            "not saved with `pp`: each stage saves the state of its parameters. Use an optimizer of "
            "`torch.optim`, or leave `pp` out of `parallelism_config`"
        )
    tree.pop("own", None)
    groups, names = tree["param_groups"], parallelism.group_names[index]
    elsewhere = set(parallelism.elsewhere)
    own = [[plain_name(name) for name in group if name not in elsewhere] for group in names]
    if own != [group["params"] for group in groups]:
        raise TrainerConfigError(
            f"`{kind}` has {len(groups)} groups of parameters that are not those of the start of training, "
            f"{len(names)} groups, and other stages of `pp` do not know them. Make all groups before the "
            "trainer, or leave `pp` out of `parallelism_config`"
        )
    tree["param_groups"] = [
        {**group, "params": list(map(plain_name, all_names))}
        for group, all_names in zip(groups, names, strict=True)
    ]
    if isinstance(slots := tree["state"], AsStored):  # not those of other stages
        tree["state"] = AsStored(slots, open_names=set(slots.layouts), layouts=slots.layouts)
    return tree


def with_own_names(state: Mapping[str, Any], parallelism: Any, index: int) -> Mapping[str, Any]:
    """Return a checkpoint's state of an optimizer whose groups name the parameters of this rank's stage.

    Args:
        state: The state, whose groups name the parameters of all stages.
        parallelism: The layout of the run; one without stages returns `state`.
        index: The index of the optimizer.

    Raises:
        ResumeError: The groups differ from those of this run.
    """
    if not isinstance(parallelism, Pipelined):
        return state
    names = parallelism.group_names[index]
    saved_groups = [list(group["params"]) for group in state["param_groups"]]
    current_groups = [list(map(plain_name, group)) for group in names]
    if saved_groups != current_groups:
        raise _groups_differ(state["kind"], saved_groups, current_groups)
    elsewhere = set(parallelism.elsewhere)
    own = {plain_name(name) for group in names for name in group if name not in elsewhere}
    groups = [
        {**group, "params": [name for name in group["params"] if name in own]}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def without_slots(tree: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's state without that of some parameters."""
    slots = tree["state"]
    if not isinstance(slots, Mapping):
        return dict(tree)
    return {**tree, "state": {name: one for name, one in slots.items() if name not in names}}


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the optimizer saves or loads its state in a way of its own, or through hooks."""
    kind = type(optimizer)
    is_changed = (
        kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict
    )
    is_on_instance = not {"state_dict", "load_state_dict"}.isdisjoint(vars(optimizer))
    return is_changed or is_on_instance or any(vars(optimizer).get(name) for name in _HOOKS)


def take_optimizer_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Load a state into the optimizer. Tensors are not copied.

    The settings of the parameter groups, such as learning rates, are set to those of the checkpoint. Groups
    that were added during training are added.

    Returns:
        Sentences for the user about settings that the optimizer was made with and that are replaced, about
        groups that are added, and about a state that the checkpoint lacks.

    Raises:
        ResumeError: If the state is of another kind of optimizer, if groups or their parameters differ, or
            if the optimizer's own `load_state_dict` fails.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise ResumeError(
            f"the checkpoint has the state of `{state['kind']}`, and this run's optimizer is `{kind}`; make "
            "the optimizer that the checkpoint was trained with, or start with a new one: "
            "`load_path` with `load_ignore_keys=['optimizers']`"
        )
    groups = state["param_groups"]
    notices = _add_groups(optimizer, model, groups)
    current_groups = [group["params"] for group in _named_groups(optimizer, model)[0]]
    saved_groups = [list(group["params"]) for group in groups]
    if current_groups != saved_groups:
        raise _groups_differ(kind, saved_groups, current_groups)
    replaced: dict[str, str] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        replaced |= _replaced_settings(group, saved)
    own = state.get("own")
    if has_own_state_dict(optimizer) and isinstance(own, Mapping) and not isinstance(own, AsStored):
        _load_own(optimizer, model, state)
    else:
        if has_own_state_dict(optimizer):
            notices.append(
                f"the checkpoint lacks what the `state_dict` of `{kind}` returns; that part of its state "
                "starts anew"
            )
        _load_slots(optimizer, model, state)
    if replaced:
        changes = ", ".join(f"`{name}` {change}" for name, change in replaced.items())
        notices.append(f"`{kind}` has the settings of the checkpoint: {changes}")
    return notices


def _load_slots(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Set the groups' settings and the state of an optimizer whose `state_dict` is torch's."""
    parameter_of = dict(_named_parameters(model))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
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
    others = (state.get("own") or {}).get("state", {})
    device = next((parameter.device for parameter in parameter_of.values()), None)
    for key, value in others.items():
        # A counter stays on the host, where a step reads it without waiting for the device.
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1
        optimizer.state[key] = value.to(device) if is_large else value


def _load_own(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the checkpoint's state to the optimizer's `load_state_dict`, in the form of its `state_dict`."""
    own = dict(state["own"])
    if "param_groups" not in own:
        _, parameters = _named_groups(optimizer, model)
        index_of = {name: index for index, name in enumerate(parameters)}
        slots = {index_of[name]: slots for name, slots in state["state"].items() if name in index_of}
        own["state"] = slots | own.get("state", {})
        own["param_groups"] = [
            {**group, **saved, "params": [index_of[name] for name in saved["params"]]}
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
        ]
    try:
        optimizer.load_state_dict(own)
    except Exception as error:
        raise ResumeError(
            f"`load_state_dict` of `{type(optimizer).__name__}` failed on the checkpoint's state: "
            f"{type(error).__name__}: {error}; it is given what `state_dict` returned at the save"
        ) from error


def _by_name(
    packed: Mapping[str, Any], names: list[str], groups: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return the slots and groups of a `state_dict` by parameter name, and its further entries.

    Args:
        packed: A `state_dict`, which counts the parameters if it has torch's form.
        names: The parameters' names in the order of the groups.
        groups: The groups with names, for a `state_dict` without groups in torch's form.
    """
    own = dict(packed)
    saved_groups = own.get("param_groups")
    saved_groups = saved_groups if isinstance(saved_groups, list) else []
    numbers = [number for group in saved_groups for number in group.get("params", ())]
    if numbers != list(range(len(names))):
        return {}, groups, own
    del own["param_groups"]
    state = dict(own.pop("state", {}))
    slots = {names[key]: state.pop(key) for key in list(state) if type(key) is int and 0 <= key < len(names)}
    if state:
        own["state"] = state
    named = [
        {**_settings(group), "params": [names[index] for index in group["params"]]} for group in saved_groups
    ]
    return slots, named, own


def _add_groups(optimizer: Optimizer, model: nn.Module, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the groups that only the checkpoint has, if the other groups are those of the checkpoint.

    Returns:
        A sentence for the user if groups are added.
    """
    groups, own_parameters = _named_groups(optimizer, model)
    parameter_of = dict(_named_parameters(model))
    added = saved[len(groups) :]
    is_alike = [group["params"] for group in groups] == [list(one["params"]) for one in saved[: len(groups)]]
    names = [name for group in added for name in group["params"]]
    if (
        not names
        or not is_alike
        or not own_parameters.keys().isdisjoint(names)
        or set(names) - set(parameter_of)
    ):
        return []
    for group in added:
        parameters = [parameter_of[name].requires_grad_() for name in group["params"]]
        optimizer.add_param_group({**group, "params": parameters})
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (" and more" if len(names) > 3 else "")
    count = f"{len(added)} further parameter group{'s' if len(added) > 1 else ''}"
    return [f"`{type(optimizer).__name__}` gets {count} of the checkpoint, with {shown}, which are trained"]


def _named_groups(
    optimizer: Optimizer, model: nn.Module
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the parameter groups with names in place of parameters, and the parameters by name, in order.

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
        groups.append({**_settings(group), "params": names})
    return groups, parameters


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's entries without its parameters, and without settings that no training changes."""
    fixed = (torch.dtype, torch.device)
    return {
        key: value
        for key, value in group.items()
        if key != "params" and not isinstance(value, fixed) and not callable(value)
    }


def _is_nested(slots: Any) -> bool:
    """Return whether the slots of a parameter hold tensors below their first level."""
    return not isinstance(slots, Mapping) or any(isinstance(one, Mapping | list) for one in slots.values())


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


def _groups_differ(kind: str, saved_groups: list[list[str]], current_groups: list[list[str]]) -> ResumeError:
    return ResumeError(
        f"the parameter groups of `{kind}` differ from the checkpoint's: "
        f"{_difference(saved_groups, current_groups)}; make the optimizer as it was made for the checkpoint"
    )


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
