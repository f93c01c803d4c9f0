"""One system's training step over an axis on each rank of a job, beside a bare loop in the same process.

`python -m torch.distributed.run --nproc-per-node 2 sharded_step.py SYSTEM step|resident MODEL PAIRS AXIS`;
rank 0 prints one JSON object. MODEL is one of `MODELS`; PAIRS are the blocks of `step`; AXIS is `dp_shard`,
or one of those for which `bare_axes.py` has a bare loop.

`step` measures three things. Bytes: the highest sum of the bytes of live storages after any operation, from
before the model is made until the second step has ended; this corresponds to
`torch.cuda.max_memory_allocated` on a GPU, and is equal in each run. Processor time and wall clock of a step:
the system and the bare loop alternate in blocks of a few steps, and each block of the system is compared with
the neighbouring block of the bare loop.

`resident` measures the growth of the resident set to its peak (VmHWM) from before the model was made, in a
process that has trained a model already and has imported the system; this includes Python's objects and
gloo's buffers. It also reports the modules that the system imported during the measurement, and the memory
that stayed resident at the end: the process's own, and pages of files such as modules and libraries.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "packages" / "hocket" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import bare_axes

from hocket.recipes.gpt import GPT, GPTConfig
from support.live_bytes import LiveBytes

MODELS = {
    "small": GPTConfig(context=64, width=256, num_layers=4, num_heads=4),  # 3.3 million parameters
    "medium": GPTConfig(context=64, width=512, num_layers=6, num_heads=8),  # 19 million
    "large": GPTConfig(context=64, width=768, num_layers=9, num_heads=12),  # 64 million
}
CONFIG, PAIRS, AXIS = MODELS[sys.argv[3]], int(sys.argv[4]), sys.argv[5]
BATCH, STEPS, WARM_UP = 4, 4, 2
POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32)
Run = Callable[[int], list[tuple[float, float]]]
"""A function that trains for a number of steps and returns wall-clock and processor seconds of each."""


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


class Batches:
    """Yields batches and records when each was requested, so that all systems are timed in the same way."""

    def __init__(self) -> None:
        # The ranks of `dp_shard` alone have data of their own.
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]) if AXIS == "dp_shard" else 0)
        shape = (BATCH, CONFIG.context + 1)
        self.batches = [
            {"tokens": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)} for _ in range(8)
        ]
        self.num = 0
        self.asked: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.num):
            self._note()
            yield self.batches[index % len(self.batches)]
        self._note()

    def _note(self) -> None:
        self.asked.append((time.perf_counter(), time.process_time()))

    def __len__(self) -> int:
        return self.num

    def take(self, num: int, train: Callable[[], object]) -> list[tuple[float, float]]:
        """Run `train` over `num` batches and return the seconds between them."""
        self.num, self.asked = num, []
        train()
        pairs = itertools.pairwise(self.asked)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs][:num]


def shard(model: GPT) -> GPT:
    """Shard the model as torch's tutorial does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return model


