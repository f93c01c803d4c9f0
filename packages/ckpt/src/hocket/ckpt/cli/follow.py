"""`hocket-ckpt follow`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hocket.ckpt.cli.exit_codes import exit_on_error

if TYPE_CHECKING:
    from hocket.ckpt.weights.follower import WeightUpdate

__all__ = ["add_follow"]


def add_follow(app: typer.Typer) -> None:
    """Add the subcommand `follow` to the command."""

    @app.command()
    def follow(
        uri: Annotated[str, typer.Argument(metavar="URI", help="The prefix of published weights.")],
        directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to update.")],
        name_prefix: Annotated[
            str, typer.Option(metavar="TEXT", help="Take the tensors with this name prefix, and remove it.")
        ] = "",
        model: Annotated[
            str | None, typer.Option(metavar="FOLDER", help="Copy config and tokenizer of this model.")
        ] = None,
        interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two checks.")] = 1.0,
        once: Annotated[bool, typer.Option("--once", help="End after one check.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print each update as a line of JSON.")] = False,
    ) -> None:
        """Keep a folder with the newest published weights, as one safetensors file, until Ctrl-C."""
        with exit_on_error(app, "follow"):
            _follow(uri, directory, name_prefix, model, interval, once=once, as_json=as_json)


def _follow(
    uri: str,
    directory: str,
    name_prefix: str,
    model: str | None,
    interval: float,
    *,
    once: bool,
    as_json: bool,
) -> None:
    from hocket.ckpt.weights.folder import FolderFollower

    if interval <= 0:
        raise ValueError(f"`--interval` is {interval:g}; expected seconds above 0")
    follower = FolderFollower(uri, directory, name_prefix=name_prefix, model_folder=model)
    if once:
        _print(follower.update(), follower.step, as_json=as_json)
        return
    try:
        while True:
            _print(follower.wait(interval_s=interval), follower.step, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print(update: "WeightUpdate | None", step: int | None, *, as_json: bool) -> None:
    import dataclasses
    import json

    from hocket.native.cli.text import count, size

    if as_json:
        print(
            json.dumps(
                {"step": step, "num_deltas": 0, "num_bytes": 0}
                if update is None
                else dataclasses.asdict(update)
            ),
            flush=True,
        )
        return
    if update is None:
        print(f"step {step} is there already", flush=True)
        return
    way = "whole" if update.is_whole else f"by {count(update.num_deltas, 'delta')}"
    print(f"step {update.step}, {way}, {size(update.num_bytes)} read", flush=True)
