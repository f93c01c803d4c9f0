"""A batch script for Slurm: a launcher on each node, a notice before the time limit, and a requeue."""

import shlex
import signal
import sys
from pathlib import Path

from hocket.dist.launch.engines.job import EngineJob

# Signals of which a time limit's notice can be told apart from Slurm's own SIGTERM, the best first.
_NOTICES = ("SIGUSR1", "SIGUSR2", "SIGHUP")

_SCRIPT = """\
#!/bin/bash
{directives}
# {notice} comes {grace_s} s before the time limit: the ranks save, the launchers end with {code}, and the
# job is queued again if it has saved since its start. With `autoresume=True` in the script it goes on there.
# `scancel` and preemption send SIGTERM: the ranks save, and Slurm decides whether the job is queued again.
trap : TERM HUP  # this shell waits for the launchers
export HOCKET_STATUS_FILE=${{TMPDIR:-/tmp}}/hocket-status-$SLURM_JOB_ID
rm -f "$HOCKET_STATUS_FILE"

# The ranks are killed `KillWait` s after the limit. They begin no save that would end later.
limit=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\\([0-9T:-]*\\).*/\\1/p')
if [ -n "$limit" ]; then
    SLURM_JOB_END_TIME=$(date -d "$limit" +%s) && export SLURM_JOB_END_TIME
fi
wait_s=$(scontrol show config | sed -n 's/^KillWait *= *\\([0-9]*\\) .*/\\1/p')
export HOCKET_GRACE_S=${{wait_s:-30}}

# A launcher that ends must not end the others: they may be saving.
srun {srun} {command}
code=$?
saved=$(cat "$HOCKET_STATUS_FILE" 2> /dev/null)
rm -f "$HOCKET_STATUS_FILE"
if [ "$code" -eq {code} ] && [ -n "$saved" ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq {code} ]; then
    echo "hocket-launch: no checkpoint was saved since the start, so the job is not queued again" >&2
fi
exit "$code"
"""


def batch_script(job: EngineJob) -> str:
    """Return a script for `sbatch`."""
    names = [name.strip() for name in job.save_signals.split(",")]
    notice = next((name for name in _NOTICES if name in names), names[0])
    grace_s = round(job.grace_s)
    directives = [f"--job-name={job.name}", f"--nodes={job.nodes.rpartition(':')[2]}", "--ntasks-per-node=1"]
    if job.gpus:
        directives.append(f"--gpus-per-node={job.gpus}")
    directives.append(f"--cpus-per-task={job.cpus}" if job.cpus else "--exclusive")
    directives += ["--requeue", "--open-mode=append", f"--signal={notice.removeprefix('SIG')}@{grace_s}"]
    srun = ["--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"]
    if job.cpus:
        srun.append(f"--cpus-per-task={job.cpus}")
    nodes = []
    if ":" in job.nodes:
        # The nodes that are left go on.
        directives.append("--no-kill")
        srun.append("--no-kill")
        nodes = ["--nnodes", job.nodes]
    # The nodes may have another `PATH`.
    program = Path(sys.executable).with_name("hocket-launch")
    launcher = [str(program)] if program.is_file() else [sys.executable, "-m", "hocket.dist.launch"]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in [*directives, *_options(job.engine_options)]),
        notice=notice,
        grace_s=grace_s,
        code=128 + signal.Signals[notice],
        srun=" ".join(srun),
        command=shlex.join([*launcher, *nodes, *job.options, *job.script]),
    )


def _options(words: list[str]) -> list[str]:
    """Return the user's options for `sbatch`, each with its value, after ours, since the last one counts."""
    options: list[str] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append(shlex.quote(word))
        else:
            options[-1] += f" {shlex.quote(word)}"
    return options
