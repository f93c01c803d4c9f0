"""The arguments of `Trainer`: their number, groups, types and text, and the refusal of flat spellings."""

import dataclasses
import inspect
import re

import pytest

from hocket.trainer import Trainer
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.setup.fields import field_docs, grouped_names
from hocket.trainer.setup.fit_setup import FitSettings
from hocket.trainer.setup.settings import CheckpointingSettings, LoopSettings, TrainerSettings
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from support.training import make

COMPOSER = {
    "accumulate_train_batch_on_tokens", "algorithm_passes", "algorithms", "auto_log_hparams", "autoresume",
    "callbacks", "compile_config", "console_log_interval", "console_stream", "deterministic_mode", "device",
    "device_train_microbatch_size", "dist_timeout", "eval_dataloader", "eval_interval",
    "eval_subset_num_batches", "load_exclude_algorithms", "load_ignore_keys", "load_object_store",
    "load_path", "load_progress_bar", "load_strict_model_weights", "load_weights_only", "log_to_console",
    "log_traces", "loggers", "max_duration", "model", "optimizers", "parallelism_config", "precision",
    "precision_config", "profiler", "progress_bar", "python_log_level", "run_name", "save_filename",
    "save_folder", "save_ignore_keys", "save_interval", "save_latest_filename", "save_metrics",
    "save_num_checkpoints_to_keep", "save_overwrite", "save_weights_only", "scale_schedule_ratio",
    "schedulers", "seed", "spin_dataloaders", "step_schedulers_every_batch", "train_dataloader",
    "train_dataloader_label", "train_subset_num_batches",
}  # fmt: skip
OWN = {
    "loss_fn", "train_step", "parallelism", "fsdp_config", "deepspeed_config", "global_train_batch_size",
    "gradient_clipping",
}  # fmt: skip
#: The flat arguments that became settings of a group.
MOVED = {
    **{
        name: ("loop", name)
        for name in (
            "prefetch_depth", "auto_shard", "gradient_sync", "steps_to_skip", "nonfinite_loss", "log_every",
            "gc_interval", "fast_dev_run", "overfit_batches", "num_sanity_val_steps",
        )
    },
    "save_async": ("checkpointing", "asynchronous"),
    "save_retention": ("checkpointing", "retention"),
    "checkpoint_store": ("checkpointing", "store"),
}  # fmt: skip


def test_the_flat_arguments_are_composers_and_few_more():
    parameters = inspect.signature(Trainer).parameters
    assert set(parameters) == COMPOSER | OWN | {"loop", "checkpointing"}
    assert len(parameters) <= 62
    assert {one.kind for one in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", MOVED)
def test_a_flat_spelling_is_refused_with_its_place(name):
    group, field = MOVED[name]
    assert grouped_names(TrainerSettings)[name] == (group, field)
    with pytest.raises(TrainerConfigError) as refused:
        make(**{name: 3})
    assert str(refused.value) == f"`{name}=3` is now `{group}={{'{field}': 3}}`"


def test_every_setting_of_a_group_is_refused_flat():
    for name, (group, field) in grouped_names(TrainerSettings).items():
        with pytest.raises(TrainerConfigError, match=f"is now `{group}=.*{field}"):
            make(**{name: None})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("max_duratoin", "did you mean `max_duration`"),
        ("prefetch_dept", "did you mean `loop={'prefetch_depth': …}`"),
        ("qqq", "`help(Trainer)` lists the arguments"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name, answer):
    with pytest.raises(TrainerConfigError) as refused:
        make(**{name: 1})
    assert f"`Trainer` has no argument `{name}`" in str(refused.value)
    assert answer in str(refused.value)
    assert isinstance(refused.value, TypeError)
    with make(max_duration="1ba") as trainer, pytest.raises(TypeError) as refused:
        trainer.fit(dration="1ba")
    assert "`Trainer.fit` has no argument `dration`; did you mean `duration`?" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("ckpt_path", "last", "give `autoresume=True`"),
        ("resume_from_checkpoint", True, "give `autoresume=True`"),
        ("resume_from_checkpoint", "run/ep1", "give `load_path='run/ep1'`"),
    ],
)
def test_the_newest_checkpoint_of_another_trainer_is_autoresume(name, value, answer):
    with pytest.raises(TrainerConfigError, match=re.escape(answer)):
        make(**{name: value})


def test_a_group_is_a_dataclass_or_a_dict():
    for loop in (LoopSettings(prefetch_depth=0), {"prefetch_depth": 0}):
        with make(loop=loop, max_duration="1ba") as trainer:
            assert trainer._config.loop == LoopSettings(prefetch_depth=0)
    with pytest.raises(TrainerConfigError, match="`loop` has the unknown key `prefetch`; did you mean"):
        make(loop={"prefetch": 0})
    with pytest.raises(TrainerConfigError, match="`checkpointing` is True; expected a dict of its settings"):
        make(checkpointing=True)
    for size in (MicrobatchSearch(headroom=0.2), {"headroom": 0.2}):
        settings = TrainerSettings(model=None, device_train_microbatch_size=size)
        assert MicrobatchSearch.of(settings.device_train_microbatch_size) == MicrobatchSearch(headroom=0.2)
    with pytest.raises(TrainerConfigError, match="unknown key `headrom`; did you mean `headroom`"):
        make(device_train_microbatch_size={"headrom": 0.2})


@pytest.mark.parametrize("settings", [LoopSettings, CheckpointingSettings, TrainerSettings, FitSettings])
def test_every_argument_has_a_text_that_help_shows(settings):
    shown = Trainer.fit.__doc__ if settings is FitSettings else Trainer.__doc__
    docs = field_docs(settings)
    for field in dataclasses.fields(settings):
        assert docs.get(field.name, "").endswith("."), field.name
        assert f" {field.name}: {docs[field.name][:20]}" in shown


def test_a_missing_model_and_a_positional_one_are_refused_by_name():
    with pytest.raises(TypeError, match=r"missing a required.*'model'"):
        Trainer()
    with pytest.raises(TypeError, match="too many positional arguments"):
        Trainer(None)
