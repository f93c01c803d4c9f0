"""The `hocket` command."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hocket.ckpt.cli.app import app as ckpt_app
from hocket.native.cli.exits import run
from hocket.native.cli.verbosity import Verbose
from hocket.stream.cli.app import app as stream_app

app = typer.Typer(name="hocket", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _told(error: Exception) -> str:
    """Return the message of an error, and its code if it has one."""
    code = getattr(error, "code", None)
    return str(error) if code is None else f"{error} [{code}]"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hocket {importlib.metadata.version('hocket')}")
        raise typer.Exit


@app.callback()
def hocket(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """PyTorch training that resumes after a crash."""


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for logs, the picture and, without --store, everything.")
    ] = Path("out"),
    store: Annotated[
        str | None, typer.Option(help="Object store for data and checkpoints: s3://bucket/prefix.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches to train.")] = 24,
    ranks: Annotated[
        str, typer.Option(help="Processes of the run that is killed, then of each resumption.")
    ] = "2,2,1,4",
) -> None:
    """Train, kill the job in the middle of a save, resume it elsewhere, and show that nothing changed."""
    # Imported here so that `hocket --help` does not wait for torch.
    from hocket.native.errors import HocketError
    from hocket.recipes.demo import DemoOptions, run_demo
    from hocket.recipes.demo.jobs import JobFailedError
    from hocket.recipes.demo.run import DemoError

    console = Console()
    try:
        numbers = tuple(int(number) for number in ranks.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"`{ranks}` is not a list of whole numbers like 2,2,1,4", param_hint="--ranks"
        ) from None
    try:
        passed = run_demo(DemoOptions(out=out, store=store, steps=steps, ranks=numbers), console)
    except DemoError as error:
        raise typer.BadParameter(str(error)) from error
    except (JobFailedError, HocketError) as error:
        Console(stderr=True).print(f"[red]hocket demo:[/] {escape(_told(error))}", highlight=False)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if passed else 1)


@app.command()
def train(
    config: Annotated[
        str | None, typer.Argument(help="A run's YAML file; with --resume, the first setting.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings in place of the file's: optimizer.lr=3e-4 …")
    ] = None,
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the resolved configuration, and do not train.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume from a checkpoint of such a run, or from the newest in a folder; needs no file."
        ),
    ] = None,
) -> None:
    """Train a run from a file; `hocket-launch -n 2 -m hocket.recipes train run.yaml` on several ranks."""
    # Imported here so that `hocket --help` does not wait for torch.
    from hocket.algos import AlgorithmError
    from hocket.native.errors import HocketError
    from hocket.recipes.config.reading import as_yaml, file_of, read_config, with_overrides
    from hocket.recipes.config.resolving import resolve
    from hocket.recipes.config.resume import config_to_resume
    from hocket.recipes.config.trainer import trainer_from
    from hocket.trainer.errors import DurationReachedError, TrainerError
    from hocket.trainer.log.notices import print_notices

    changes = list(settings or [])
    try:
        if resume is not None:
            # `changes` are applied afterwards, because one of them may name another checkpoint.
            run_config, folder = config_to_resume(resume)
            changes = [*([] if config is None else [config]), *changes]
        elif config is None:
            raise typer.BadParameter("give a YAML file, or --resume with a checkpoint", param_hint="CONFIG")
        else:
            run_config, folder = read_config(config), str(file_of(config).resolve().parent)
        run_config = with_overrides(run_config, changes)
        if is_printed:
            sys.stdout.write(as_yaml(resolve(run_config)))
            return
        with trainer_from(run_config, folder=folder) as trainer:
            try:
                trainer.fit()
            except DurationReachedError:
                # As with `autoresume`, a resumed run that has nothing left to do is no failure.
                if resume is None or (most := trainer.state.max_duration) is None:
                    raise
                notice = f"the run has trained for its `max_duration` of {most.describe()}: it is finished"
                print_notices(trainer.state, [f"{notice}; a longer `training.max_duration` goes on"])
    except (AlgorithmError, HocketError, TrainerError) as error:
        Console(stderr=True).print(f"[red]hocket train:[/] {escape(_told(error))}", highlight=False)
        raise typer.Exit(1) from error


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def drill(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A training script; its arguments follow.")],
    ranks: Annotated[int, typer.Option("-n", "--nproc", help="Processes, an even number.")] = 2,
    faults: Annotated[
        str | None, typer.Option(help="Names, divided by commas, such as killed,stopped; all by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds that a collective may take.")] = 15.0,
    restarts: Annotated[int, typer.Option("--max-restarts", help="Restarts of the job.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="An empty folder for logs; a temporary one by default.")
    ] = None,
) -> None:
    """Inject faults into a job on this machine, and show how it goes on: `hocket drill train.py {run}`.

    `{run}` in the script's arguments stands for a folder of each run's own, for its checkpoints.
    """
    # Imported here so that `hocket --help` does not wait for torch.
    from hocket.dist.drill.faults import select

    try:
        chosen = select(faults)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faults") from None
    if out is not None and out.exists() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty", param_hint="--out")
    from hocket.dist.drill.table import run_drill
    from hocket.dist.errors import DistError

    try:
        rows = run_drill(
            [str(script), *context.args],
            chosen,
            ranks=ranks,
            steps=steps,
            timeout_s=timeout,
            restarts=restarts,
            folder=out,
        )
    except DistError as error:
        Console(stderr=True).print(f"[red]hocket drill:[/] {escape(_told(error))}", highlight=False)
        raise typer.Exit(1) from error
    # After an out-of-memory error the trainer halves the microbatch, which adds in another order.
    is_well = all(row.problem or row.is_equal is not False or row.fault.name == "memory" for row in rows)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def samples(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A folder of checkpoints, or one of them; or a URI.")
    ],
    step: Annotated[int, typer.Option(metavar="N", help="The step, as loggers count: from 1 on.")],
    data: Annotated[
        list[str], typer.Option(metavar="DATA", help="The run's data set; again for each further stream.")
    ],
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Only the part of this data-parallel rank.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="How many there are; by default, as in the checkpoint.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many samples; 0: all of them.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Name the samples of a step, from the nearest checkpoint and the order of the data; reads no sample."""
    from hocket.native.errors import HocketError
    from hocket.recipes.samples import show

    try:
        show(run, step, data=data, rank=rank, num_ranks=ranks, limit=limit, as_json=as_json)
    except HocketError as error:
        Console(stderr=True).print(f"[red]hocket samples:[/] {escape(_told(error))}", highlight=False)
        raise typer.Exit(1) from error


