"""Repair of optimizers after surgery, so that they hold the parameters that the model has now."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.algos.surgery.report import OptimizerChange

Optimizers = Optimizer | Sequence[Optimizer]


def as_optimizers(optimizers: Optimizers | None) -> list[Optimizer]:
    """Return a list of optimizers; empty for None."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under its first name."""
    return dict(model.named_parameters())


def repair_optimizers(
    optimizers: Optimizers | None, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> list[OptimizerChange]:
    """Point optimizers at a model's present parameters, by name.

    Parameters that the model still has keep their place and state, also under another name. A new parameter
    with the name of one that is gone takes its place in the group, and its state where the shape is the same.
    Other new parameters go to the group of the parameters they replace: those whose names share the longest
    prefix, and the same last part (`weight`, `bias`) where groups differ in that. Parameters that are gone
    are removed with their state. If the replaced parameters were in no optimizer (frozen, say), the new ones
    are not added; nor is a frozen parameter in place of one that was trained.

    Args:
        optimizers: One or several; None repairs nothing.
        before: The model's parameters by name, before the surgery.
        after: The parameters by name, after the surgery.

    Returns:
        The changes.
    """
    new_ids = {id(parameter) for parameter in after.values()}
    gone = {name: parameter for name, parameter in before.items() if id(parameter) not in new_ids}
    old_ids = {id(parameter) for parameter in before.values()}
    new = {
        name: parameter
        for name, parameter in after.items()
        if id(parameter) not in old_ids and not _is_frozen_now(before.get(name), parameter)
    }
    changes: list[OptimizerChange] = []
    placed: set[str] = set()
    for index, optimizer in enumerate(as_optimizers(optimizers)):
        changes += _repair(
            optimizer,
            f"{type(optimizer).__name__} {index}",
            before=before,
            after=after,
            gone=gone,
            new=new,
            placed=placed,
        )
    if optimizers is not None:
        changes += [OptimizerChange("", "not optimized", name, None) for name in new if name not in placed]
    return changes


def _repair(
    optimizer: Optimizer,
    title: str,
    *,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    gone: Mapping[str, nn.Parameter],
    new: Mapping[str, nn.Parameter],
    placed: set[str],
) -> list[OptimizerChange]:
    changes: list[OptimizerChange] = []
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    renamed = {
        id(parameter): name for name, parameter in gone.items() if name in new and id(parameter) in group_of
    }
    # A parameter that is in no optimizer gives no group to the new parameters that replace it.
    homes = {name: group_of[id(parameter)] for name, parameter in before.items() if id(parameter) in group_of}
    strays = {name: group for name in new if name not in placed and name not in gone
              for group in [_home(name, before, homes)] if group is not None}  # fmt: skip
    names = {id(parameter): name for name, parameter in gone.items()}
    for index, group in enumerate(optimizer.param_groups):
        params: list[torch.Tensor] = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                params.append(parameter)
                continue
            state = optimizer.state.pop(parameter, None)
            if id(parameter) in renamed and name not in placed:
                params.append(new[name])
                placed.add(name)
                fits = state is not None and new[name].shape == parameter.shape
                if fits and state is not None:
                    optimizer.state[new[name]] = state
                changes.append(OptimizerChange(title, "renamed" if fits else "added", name, index, fits))
            else:
                changes.append(OptimizerChange(title, "removed", name, index, bool(state)))
        for name in (name for name, home in strays.items() if home == index):
            params.append(new[name])
            placed.add(name)
            changes.append(OptimizerChange(title, "added", name, index))
        if "param_names" in group:
            group["param_names"] = _names_for(group, params, before, after)
        group["params"] = params
    return changes


def _names_for(
    group: Mapping[str, Any],
    params: Sequence[torch.Tensor],
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> list[str]:
    """Return the names of a group's new parameters, for an optimizer that was built of named parameters.

    The optimizer may name parameters without the first part of their names in the model, as those of a
    submodule. Parameters that keep their names in the model keep those that the optimizer has.
    """
    given = dict(zip(map(id, group["params"]), group["param_names"], strict=False))
    old = {id(parameter): name for name, parameter in before.items() if id(parameter) in given}
    new = {id(parameter): name for name, parameter in after.items()}
    prefix = next(
        (name.removesuffix(given[one]) for one, name in old.items() if name.endswith(given[one])), ""
    )
    return [
        given[id(one)]
        if id(one) in given and old.get(id(one)) == new.get(id(one))
        else new.get(id(one), "").removeprefix(prefix)
        for one in params
    ]


def _is_frozen_now(old: nn.Parameter | None, new: nn.Parameter) -> bool:
    """Return whether a frozen parameter takes the place of a trained one, or of none."""
    return not new.requires_grad and (old is None or old.requires_grad)


def _home(name: str, before: Mapping[str, Any], homes: Mapping[str, int]) -> int | None:
    """Choose the group for a new parameter: that of the old parameter with the nearest name."""
    parts = name.split(".")
    best, nearest = 0, list[str]()
    for other in before:
        other_parts = other.split(".")
        shared = next((i for i, pair in enumerate(zip(parts, other_parts, strict=False))
                       if pair[0] != pair[1]), min(len(parts), len(other_parts)))  # fmt: skip
        if shared > best:
            best, nearest = shared, []
        if shared == best:
            nearest.append(other)
    candidates = [other for other in nearest if other.split(".")[-1] == parts[-1]] or nearest
    groups = [homes.get(other) for other in candidates]
    return groups[0] if groups else None


def drop_frozen(optimizers: Optimizers | None, frozen: Mapping[str, nn.Parameter]) -> list[OptimizerChange]:
    """Remove parameters that are no longer trained from optimizers, with their state.

    Args:
        optimizers: One or several; None changes nothing.
        frozen: The parameters by name.

    Returns:
        The removals.
    """
    names = {id(parameter): name for name, parameter in frozen.items()}
    changes: list[OptimizerChange] = []
    for index, optimizer in enumerate(as_optimizers(optimizers)):
        title = f"{type(optimizer).__name__} {index}"
        for number, group in enumerate(optimizer.param_groups):
            for parameter in (one for one in group["params"] if id(one) in names):
                state = optimizer.state.pop(parameter, None)
                changes.append(OptimizerChange(title, "removed", names[id(parameter)], number, bool(state)))
            _remove(group, names)
    return changes


def update_params_in_optimizer(
    old_params: Iterable[nn.Parameter], new_params: Iterable[nn.Parameter], optimizers: Optimizers
) -> None:
    """Put new parameters into an optimizer in place of old ones, as Composer's function of that name does.

    Parameters in both stay. Old ones are removed, with their state; new ones are appended to the group that
    the old ones were in, named `added_0`, `added_1`, ... in an optimizer with names.
    `replace_module_classes(..., optimizers=...)` does more: it goes by name.

    Args:
        old_params: The parameters of a module before.
        new_params: The parameters after.
        optimizers: One or several; the old parameters may be in one of them.

    Raises:
        ValueError: The old parameters are in several groups, or in none, and there are new ones to place.
    """
    old, new = list(old_params), list(new_params)
    new_ids, old_ids = {id(parameter) for parameter in new}, {id(parameter) for parameter in old}
    added = [parameter for parameter in new if id(parameter) not in old_ids]
    removed = {id(parameter) for parameter in old if id(parameter) not in new_ids}
    if not added and not removed:
        return
    groups = [group for optimizer in as_optimizers(optimizers) for group in optimizer.param_groups]
    old_groups = [group for group in groups if any(id(parameter) in removed for parameter in group["params"])]
    if added and len(groups) == 1:
        old_groups = groups
    if added and len(old_groups) != 1:
        raise ValueError(
            f"{len(added)} new parameters replace parameters that are in {len(old_groups)} parameter groups, "
            "expected one. Add them to the optimizer yourself, or use `replace_module_classes(..., "
            "optimizers=...)`, which goes by name"
        )
    for optimizer in as_optimizers(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in removed:
                    optimizer.state.pop(parameter, None)
            _remove(group, removed)
    if added:
        old_groups[0]["params"] += added
        if "param_names" in old_groups[0]:
            old_groups[0]["param_names"] += [f"added_{number}" for number in range(len(added))]


def _remove(group: dict[str, Any], ids: Collection[int]) -> None:
    """Remove parameters from a group, and their names where it has names."""
    is_kept = [id(parameter) not in ids for parameter in group["params"]]
    for key in ("params", "param_names"):
        if key in group:
            group[key] = list(itertools.compress(group[key], is_kept))
