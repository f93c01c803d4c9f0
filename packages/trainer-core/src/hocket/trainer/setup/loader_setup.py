"""The loader of the training data, and its division over the ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hocket.trainer.data.data_spec import as_data_spec, with_model_weights
from hocket.trainer.data.division_check import DivisionCheck
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.data.loader_checks import loader_length
from hocket.trainer.data.prefetch import BatchPrefetcher
from hocket.trainer.data.sampling import shard
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.loop.run import Run
from hocket.trainer.process.rng import capture_rng
from hocket.trainer.setup.config import TrainerConfig
from hocket.trainer.setup.replay_setup import join_ranks
from hocket.trainer.setup.trial_run import in_order
from hocket.trainer.state import State
from hocket.trainer.step.losses.loss_weighing import LossWeighing, is_read


def attach_loader(run: Run, config: TrainerConfig, made: ExitStack) -> None:
    """Make `run.loader` from the `train_dataloader`, and check that it serves this rank. Collective.

    Raises:
        DataError: If the data loader serves other ranks, or gives every rank the same samples.
    """
    state = run.state
    described = as_data_spec(config.train_dataloader)
    reads_loss = is_read(described, state.model) and config.accumulate_train_batch_on_tokens
    described = with_model_weights(described, state.model)
    if config.loop.overfit_batches:
        described = replace(described, dataloader=in_order(described.dataloader))
    if config.global_train_batch_size is not None:
        described = replace(described, dataloader=_global_batches(described.dataloader, config, state))
    if config.replay is not None:
        described = join_ranks(described, config.replay, state, auto_shard=config.loop.auto_shard)
    spec, run.data_source, notice, is_unknown = shard(
        described,
        state.parallelism,
        seed=state.seed,
        auto_shard=config.loop.auto_shard,
        argument="train_dataloader",
    )
    run.notices += [] if notice is None else [notice]
    loader: Any = config.trial.train_on(spec.dataloader)
    spec = replace(spec, dataloader=loader)
    state.dataloader = state.train_dataloader = loader
    state.dataloader_label = config.train_dataloader_label
    limits = [number for number in (loader_length(loader), config.max_batches) if number]
    # The shortest loader of all ranks ends an epoch; 0 stands for an unknown length.
    state.dataloader_len = num_batches = int(min(run.sync.gather(min(limits, default=0)))) or None

    def set_length(length: int | None) -> None:
        state.dataloader_len = num_batches if length is None else min(length, config.max_batches or length)

    if not config.accumulate_train_batch_on_tokens:
        spec = spec.weighted_by(None)
    run.context.spec = spec
    checkpointer = run.checkpointer
    depth = config.loop.prefetch_depth
    if checkpointer is not None and depth > 1:
        # A save is foreseen one batch ahead. Fetching further ahead advances the random generators before the
        # steps that a resumed run repeats, so the resumed run would not be bit-identical.
        depth = 1
        run.notices.append(
            f"`prefetch_depth` is {config.loop.prefetch_depth}, and 1 is used: a run that saves "
            "checkpoints fetches one batch ahead, so that it resumes exactly"
        )
    run.loader = run.run_state.loader = TrainLoader(
        BatchPrefetcher(
            spec,
            device=state.device,
            depth=depth,
            max_batches=config.max_batches,
            timeout_s=config.dist_timeout,
        ),
        sync=run.sync,
        stop=state.stop,
        counts=lambda: state.counts,
        capture_rng=None if checkpointer is None else lambda: capture_rng(state.device, loader),
        keeps_resume_points=checkpointer is not None and not checkpointer.is_foreseeable,
        check_division=DivisionCheck(spec, run.sync, is_unknown=is_unknown)
        if run.sync.num_ranks > 1
        else None,
        on_length=set_length,
    )
    run.context.weighing = LossWeighing(spec, run.loader, run.sync, state.model) if reads_loss else None
    if (profiler := config.profiler) is not None:
        run.loader.prefetcher.next_batch = profiler.time_next
    made.callback(run.loader.close)


def _global_batches(loader: Any, config: TrainerConfig, state: State) -> GlobalBatchLoader:
    size, max_batches = config.global_train_batch_size, config.max_batches
    assert size is not None
    divided = GlobalBatchLoader(
        loader,
        size,
        state.parallelism.data_parallel,
        seed=state.seed,
        max_duration=lambda: state.max_duration,
    )

    # An epoch in progress is continued, by the state of a checkpoint, or starts anew.
    counts = state.counts
    divided.load_state_dict(
        {
            "epoch": counts.epoch,
            "batch": 0,
            "sample": 0,
            "samples_before": counts.sample - counts.sample_in_epoch,
            "batches_before": counts.batch - counts.batch_in_epoch,
        }
    )

    def set_length(num_batches: int) -> None:
        state.dataloader_len = min(num_batches, max_batches or num_batches)

    if not isinstance(size, int):
        divided.on_epoch = set_length  # epochs differ in length while the batches grow
    return divided