def bare() -> Run:
    data = Batches()
    if AXIS == "dp_shard":
        model = shard(build())

        def backward(batch: dict[str, Tensor]) -> None:
            model.loss(model(batch), batch).backward()
    else:
        model, backward = bare_axes.AXES[AXIS](build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for batch in data:
            backward(batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return lambda num: data.take(num, train)


def hocket_dist() -> Run:
    """Return a plain loop that uses Hocket's layout."""
    from hocket.dist import provide

    model, data = build(), Batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module = provide({}, device="cpu").lay_out(model, [optimizer])

    def train() -> None:
        for batch in data:
            model.loss(module(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return lambda num: data.take(num, train)


def hocket() -> Run:
    """Return a run of Hocket's trainer."""
    from hocket.trainer import Trainer

    model, data = build(), Batches()
    data.num = 1
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        **({"fsdp_config": {}} if AXIS == "dp_shard" else {"parallelism_config": {AXIS: 2}}),
        **({"device_train_microbatch_size": 1} if AXIS == "pp" else {}),
        device="cpu",
        progress_bar=False,
        precision="fp32",
    )

    def train() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.fit(f"{data.num}ba")

    return lambda num: data.take(num, train)


def accelerate() -> Run:
    """Return a loop of Accelerate with `fsdp_version=2`, prepared as in its documentation.

    On a CPU, Accelerate replicates the model and ignores the plugin. The two lines that set its state make
    its code for FSDP2 run over gloo.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module, optimizer = accelerator.prepare(model, optimizer)
    if not any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        raise RuntimeError(f"Accelerate did not shard on the CPU: it made a {type(module).__name__}")
    data = Batches()

    def train() -> None:
        for batch in data:
            accelerator.backward(module.loss(module(batch), batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return lambda num: data.take(num, train)


def lightning() -> Run:
    """Return a run of Lightning's `ModelParallelStrategy`, whose `configure_model` calls `fully_shard`."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def configure_model(self) -> None:
            if hasattr(self.model.head.weight, "full_tensor"):
                return
            for block in self.model.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"], mp_policy=POLICY)
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"], mp_policy=POLICY)

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.model.loss(self.model(batch), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = Batches()
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()

    def train() -> None:
        trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 1
        trainer.fit(module, data)

    return lambda num: data.take(num, train)


SYSTEMS: dict[str, Callable[[], Run]] = {
    "bare": bare,
    "hocket_dist": hocket_dist,
    "hocket": hocket,
    "accelerate": accelerate,
    "lightning": lightning,
}


def measure_step(system: str) -> dict[str, list[float]]:
    """Measure the bytes of both loops, then alternate blocks of both."""
    runs, peaks = {}, {}
    for name, make in (("bare", bare), ("system", SYSTEMS[system])):
        with LiveBytes() as meter:
            runs[name] = make()
            runs[name](WARM_UP)
        peaks[name] = meter.peak / 2**20
    figures: dict[str, list[float]] = {"peak_mib": [peaks["system"]], "bare_peak_mib": [peaks["bare"]]}
    for number in range(PAIRS):
        block = {}
        for name in list(runs)[:: 1 if number % 2 else -1]:
            dist.barrier()
            # The first step of a block includes work that a trainer does once.
            walls, cpus = zip(*runs[name](1 + STEPS)[1:], strict=True)
            block[name] = statistics.median(walls), statistics.median(cpus)
        for index, unit in enumerate(("wall", "cpu")):
            system_s, bare_s = block["system"][index], block["bare"][index]
            figures.setdefault(f"{unit}_ms", []).append(system_s * 1e3)
            figures.setdefault(f"bare_{unit}_ms", []).append(bare_s * 1e3)
            figures.setdefault(f"{unit}_ratio", []).append(system_s / bare_s)
    return figures


def measure_resident(system: str) -> dict[str, list[float]]:
    """Return the growth of resident memory to its peak, after a system's imports."""
    if system == "lightning":
        import lightning.pytorch  # noqa: F401
    elif system == "accelerate":
        import accelerate  # noqa: F401
    elif system.startswith("hocket"):
        import hocket.dist
        import hocket.trainer  # noqa: F401
    bare()(WARM_UP)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, modules, parts_before = _status("VmRSS"), set(sys.modules), _resident_parts()
    run = SYSTEMS[system]()
    run(STEPS)
    peak = _status("VmHWM")
    gc.collect()
    parts_after = _resident_parts()
    return {
        "resident_mib": [(peak - before) / 2**20],
        "imported": [len(set(sys.modules) - modules)],
        **{f"{part}_mib": [(parts_after[part] - size) / 2**20] for part, size in parts_before.items()},
    }


def _status(field: str) -> int:
    return _kilobytes(Path("/proc/self/status"), field)


def _resident_parts() -> dict[str, int]:
    """Return the resident bytes that belong to the process alone, and those of files."""
    anonymous = _kilobytes(Path("/proc/self/smaps_rollup"), "Anonymous:")
    return {
        "anonymous": anonymous,
        "of_files": _kilobytes(Path("/proc/self/smaps_rollup"), "Rss:") - anonymous,
    }


def _kilobytes(table: Path, field: str) -> int:
    lines = table.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Measure one system and print the figures of the slower or larger rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    system, mode = sys.argv[1:3]
    dist.init_process_group("gloo")
    figures = measure_step(system) if mode == "step" else measure_resident(system)
    gathered: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, figures)
    if dist.get_rank() == 0:
        largest = {
            key: [
                max(values) for values in zip(*(rank_figures[key] for rank_figures in gathered), strict=True)
            ]
            for key in figures
        }
        print(json.dumps(largest), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
