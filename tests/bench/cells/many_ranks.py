"""One phase of a save by thousands of ranks, simulated in one process; prints a JSON object of its figures.

The phases share a folder. `report` packs what each rank sends to rank 0, `commit` is rank 0's work, `open` is
each rank's work at a load, and `reshard` plans a checkpoint of small tensors for as many ranks.

Nothing is written but manifests. Digests are random, since those of real data do not compress.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HIDDEN, WIDE, KEYS, WORDS, LAYERS = 8192, 28672, 1024, 128256, 80
SAVE_ID = "0123456789abcdef" * 2
SMALL_TENSORS, SMALL_SHAPE = 300, (4096, 4)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a transformer of 70B parameters and of AdamW's two moments of each."""
    parameters: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        parameters |= {
            f"layers.{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"layers.{layer}.self_attn.k_proj.weight": (KEYS, HIDDEN),
            f"layers.{layer}.self_attn.v_proj.weight": (KEYS, HIDDEN),
            f"layers.{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"layers.{layer}.mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"layers.{layer}.mlp.up_proj.weight": (WIDE, HIDDEN),
            f"layers.{layer}.mlp.down_proj.weight": (HIDDEN, WIDE),
            f"layers.{layer}.input_layernorm.weight": (HIDDEN,),
            f"layers.{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    parameters |= {"norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}
    states = {f"model.{name}": shape for name, shape in parameters.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        states |= {f"optim.state.{name}.{moment}": shape for name, shape in parameters.items()}
    return states


def memory_mib(field: str = "VmHWM") -> float:
    """Return the peak memory of this process, or with `VmRSS` its memory now."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(field)).split()[1]) / 1024


def snapshot(num_ranks: int) -> Any:
    """Return the tree of a rank, without tensors behind it."""
    import torch

    from hocket.ckpt.document.planning import TensorPlacement
    from hocket.ckpt.torch.layout import TensorInfo
    from hocket.ckpt.torch.saving.plan import SavePlan, StateSnapshot

    placing = TensorPlacement((num_ranks,), tuple(range(num_ranks)), (0,))
    local = torch.empty(0)
    infos = [
        TensorInfo(name, tuple(name.split(".")), "F32", shape, 4, placing, None, local, None)
        for name, shape in shapes().items()
    ]
    plan = SavePlan((), "layout", (), frozenset(), ())
    return StateSnapshot(infos, plan, {}, {}, {"shard": num_ranks})


def written(rank: int, num_ranks: int) -> Iterator[tuple[dict[str, Any], list[tuple[Any, ...]]]]:
    """Yield the record of a rank's file, and its chunks as `ckpt_pack_report` takes them."""
    from hocket.ckpt.document.planning import TensorPlacement, local_box

    placing = TensorPlacement((num_ranks,), tuple(range(num_ranks)), (0,))
    named = shapes()
    boxes = {shape: local_box(shape, placing, rank) for shape in set(named.values())}
    numbers = {name: number for number, name in enumerate(named)}
    entries, chunks, offset = {}, [], 0
    for name in sorted(named):
        box = boxes[named[name]]
        if box is not None and box.num_items:
            entry = f"{name}@{','.join(map(str, box.start))}"
            entries[entry] = (offset, 4 * box.num_items)
            chunks.append((entry, numbers[name], box.start, box.size))
            offset += 4 * box.num_items
    num_blocks = -(-offset // (1 << 20))
    file = {
        "path": f"data/{SAVE_ID[:8]}-r{rank:05d}-000.safetensors",
        "size": 4096 * 64 + offset,
        "data_start": 4096 * 64,
        "header": base64.b64encode(os.urandom(16)).decode(),
        "digests": base64.b64encode(os.urandom(16 * num_blocks)).decode(),
        "entries": entries,
    }
    yield file, chunks


def report(num_ranks: int, folder: Path) -> dict[str, float]:
    """Pack the message of every rank; the seconds are those of one rank."""
    from hocket.ckpt.torch.saving.rank_reports import RankReport, ReportHead
    from hocket.native import _native

    head = ReportHead(destination="`/run/step-1` of step 1", layout="layout", values="values")
    messages, seconds = [], 0.0
    for rank in range(num_ranks):
        for file, chunks in written(rank, num_ranks):
            begin = time.perf_counter()
            packed = _native.ckpt_pack_report(file, chunks)
            messages.append(RankReport(head=head, packed=packed).to_bytes())
            seconds += time.perf_counter() - begin
    (folder / "messages").write_bytes(pickle.dumps(messages))
    total = sum(map(len, messages))
    return {"report_ms": 1e3 * seconds / num_ranks, "reports_mb": total / 1e6}


def commit(num_ranks: int, folder: Path) -> dict[str, float]:
    """Do rank 0's work between the last report and the write of the manifest, at the second save of a job."""
    from hocket.ckpt.torch.saving import rank_reports
    from hocket.ckpt.torch.saving.joined_manifest import joined_tree_of, union_manifest
    from hocket.native import _native

    tree = snapshot(num_ranks)
    begin = time.perf_counter()
    joined_tree_of(tree)
    first_ms = 1e3 * (time.perf_counter() - begin)
    messages = pickle.loads((folder / "messages").read_bytes())
    before = memory_mib("VmRSS") - sum(map(len, messages)) / (1 << 20)
    released = 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal released
        started = time.thread_time()
        result = call()
        released += time.thread_time() - started
        return result

    begin, used = time.perf_counter(), time.thread_time()
    reports = rank_reports.read_reports(messages)
    leads = rank_reports.leads_of(reports)
    assert all(one.is_like(reports[lead]) for one, lead in zip(reports, leads, strict=True))
    packed = timed(lambda: _native.CkptReports([one.packed for one in reports]))
    assert len(packed.files()) == num_ranks
    joined = _Joined(packed, timed)
    manifest = union_manifest(
        save_id=SAVE_ID,
        step=1,
        tree=joined_tree_of(tree),
        tree_of=[0] * num_ranks,
        values=tree.values,
        integer_keyed=tree.integer_keyed,
        mesh=tree.mesh,
        inlined={},
        reports=joined,  # type: ignore[arg-type]
        user=b"null",
        policy="reseed",
    )
    seconds, used = time.perf_counter() - begin, time.thread_time() - used
    (folder / "checkpoint.json.zst").write_bytes(manifest)
    return {
        "commit_s": seconds,
        "commit_cpu_s": used,
        "commit_lock_ms": 1e3 * (used - released),
        "commit_first_ms": first_ms,
        "commit_mib": memory_mib() - before,
        "manifest_mb": len(manifest) / 1e6,
    }


class _Joined:
    """Reports whose join is timed: it releases the interpreter's lock."""

    def __init__(self, reports: Any, timed: Callable[[Callable[[], Any]], Any]) -> None:
        self._reports = reports
        self._timed = timed

    def join(self, *arguments: Any, **keywords: Any) -> Any:
        """Join the reports."""
        return self._timed(lambda: self._reports.join(*arguments, **keywords))


def open_(num_ranks: int, folder: Path) -> dict[str, float]:
    """Open the checkpoint, as each rank does at a load."""
    import hocket.ckpt

    before = memory_mib("VmRSS")
    begin, used = time.perf_counter(), time.process_time()
    opened = hocket.ckpt.open(folder)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    assert opened.manifest.world_size == num_ranks
    return {"open_s": seconds, "open_cpu_s": used, "open_mib": memory_mib() - before}


def reshard(num_ranks: int, folder: Path) -> dict[str, float]:
    """Plan a checkpoint of small tensors for as many ranks."""
    from hocket.ckpt.document.records import TensorRecord
    from hocket.ckpt.formats.hocket import plan_shards

    tensors = {
        f"t{number}": TensorRecord(dtype="F32", shape=SMALL_SHAPE, path=(f"t{number}",))
        for number in range(SMALL_TENSORS)
    }
    before = memory_mib("VmRSS")
    begin, used = time.perf_counter(), time.process_time()
    plan = plan_shards(
        str(folder),
        tensors,
        ranks=num_ranks,
        file_bytes=64 << 20,
        save_id=SAVE_ID,
        compression=None,
        writer="bench",
    )
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    num_chunks = SMALL_TENSORS * min(num_ranks, SMALL_SHAPE[0])
    assert len(plan.files) == min(num_ranks, SMALL_SHAPE[0])
    return {
        "reshard_s": seconds,
        "reshard_us_per_chunk": 1e6 * used / num_chunks,
        "reshard_mib": memory_mib() - before,
    }


PHASES = {"report": report, "commit": commit, "open": open_, "reshard": reshard}


def main() -> None:
    """Run one phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    json.dump(PHASES[arguments.phase](arguments.ranks, arguments.folder), sys.stdout)


if __name__ == "__main__":
    main()
