"""One training job of the demo, as each rank runs it: `hocket-launch -n 2 -m hocket.recipes.train --help`.

It is an ordinary training script: a model, a data set, an optimizer and a `Trainer`. Only the `Journal` is
specific to the demo: it records the samples that each step was trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch

from hocket.recipes.corpus import CONTEXT, GLOBAL_BATCH
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.stream import StreamingDataLoader, StreamingDataset
from hocket.trainer import Callback, DataSpec, Logger, State, Trainer
from hocket.trainer.loggers import FileLogger
from hocket.trainer.optim import CosineAnnealingWithWarmupScheduler

SEED = 17


class Journal(Callback):
    """A callback that writes this rank's samples of each step as a line of JSON.

    A line such as `{"step": 3, "ids": [41, 7]}` is flushed before the step ends, so that the samples of a
    killed job can be read afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write a line."""
        if self._file is not None:
            ids = state.batch["id"].tolist()
            print(json.dumps({"step": state.timestamp.counts.batch, "ids": ids}), file=self._file, flush=True)

    def close(self, state: State, logger: Logger) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def count_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Count the bytes of a batch that the model predicts: all but the first of each sample."""
    return batch["tokens"][:, 1:].numel()


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="where the shards are: a folder or a URI")
    parser.add_argument("--cache", required=True, help="local folder for fetched shards")
    parser.add_argument(
        "--journal", type=Path, required=True, help="local folder for losses and sample lists"
    )
    parser.add_argument("--save-folder", required=True, help="where checkpoints go: a folder or a URI")
    parser.add_argument("--save-interval", default="6ba", help="time between checkpoints")
    parser.add_argument("--load-path", help="a checkpoint to start from")
    parser.add_argument("--steps", type=int, default=24, help="batches to train in all")
    return parser.parse_args(given)


def make_trainer(args: argparse.Namespace) -> Trainer:
    """Make the trainer of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(context=CONTEXT, width=128, num_layers=4))
    dataset = StreamingDataset(
        remote=args.data, local=args.cache, global_batch_size=GLOBAL_BATCH, shuffle=True, shuffle_seed=SEED
    )
    rank, _ = dataset.data_parallel
    return Trainer(
        model=model,
        train_dataloader=DataSpec(StreamingDataLoader(dataset), get_num_tokens_in_batch=count_tokens),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="4ba"),
        max_duration=f"{args.steps}ba",
        callbacks=[Journal(args.journal / f"samples-rank{rank}.jsonl")],
        loggers=[FileLogger(str(args.journal / "metrics.jsonl"), overwrite=True)],
        fsdp_config={},
        seed=SEED,
        save_folder=args.save_folder,
        save_interval=args.save_interval,
        checkpointing={"asynchronous": True},
        load_path=args.load_path,
        autoresume=True,
    )


def main() -> None:
    """Train."""
    with make_trainer(arguments()) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main()
