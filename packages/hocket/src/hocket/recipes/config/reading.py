"""Readers of a run's configuration: from a file, from the command line and from a checkpoint."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import hocket.ckpt as ckpt
from hocket.recipes.config.resolving import PART_SECTIONS, parts_by_name, plain_name, regrouped
from hocket.trainer.errors import TrainerConfigError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML's safe loader, changed for configurations of runs.

    It also reads `3e-4` as a number, keeps a date as text, which a checkpoint can store, and refuses a name
    that is given twice.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # `<<` merges another mapping, whose names may be given again.
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{name}` is given twice; leave one of them out", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def file_of(source: str | os.PathLike[str]) -> Path:
    """Return the path of a run's file, with `~` expanded."""
    return Path(source).expanduser()


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a YAML file, or a copy of a configuration that is a dict.

    Raises:
        TrainerConfigError: If there is no such file, or the file is not YAML with sections.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = file_of(source)
    if not path.is_file():
        is_uri = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(source)) is not None
        hint = " on this machine; a URI is not read here, so copy the file first" if is_uri else ""
        raise TrainerConfigError(
            f"there is no file `{os.fspath(source)}`; expected a run's configuration in YAML{hint}"
        )
    try:
        config = _parse(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TrainerConfigError(f"`{path}` is no YAML: {error}") from error
    if not isinstance(config, dict):
        raise TrainerConfigError(
            f"`{path}` is a `{type(config).__name__}`; expected sections such as `model:`"
        )
    return config


def with_overrides(config: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a configuration with values from the command line, such as `optimizer.lr=3e-4`.

    Raises:
        TrainerConfigError: If an override has no `=`, its value is not YAML, its path leads through a value
            without parts, or it is a setting of an algorithm, a callback or a logger and does not name it.
    """
    result = copy.deepcopy(dict(config))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise TrainerConfigError(f"`{override}` is no setting; expected `section.name=value`")
        try:
            value = _parse(text)
        except yaml.YAMLError as error:
            raise TrainerConfigError(f"`{override}`: the value is no YAML: {error}") from error
        names = path.split(".")
        if len(names) > 1 and names[0] in PART_SECTIONS:
            names = _name_part(result, names, value, override)
        *parents, last = names
        inner = result
        for name in parents:
            if inner.get(name) is None:
                inner[name] = {}
            elif isinstance(inner[name], str):
                # `model: gpt` in the file and `model.width=64` on the command line.
                inner[name] = {"name": inner[name]}
            inner = inner[name]
            if not isinstance(inner, dict):
                raise TrainerConfigError(f"`{override}`: `{name}` is `{inner}`, which has no parts")
        inner[last] = value
    return result


def _name_part(config: dict[str, Any], path: list[str], value: Any, override: str) -> list[str]:
    """Give the parts of a section by name, and return an override's path with the name as spelled there."""
    section, name, *rest = path
    if config.get(section) is not None:
        config[section] = parts_by_name(config[section], section)
    names = [str(one) for one in config.get(section) or {}]
    if not rest and value is not None and not isinstance(value, (bool, Mapping)):
        example = names[0] if names else "NAME"
        raise TrainerConfigError(
            f"`{override}` does not name a part and its setting; expected `{section}.{example}.SETTING=VALUE`"
        )
    return [section, {plain_name(one): one for one in names}.get(plain_name(name), name), *rest]


def config_of_checkpoint(uri: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return a checkpoint's URI and the configuration of the run that saved it.

    Args:
        uri: URI of a checkpoint, or of a folder of checkpoints, of which the newest committed one is used.

    Raises:
        TrainerConfigError: If the checkpoint was not saved by a run from a file.
    """
    path, config, _ = stored_run(uri)
    return path, config


def stored_run(uri: str | os.PathLike[str]) -> tuple[str, dict[str, Any], str | None]:
    """Return what `config_of_checkpoint` returns, and the folder of the run's file where it is recorded."""
    path = os.fspath(uri).rstrip("/")
    committed = [entry.uri for entry in ckpt.list_checkpoints(path) if entry.status == "committed"]
    path = committed[-1] if committed else path
    user = ckpt.open(path).manifest.user
    states = user.get("callbacks", {}) if isinstance(user, Mapping) else {}
    if "RunConfig" not in states:
        raise TrainerConfigError(
            f"`{path}` has no configuration of a run; expected a checkpoint that `hocket train` saved. "
            "Give the file, and `checkpoint.load_path=…`"
        )
    stored = states["RunConfig"]
    return path, regrouped(copy.deepcopy(dict(stored["config"]))), stored.get("folder")


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as YAML."""
    text: str = yaml.safe_dump(dict(config), sort_keys=False)
    return text


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)
