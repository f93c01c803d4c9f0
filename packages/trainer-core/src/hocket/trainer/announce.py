"""What a fit says when it starts, and when it goes on from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hocket.trainer.loader_checks import describe_order, describe_split
from hocket.trainer.state import State


def announce(state: State, *, data_source: str, notices: Iterable[str]) -> None:
    """Print, on the standard error stream, how the run is laid out; on rank 0 alone.

    Args:
        state: Of the run.
        data_source: Where the data's rank and world came from.
        notices: Sentences to add.
    """
    if state.parallelism.data_parallel[0] != 0:
        return
    # Here, not above: rich takes a tenth of a second to import.
    from rich.console import Console
    from rich.table import Table

    describe: Any = getattr(state.parallelism, "describe", None)
    layout = describe() if describe is not None else type(state.parallelism).__name__
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    rows = {
        "model": f"{type(state.model).__name__}, {parameters:,} parameters",
        "device": f"{state.device}, {state.precision}",
        "layout": layout,
        "batch": describe_split(
            state.dataloader, state.parallelism.data_parallel, state.device_train_microbatch_size
        ),
        "data": f"{data_source}; {describe_order(state.dataloader)}",
        "length": f"{state.max_duration}, from {state.timestamp.batch}",
    }
    table = Table.grid(padding=(0, 2))
    for name, told in rows.items():
        table.add_row(f"[bold]{name}[/]", told)
    console = Console(file=sys.stderr, highlight=False)
    console.print(f"[bold]hocket[/] run [bold]{state.run_name}[/]")
    console.print(table)
    for notice in notices:
        console.print(f"note: {notice}", markup=False)
