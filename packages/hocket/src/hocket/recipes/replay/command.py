"""The command `hocket replay`: in this process, or in a job of several ranks on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence

from hocket.recipes.replay.report import replay_step, show
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
        Whether the loss differs from the recorded one.
    """
    # The report alone goes to stdout; what the script prints goes beside the messages of the trainer.
    with contextlib.redirect_stdout(sys.stderr):
        report = replay_step(script, step, arguments, run=run, from_start=from_start, is_module=is_module)
    if global_rank() == 0:
        show(report, limit=limit, as_json=as_json)
    return report.verdict == "different"


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
