"""Files of a source: which of them are read, and the columns that the names of folders hold."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hocket.stream.errors import ConfigError, SampleError, SourceNotFoundError
from hocket.stream.settings.places import find_folder

logger = logging.getLogger("hocket.stream")

_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_NON_WORD = re.compile(r"[-._ 0-9]+")
_PARTITION = re.compile(r"([^=]+)=(.*)")
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
#: Beginnings of files that stand for others, and the command that fetches those.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("a git-LFS pointer", "git lfs pull"),
    b"/annex/objects/": ("a git-annex pointer", "git annex get"),
}
_MAX_POINTER_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFiles:
    """The files of a source, by name."""

    root: Path
    files: list[Path]

    partitions: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """Columns of each file that the names of its folders hold, as in `date=2020-01-01`."""

    def partition_columns(self) -> dict[str, str]:
        """Return the encodings of the columns that the names of folders hold."""
        columns: dict[str, str] = {}
        for values in self.partitions.values():
            for name, value in values.items():
                kind = "json" if value is None else type(value).__name__
                columns[name] = kind if columns.get(name, kind) == kind else "json"
        return columns

    def add_partition(self, sample: dict[str, Any], path: Path) -> dict[str, Any]:
        """Add the columns that the names of a file's folders hold to one of its samples.

        Raises:
            SampleError: The sample has such a column with another value.
        """
        if not self.partitions:
            return sample
        for name, value in self.partitions.get(path, {}).items():
            if name in sample and not _is_same(sample[name], value):
                raise SampleError(
                    f"`{path}` has a sample with {sample[name]!r:.60} in column `{name}`, and is in a folder "
                    f"`{name}={value}`: expected the same value; rename the folder, or the column"
                )
            sample.setdefault(name, value)
        return sample


def find_files(
    source: str | os.PathLike[str],
    suffixes: tuple[str, ...],
    *,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> SourceFiles:
    """Return `source` if it is a file, else the files below it with one of the suffixes, by name.

    Links to folders are followed, hidden files and folders left out.

    Args:
        source: A file or a folder.
        suffixes: Ends of file names, in lower case.
        split: `train`, `validation` or `test`: read only the files of this split; `all`: read all files. By
            default, a folder may have the files of one split only.
        columns: Encodings by column name that the caller gives.

    Raises:
        SourceNotFoundError: `source` does not exist.
        ConfigError: There is no such file below it, `source` is not a local path, a file stands for another
            one that is not there, or files belong to several splits.
    """
    path = source_path(source)
    if path.is_file():
        check_present(path)
        return SourceFiles(root=path.parent, files=[path])
    files: list[Path] = []
    for file in walk(path):
        if file.name.lower().endswith(suffixes):
            files.append(file)
        elif file.is_symlink() and not file.exists():
            check_present(file)  # raises; it may have been a link to a folder
    files.sort()
    if not files:
        raise ConfigError(
            f"there is no file in `{path}` that ends with {', '.join(suffixes)}: expected one; hidden files "
            "and folders are not read"
        )
    files = _choose_split(path, files, split)
    for file in files:
        check_present(file)
    return SourceFiles(root=path, files=files, partitions=partition_values(path, files, columns or {}))


def source_path(source: str | os.PathLike[str]) -> Path:
    """Return the local path of a source.

    Raises:
        SourceNotFoundError: It does not exist.
        ConfigError: It is not a local path.
    """
    path = find_folder(source)
    if path is None:
        raise ConfigError(
            f"the source `{source}` is in an object store: expected a local path; download the source first"
        )
    if not path.exists():
        raise SourceNotFoundError(f"the source `{path}` does not exist: expected a file or a folder")
    return path


def walk(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, also those behind links to folders, but none twice in a circle.

    Hidden files and folders (`.ipynb_checkpoints`, `__MACOSX`) are left out. A link to a file that does not
    exist is yielded.

    Raises:
        ConfigError: A folder cannot be read.
    """
    seen: dict[tuple[int, int], Path] = {}
    yield from _walk(root, (), seen)


