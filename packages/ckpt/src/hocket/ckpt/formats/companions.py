"""Files beside the tensors of a model: its config and tokenizer, or the optimizer that accelerate saved."""

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.output_file import OutFile
from hocket.native import _native
from hocket.native.errors import StoreConfigError

__all__ = ["check_whole", "companions", "other_states"]

_MARKER = "config.json"
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_MAX_BYTES = 256 << 20
_PART = re.compile(r"-\d+-of-0*(\d+)\b")
# Llama's files, of which each holds a slice of every tensor.
_SLICE = re.compile(r"consolidated\.\d+\.pth")
_STATE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".safetensors", ".distcp")


def companions(root: str) -> list[OutFile]:
    """Return the files beside a model's tensors, for a copy of the model; none if there is no `config.json`.

    Includes every file directly in the folder that has the suffix of a config, a vocabulary, a template or
    model code and at most 256 MiB, except the index of shards, which belongs to the tensors.

    Args:
        root: The folder or prefix of the model.

    Raises:
        StoreError: The folder cannot be listed, or a file cannot be read.
    """
    store = _native.Store(root)
    _, objects = store.list_dirs()
    sizes = {entry.key: entry.size for entry in objects}
    if _MARKER not in sizes:
        return []
    names = [
        name
        for name, size in sorted(sizes.items())
        if name.endswith(_SUFFIXES) and not name.endswith(".index.json") and size <= _MAX_BYTES
    ]
    return [OutFile(path=name, parts=[store.get(name)]) for name in names]


def other_states(root: str, own: Collection[str]) -> dict[str, int]:
    """Return the files beside a model that hold other state, such as accelerate's `optimizer.bin`.

    Args:
        root: The folder or prefix of the model.
        own: The files that belong to the model.

    Returns:
        Their sizes by name.

    Raises:
        StoreError: The folder cannot be listed.
    """
    _, objects = _native.Store(root).list_dirs()
    return {
        entry.key: entry.size
        for entry in sorted(objects, key=lambda entry: entry.key)
        if entry.key.endswith(_STATE_SUFFIXES) and entry.key not in own
    }


def check_whole(uri: str, contents: CheckpointContents) -> None:
    """Check by its name and the index beside it that a single file is not one of several of a model.

    Raises:
        CheckpointIncompatibleError: It is.
        StoreError: The folder cannot be listed, or an index cannot be read.
    """
    if len(contents.files) != 1:
        return
    name = contents.files[0]["path"]
    found = _PART.search(name)
    num_files = int(found[1]) if found is not None else _num_beside(contents.root, name)
    if num_files > 1:
        raise CheckpointIncompatibleError(
            f"`{uri}`: `{name}` is one of the {num_files} files of a model and holds a part of its tensors. "
            "Name the folder with all of them and their index (`*.index.json`); Llama's `consolidated.*.pth` "
            "have none, and transformers' script joins them. To convert it alone, give it another name"
        )


def _num_beside(root: str, name: str) -> int:
    """Return the number of files of the model of `name`, by its index or their names; 1 without both."""
    store = _native.Store(root)
    sizes: dict[str, int] = {}
    with contextlib.suppress(StoreConfigError):  # a web server has no listing
        sizes = {entry.key: entry.size for entry in store.list_dirs()[1]}
    if _SLICE.fullmatch(name):
        return sum(_SLICE.fullmatch(other) is not None for other in sizes)
    for index in (other for other, size in sizes.items() if size <= _MAX_BYTES):
        if not index.endswith(".index.json"):
            continue
        with contextlib.suppress(ValueError):
            parsed: Any = json.loads(store.get(index))
            weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
            files = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
            if name in files:
                return len(files)
    return 1
