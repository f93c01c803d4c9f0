"""Replacement of modules of a model by class."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import nn

from hocket.algos.errors import AlgorithmConfigError, NoEffectWarning, SurgeryError
from hocket.algos.surgery.checks import (
    check_forward,
    check_operable,
    default_with_values,
    describe,
    device_of,
    devices_of,
    signature_of,
)
from hocket.algos.surgery.optimizers import Optimizers, named_parameters, repair_optimizers
from hocket.algos.surgery.report import Replacement, SurgeryReport

Policy = Callable[[Any, int], nn.Module | None]
"""`policy(module, index)` returns a replacement, or `module` changed in place, or None to leave it."""
Policies = Mapping[type[nn.Module], Policy]
IfNone = Literal["warn", "error", "ignore"]


def replace_module_classes(
    model: nn.Module,
    policies: Policies,
    optimizers: Optimizers | None = None,
    recurse_on_replacements: bool = False,
    indices: MutableMapping[type[nn.Module], int] | None = None,
    *,
    if_none: IfNone = "warn",
    title: str = "surgery",
) -> SurgeryReport:
    """Replace the modules inside `model` that are instances of given classes.

    A policy is called once for each module, also for one in several places, and returns its replacement; the
    first class in `policies` that fits decides. A new module gets the old one's training mode, and its device
    if the new parameters are elsewhere. Submodules of a replaced module are visited only if they are in use
    elsewhere in the model: those that the new module keeps are not offered to a policy again.

    Args:
        model: Changed in place; itself never replaced.
        policies: For each class, the function that makes the replacement.
        optimizers: Built over the model's parameters; repaired by name, with their state.
        recurse_on_replacements: Visit the submodules of replacements, too.
        indices: For each class, the index of the next module; advanced in place. Starts at 0 if None.
        if_none: Action if nothing was replaced: warn, raise, or neither.
        title: The name of the method, for messages.

    Returns:
        The report: the modules replaced and their number, the modules left, and the optimizers' changes.

    Raises:
        SurgeryError: A policy returned no module, one that cannot be called like the old one, or one whose
            device cannot be determined; the model is wrapped, sharded or without values; nothing was replaced
            and `if_none` is `"error"`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> len(replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()}))
        1
    """
    if not policies:
        raise AlgorithmConfigError(f"{title}: `policies` is empty, expected at least one class with a policy")
    check_operable(model, title)
    report, old_parameters = SurgeryReport(title), named_parameters(model)
    counts: MutableMapping[type[nn.Module], int] = {} if indices is None else indices
    visited_ids: set[int] = {id(model)}
    todo = list(model.children())
    names = _names(model)
    while todo:
        module = todo.pop(0)
        if id(module) in visited_ids:
            continue
        visited_ids.add(id(module))
        module_class = next((one for one in policies if isinstance(module, one)), None)
        new = (
            None
            if module_class is None
            else _ask(model, policies[module_class], module_class, module, counts, names, report)
        )
        if new is None:
            todo = [*module.children(), *todo]
            continue
        if new is not module:
            _put(model, names[id(module)], module, new)
        report.replacements.append(Replacement(tuple(names[id(module)]), module, new))
        inside = list(new.modules())[1:]
        if recurse_on_replacements:
            names |= _names(model)
            todo = [*new.children(), *todo]
        elif new is module:
            todo = [*module.children(), *todo]
        else:
            visited_ids |= {id(new), *map(id, inside)}
    report.optimizer_changes = repair_optimizers(optimizers, old_parameters, named_parameters(model))
    if not report:
        _tell_no_effect(report, model, policies, if_none)
    return report


def count_module_instances(
    module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]
) -> int:
    """Count the modules inside `module`, itself left out, that are instances of a class; shared ones once."""
    return sum(isinstance(one, module_class) for one in list(module.modules())[1:])


def parts_of(model: nn.Module, *classes: type[nn.Module]) -> set[int]:
    """Return the ids of the modules inside those of some classes.

    A policy leaves these modules, which an earlier surgery put or kept there, so that none is treated twice.
    """
    treated = [module for module in model.modules() if isinstance(module, classes)]
    return {id(part) for module in treated for part in list(module.modules())[1:]}


def _names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def _ask(
    model: nn.Module,
    policy: Policy,
    module_class: type[nn.Module],
    module: nn.Module,
    counts: MutableMapping[type[nn.Module], int],
    names: Mapping[int, list[str]],
    report: SurgeryReport,
) -> nn.Module | None:
    """Call the policy for a module, and check that its result can take the module's place."""
    name = names[id(module)][0]
    old_signature = signature_of(module)
    was_training, device = module.training, _device_near(model, name)
    index = counts.get(module_class, 0)
    with default_with_values(device):
        new: Any = policy(module, index)
    counts[module_class] = index + 1
    if new is None:
        report.skipped[name] = ""
        return None
    where = f"{report.title}: the policy for `{name}` ({type(module).__name__})"
    if not isinstance(new, nn.Module):
        raise SurgeryError(
            f"{where} returned a {type(new).__name__}, expected a torch.nn.Module, or None to leave it"
        )
    check_forward(old_signature, new, where)
    if new is not module:
        new.train(was_training)
        _to_device(new, device, devices_of(model), where)
    return new