def _walk(
    folder: Path, above: tuple[tuple[int, int], ...], seen: dict[tuple[int, int], Path]
) -> Iterator[Path]:
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"the folder `{folder}` cannot be read: {error}") from None
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    if identity in seen:
        logger.warning("`%s` and `%s` are one folder: its samples come twice", seen[identity], folder)
    seen.setdefault(identity, folder)
    for entry in entries:
        if is_hidden(entry):
            continue
        if _is_folder(entry):
            yield from _walk(folder / entry.name, (*above, identity), seen)
        else:
            yield folder / entry.name


def is_hidden(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is not read, as `.ipynb_checkpoints`, `__MACOSX` and `_temporary`."""
    name = entry.name
    return name.startswith(".") or ((name.startswith("__") or name == "_temporary") and _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def check_present(path: Path) -> None:
    """Raise if a file only stands for another one, which is not there."""
    try:
        if path.stat().st_size >= _MAX_POINTER_BYTES:
            return
        with path.open("rb") as file:
            begin = file.read(64)
    except FileNotFoundError:
        raise ConfigError(
            f"`{path}` is a link to `{os.path.realpath(path)}`, which does not exist: expected a file or "
            "a folder; restore it (`git annex get` for git-annex), or delete the link"
        ) from None
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from None
    for mark, (name, command) in _POINTERS.items():
        if begin.startswith(mark):
            raise ConfigError(f"`{path}` is {name}, not the data: expected the file; run `{command}` first")


def _choose_split(root: Path, files: list[Path], split: str | None) -> list[Path]:
    wanted = None if split is None else _SPLITS.get(split.lower(), split)
    if wanted == "all":
        return files
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_name(file.relative_to(root).parts), []).append(file)
    names = sorted(name for name in by_split if name is not None)
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(f"`split` is `{split}`: expected a split of `{root}`, {names}, or `all`")
        return by_split[wanted]
    if len(names) > 1:
        example = "train" if "train" in names else names[0]
        examples = ", ".join(f"`{by_split[name][0].relative_to(root)}`" for name in names)
        raise ConfigError(
            f"`{root}` has files of the splits {names}, by their names ({examples}): expected one split, so "
            f"that they are not merged; give `split`, as `{example}`, or `all` to read all of them"
        )
    return files


def split_name(parts: tuple[str, ...]) -> str | None:
    """Return the split that the names of a file and of its folders tell, as `datasets` understands them."""
    for part in parts:
        for word in _NON_WORD.split(part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def partition_values(root: Path, files: list[Path], columns: Mapping[str, str]) -> dict[Path, dict[str, Any]]:
    """Return the columns of each file that the names of its folders hold: int if all values are, else str."""
    texts: dict[Path, dict[str, str | None]] = {}
    for file in files:
        pairs = (_PARTITION.fullmatch(part) for part in file.relative_to(root).parts[:-1])
        texts[file] = {unquote(pair[1]): _partition_text(pair[2]) for pair in pairs if pair}
    names = list(dict.fromkeys(name for found in texts.values() for name in found))
    if not names:
        return {}
    values: dict[Path, dict[str, Any]] = {file: {} for file in files}
    for name in names:
        column = {file: found.get(name) for file, found in texts.items()}
        is_number = columns.get(name) != "str" and all(
            text is None or _INTEGER.fullmatch(text) for text in column.values()
        )
        for file, text in column.items():
            values[file][name] = int(text) if is_number and text is not None else text
    return values


def _is_same(value: Any, partition: Any) -> bool:
    """Return whether a value of a file is the one in a folder's name, such as 1 and `month=01`."""
    if str(value).lower() == str(partition).lower():
        return True
    with contextlib.suppress(ValueError, TypeError):
        return isinstance(value, (int, float)) and float(partition) == value
    return False


def _partition_text(text: str) -> str | None:
    return None if text == _NULL_PARTITION else unquote(text)
