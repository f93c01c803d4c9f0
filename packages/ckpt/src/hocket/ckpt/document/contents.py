"""The contents of a checkpoint of any format: its files, tensors and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.records import PathItem, PerRank, TensorRecord, ThinnedState, ValueRecord
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.gc_pause import gc_paused

if TYPE_CHECKING:
    from hocket.native import _native
    from hocket.native._native import CkptFile

__all__ = ["STEP_NAMES", "CheckpointContents"]

STEP_NAMES = (
    *("timestamp.batch", "state.timestamp.Timestamp.batch", "state.timestamp.batch", "global_step"),
    *("trainer_state.global_step", "global_steps", "step", "iteration", "iter_num"),
)
"""Values that count a trainer's steps: Hocket's, Composer's, Lightning's, and those that scripts use."""

_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckpointContents:
    """The table of contents of a checkpoint of any format; what a format does not record has its default."""

    format: str
    """`hocket`, `dcp`, `torch` or `safetensors`."""
    writer: str
    """The program that wrote a Hocket checkpoint; otherwise the format."""
    save_id: str
    """The id of the save; in other formats, a digest that changes with the tensors, values or sizes."""
    files: tuple[CkptFile, ...] = ()
    """The data files; those of other formats have no digests."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    values: Mapping[str, ValueRecord] = field(default_factory=dict)
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of the mappings with integer keys, which would otherwise be read as lists."""
    step: int = 0
    step_from: str | None = None
    """The value, or the entry of `__metadata__`, that the step of another format is from."""
    world_size: int = 1
    mesh: Mapping[str, int] | None = None
    per_rank: PerRank | None = None
    user: Any = None
    thinned: ThinnedState | None = None
    """The part of the state that was dropped later; only Hocket's format has it."""
    root: str = ""
    """The folder or prefix of the files, in formats whose files may lie among others."""
    opaque: Mapping[str, str] = field(default_factory=dict)
    """Entries that have no supported form: name → reason. They are neither read nor converted."""
    items: tuple[tuple[int, int, int, str, str], ...] = ()
    """Zips inside files: file, offset, bytes, `torch` or `zstd`, and the name of the entry."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The `__metadata__` of safetensors files."""

    def __repr__(self) -> str:
        counts = f"{len(self.tensors)} tensors, {len(self.values)} values, {len(self.files)} files"
        return f"<{type(self).__name__} of step {self.step} ({self.format}): {counts}>"

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes; shared storage is counted once."""
        return sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    @property
    def attached(self) -> dict[str, Any]:
        """The parts beside tensors and values, such as the step, by a name in parentheses."""
        return {}

    def refuse_dropped(self, names: Sequence[str], source: str) -> None:
        """Raise for names that the checkpoint `source` lacks since it was thinned.

        Raises:
            CheckpointIncompatibleError: A glob of what was dropped matches a name, or the names below it.
        """
        if self.thinned is None:
            return
        gone = [
            f"`{name}`"
            for name in names
            if any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.", glob) for glob in self.thinned.dropped)
        ]
        if gone:
            more = f" and {len(gone) - _NAMES_SHOWN} more" if len(gone) > _NAMES_SHOWN else ""
            raise CheckpointIncompatibleError(
                f"`{source}` was thinned: {', '.join(gone[:_NAMES_SHOWN])}{more} were dropped from it. "
                "Resume from a whole checkpoint, or load the weights alone with `include=`"
            )

    @classmethod
    @gc_paused()
    def of(cls, opened: _native.Checkpoint) -> CheckpointContents:
        """Build the contents of an opened checkpoint of another format; takes them from it."""
        raw = opened.take_contents()
        values = ValueRecord.by_name(raw["values"])
        step, step_from = _recorded_step(values, raw["metadata"])
        return CheckpointContents(
            format=raw["format"],
            writer=raw["format"],
            save_id=raw["digest"],
            root=raw["root"],
            files=tuple(
                {"path": path, "size": size, "data_start": 0, "header": "", "digests": ""}
                for path, size in raw["files"]
            ),
            tensors=TensorRecord.by_name(raw["tensors"]),
            values=values,
            step=step,
            step_from=step_from,
            opaque=raw["opaque"],
            items=raw["items"],
            metadata=raw["metadata"],
            integer_keyed=frozenset(raw["integer_keyed"]),
        )


def _recorded_step(values: Mapping[str, ValueRecord], metadata: Mapping[str, str]) -> tuple[int, str | None]:
    """Return the step that another format records, and its name there; 0 and None if it records none."""
    for name in STEP_NAMES:
        found = values[name].value if name in values else None
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**64:
            return found, name
    text = metadata.get("step", "")
    is_count = text.isascii() and text.isdecimal() and len(text) < 20
    return (int(text), "step") if is_count else (0, None)
