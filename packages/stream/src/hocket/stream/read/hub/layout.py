"""The configurations and splits of a data set on a hub, by its README or by the names of its files.

The rules are those of `datasets`: `configs` at the start of `README.md` name the files of each configuration
and split by patterns. Without them there is one configuration, and the names of files and folders tell the
splits.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hocket.stream.convert.sources import split_name
from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.patterns import match

SUFFIX = ".parquet"
DEFAULT = "default"
ALL = "all"
#: Files whose front matter may name configurations; the later one wins.
_CARDS = ("README.md", ".huggingface.yaml")
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_SHARDED = "data/*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*"
_SHARDED_NAME = re.compile(r"(.+)-\d{5}-of-\d{5}\d*.*\..*")
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
#: The names in the hub's own conversion: configuration, split, number.
_CONVERTED_NAME = re.compile(r"[^/]+/[^/]+/\d{4}\.parquet")
_SEPARATORS = "[-._ 0-9]"
_BY_FOLDER = ("**/{word}/**", "**/{word}{sep}*/**", "**/*{sep}{word}/**", "**/*{sep}{word}{sep}*/**")
_BY_NAME = ("**/{word}{sep}*", "**/*{sep}{word}{sep}*")
#: Suffixes of data that is not read in place.
_OTHER_DATA = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".arrow", ".tar", ".xml", ".zip", ".gz", ".zst")
_MOST_NAMES = 20

Splits = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubLayout:
    """The choice of a configuration and a split of a data set on a hub."""

    config: str | None = None
    """Name of the configuration; None for the only one, or the default."""

    split: str | None = None
    """Name of the split; None for the only one, `all` for all."""

    is_root: bool = True
    """Whether the data set is the whole repository, whose README counts."""

    is_converted: bool | None = False
    """Whether the revision is the hub's own conversion, with folders of configurations and splits. None for a
    commit, of which the names of its files tell it."""

    def choose(self, origin: str, keys: Sequence[str], read: Callable[[str], bytes]) -> set[str]:
        """Return the Parquet files of the configuration and split.

        Args:
            origin: The data set.
            keys: Paths of all files within it.
            read: Returns the bytes of one of them.

        Raises:
            ConfigError: There is no such configuration or split, several and none is chosen, or their files
                are not Parquet.
        """
        name, splits = self._of_config(origin, keys, read)
        where = f"`{origin}`" if name == DEFAULT else f"the configuration `{name}` of `{origin}`"
        if self.split is None and len(splits) > 1:
            raise ConfigError(
                f"{where} has the splits {list(splits)[:_MOST_NAMES]}: expected one, so that they are not "
                f"merged; give `split`, as `{next(iter(splits))}`, or `{ALL}`"
            )
        wanted = self.split
        if wanted is not None and wanted not in splits and wanted != ALL:
            wanted = split_name((wanted,)) if wanted.isalpha() else None
            if wanted not in splits:
                raise ConfigError(
                    f"`split` is `{self.split}`, and {where} has the splits {list(splits)[:_MOST_NAMES]}: "
                    f"expected one of them, or `{ALL}`"
                )
        chosen = splits[wanted] if wanted in splits else [key for found in splits.values() for key in found]
        parquet = {key for key in chosen if key.lower().endswith(SUFFIX)}
        others = Counter(key[key.rindex(".") :] for key in chosen if key.lower().endswith(_OTHER_DATA))
        if not parquet or sum(others.values()) > len(parquet):
            found = others or Counter(PurePosixPath(key).suffix for key in chosen)
            what = f"{len(parquet)} files in Parquet and {dict(found.most_common(3))} others"
            what = what if chosen else "no files"
            raise ConfigError(
                f"{where} has {what}: expected Parquet, or an `index.json`; a hub keeps a conversion of many "
                f"data sets at the revision `refs/convert/parquet` (`{_converted(origin)}`), or use "
                "`hocket-stream convert`"
            )
        return parquet

    def _of_config(
        self, origin: str, keys: Sequence[str], read: Callable[[str], bytes]
    ) -> tuple[str, Splits]:
        """Return the name of the configuration, and the files of its splits."""
        is_converted = _is_conversion(keys) if self.is_converted is None else self.is_converted
        if is_converted and self.is_root:
            converted = _by_two_folders(keys)
            name = self._name(origin, list(converted), None)
            return name, converted[name]
        configs = _read_configs(origin, keys, read) if self.is_root else {}
        if not configs:
            name = self._name(origin, [DEFAULT], DEFAULT)
            return name, default_splits(keys)
        name = self._name(origin, list(configs), _default_config(origin, configs))
        return name, _splits_of(origin, name, configs[name], keys)

    def _name(self, origin: str, names: Sequence[str], default: str | None) -> str:
        """Return the name of the chosen configuration."""
        if self.config is not None and self.config not in names:
            raise ConfigError(
                f"`config` is `{self.config}`, and `{origin}` has the configurations {names[:_MOST_NAMES]}: "
                "expected one of them"
            )
        chosen = self.config or default or (names[0] if len(names) == 1 else None)
        if chosen is None:
            raise ConfigError(
                f"`{origin}` has the configurations {list(names)[:_MOST_NAMES]}, none of which is the "
                f"default: expected one of them; give `config`, as `{names[0]}`"
                if names
                else f"`{origin}` has no files of a conversion: expected `config/split/0000.parquet`"
            )
        return chosen


def default_splits(keys: Sequence[str]) -> Splits:
    """Return the files of each split by the names of files and folders, in the order of `datasets`."""
    if sharded := match(_SHARDED, keys):
        names: Splits = {}
        for key in sharded:
            if part := _SHARDED_NAME.fullmatch(key.rpartition("/")[2]):
                names.setdefault(part[1], []).append(key)
        if names:
            first = [name for name in _KEYWORDS if name in names]
            return {name: names[name] for name in [*first, *sorted(set(names) - set(first))]}
    for patterns in (_BY_FOLDER, _BY_NAME):
        splits = {}
        for name, words in _KEYWORDS.items():
            filled = [pattern.format(word=word, sep=_SEPARATORS) for word in words for pattern in patterns]
            if found := list(dict.fromkeys(key for pattern in filled for key in match(pattern, keys))):
                splits[name] = found
        if splits:
            return splits
    return {"train": match("**", keys)}


def _is_conversion(keys: Sequence[str]) -> bool:
    """Return whether the files are those of the hub's own conversion, which has no README."""
    shown = [key for key in keys if not key.startswith(".")]
    return bool(shown) and all(_CONVERTED_NAME.fullmatch(key) for key in shown)


