"""`hocket-ckpt demo`."""

import shlex

from rich.text import Text

from hocket.ckpt.verbs.demo import write_demo
from hocket.native.cli.text import console, count, size

__all__ = ["show"]


def show(directory: str) -> None:
    """Write the demo checkpoint and print commands to try on it."""
    manifest = write_demo(directory)
    out = console()
    num_bytes = sum(file["size"] for file in manifest.files)
    summary = f"{count(len(manifest.tensors), 'tensor')}, {size(num_bytes)}"
    out.print(
        f"Wrote {directory}: {summary}, by {count(manifest.world_size, 'rank')} in {len(manifest.files)} "
        "files."
    )
    out.print()
    quoted = shlex.quote(directory)
    for command, purpose in (
        (f"inspect {quoted}", "what is in it, and which rank wrote what"),
        (f"inspect {quoted} --tensor model.embed.weight", "one tensor's numbers"),
        (f"verify {quoted}", "every byte against its digest"),
    ):
        out.print(Text.assemble(("  hocket-ckpt " + command, "bold"), (f"   # {purpose}", "dim")))
