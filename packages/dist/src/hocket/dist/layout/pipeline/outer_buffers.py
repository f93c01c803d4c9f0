"""The buffers outside of the blocks: the stage that changes each, and their values around trial passes.

Code outside of the blocks runs on every rank, and on all ranks but one it computes with zeros in place of
activations: what comes before the blocks counts on the first stage, and what comes after them on the last.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from hocket.dist.errors import ModelError
from hocket.dist.layout.pipeline.stages import Stages

Part = Literal["before", "between", "after"]
"""The part of a forward pass, as seen from the blocks."""

_Snapshot = Mapping[str, tuple[torch.Tensor, int, torch.Tensor]]
_Versions = Mapping[str, tuple[torch.Tensor, int, bool]]


class OuterBuffers:
    """The saved buffers of a model that are outside of its blocks, and the stages that change them.

    A pass that skips the blocks shows the part of it in which a buffer changes. The stage that computes this
    part has the value to save; a buffer that no pass changes stays with the stage of its module.

    Args:
        model: The model.
        stages: Its stages.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self._model, self._stages = model, stages
        self._parts_of: dict[str, set[Part]] = {}
        self._last: _Snapshot = {}
        self._versions: _Versions = {}
        self._changed_before: set[str] = set()
        self._kept: set[str] = set()
        inside = tuple(f"{name}." for name in stages.blocks)
        self._around = [
            (prefix, module)
            for prefix, module in model.named_modules(remove_duplicate=False)
            if not f"{prefix}.".startswith(inside)
        ]

    def stage_of(self, name: str) -> int:
        """Return the stage whose value of a buffer, or of a parameter, is saved."""
        if name not in self._parts_of:
            return self._stages.stage_of_entry(name)
        return 0 if "before" in self._parts_of[name] else self._stages.num_stages - 1

    def begin(self) -> None:
        """Begin to watch a pass that skips the blocks, or a block."""
        self._last = self._snapshot()

    def end_part(self, part: Part) -> None:
        """Note the buffers that changed since `begin` or the part before."""
        for name in self._changed():
            self._parts_of.setdefault(name, set()).add(part)
        self._last = self._snapshot()

    def begin_step(self) -> None:
        """Begin to watch a part of a training step, at every step, as a buffer may not change at once."""
        self._versions = self._read_versions()

    def end_step_part(self, part: Part) -> None:
        """Note the buffers that changed since `begin_step`; only `agree` lets the other ranks know."""
        changed = set()
        for name, (one, version, is_saved) in self._read_versions().items():
            old, before, _ = self._versions.get(name, (None, 0, False))
            if one is old and version == before:
                continue
            changed.add(name)
            if is_saved and part not in self._parts_of.get(name, ()) and name in dict(self._outer()):
                self._parts_of.setdefault(name, set()).add(part)
        if part == "before":
            self._changed_before = changed
        else:
            self._kept -= changed - self._changed_before

    def _read_versions(self) -> _Versions:
        """Return the buffers outside of the blocks, their versions, and whether they are saved.

        Versions cost no pass over the values.
        """
        return {
            _joined(prefix, key): (
                one,
                0 if one.is_inference() else one._version,
                key not in module._non_persistent_buffers_set,
            )
            for prefix, module in self._around
            for key, one in module._buffers.items()
            if one is not None
        }

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Let all ranks know the same changes. Collective.

        Args:
            gather: Returns the values of all ranks of the pipeline.

        Raises:
            ModelError: A buffer is changed by two stages, which have other values of it.
        """
        for found in gather(self._parts_of):
            for name, parts in found.items():
                self._parts_of.setdefault(name, set()).update(parts)
        model, blocks = type(self._model).__name__, self._stages.list_name
        for name, parts in sorted(self._parts_of.items()):
            if "between" in parts:
                raise ModelError(
                    f"{model} changes its buffer `{name}` in the blocks of `{blocks}` or between them, which "
                    "are on several stages of `pp`, each with a value of its own. Register it in a block, "
                    "change it before or after all of them, register it with `persistent=False` if it need "
                    "not be saved, or leave `pp` out"
                )
            if len(parts) > 1:
                raise ModelError(
                    f"{model} changes its buffer `{name}` before the blocks of `{blocks}` and after them, on "
                    "two stages of `pp`, each with a value of its own. Use two buffers, or leave `pp` out"
                )

    def _snapshot(self) -> _Snapshot:
        """Return the buffers with their versions and values."""
        return {
            name: (one, 0 if one.is_inference() else one._version, one.detach().clone())
            for name, one in self._saved()
        }

    def _changed(self) -> list[str]:
        """Return the names of the buffers that were replaced or written to since the last snapshot.

        The values tell of writes through `.data`, and the versions of writes of equal values.
        """
        names = []
        for name, one in self._saved():
            old, version, value = self._last.get(name, (None, 0, one))
            is_same = one is old and (one.is_inference() or one._version == version)
            if not is_same or not _are_equal(one, value):
                names.append(name)
        return names

    @contextlib.contextmanager
    def keeping_first(self) -> Iterator[None]:
        """Restore at the end the buffers that the first stage changes outside of the blocks.

        Those that change after the blocks alone, at this step for the first time, keep their change.
        """
        self._kept = kept = {name for name, _ in self._outer() if self.stage_of(name) == 0}
        with keeping_buffers(self._model, kept.__contains__):
            yield

    def _saved(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, one in self._outer():
            module, _, key = name.rpartition(".")
            if key not in self._model.get_submodule(module)._non_persistent_buffers_set:
                yield name, one

    def _outer(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers, under all of their names, that no block has."""
        inner = {id(one) for block in self._stages.blocks.values() for one in block.buffers()}
        named = self._model.named_buffers(remove_duplicate=False)
        return [(name, one) for name, one in named if id(one) not in inner]


@contextlib.contextmanager
def keeping_buffers(model: nn.Module, is_kept: Callable[[str], bool] = lambda _: True) -> Iterator[None]:
    """Restore the buffers of a model at the end, those that were replaced or added, too.

    Args:
        model: The model.
        is_kept: Tells by a buffer's name whether it is restored; asked at the start and at the end.
    """
    modules = list(model.named_modules())
    before = [
        (module, prefix, key, one, None if one is None else one.detach().clone())
        for prefix, module in modules
        for key, one in module._buffers.items()
        if is_kept(_joined(prefix, key))
    ]
    known = {(id(module), key) for module, _, key, _, _ in before}
    try:
        yield
    finally:
        for prefix, module in modules:
            for key in list(module._buffers):
                if (id(module), key) not in known and is_kept(_joined(prefix, key)):
                    del module._buffers[key]
        with torch.no_grad():
            for module, prefix, key, one, value in before:
                if not is_kept(_joined(prefix, key)):
                    continue
                if one is not None and value is not None and not one.is_inference():
                    one.copy_(value)  # those of inference are never written to outside of it
                module._buffers[key] = one


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are equal; those that are not numbers are equal to each other."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