def _by_two_folders(keys: Sequence[str]) -> dict[str, Splits]:
    """Return the files by their first two folders."""
    found: dict[str, Splits] = {}
    for key in keys:
        config, _, below = key.partition("/")
        split, _, name = below.partition("/")
        if name.lower().endswith(SUFFIX) and not key.startswith((".", "_")):
            found.setdefault(config, {}).setdefault(split, []).append(key)
    return found


def _read_configs(
    origin: str, keys: Sequence[str], read: Callable[[str], bytes]
) -> dict[str, Mapping[str, Any]]:
    """Return the configurations that the README names."""
    listed: Any = None
    for card in _CARDS:
        if card not in keys:
            continue
        text: str | None = read(card).decode(errors="replace")
        if card == "README.md":
            front = _FRONT_MATTER.match(text or "")
            text = None if front is None else front[1]
        if text is not None and "configs" in text:
            document = _parse_yaml(f"{origin}/{card}", text)
            listed = document.get("configs", listed) if isinstance(document, dict) else listed
    if not listed:
        return {}
    if not isinstance(listed, list) or not all(
        isinstance(config, dict) and isinstance(config.get("config_name"), str) for config in listed
    ):
        raise ConfigError(
            f"`configs` in `{origin}/README.md` is {listed!r:.200}: expected a list of mappings, each "
            "with a text as `config_name`"
        )
    return {config["config_name"]: config for config in listed}


def _parse_yaml(place: str, text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"`{place}` names configurations, and reading them needs PyYAML: pip install 'hocket-stream[hub]'"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{place}` is not valid YAML: {error}") from None


def _default_config(origin: str, configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    marked = [
        name
        for name, config in configs.items()
        if len(configs) == 1 or name == DEFAULT or config.get("default")
    ]
    if len(marked) > 1:
        raise ConfigError(f"`{origin}` has several default configurations, {marked}: give `config`")
    return marked[0] if marked else None


def _splits_of(origin: str, name: str, config: Mapping[str, Any], keys: Sequence[str]) -> Splits:
    """Return the files of the splits of a configuration by its patterns."""
    folder = str(config.get("data_dir") or "").strip("/")
    folder = "" if folder == "." else folder
    below = f"{folder}/" if folder else ""
    inside = [key[len(below) :] for key in keys if key.startswith(below)]
    patterns = _sanitize(origin, name, config.get("data_files"))
    if patterns is None:
        splits = default_splits(inside)
    else:
        splits = {
            split: list(dict.fromkeys(key for pattern in listed for key in match(pattern, inside)))
            for split, listed in patterns.items()
        }
    return {split: [below + key for key in found] for split, found in splits.items()}


def _sanitize(origin: str, name: str, files: Any) -> dict[str, list[str]] | None:
    """Return the patterns of each split; None if the names of files tell the splits."""

    def texts(value: Any) -> list[str] | None:
        listed = [value] if isinstance(value, str) else value
        is_list = isinstance(listed, list) and listed and all(isinstance(text, str) for text in listed)
        return listed if is_list else None

    if files is None:
        return None
    if (patterns := texts(files)) is not None:
        return {"train": patterns}
    found: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        path = texts(entry.get("path")) if isinstance(entry, dict) else None
        if path is None or not isinstance(split := entry.get("split"), str) or split in found:
            raise ConfigError(
                f"`data_files` of the configuration `{name}` of `{origin}` is {files!r:.200}: expected "
                "patterns, or a list with one `split` and `path` for each split"
            )
        found[split] = path
    return found


def _converted(origin: str) -> str:
    """Return the URI of the hub's own conversion of a data set."""
    repository = "/".join(origin.split("/")[:5])
    return f"{repository.partition('@')[0]}@refs/convert/parquet"
