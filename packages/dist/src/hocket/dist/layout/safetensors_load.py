"""Loading of a folder of safetensors files directly into shards.

Every rank opens the files and reads only the rows of its own shards, so no rank holds a full copy, and
nothing is sent between ranks.
"""

import os
from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.dist.errors import WeightsError
from hocket.dist.layout.deferred_init import fill, shard_range, sharded_axes
from hocket.dist.layout.safetensors_files import StoredTensor, open_folder


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, only: Collection[str] | None = None
) -> set[str]:
    """Fill the parameters and buffers of a model, sharded or plain, from a folder of safetensors files.

    Args:
        model: Laid out, with storage.
        folder: As `save_pretrained` of Transformers writes it: `model.safetensors`, or several files with
            `model.safetensors.index.json`. Its path, or a URI such as `s3://bucket/model` or
            `hf://owner/name@revision`, of which all ranks read the same commit.
        only: Names to fill; all by default.

    Returns:
        The names that were filled.

    Raises:
        WeightsError: The folder has no such files, or lacks a tensor, or has one of another shape.
        ImportError: The package that reads the folder is not installed.
        OSError: The folder cannot be read; from a store, an error of `hocket.native.errors`.
    """
    weights = open_folder(os.fspath(folder))
    tensors = dict(_stored_tensors(model))
    aliases = _aliases(model)
    wanted = {name for name in tensors if only is None or name in only}
    filled: set[str] = set()
    names_in = {}
    for path, indexed_names in weights.find_files().items():
        with weights.open(path) as file:
            # A tensor that is in several files is read from the one that the index names.
            names_in[path] = indexed_names.intersection(file.keys()) if indexed_names else set(file.keys())
    wrapper = _wrapper(tensors, set().union(*names_in.values()))
    for path, names in names_in.items():
        # One open file at a time: the pages that were read stay in memory while a file is open.
        with weights.open(path) as file:
            for stored in sorted(names):
                name = aliases.get(wrapper + stored, wrapper + stored)
                if name in wanted and name not in filled:
                    _fill_from(tensors[name], file.get_slice(stored), f"`{stored}` in {folder}/{path}")
                    filled.add(name)
    missing = sorted(wanted - filled)
    if missing:
        stored_names = set().union(*names_in.values())
        question = "Are the names those of this model's `state_dict()`?"
        if any(".base_layer." in name for name in stored_names) and not any(
            ".base_layer." in one for one in wanted
        ):
            question = (
                "Its layers have LoRA's adapters around them, as older releases wrote a model with the "
                "algorithm `LoRA`: load the folder with that algorithm, and write it anew with "
                "`save_pretrained`, after `merge_lora(model)` for a plain model"
            )
        raise WeightsError(
            f"{folder} has no values for {len(missing)} of {len(wanted)} tensors of {type(model).__name__}, "
            f"the first `{missing[0]}`. {question}"
        )
    return filled


def _stored_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the buffers that a state dict would have, tied parameters once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for leaf, value in module._buffers.items():
            if value is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}" if prefix else leaf, value


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return a map from the later names of tied parameters to their first name."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first[id(parameter)] = name
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def _wrapper(names: Collection[str], stored: Collection[str]) -> str:
    """Return the prefix that a wrapper of the model adds to all names: the one with the most stored names.

    The trainer holds a model with a loss function as `module`, and one of Transformers as `model`.
    """
    fitting = [
        prefix for prefix in ("", "module.", "model.") if all(name.startswith(prefix) for name in names)
    ]
    return max(fitting, key=lambda prefix: sum(name.removeprefix(prefix) in stored for name in names))


def _fill_from(tensor: torch.Tensor, stored: StoredTensor, where: str) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise WeightsError(f"{where} has shape {shape}, expected {tuple(tensor.shape)}")
    if not isinstance(tensor, DTensor) or not shape:
        fill(tensor, stored[:] if shape else stored[...])
        return
    ranges = _ranges(tensor)
    part = stored[slice(*ranges[0])]
    for dim, (start, stop) in enumerate(ranges[1:], start=1):
        part = part.narrow(dim, start, stop - start)
    with torch.no_grad():
        tensor.to_local().copy_(part)


def _ranges(tensor: DTensor) -> list[tuple[int, int]]:
    """Return the first index of each dim that this rank holds, and one past the last."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    ranges = [(0, size) for size in tensor.shape]
    for axis, dim in sharded_axes(tensor):
        start, stop = ranges[dim]
        first, last = shard_range(stop - start, tensor.device_mesh.size(axis), coordinate[axis])
        ranges[dim] = start + first, start + last
    return ranges
