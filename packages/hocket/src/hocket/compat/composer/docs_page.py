"""The page on the differences from Composer; `python -m hocket.compat.composer.docs_page FILE` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hocket.compat.composer.absent_names import ABSENT
from hocket.compat.composer.spellings import SPELLINGS, Spelling
from hocket.compat.composer.trainer import DEFAULTS

_HEAD = """\
# Coming from Composer

This page is generated from the tables that the code uses (`python -m hocket.compat.composer.docs_page FILE`).

## Running a script

A script that imports `composer` runs unchanged in one of these ways:

```
composer -n 4 script.py
hocket-launch --compat composer -n 4 script.py
torchrun --nproc-per-node=4 -m hocket.compat.composer script.py
python -m hocket.compat.composer script.py
```

In such a script `import streaming` loads `hocket.compat.streaming`. The process group lasts until the script
ends, not only until `Trainer.close`.

The command `composer` is Composer's own launcher where Composer is installed. In a program of your own,
either call `install()` before anything imports `composer`, or change the import:

```python
import torch
from hocket.compat.composer import Trainer
from hocket.compat.composer.algorithms import LabelSmoothing
from hocket.compat.composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 2)
model = ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=16),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    algorithms=[LabelSmoothing(smoothing=0.1)],
    max_duration="2ep",
    progress_bar=False,
)
trainer.fit()
trainer.close()
assert trainer.state.timestamp.batch == "8ba"
```

## What is different

- Learning rates are Composer's: the rate of batch k is the schedule at batch k - 1, because Composer steps
  its schedules before it advances the time, and the last of several schedules decides. With `hocket.trainer`,
  the rate of batch k is the schedule at batch k, several schedules multiply, and torch's schedulers step with
  each epoch beside schedules that advance with each batch. A script that moves to it has other losses from
  its second batch on.
- `GradientClipping` by norm also logs the norm before it, as `l2_norm/grad/before_clipping`.
- A schedule with warmup whose `t_max` is before the end of the run keeps its last value from there on, as
  the other schedules do; Composer refuses it.
- A checkpoint is a folder that any number of ranks can load. `load_path` may be a checkpoint, a folder or
  `…/latest-rank0.pt`, which mean the newest checkpoint there, or a file that Composer saved. `hocket-ckpt
  convert checkpoints/ep1 ep1.pt --to torch` writes a file for `torch.load`: its entry `model` is what
  Composer has under `["state"]["model"]`, without the prefix `module.` of the names.
- `save_num_checkpoints_to_keep=0` keeps the newest checkpoint: in Composer it keeps none where they were
  uploaded, and here a checkpoint is written to its place directly.
- `save_filename="ep{epoch}/rank{rank}.pt"` writes the folders `ep1`, `ep2` and so on.
- The logger's destinations get no checkpoints to upload. To have checkpoints in an object store, give
  `save_folder` its URI.
- Every sharding is FSDP2's; `deepspeed_config` is translated to it.
- `metrics/train/…` and `state.train_metrics` are over the epoch so far; Composer's are over the batch. A
  mean of `CrossEntropy` or `LossMetric` is over samples; Composer's is over batches, each with equal weight.
- After a batch, `state.loss` is the mean over the batch, a tensor; Composer's is that of the last microbatch.
- Losses and metrics of training are logged with the number of the batch, from 1; Composer's start at 0.
- Samples and tokens are counted after `AFTER_DATALOADER`, `BATCH_START` and `BEFORE_TRAIN_BATCH`, at which an
  algorithm may drop some, as `SelectiveBackprop` does; Composer counts them before.
- `EMA` starts from the weights that the training starts with; Composer's from those after the first update.
- After `stop_training()` the batches that were fetched ahead are still trained on, where the run saves
  checkpoints; `max_duration` stays, so that another `fit` goes on.
- An exception in `fit`, `KeyboardInterrupt` included, closes the trainer. Go on with a new one and
  `autoresume=True`.
- `fit(train_dataloader=…)` in the middle of an epoch starts a new epoch.
- A loss that is NaN does not end the run, as in Composer; `loop={"nonfinite_loss":
  "raise"}` has it do so.