@app.command()
def replay(
    script: Annotated[str, typer.Argument(help="A training script, or a YAML file of `hocket train`.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The step, as loggers count: from 1 on.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's arguments, after `--`, as the run had them.")
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--nproc", help="Processes, if the run had several.")] = 1,
    run_folder: Annotated[
        str | None,
        typer.Option(
            "--run", help="The folder or URI of the checkpoints, if not the script's `save_folder`."
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Run the script from its beginning, without a checkpoint.")
    ] = False,
    other: Annotated[
        str | None,
        typer.Option(
            "--until-different",
            metavar="OTHER",
            help="Another script, or another folder of checkpoints of this one: find where the runs part.",
        ),
    ] = None,
    other_arguments: Annotated[
        str | None,
        typer.Option(help="The arguments of OTHER as one text, if they are not those of SCRIPT."),
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many layers; 0: all of them.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Run a step again from the nearest checkpoint; compare its loss, find its first bad tensor."""
    # Imported here so that `hocket --help` does not wait for torch.
    from hocket.native.errors import HocketError
    from hocket.recipes.replay.command import compare_runs, replay_here, replay_on_ranks
    from hocket.trainer.errors import TrainerError

    try:
        if other is not None:
            if from_start:
                raise typer.BadParameter("is not for `--until-different`", param_hint="--from-start")
            raise typer.Exit(
                compare_runs(
                    script,
                    other,
                    arguments or [],
                    step=step,
                    run=run_folder,
                    is_module=is_module,
                    num_ranks=ranks,
                    other_arguments=None if other_arguments is None else shlex.split(other_arguments),
                    as_json=as_json,
                )
            )
        if step is None:
            raise typer.BadParameter("give the step to replay, or `--until-different`", param_hint="--step")
        if other_arguments is not None:
            raise typer.BadParameter("is only for `--until-different`", param_hint="--other-arguments")
        if ranks > 1:
            raise typer.Exit(replay_on_ranks(ranks, sys.argv[1:]))
        is_different = replay_here(
            script,
            step,
            arguments or [],
            run=run_folder,
            from_start=from_start,
            is_module=is_module,
            limit=limit,
            as_json=as_json,
        )
    except (HocketError, TrainerError) as error:
        Console(stderr=True).print(f"[red]hocket replay:[/] {escape(_told(error))}", highlight=False)
        raise typer.Exit(1) from error
    raise typer.Exit(1 if is_different else 0)


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False) -> None:
    """Show versions, devices, stores and the variables that matter, for a report; no secrets."""
    from hocket.native.cli.text import print_json
    from hocket.recipes.environment import describe, lines

    document = describe()
    if as_json:
        print_json(document)
    else:
        print("\n".join(lines(document)))


@app.command()
def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="The code in a message, such as HKT-TR09; all without it."),
    ] = None,
) -> None:
    """Explain an error: why it is raised, and what to do."""
    from hocket.native.cli.explain import explain as show

    show("hocket", code)


app.add_typer(ckpt_app, name="ckpt")
app.add_typer(stream_app, name="stream")


def main() -> None:
    """Run the `hocket` command."""
    run("hocket", app)
