"""A run from a file: `hocket train run.yaml optimizer.lr=3e-4`, or `trainer_from("run.yaml").fit()`.

A file has one section for each part of a run, and a section takes the arguments of its part:

| section | contents |
|---|---|
| `model` | `hf:NAME`, a recipe's name (`gpt`) or `module:function`; or `name` and its arguments |
| `data` | `train` and `eval`: a folder or URI of MDS, or `module:function`; other arguments go to both |
| `training` | arguments of `Trainer`, such as `max_duration`, `precision` and `seed` |
| `optimizer` | `name`, of `hocket.trainer.optim` or `torch.optim` (default `AdamW`), and its arguments |
| `scheduler` | `name`, of `hocket.trainer.optim`, and its arguments; or a list of these |
| `algorithms`, `callbacks`, `loggers` | by name, the arguments of each, and `enabled` |
| `parallelism` | keys of `FSDPConfig`, and `dist_timeout`; `{}` shards with the defaults |
| `checkpoint` | arguments of `Trainer` that start with `save_` or `load_`, and `autoresume` |
| `profiler` | arguments of `Profiler`; `schedule`: those of `cyclic_schedule`; `trace_folder`: a folder |
| `logging` | arguments of `Trainer`, such as `run_name` and `progress_bar` |
"""

from hocket.recipes.config.reading import config_of_checkpoint, read_config
from hocket.recipes.config.resolving import resolve
from hocket.recipes.config.trainer import RunConfig, trainer_from

__all__ = ["RunConfig", "config_of_checkpoint", "read_config", "resolve", "trainer_from"]
