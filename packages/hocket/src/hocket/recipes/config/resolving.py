"""Validation of a configuration's sections and names, and its conversion into one form."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.recipes.config.declared_types import as_declared
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.setup.fields import grouped_names
from hocket.trainer.setup.settings import TrainerSettings

_ARGUMENTS = inspect.signature(TrainerSettings).parameters

# Arguments of `Trainer` that are objects, or that other sections make.
_ELSEWHERE = {
    "model", "loss_fn", "train_step", "optimizers", "schedulers", "train_dataloader", "eval_dataloader",
    "algorithms", "algorithm_passes", "callbacks", "loggers", "profiler", "fsdp_config", "deepspeed_config",
    "parallelism_config", "parallelism", "dist_timeout", "store",
}  # fmt: skip
_LOGGING = {
    "run_name", "progress_bar", "log_to_console", "console_stream", "console_log_interval", "log_traces",
    "auto_log_hparams", "python_log_level",
}  # fmt: skip


def _section_of(name: str) -> str:
    if name in _LOGGING:
        return "logging"
    is_of_checkpoints = name.startswith(("save_", "load_")) or name in ("autoresume", "checkpointing")
    return "checkpoint" if is_of_checkpoints else "training"


#: The arguments of `Trainer` by section.
TRAINER_SECTIONS = {
    section: tuple(name for name in _ARGUMENTS if name not in _ELSEWHERE and _section_of(name) == section)
    for section in ("training", "checkpoint", "logging")
}

#: The dataclass of each argument of `Trainer` that is a group of settings.
_GROUPS: dict[str, type[Any]] = {
    field.name: field.metadata["group"]
    for field in dataclasses.fields(TrainerSettings)
    if "group" in field.metadata
}
SECTIONS = (
    "model", "data", "training", "optimizer", "scheduler", "algorithms", "callbacks", "loggers",
    "parallelism", "checkpoint", "profiler", "logging",
)  # fmt: skip

#: The sections that hold several parts, each with a name.
PART_SECTIONS = ("algorithms", "callbacks", "loggers")

#: Settings that are also accepted in `model` and `data`, and the section of each.
_MOVED = {"precision": "training", "seed": "training", "device": "training"}


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in one form, with the defaults of `Trainer` filled in.

    Each part becomes a mapping with a `name`. Alternative spellings of settings are replaced by those of the
    components. Parts that are not `enabled` are left out.

    Raises:
        TrainerConfigError: If a section or an argument of `Trainer` is unknown (the message names the
            nearest one), or an argument of `Trainer` has a wrong type.
    """
    _check_sections(config)
    resolved: dict[str, Any] = {name: config[name] for name in SECTIONS if config.get(name) is not None}
    for name in ("model", "optimizer"):
        if name in resolved:
            resolved[name] = as_part(resolved[name], name)
    for name in ("data", "parallelism", "profiler"):
        if name in resolved:
            resolved[name] = _mapping(resolved[name], name)
    _move(resolved)
    if "scheduler" in resolved:
        given = resolved["scheduler"]
        schedulers = given if isinstance(given, list) else [given]
        resolved["scheduler"] = [_scheduler(as_part(one, "scheduler")) for one in schedulers]
    for name in PART_SECTIONS:
        if name in resolved:
            resolved[name] = _parts(resolved[name], name)
    for name, keys in TRAINER_SECTIONS.items():
        given = _mapping(resolved.get(name, {}), name)
        _check_places(given, name)
        check_names(given, keys, f"`{name}`")
        resolved[name] = {
            key: _group(key, given.get(key, {}), name)
            if key in _GROUPS
            else trainer_argument(key, given.get(key, _ARGUMENTS[key].default), name)
            for key in keys
        }
    return {name: resolved[name] for name in SECTIONS if name in resolved}


def trainer_argument(name: str, value: Any, section: str) -> Any:
    """Return the value of an argument of `Trainer`, as `as_declared` does.

    Raises:
        TrainerConfigError: If the value has another type than the argument.
    """
    return as_declared(value, _ARGUMENTS[name], TrainerSettings, f"{section}.{name}")


