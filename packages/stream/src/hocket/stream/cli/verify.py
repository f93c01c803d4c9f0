"""`hocket-stream verify`."""

import dataclasses
import time

from rich.text import Text

from hocket.native.cli.progress import progress
from hocket.native.cli.text import OutputConsole, console, count, print_json, size
from hocket.stream.cli.exit_codes import in_options_of
from hocket.stream.read.dataset_index import DatasetIndex
from hocket.stream.verify import CheckedShard, VerifyReport, verify

__all__ = ["show"]


def show(uri: str, *, split: str | None = None, config: str | None = None, as_json: bool) -> bool:
    """Verify a data set, or a split of it, and print the result; return whether it is intact."""
    start_s = time.monotonic()
    total = DatasetIndex(uri, split=split, config=config).stored_bytes
    out = console()
    num_read = 0
    with progress("verifying", quiet=as_json) as show:

        def on_shard(shard: CheckedShard) -> None:
            nonlocal num_read
            num_read += shard.num_bytes
            show(num_read, total)
            if not as_json:
                _print_shard(out, shard)

        verdict = verify(uri, split=split, config=config, on_shard=on_shard)
    if as_json:
        print_json(_document(verdict))
        return not verdict.bad
    seconds = time.monotonic() - start_s
    read = f"{size(sum(shard.num_bytes for shard in verdict.shards))} in {seconds:.1f} s"
    if verdict.bad:
        summary = f"{len(verdict.bad)} of {count(len(verdict.shards), 'shard')}"
        out.print(Text.assemble(("corrupt", "bold red"), f": {summary}; {read}"))
    else:
        out.print(Text.assemble(("sound", "bold green"), f": {count(len(verdict.shards), 'shard')}; {read}"))
    return not verdict.bad


def _print_shard(out: OutputConsole, shard: CheckedShard) -> None:
    if shard.problem is not None:
        out.print(Text.assemble(("BAD  ", "bold red"), f"{shard.name}: {_problem(shard)}"))
    elif not out.is_terminal:
        out.print(Text.assemble(("ok   ", "green"), f"{shard.name}  {size(shard.num_bytes)}"))


def _document(verdict: VerifyReport) -> dict[str, object]:
    return {
        "uri": verdict.uri,
        "sound": not verdict.bad,
        "shards": len(verdict.shards),
        "bytes": sum(shard.num_bytes for shard in verdict.shards),
        "bad": [dataclasses.asdict(shard) | {"problem": _problem(shard)} for shard in verdict.bad],
    }


def _problem(shard: CheckedShard) -> str:
    return in_options_of(shard.problem or "", ())
