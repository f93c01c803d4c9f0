"""An ordinary training script, to which tests pass invalid arguments.

`hocket-launch -n 2 job.py --out DIR --attempts JSON` trains once for each object of the list, one after the
other in the same processes. The outcomes of a rank's attempts are in `DIR/rank{r}.json`; the script ends with
the last error. In an attempt, `rank1` holds arguments for rank 1 only, and `env` variables set while it runs.

A script of one attempt runs without further help. Several attempts share one process group, and a rank that
has finished them waits for the others, because the launcher ends all ranks when one exits with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.stream import StreamingDataLoader, StreamingDataset
from hocket.trainer import Trainer


class Regression(torch.nn.Module):
    """A model in the form that the trainer needs: `forward(batch)` and `loss(outputs, batch)`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [4, *[width] * depth]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def loss(self, outputs, batch):
        return (outputs.mean(dim=1) - batch["x"].mean(dim=1)).square().mean()


@contextmanager
def surroundings(env: dict[str, str | None], file_limit: int | None):
    """Change environment variables (None removes), and limit the size of files, as on a full disk."""
    before = {name: os.environ.get(name) for name in env}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    set_all(env)
    if file_limit is not None:
        signal.signal(
            signal.SIGXFSZ, signal.SIG_IGN
        )  # the write then fails with EFBIG, as a full disk's does
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        set_all(before)


def set_all(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def train(
    *,
    remote: str | None = None,
    local: str | None = None,
    download_timeout: float = 120.0,
    width: int = 8,
    depth: int = 1,
    steps: int = 4,
    dist_timeout: float = 20.0,
    **options: object,
) -> float:
    torch.manual_seed(1)
    if "parallelism_config" not in options:
        options.setdefault("fsdp_config", {})
    model = Regression(width, depth)
    dataset = StreamingDataset(
        remote=remote, local=local, global_batch_size=4, download_timeout=download_timeout
    )
    trainer = Trainer(
        model=model,
        train_dataloader=StreamingDataLoader(dataset),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration=f"{steps}ba",
        progress_bar=False,
        dist_timeout=dist_timeout,
        **options,
    )
    with trainer:
        trainer.fit()
        return float(trainer.state.loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attempts", type=json.loads, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    outcomes: list[dict[str, object]] = []
    (args.out / f"pid{rank}").write_text(str(os.getpid()))
    last: Exception | None = None
    if len(args.attempts) > 1:
        dist.init_process_group("gloo")
    for attempt in args.attempts:
        only = attempt.pop("rank1", {})
        attempt.update(only if rank == 1 else {})
        began = time.monotonic()
        outcome: dict[str, object] = {}
        try:
            with surroundings(attempt.pop("env", {}), attempt.pop("file_limit", None)):
                outcome["loss"] = train(**attempt)
        except Exception as error:  # noqa: BLE001 - told to the test; the last one leaves the script
            last = error
            outcome |= {"class": f"{type(error).__module__}.{type(error).__name__}", "message": str(error)}
        outcome["seconds"] = time.monotonic() - began
        outcomes.append(outcome)
        (args.out / f"rank{rank}.json").write_text(json.dumps(outcomes))
    if len(args.attempts) > 1:
        dist.barrier()
        dist.destroy_process_group()
    if last is not None:
        raise last


if __name__ == "__main__":
    main()
