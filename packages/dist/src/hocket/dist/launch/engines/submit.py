"""The submission of a job to an engine, by the engine's own command."""

import shutil
import subprocess

from hocket.dist.errors import ConfigError
from hocket.dist.launch.engines.job import EngineJob
from hocket.dist.launch.engines.kubernetes import job_set
from hocket.dist.launch.engines.slurm import batch_script


def submit(engine: str, job: EngineJob, *, prints: bool) -> int:
    """Submit a job, or print what would be submitted.

    Args:
        engine: One of `ENGINES`.
        job: The job.
        prints: Whether to print it only.

    Returns:
        The exit code of the engine's command.

    Raises:
        ConfigError: The engine's command is not installed here.
    """
    if engine == "slurm":
        command, text = ["sbatch"], batch_script(job)
    else:
        command, text = ["kubectl", "create", *job.engine_options, "-f", "-"], job_set(job)
    if prints:
        print(text, end="")
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"`{command[0]}` was not found, by which a job is submitted. Submit from a machine that has it, "
            "or pass `--print` and take the text there"
        )
    return subprocess.run(command, input=text, text=True, check=False).returncode
