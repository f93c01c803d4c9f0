"""The training script, configuration or module that a replay runs."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hocket.recipes.config.reading import file_of, read_config, with_overrides
from hocket.recipes.config.trainer import trainer_from
from hocket.trainer.errors import ReplayError
from hocket.trainer.replay import Replay, ReplayFinished, replaying


def run_within(replay: Replay, script: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a training script within a replay, up to the end of the replay's last step.

    Args:
        replay: The replay, which takes what is found.
        script: A Python file, the YAML file of `hocket train`, or the name of a module.
        arguments: The script's arguments; for a YAML file, settings in place of the file's.
        is_module: Whether `script` is the name of a module.

    Raises:
        ReplayError: There is no such file, or the script ended before the step.
    """
    if not is_module and not Path(script).is_file():
        raise ReplayError(
            f"there is no file `{script}`; expected a training script, or a YAML file of `hocket train`"
        )
    code: object = 0
    with replaying(replay):
        try:
            _run(script, arguments, is_module=is_module)
        except ReplayFinished:
            return
        except SystemExit as ended:
            code = ended.code
    if replay.is_over:
        return  # the script has turned the end of the replay into an exit of its own
    last = max(replay.losses.losses(), default=replay.start_step)
    ending = "" if code in (0, None) else f", with exit code {code}"
    raise ReplayError(
        f"the script ended after step {last}, before step {replay.step}{ending}. Give it the arguments of "
        "the run, with a duration that contains the step"
        + ("" if replay.location else "; it made no `hocket.trainer.Trainer` that trained")
    )


def _run(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    if not is_module and script.endswith((".yaml", ".yml")):
        config = with_overrides(read_config(script), arguments)
        with trainer_from(config, folder=str(file_of(script).resolve().parent)) as trainer:
            trainer.fit()
        return
    argv, path = sys.argv, sys.path.copy()
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
