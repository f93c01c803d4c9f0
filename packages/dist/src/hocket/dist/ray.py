"""Ray Train: training functions for `TorchTrainer`, with Ray's failure policy, notices and checkpoints.

Ray starts a worker for each rank, sets torch's variables, and makes the process group, which Hocket takes as
it is. `python -m hocket.dist.ray --workers N script.py` runs a script in the workers, and `hocket-launch --on
ray` submits that.
"""

import argparse
import functools
import importlib
import json
import os
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.dist.errors import ConfigError

__all__ = ["RayReports", "checkpoint_path", "main", "training_function"]

_STATUS_FILE = "HOCKET_STATUS_FILE"
_POINTER = "hocket.json"
_NOTICE_CODE = 143
_HOLD_S = 600.0
"""Seconds in which Ray ends a worker that has saved; it does so when its notice's deadline is over."""


class RayReports:
    """A callback for the trainer: reports to Ray at the end of epochs, and saves on Ray's notices.

    At each report, Ray gets the batch, the epoch and rank 0's loss, and if a checkpoint has been committed
    since the last report, a checkpoint of its own that names it; `checkpoint_path` returns the name. The data
    stay where the trainer saves them. When Ray announces that a node is preempted, all ranks save after the
    present step, `fit` raises `SystemExit`, and Ray starts the workers again, where the run goes on by
    `autoresume=True`.

    Outside of Ray's workers it does nothing. All workers need it, since a report waits for all.

    Args:
        every_batches: Batches between two reports, in place of the end of each epoch.

    Raises:
        ConfigError: If `every_batches` is below 1.
    """

    def __init__(self, every_batches: int | None = None) -> None:
        if every_batches is not None and every_batches < 1:
            raise ConfigError(f"`every_batches` is {every_batches}, expected 1 or more")
        self._every = every_batches
        self._worker: Any = None

    def fit_start(self, state: Any, logger: Any) -> None:
        """Find the worker in which the fit runs."""
        self._worker = _find_worker()

    def batch_end(self, state: Any, logger: Any) -> None:
        """Pass on a notice, and report if that is due."""
        if self._worker is None:
            return
        if (notice := _notice(self._worker)) is not None:
            end = notice.deadline_ms
            state.give_notice(None if not end else max(end / 1000 - time.time(), 0.0))
        if self._every is not None and state.timestamp.counts.batch % self._every == 0:
            self._report(state)

    def epoch_end(self, state: Any, logger: Any) -> None:
        """Report, unless reports are made by batches."""
        if self._worker is not None and self._every is None:
            self._report(state)

    def _report(self, state: Any) -> None:
        counts = state.timestamp.counts
        metrics = {"batch": counts.batch, "epoch": counts.epoch}
        if state.loss is not None:
            metrics["loss"] = float(state.loss)
        _report(metrics)


