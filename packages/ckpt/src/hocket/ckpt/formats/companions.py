"""Files beside the tensors of a model: its config and tokenizer, or the optimizer that accelerate saved."""

from collections.abc import Collection

from hocket.ckpt.formats.output_file import OutFile
from hocket.native import _native

__all__ = ["companions", "other_states"]

_MARKER = "config.json"
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_MAX_BYTES = 256 << 20
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
