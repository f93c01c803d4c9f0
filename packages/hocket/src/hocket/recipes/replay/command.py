"""The command `hocket replay`: in this process, or in a job of several ranks on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hocket.native.paths import is_uri
from hocket.recipes.replay.difference import Side, find_difference
from hocket.recipes.replay.difference import show as show_difference
from hocket.recipes.replay.report import replay_step, show
from hocket.trainer.errors import ReplayError
from hocket.trainer.process.world import global_rank


def replay_here(
    script: str,
    step: int,
    arguments: Sequence[str],
    *,
    run: str | None,
    from_start: bool,
    is_module: bool,
    limit: int,
    as_json: bool,
) -> bool:
    """Replay a step in this process, and print the report on rank 0.

    Returns:
        Whether the loss differs from the recorded one; on the other ranks than rank 0, False.
    """
    # The report alone goes to stdout; what the script prints goes beside the messages of the trainer.
    with contextlib.redirect_stdout(sys.stderr):
        report = replay_step(script, step, arguments, run=run, from_start=from_start, is_module=is_module)
    if global_rank() == 0:
        show(report, limit=limit, as_json=as_json)
    # The launcher ends all ranks when one exits with another code than 0, so the rank that prints does.
    return report.verdict == "different" and global_rank() == 0


def compare_runs(
    script: str,
    other: str,
    arguments: Sequence[str],
    *,
    step: int | None,
    run: str | None,
    is_module: bool,
    num_ranks: int,
    other_arguments: Sequence[str] | None,
    as_json: bool,
) -> int:
    """Print the first step and tensor at which two runs part, and return the exit code.

    Args:
        script: The script of both runs, or of the first one.
        other: The script of the second run; or the folder of its checkpoints, if both have one script.
        arguments: The arguments of the scripts, or of the first one.
        step: The last step to compare; None for as far as both runs came.
        run: The folder of the first run's checkpoints; None for the script's `save_folder`.
        is_module: Whether scripts are names of modules.
        num_ranks: Number of ranks of each run.
        other_arguments: The arguments of the second run; None for those of the first one.
        as_json: Whether to print JSON.

    Raises:
        ReplayError: A run cannot be replayed, or there is no `other`.
    """
    one = Side(script=script, arguments=arguments, run=run, is_module=is_module, num_ranks=num_ranks)
    is_script = Path(other).is_file() or (is_module and not Path(other).is_dir() and "/" not in other)
    if not is_script and not is_uri(other) and not Path(other).is_dir():
        raise ReplayError(
            f"there is no file or folder `{other}`; expected another script, or a folder or URI of "
            "checkpoints"
        )
    second = replace(one, script=other, run=None) if is_script else replace(one, run=other)
    if other_arguments is not None:
        second = replace(second, arguments=other_arguments)
    found = find_difference(one, second, step=step)
    show_difference(found, as_json=as_json)
    return 0 if found.step is None and not found.hint else 1


def replay_on_ranks(ranks: int, given: Sequence[str]) -> int:
    """Run the command in a job of several ranks on this machine, and return its exit code.

    Args:
        ranks: Number of ranks.
        given: The arguments of the command, `-n` among them.
    """
    launch = [sys.executable, "-m", "hocket.dist.launch", "-n", str(ranks), "-m", "hocket.recipes"]
    return subprocess.call([*launch, *without_ranks(given)])


def without_ranks(given: Sequence[str]) -> list[str]:
    """Return arguments of the command without `-n` and its number; the script's own, after `--`, are kept."""
    own = list(given)
    rest = own[own.index("--") :] if "--" in own else []
    own = own[: len(own) - len(rest)]
    kept: list[str] = []
    words = iter(own)
    for word in words:
        if word in ("-n", "--nproc"):
            next(words, None)
        elif not word.startswith("--nproc=") and not (word.startswith("-n") and word[2:].isdecimal()):
            kept.append(word)
    return [*kept, *rest]