def training_function(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for Ray's `TorchTrainer` that calls `train` in each worker.

    An error of `train` goes to Ray's failure policy. After a notice of preemption, on which the run has
    saved, the worker waits for Ray to end it, which Ray counts as a preemption and not as a failure. When
    `train` returns, Ray gets the last checkpoint.

    Args:
        train: A function that makes a trainer with `RayReports()` among its callbacks, and fits. It is called
            with Ray's `train_loop_config` if it takes an argument.
    """

    @functools.wraps(train)
    def run(*arguments: Any) -> Any:
        handle, path = tempfile.mkstemp(prefix="hocket-status-")
        os.close(handle)
        os.environ[_STATUS_FILE] = path
        try:
            result = train(*arguments)
            _report({})
            return result
        except SystemExit as ended:
            if ended.code != _NOTICE_CODE or (worker := _find_worker()) is None:
                raise
            _await_end(worker)
            raise
        finally:
            Path(path).unlink(missing_ok=True)

    return run


def checkpoint_path(checkpoint: Any = None) -> str | None:
    """Return Hocket's checkpoint that a checkpoint of Ray names, for the trainer's `load_path`.

    Args:
        checkpoint: A checkpoint of a `Result`; by default that from which Ray starts this worker.

    Returns:
        The place; None if there is no checkpoint.

    Raises:
        ConfigError: The checkpoint is not one of `RayReports`.
    """
    if checkpoint is None:
        checkpoint = _ray_train().get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        pointer = Path(folder, _POINTER)
        if not pointer.is_file():
            raise ConfigError(
                f"the checkpoint of Ray at {checkpoint.path} has no `{_POINTER}`, so it is none that "
                "`RayReports` has reported. Load it by the code that saved it"
            )
        found = json.loads(pointer.read_text())
    return f"{found['folder'].rstrip('/')}/{found['checkpoint']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script in the workers of a `TorchTrainer`, and return the exit code.

    Args:
        argv: The arguments after the command's name; `sys.argv[1:]` by default.
    """
    options = parser().parse_args(argv)
    train, torch = _ray_train(), importlib.import_module("ray.train.torch")
    resources = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    config = {"script": options.script, "arguments": options.arguments, "is_module": options.module}
    trainer = torch.TorchTrainer(
        training_function(_run_script),
        train_loop_config=config,
        scaling_config=train.ScalingConfig(
            num_workers=options.workers, use_gpu=bool(options.gpus), resources_per_worker=resources
        ),
        run_config=train.RunConfig(
            storage_path=options.storage,
            failure_config=train.FailureConfig(max_failures=options.max_failures),
        ),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        print(f"the last checkpoint is {checkpoint_path(result.checkpoint)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m hocket.dist.ray`."""
    made = argparse.ArgumentParser(prog="python -m hocket.dist.ray", allow_abbrev=False)
    made.add_argument("--workers", type=int, required=True, help="number of ranks")
    made.add_argument("--gpus", type=float, default=1, help="GPUs of each worker (default 1; 0 for none)")
    made.add_argument("--cpus", type=float, default=1, help="CPUs of each worker (default 1)")
    made.add_argument("--max-failures", type=int, default=0, help="restarts after failures; -1 without limit")
    made.add_argument("--storage", help="folder or URI for Ray's own files, which all nodes reach")
    made.add_argument("-m", "--module", action="store_true", help="the script is a module")
    made.add_argument("script")
    made.add_argument("arguments", nargs=argparse.REMAINDER)
    return made


def _run_script(config: Mapping[str, Any]) -> None:
    sys.argv = [config["script"], *config["arguments"]]
    if config["is_module"]:
        runpy.run_module(config["script"], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(config["script"]).resolve().parent))
        runpy.run_path(config["script"], run_name="__main__")


def _ray_train() -> Any:
    try:
        return importlib.import_module("ray.train")
    except ImportError as error:
        raise ConfigError(
            f"`ray.train` cannot be imported: {error}. `pip install 'hocket-dist[ray]'`"
        ) from error


def _find_worker() -> Any:
    """Return Ray's record of this worker; None outside of a worker.

    `ray.train.get_preemption_info` waits for all ranks. The record has the same notice, and the ranks agree
    on it by the trainer's own exchange.
    """
    if "ray.train" not in sys.modules:
        return None
    try:
        context = importlib.import_module("ray.train.v2._internal.execution.context")
        return context.get_train_context()
    except (ImportError, AttributeError, RuntimeError):
        return None


def _notice(worker: Any) -> Any:
    """Return Ray's notice of preemption; None without one, or with a Ray that gives none."""
    return getattr(getattr(worker, "preemption_context", None), "preemption_info", None)


def _report(metrics: Mapping[str, Any]) -> None:
    """Report to Ray, on all workers, with the last checkpoint that rank 0 has not reported yet."""
    train = _ray_train()
    status = os.environ.get(_STATUS_FILE)
    text = Path(status).read_text() if status and Path(status).is_file() else ""
    is_first = train.get_context().get_world_rank() == 0
    if not text or not is_first or text == os.environ.get("HOCKET_RAY_REPORTED"):
        train.report(dict(metrics))
        return
    os.environ["HOCKET_RAY_REPORTED"] = text
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _POINTER).write_text(text)
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder))


def _await_end(worker: Any) -> None:
    """Wait until Ray ends this worker, if it has given a notice."""
    print(
        f"hocket: saved on Ray's notice; waiting for the end: {shlex.quote(str(_notice(worker)))}",
        file=sys.stderr,
    )
    ends = time.monotonic() + _HOLD_S
    while _notice(worker) is not None and time.monotonic() < ends:
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
