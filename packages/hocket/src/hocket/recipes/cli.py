"""The `hocket` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help="PyTorch training that carries on.")


@app.callback()
def hocket() -> None:
    """Keeps `demo` a verb of its own while it is the only one."""


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
    """Trains, is killed in the middle of a save, carries on elsewhere, and shows that nothing changed."""
    # Here and not above: `hocket --help` should not wait for torch.
    from hocket.native.errors import HocketError
    from hocket.recipes.demo import DemoOptions, run_demo
    from hocket.recipes.demo.jobs import JobFailedError
    from hocket.recipes.demo.run import DemoError

    console = Console()
    try:
        numbers = tuple(int(number) for number in ranks.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"`{ranks}` is no list of whole numbers like 2,2,1,4", param_hint="--ranks"
        ) from None
    try:
        passed = run_demo(DemoOptions(out=out, store=store, steps=steps, ranks=numbers), console)
    except DemoError as error:
        raise typer.BadParameter(str(error)) from error
    except (JobFailedError, HocketError) as error:
        Console(stderr=True).print(f"[red]hocket demo:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if passed else 1)


def main() -> None:
    """Entry point of `hocket`."""
    app()