def _device_near(model: nn.Module, name: str) -> torch.device | None:
    """Return the device of a module, or of the nearest module around it that has one."""
    while True:
        device = device_of(model.get_submodule(name))
        if device is not None or not name:
            return device
        name = name.rpartition(".")[0]


def _to_device(
    new: nn.Module, device: torch.device | None, model_devices: set[torch.device], where: str
) -> None:
    tensors = [*new.parameters(), *new.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SurgeryError(
            f"{where} returned a {type(new).__name__} on the meta device, which has no values. Make it on a "
            "real device"
        )
    new_devices = devices_of(new)
    if device is None and len(new_devices) > 1:
        raise SurgeryError(
            f"{where} returned a {type(new).__name__} whose parameters are on several devices, and the old "
            "module has no device to move them to. Make it on one device"
        )
    if device is None and model_devices and not new_devices <= model_devices:
        raise SurgeryError(
            f"{where} returned a {type(new).__name__} on {', '.join(map(str, new_devices))}, where nothing "
            f"of the model is. The modules around it are on {', '.join(sorted(map(str, model_devices)))}, "
            "and the old module has no device of its own that would tell which one it belongs to. Make it on "
            "that device"
        )
    if device is not None and any(tensor.device != device for tensor in tensors):
        new.to(device)


def _put(model: nn.Module, names: list[str], old: nn.Module, new: nn.Module) -> None:
    for name in names:
        parent_name, _, last = name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
        except AttributeError:
            continue  # the parent itself was replaced, and this place with it
        if getattr(parent, last, None) is old:
            setattr(parent, last, new)


def _tell_no_effect(report: SurgeryReport, model: nn.Module, policies: Policies, if_none: IfNone) -> None:
    if if_none == "ignore":
        return
    if report.skipped:
        examples = ", ".join(f"`{name}`" for name in list(report.skipped)[:3])
        more = ", …" if len(report.skipped) > 3 else ""
        reason = (
            f"all {len(report.skipped)} modules of the classes that it treats ({examples}{more}) are too "
            "small or already treated, or a policy of your own lacks its `return`"
        )
    else:
        reason = f"the model has no module of its classes ({describe(list(policies))})"
    if isinstance(model, tuple(policies)):
        reason += f". The model itself is a {type(model).__name__}; wrap it in a module to have it replaced"
    message = f"{report.title} replaced nothing in {type(model).__name__}: {reason}"
    if if_none == "error":
        raise SurgeryError(message)
    warnings.warn(message, NoEffectWarning, stacklevel=4)