- A step of `SAM` fires `BEFORE_TRAIN_BATCH` and `AFTER_TRAIN_BATCH` once, Composer's twice.
- `SWA` gives the model its mean at `swa_end`. With `update_interval="1ba"`, `swa_end="1dur"` and a
  `max_duration` in epochs, Composer's never does: it looks at the end of a batch, when the last epoch is not
  counted yet.
- After a run that saves at its end, the model has the weights that were trained with `EMA`; `get_ema_model`
  gives it their averages. Composer's last save leaves the averages in the model.
- `State.get_elapsed_duration` advances with each batch; Composer's counts whole units of `max_duration`: with
  `"4ep"` it is one of 0, 0.25, 0.5, 0.75 and 1.
- Half precision works on a CPU too. `trainer.state.scaler` is None: gradients of fp16 are unscaled before
  `AFTER_TRAIN_BATCH`.
- The backward pass keeps no graph of itself: `Algorithm.backwards_create_graph` is refused.
- Times of different units are unequal, where Composer's comparison raises. A `Timestamp` never changes:
  `copy(batch=3)` makes another one. `Timestamp.to_next_iteration` leaves the counts within the epoch as they
  are, because an iteration of tokens may end in the middle of one.
- Errors have types and texts of their own; each is a `ValueError`, `RuntimeError` or the like.
- `trainer.state.device` is a `torch.device`. `composer.utils.get_device(…)` returns a `Device`, which has
  `module_to_device` and `batch_to_device`; `State` and `Trainer` take both.
- `trainer.state.schedulers` has schedules of the time, with `get_last_lr` and `step`, in the place of torch's
  `LambdaLR`; `trainer.state.callbacks` has the callbacks without the loggers, which are in
  `trainer.logger.destinations`.
- An algorithm that was given a pass of its own by `algorithm_passes` runs where Composer has it; the default
  passes sort by `Algorithm.order`, and reverse at the events that end what another began.
- `FileLogger` writes one JSON object a line, Composer's a line of text. `InMemoryLogger` is read when the
  values have arrived: reading waits for them.
- The numbers of GPUs that `SystemMetricsMonitor` logs are named `system/gpu_…`; those of the host have
  Composer's names. Counts of replaced modules are logged as `<Algorithm>/num_<Class>`.
- `save_format="torchscript"` is refused, because torch has superseded it; use `"torch_export"`.
- `factorize_matrix` and `factorize_conv2d` compute the nearest factors directly, whatever `n_iters` is.
- Several loaders to evaluate on that have no labels are `eval`, `eval_1`, `eval_2`; in Composer they share
  the label `eval`, and each replaces the results of the one before.
"""


def render() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD, "## Defaults", "", "Where Hocket's own defaults differ, Composer's hold:", ""]
    lines += ["| argument of `Trainer` | default |", "|---|---|"]
    lines += [f"| `{name}` | `{value!r}` |" for name, value in DEFAULTS.items()]
    lines += [
        "| `optimizers` | `DecoupledSGDW(lr=0.1)` |",
        '| `precision` | `"amp_fp16"` on a GPU, else `"fp32"` |',
        "",
        "## Past spellings",
        "",
        "| of | past | now | note |",
        "|---|---|---|---|",
    ]
    lines += [_row(row) for row in SPELLINGS]
    lines += ["", "## Names without a counterpart", "", "They can be imported, and raise on use.", ""]
    lines += ["| name | instead |", "|---|---|", *_absent()]
    return "\n".join(lines) + "\n"


def _row(row: Spelling) -> str:
    values = [f"`{old!r}` is `{new!r}`" for old, new in row.values.items()]
    note = ", ".join(values) or row.note
    now = "no effect" if row.new is None else f"`{row.new}`"
    return f"| `{row.of}` | `{row.old}` | {now} | {note} |"


def _absent() -> Iterator[str]:
    for module, names in ABSENT.items():
        for name, instead in names.items():
            yield f"| `{module}.{name}` | {instead} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
