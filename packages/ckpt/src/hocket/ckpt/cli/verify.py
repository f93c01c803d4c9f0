"""`hocket-ckpt verify`."""

import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hocket.ckpt.document.file_names import stored_bytes
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.read.opener import open  # noqa: A004 - this package's own
from hocket.ckpt.verbs.verify import BadBlock, VerifyReport, verify
from hocket.native.cli.progress import progress
from hocket.native.cli.text import console, count, print_json, size

__all__ = ["show"]


_MAX_FINDINGS = 10


def show(uri: str, *, strict: bool = False, as_json: bool) -> bool:
    """Verify a checkpoint; print the verdict, then the first flaws. Return whether it is sound."""
    start_s = time.monotonic()
    if as_json:
        verdict = verify(uri, strict=strict)
        print_json(_document(verdict))
        return verdict.is_sound
    verdict = _with_progress(uri, strict)
    out = console()
    _print_verdict(out, verdict, time.monotonic() - start_s)
    _print_findings(out, verdict.flaws)
    return verdict.is_sound


def _with_progress(uri: str, strict: bool) -> VerifyReport:
    total = sum(map(stored_bytes, open(uri).contents.files))
    done = 0
    with progress("verifying", quiet=False) as on_progress:

        def on_file(_path: str, size: int, _flaws: list[BadBlock]) -> None:
            nonlocal done
            done += size
            on_progress(done, total)

        return verify(uri, strict=strict, on_file=on_file)


def _print_findings(out: Console, flaws: Sequence[BadBlock]) -> None:
    for flaw in flaws[:_MAX_FINDINGS]:
        location = "" if flaw.offset is None else f" at data offset {flaw.offset}"
        out.print(Text.assemble(("BAD  ", "bold red"), f"{flaw.file}{location}: {flaw.problem}"))
        names = [*flaw.tensors, *(f"chunk {chunk}" for chunk in flaw.chunks if chunk not in flaw.tensors)]
        for name in names[:_MAX_FINDINGS]:
            out.print(Text.assemble("       ", (name, "red")))
        if len(names) > _MAX_FINDINGS:
            out.print(f"       and {len(names) - _MAX_FINDINGS} more")
    if len(flaws) > _MAX_FINDINGS:
        out.print(f"and {len(flaws) - _MAX_FINDINGS} more; `--json` lists all of them")


def _print_verdict(out: Console, verdict: VerifyReport, seconds: float) -> None:
    contents = verdict.contents
    files = count(len(contents.files), "file")
    if FORMATS[contents.format].has_manifest:
        blocks = count(verdict.num_blocks, "block")
        checked = f"{files}, {blocks}, {size(verdict.num_bytes)} read in {seconds:.1f} s"
    else:
        zips = count(verdict.num_blocks, "zip") + " by CRC-32"
        checks = "layout only: it has no digests" if contents.format == "safetensors" else zips
        checked = f"{files}, {size(verdict.num_bytes)}, {checks}, {seconds:.1f} s"
    if verdict.is_sound:
        num_tensors = count(len(verdict.contents.tensors), "tensor")
        out.print(Text.assemble(("sound", "bold green"), f": {num_tensors}; {checked}"))
        return
    summary = f"{count(len(verdict.flaws), 'flaw')} in {count(len(verdict.bad_tensors), 'tensor')}"
    out.print(Text.assemble(("corrupt", "bold red"), f": {summary}; {checked}"))


def _document(verdict: VerifyReport) -> dict[str, object]:
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
