"""`hocket-ckpt verify`."""

import dataclasses
import sys
import time

from rich.console import Console
from rich.text import Text

from hocket.ckpt.cli.progress import progress
from hocket.ckpt.cli.text import console, count, print_json, size
from hocket.ckpt.datafiles import stored_bytes
from hocket.ckpt.formats.catalogue import Catalogue
from hocket.ckpt.reader import open  # noqa: A004 - this package's own
from hocket.ckpt.verifying import Flaw, Verdict, verify

__all__ = ["show"]


def show(uri: str, *, strict: bool = False, as_json: bool) -> bool:
    """Verifies a checkpoint and prints the verdict; whether it is sound."""
    began = time.monotonic()
    if as_json:
        verdict = verify(uri, strict=strict)
        print_json(_document(verdict))
        return verdict.is_sound
    out = console()
    if sys.stdout.isatty():
        verdict = _with_progress(uri, strict, out)
    else:
        verdict = verify(uri, strict=strict, on_file=_FilePrinter(out))
    _print_verdict(out, verdict, time.monotonic() - began)
    return verdict.is_sound


def _with_progress(uri: str, strict: bool, out: Console) -> Verdict:
    total = sum(map(stored_bytes, open(uri).contents.files))
    print_file, done = _FilePrinter(out), 0
    with progress("verifying", quiet=False, out=out) as on_progress:

        def on_file(path: str, size: int, flaws: list[Flaw]) -> None:
            nonlocal done
            done += size
            on_progress(done, total)
            if flaws:
                print_file(path, size, flaws)

        return verify(uri, strict=strict, on_file=on_file)


class _FilePrinter:
    """Prints a file's flaws, or that it has none."""

    def __init__(self, out: Console) -> None:
        self._out = out

    def __call__(self, path: str, num_bytes: int, flaws: list[Flaw]) -> None:
        if not flaws:
            self._out.print(Text.assemble(("ok   ", "green"), f"{path}  {size(num_bytes)}"))
        for flaw in flaws:
            where = "" if flaw.offset is None else f" at data offset {flaw.offset}"
            self._out.print(Text.assemble(("BAD  ", "bold red"), f"{path}{where}: {flaw.problem}"))
            for name in flaw.tensors:
                self._out.print(Text.assemble("       ", (name, "red")))
            for chunk in flaw.chunks:
                if chunk not in flaw.tensors:
                    self._out.print(Text.assemble("       chunk ", (chunk, "red")))


def _print_verdict(out: Console, verdict: Verdict, seconds: float) -> None:
    contents = verdict.contents
    if isinstance(contents, Catalogue):
        zips = count(verdict.num_blocks, "zip") + " by CRC-32"
        by = "layout only: it has no digests" if contents.format == "safetensors" else zips
        checked = f"{count(len(contents.files), 'file')}, {size(verdict.num_bytes)}, {by}, {seconds:.1f} s"
    else:
        checked = (
            f"{count(len(contents.files), 'file')}, {count(verdict.num_blocks, 'block')}, "
            f"{size(verdict.num_bytes)} read in {seconds:.1f} s"
        )
    if verdict.is_sound:
        num_tensors = count(len(verdict.contents.tensors), "tensor")
        out.print(Text.assemble(("sound", "bold green"), f": {num_tensors}; {checked}"))
        return
    hit = f"{count(len(verdict.flaws), 'flaw')} in {count(len(verdict.bad_tensors), 'tensor')}"
    out.print(Text.assemble(("corrupt", "bold red"), f": {hit}; {checked}"))


def _document(verdict: Verdict) -> dict[str, object]:
    return {
        "uri": verdict.uri,
        "sound": verdict.is_sound,
        "files": len(verdict.contents.files),
        "blocks": verdict.num_blocks,
        "bytes": verdict.num_bytes,
        "tensors": len(verdict.contents.tensors),
        "bad_tensors": verdict.bad_tensors,
        "flaws": [dataclasses.asdict(flaw) for flaw in verdict.flaws],
    }