def regrouped(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration, with the settings in groups that were flat when it was stored."""
    result = {
        name: dict(section) if name in TRAINER_SECTIONS else section for name, section in config.items()
    }
    for name, (group, field) in grouped_names(TrainerSettings).items():
        for section in TRAINER_SECTIONS.keys() & result.keys():
            if name in result[section]:
                settings = result.setdefault(_section_of(group), {})
                settings[group] = {**settings.get(group, {}), field: result[section].pop(name)}
    return result


def _group(name: str, given: Any, section: str) -> dict[str, Any]:
    """Return the settings of a group, with its defaults filled in.

    Raises:
        TrainerConfigError: If a setting is unknown, or has a wrong type.
    """
    where, kind = f"{section}.{name}", _GROUPS[name]
    known = {key: one for key, one in inspect.signature(kind).parameters.items() if key not in _ELSEWHERE}
    check_names(_mapping(given, where), known, f"`{where}`")
    return {
        key: as_declared(given.get(key, one.default), one, kind, f"{where}.{key}")
        for key, one in known.items()
    }


def _check_places(given: Iterable[str], section: str) -> None:
    """Refuse the flat spelling of a setting in a group.

    Raises:
        TrainerConfigError: If there is one; the message names its place.
    """
    places = grouped_names(TrainerSettings)
    for name in given:
        if name in places:
            group, field = places[name]
            raise TrainerConfigError(f"`{section}.{name}` is now `{_section_of(group)}.{group}.{field}`")


def _check_sections(config: Mapping[str, Any]) -> None:
    """Refuse what is no section, and name the section of an argument of `Trainer` at the top.

    Raises:
        TrainerConfigError: If there is one; the message names its place, or the nearest section.
    """
    for name in config:
        section = next((one for one, names in TRAINER_SECTIONS.items() if name in names), None)
        if section is not None and name not in SECTIONS:
            raise TrainerConfigError(
                f"`{name}` is unknown in the configuration; expected it in a section: `{section}.{name}`"
            )
    check_names(config, SECTIONS, "the configuration")


def check_names(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Refuse a name that is not known.

    Raises:
        TrainerConfigError: If a name is not known; the message names the nearest known one.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"expected some of {', '.join(sorted(names))}"
            raise TrainerConfigError(f"`{name}` is unknown in {of}; {hint}")


def plain_name(name: str) -> str:
    """Return a part's name in lower case and without `_`: `label_smoothing` and `LabelSmoothing` are one."""
    return name.replace("_", "").lower()


def parts_by_name(given: Any, section: str) -> dict[str, Any]:
    """Return parts, given as one name, a list or a mapping by name, as a mapping of their settings by name.

    Raises:
        TrainerConfigError: If `given` is none of these, or a list that has a part twice or without a name.
    """
    if isinstance(given, Mapping):
        return dict(given)
    parts = [as_part(one, section) for one in _as_list(given, section)]
    names = [part.pop("name", None) for part in parts]
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1:
            what = f"has `{name}` twice" if isinstance(name, str) else "has a part without `name`"
            raise TrainerConfigError(f"`{section}` {what}, so a setting cannot say which one it is for")
    return dict(zip(names, parts, strict=True))


def as_part(given: Any, section: str) -> dict[str, Any]:
    """Return a part as a mapping with its name: `gpt` becomes `{"name": "gpt"}`."""
    return {"name": given} if isinstance(given, str) else dict(_mapping(given, section))


def _mapping(given: Any, section: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TrainerConfigError(
            f"`{section}` is `{given}`; expected a mapping of its settings, such as `name: value`"
        )
    return given


def _move(config: dict[str, Any]) -> None:
    """Move settings from the `model` and `data` sections to the sections that they belong to."""
    for section in ("model", "data"):
        for name in _MOVED.keys() & config.get(section, {}):
            target = dict(_mapping(config.get(_MOVED[name], {}), _MOVED[name]))
            settings = dict(config[section])
            value = settings.pop(name)
            if name in target and target[name] != value:
                raise TrainerConfigError(
                    f"`{section}.{name}` is `{value}` and `{_MOVED[name]}.{name}` is `{target[name]}`; "
                    "leave one of them out"
                )
            config[section], config[_MOVED[name]] = settings, {**target, name: value}


def _scheduler(part: dict[str, Any]) -> dict[str, Any]:
    if "warmup_steps" in part:
        if "t_warmup" in part:
            raise TrainerConfigError("`warmup_steps` and `t_warmup` are both given in `scheduler`")
        steps = part.pop("warmup_steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise TrainerConfigError(f"`scheduler.warmup_steps` is `{steps}`; expected a number of batches")
        part["t_warmup"] = f"{steps}ba"
    return {
        "name": "CosineAnnealingWithWarmupScheduler" if "t_warmup" in part else "ConstantScheduler"
    } | part


def _parts(given: Any, section: str) -> list[dict[str, Any]]:
    """Return the enabled parts, given as one name, a list or a mapping by name, as a list of mappings."""
    if isinstance(given, Mapping):
        parts = [
            {"name": name} if options is None or options is True
            else {"name": name, "enabled": False} if options is False
            else {"name": name, **_mapping(options, f"{section}.{name}")}
            for name, options in given.items()
        ]  # fmt: skip
    else:
        parts = [as_part(one, section) for one in _as_list(given, section)]
    for part in parts:
        if not isinstance(part.get("enabled", True), bool):
            raise TrainerConfigError(
                f"`enabled` of `{part.get('name')}` in `{section}` is `{part['enabled']}`; "
                "expected true or false"
            )
    return [
        {key: value for key, value in part.items() if key != "enabled"}
        for part in parts
        if part.get("enabled", True)
    ]


def _as_list(given: Any, section: str) -> list[Any]:
    if not isinstance(given, (str, list, tuple)):
        raise TrainerConfigError(f"`{section}` is `{given}`; expected a list of names, or settings by name")
    return [given] if isinstance(given, str) else list(given)
