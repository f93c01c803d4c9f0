"""torch's profiler, run by the trainer's schedule."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hocket.trainer.checks import check_count, local_path
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.profiler.json_trace import read_json, write_json
from hocket.trainer.profiler.schedule import TORCH_ACTION, ProfilerAction


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchProfilerConfig:
    """Settings of torch's profiler.

    Attributes:
        folder: The folder of its traces; fields as in `filename`.
        filename: The trace of one rank and window, with fields such as `{run_name}`, `{rank}` and `{batch}`.
        memory_filename: A page (`.html`) or data (`.json`, `.json.gz`) of the memory over time, in `folder`
            unless it is a path; turns on `record_shapes`, `profile_memory` and `with_stack`.
        overwrite: Whether an existing trace is replaced.
        use_gzip: Whether the trace is compressed.
        record_shapes: Whether operators' shapes are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether Python stacks are recorded; slow.
        with_flops: Whether floating-point operations of matrix products are estimated.
        num_traces_to_keep: The number of newest traces to keep; -1 for all.
    """

    folder: str | os.PathLike[str] = "{run_name}/torch_traces"
    filename: str = "rank{rank}.{batch}.pt.trace.json"
    memory_filename: str | None = None
    overwrite: bool = False
    use_gzip: bool = False
    record_shapes: bool = False
    profile_memory: bool = True
    with_stack: bool = False
    with_flops: bool = True
    num_traces_to_keep: int = -1

    def __post_init__(self) -> None:
        check_count("torch_prof_num_traces_to_keep", self.num_traces_to_keep, least=-1)
        for place in ("folder", "filename", "memory_filename"):
            given = getattr(self, place)
            if given is not None:
                object.__setattr__(self, place, local_path(f"torch_prof_{place}", given))
        if "{rank}" not in self.filename:
            raise TrainerConfigError(
                f"`torch_prof_filename` is `{self.filename}`, and every rank writes one; put `{{rank}}` "
                "into it"
            )
        name = self.memory_filename
        if name is not None and not name.endswith((".html", ".json", ".json.gz")):
            raise TrainerConfigError(
                f"`torch_prof_memory_filename` is `{name}`; expected a name that ends in `.html`, `.json` or "
                "`.json.gz`"
            )

    @classmethod
    def argument_names(cls) -> list[str]:
        """Return the names of the settings as arguments of `Profiler`."""
        return [f"torch_prof_{field.name}" for field in fields(cls)]

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TorchProfilerConfig:
        """Return the settings given as `torch_prof_<setting>`."""
        settings = {name.removeprefix("torch_prof_"): value for name, value in arguments.items()}
        if settings.get("folder", "") is None:
            del settings["folder"]
        return cls(**settings)

    @property
    def is_on(self) -> bool:
        """Whether a setting needs torch's profiler."""
        return self.record_shapes or self.profile_memory or self.with_stack or self.with_flops

    def with_memory_needs(self) -> tuple[TorchProfilerConfig, list[str]]:
        """Return the settings that a memory timeline needs, and the names of those that were off."""
        if self.memory_filename is None:
            return self, []
        missing = [
            name for name in ("record_shapes", "profile_memory", "with_stack") if not getattr(self, name)
        ]
        return replace(self, record_shapes=True, profile_memory=True, with_stack=True), missing


class TorchProfiler:
    """Runs `torch.profiler.profile` and writes a trace at the end of each window.

    Args:
        config: Settings.
        action: A function that returns the profiler's action in the next batch.
        names: A function that returns the fields of file names.
        handlers: Functions that are called with torch's profiler when a window ends, such as
            `torch.profiler.tensorboard_trace_handler(…)`.
    """

    def __init__(
        self,
        config: TorchProfilerConfig,
        *,
        action: Callable[[], ProfilerAction],
        names: Callable[[], Mapping[str, Any]],
        handlers: Sequence[Callable[[Any], object]] = (),
    ) -> None:
        self._config = config
        self._names = names
        self._handlers = handlers
        self._saved: list[Path] = []
        self._window: Path | None = None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=lambda step: TORCH_ACTION[action()],  # noqa: ARG005 - batches are counted by the trainer
            on_trace_ready=self._save,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )

    def start(self) -> None:
        """Start with the action of the first batch."""
        self.profile.start()

    def step(self) -> None:
        """Move on to the next batch."""
        with warnings.catch_warnings():
            # Each window is written by itself, so that earlier events need not be kept.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self.profile.step()

    def stop(self) -> None:
        """Stop; a window that is being recorded is written."""
        self.profile.stop()

    def take(self) -> Path | None:
        """Return the trace of the window that has just ended, once."""
        path, self._window = self._window, None
        return path

    def memory_path(self) -> Path | None:
        """Return the path of this window's memory timeline; None if no timeline is written."""
        name = self._config.memory_filename
        if name is None:
            return None
        names = self._names()
        path = Path(name.format(**names))
        is_plain = path.parent == Path(".") and not os.path.isabs(name)
        folder = Path(os.fspath(self._config.folder).format(**names)) if is_plain else path.parent
        if names["world_size"] > 1 and "{rank}" not in name:
            path = path.with_name(f"rank{names['rank']}_{path.name}")
        return folder / path.name

    def _save(self, finished: profile) -> None:
        names = self._names()
        path = Path(os.fspath(self._config.folder).format(**names), self._config.filename.format(**names))
        if self._config.use_gzip and path.suffix != ".gz":
            path = path.with_name(path.name + ".gz")
        if path.exists() and not self._config.overwrite:
            raise FileExistsError(
                f"the trace `{path}` exists; pass `torch_prof_overwrite=True`, or another `torch_prof_folder`"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))
        for handler in self._handlers:
            handler(_WrittenProfiler(finished, path))
        self._window = path
        self._saved.append(path)

    def forget_old(self) -> None:
        """Delete traces beyond the number to keep."""
        keep = self._config.num_traces_to_keep
        while keep >= 0 and len(self._saved) > keep:
            self._saved.pop(0).unlink(missing_ok=True)


class _WrittenProfiler:
    """torch's profiler after its trace was written.

    torch writes a trace only once, so a further export is a copy.
    """

    def __init__(self, finished: profile, path: Path) -> None:
        self._finished = finished
        self._path = path

    def export_chrome_trace(self, path: str, *args: Any, **options: Any) -> None:
        """Write the trace to a further file, compressed if its name ends in `.gz`."""
        write_json(Path(path), read_json(self._path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finished, name)


def check_torch_handler(handler: Any) -> Callable[[Any], object]:
    """Return `handler` as a function of torch's profiler.

    Raises:
        TrainerConfigError: If `handler` is not callable.
    """
    if not callable(handler):
        raise TrainerConfigError(
            f"`trace_handlers` has a `{type(handler).__name__}`; expected a `JSONTraceHandler`, or a "
            "function of torch's profiler such as `torch.profiler.tensorboard_trace_handler(…)`"
        )
    torch_handler: Callable[[Any], object] = handler
    return torch_handler
